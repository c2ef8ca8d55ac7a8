"""The files that describe clusters, read as the tests of them need it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
SERVE_CONFIGS = sorted((ROOT / "deployments").glob("serve*.yaml"))
MANIFESTS = sorted((ROOT / "deployments" / "kuberay").glob("*.yaml"))
RAY_SERVICES = [path for path in MANIFESTS if path.name.startswith("rayservice-")]


def load(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(path.read_text())
    return loaded


def objects(path: Path) -> list[dict[str, Any]]:
    """Every Kubernetes object of a manifest."""
    return list(yaml.safe_load_all(path.read_text()))


def ray_service(path: Path) -> dict[str, Any]:
    (found,) = (item for item in objects(path) if item["kind"] == "RayService")
    return found


def serve_config(service: dict[str, Any]) -> dict[str, Any]:
    """The Serve config inside a RayService."""
    loaded: dict[str, Any] = yaml.safe_load(service["spec"]["serveConfigV2"])
    return loaded


def groups(service: dict[str, Any]) -> list[dict[str, Any]]:
    """The head's group, then the workers'."""
    cluster = service["spec"]["rayClusterConfig"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def pod(group: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = group["template"]["spec"]
    return spec


def container(group: dict[str, Any]) -> dict[str, Any]:
    (only,) = pod(group)["containers"]
    found: dict[str, Any] = only
    return found


def env(group: dict[str, Any]) -> dict[str, str]:
    return {item["name"]: item["value"] for item in container(group)["env"]}


def pre_stop(group: dict[str, Any]) -> str:
    """The shell command that a pod runs before it stops."""
    shell, flag, command = container(group)["lifecycle"]["preStop"]["exec"]["command"]
    assert (shell, flag) == ("bash", "-c")
    return str(command)


class Dockerfile:
    """Instructions of ./Dockerfile by stage, with continued lines joined and comments dropped."""

    def __init__(self, text: str):
        self.stages: dict[str, list[tuple[str, str]]] = {}
        self.parents: dict[str, str] = {}
        self.args: dict[str, str] = {}
        stage = ""
        lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
        for line in "\n".join(lines).replace("\\\n", " ").splitlines():
            word, rest = line.split(maxsplit=1)
            if word == "FROM":
                parent, _, stage = rest.partition(" AS ")
                self.parents[stage] = parent
                self.stages[stage] = []
            elif word == "ARG":
                name, _, value = rest.partition("=")
                self.args[name] = value
            if stage:
                self.stages[stage].append((word, " ".join(rest.split())))

    def of(self, stage: str, word: str) -> list[str]:
        """Arguments of these instructions in a stage and in those it builds on, in order."""
        parent = self.parents[stage]
        before = self.of(parent, word) if parent in self.stages else []
        return before + [rest for name, rest in self.stages[stage] if name == word]

    def env(self, stage: str) -> dict[str, str]:
        return dict(pair.split("=", 1) for line in self.of(stage, "ENV") for pair in line.split())


def dockerfile() -> Dockerfile:
    return Dockerfile((ROOT / "Dockerfile").read_text())
