"""Ray's own commands: `serve deploy` with the shipped file, `serve run` with the builder, on one cluster."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from pagedray.deployments.proxy import free_port
from tests.deployments.served import ROOT, START_S, Served, wait_for

pytestmark = pytest.mark.ray
SERVE = str(Path(sys.executable).with_name("serve"))
QUICK = {"PAGEDRAY_CPU_THREADS": "1", "PAGEDRAY_NUM_KV_BLOCKS": "256"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[Served, int]]:
    """A Ray with the port of its dashboard."""
    dashboard_port = free_port()
    with Served("-m", "tests.deployments.plain_ray", str(dashboard_port), env=QUICK) as server:
        server.wait_for(lambda: "up at" in server.output, "Ray")
        yield server, dashboard_port


def command(server: Served, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([SERVE, *args], env=server.env, capture_output=True, text=True, timeout=START_S, cwd=ROOT)


def answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=10).status_code == 200
    except httpx.HTTPError:
        return False


def test_deploy_and_run(cluster: tuple[Served, int], tmp_path: Path) -> None:
    server, dashboard_port = cluster
    dashboard = f"http://127.0.0.1:{dashboard_port}"
    port = free_port()
    config = yaml.safe_load((ROOT / "deployments" / "serve.yaml").read_text())
    config["http_options"] = {"host": "127.0.0.1", "port": port}
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump(config))

    done = command(server, "deploy", str(file), "-a", dashboard)
    assert done.returncode == 0, done.stderr

    def status() -> str:
        return command(server, "status", "-a", dashboard).stdout

    wait_for(lambda: answers(port), "answer", START_S, lambda: status() + server.output)
    body = {"model": "smollm2-135m-instruct", "prompt": "The capital of France is", "max_tokens": 2, "temperature": 0}
    answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=START_S).json()
    assert answer["choices"][0]["text"] == " Paris."

    config["applications"][0]["args"]["cache"]["block_sise"] = 16
    file.write_text(yaml.safe_dump(config))
    assert command(server, "deploy", str(file), "-a", dashboard).returncode == 0
    failed = wait_for(lambda: "DEPLOY_FAILED" in status() and status(), "failure", START_S, status)
    assert "unknown setting 'block_sise'" in failed

    address = server.output.split("up at ")[1].split()[0]
    args = [
        "run",
        "--address",
        address,
        "pagedray.deployments:build",
        "served_model_name=first,second",
        "dtype=bfloat16",
    ]
    with (tmp_path / "run").open("w") as log:
        running = subprocess.Popen([SERVE, *args], env=server.env, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)
    try:
        names = wait_for(lambda: _model_names(port) == ["first", "second"], "the new model names", START_S, status)
        assert names
        running.send_signal(signal.SIGINT)
        running.wait(60)
    finally:
        running.kill()
        running.wait()


def _model_names(port: int) -> list[str]:
    try:
        return [card["id"] for card in httpx.get(f"http://127.0.0.1:{port}/v1/models", timeout=10).json()["data"]]
    except (httpx.HTTPError, json.JSONDecodeError, KeyError):
        return []
