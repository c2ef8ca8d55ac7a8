"""cluster.yaml: a RayService that the operator accepts, and the application of deployments/serve.yaml inside it."""

from __future__ import annotations

import copy
import importlib.metadata
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from pagedray.engine.config import load_config

ROOT = Path(__file__).resolve().parent.parent
# The operator's CustomResourceDefinitions, from ray-operator/config/crd/bases of the KubeRay repository.
DEFINITIONS = Path(os.environ.get("KUBERAY_CRDS", ROOT.parent / "shared" / "kuberay"))


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    return loaded


def containers(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = manifest["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [container for group in groups for container in group["template"]["spec"]["containers"]]


def closed(schema: Any) -> Any:
    """The same schema, refusing unknown fields: the operator would drop them in silence."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: closed(value) for key, value in schema.items()}
    if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        result.setdefault("additionalProperties", False)
    return result


@pytest.fixture(scope="module")
def validate() -> Callable[[dict[str, Any]], None]:
    path = DEFINITIONS / "ray.io_rayservices.yaml"
    if not path.exists():
        pytest.skip(f"{path} is not there: put KubeRay's definitions somewhere and name the folder in KUBERAY_CRDS")
    versions = yaml.load(path.read_text(), yaml.CSafeLoader)["spec"]["versions"]
    (schema,) = (version["schema"]["openAPIV3Schema"] for version in versions if version["name"] == "v1")
    validator = jsonschema.Draft7Validator(closed(schema))
    return validator.validate


def test_the_operator_accepts_it(validate: Callable[[dict[str, Any]], None], manifest: dict[str, Any]) -> None:
    validate(manifest)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda spec: spec.update(serveConfig="typo"),
        lambda spec: spec.pop("rayClusterConfig"),
        lambda spec: spec["rayClusterConfig"]["authOptions"].update(mode="password"),
        lambda spec: spec["rayClusterConfig"]["headGroupSpec"]["rayStartParams"].update({"num-cpus": 0}),
        lambda spec: spec["rayClusterConfig"]["workerGroupSpecs"][0].pop("groupName"),
        lambda spec: spec["rayClusterConfig"]["workerGroupSpecs"][0].update(replicas="1"),
        lambda spec: spec["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"][0].update(probe={}),
        lambda spec: spec["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"][0]["env"].append({}),
    ],
)
def test_a_planted_fault_is_refused(
    validate: Callable[[dict[str, Any]], None],
    manifest: dict[str, Any],
    spoil: Callable[[dict[str, Any]], object],
) -> None:
    spoilt = copy.deepcopy(manifest)
    spoil(spoilt["spec"])
    with pytest.raises(jsonschema.ValidationError):
        validate(spoilt)


def test_it_serves_the_application_of_serve_yaml(manifest: dict[str, Any]) -> None:
    from ray.serve.schema import ServeDeploySchema

    inside = yaml.safe_load(manifest["spec"]["serveConfigV2"])
    beside = yaml.safe_load((ROOT / "deployments" / "serve.yaml").read_text())
    for config in (inside, beside):
        ServeDeploySchema.model_validate(config)
        for application in config["applications"]:
            # Each names the settings that its readers are likely to change, so compare what they amount to.
            application["args"] = load_config(application["args"])
    assert inside == beside


def test_replicas_can_be_reached_from_outside_their_pod(manifest: dict[str, Any]) -> None:
    http = yaml.safe_load(manifest["spec"]["serveConfigV2"])["http_options"]
    (worker,) = (container for container in containers(manifest) if container["name"] == "ray-worker")
    assert http["host"] == "0.0.0.0"
    assert {"name": "serve", "containerPort": http["port"]} in worker["ports"]
    assert manifest["spec"]["excludeHeadPodFromServeSvc"] is True


def test_all_nodes_run_the_same_ray_in_the_same_mode(manifest: dict[str, Any]) -> None:
    head, *workers = containers(manifest)
    assert workers
    env = {item["name"]: item["value"] for item in head["env"]}
    assert env["RAY_SERVE_ENABLE_HA_PROXY"] == env["RAY_SERVE_THROUGHPUT_OPTIMIZED"] == "1"
    for worker in workers:
        assert (worker["image"], worker["env"]) == (head["image"], head["env"])
    assert manifest["spec"]["rayClusterConfig"]["rayVersion"] == importlib.metadata.version("ray")


def test_a_node_is_found_dead_within_seconds(manifest: dict[str, Any]) -> None:
    env = {item["name"]: item["value"] for item in containers(manifest)[0]["env"]}
    period, timeout = (int(env[f"RAY_health_check_{name}_ms"]) for name in ("period", "timeout"))
    assert int(env["RAY_health_check_failure_threshold"]) * (period + timeout) <= 3000


def test_every_container_has_probes_and_bounds(manifest: dict[str, Any]) -> None:
    for container in containers(manifest):
        assert {"startupProbe", "readinessProbe", "livenessProbe"} <= set(container)
        assert container["resources"]["requests"]["memory"] == container["resources"]["limits"]["memory"]
