"""A Ray of our own: how many processes it starts beforehand, with what in them, and without which."""

from __future__ import annotations

import json
import os
import subprocess
import time

import pytest
from ray._private.node import Node

from pagedray.deployments import own_ray, preload
from pagedray.deployments.process_start import began_at_s, began_s
from pagedray.engine.config import load_config
from tests.deployments.served import START_S, Served


@pytest.mark.parametrize(
    ("flags", "num_cores", "expected"),
    [
        ({}, 1, 7),  # controller, two proxies, ingress; replica, scheduler, worker
        ({}, 128, 9),  # and a scheduler and a worker for an engine that is rebuilt
        ({}, 8, 8),
        ({"haproxy": False}, 1, 6),
        ({"num_engine_replicas": 2, "num_ingress_replicas": 3}, 1, 12),
        ({"tensor_parallel_size": 4}, 128, 15),
    ],
)
def test_there_is_a_process_for_every_actor(flags: dict[str, object], num_cores: int, expected: int) -> None:
    config = load_config(None, {**flags, "device": "cpu"}, {})
    assert own_ray.idle_workers(config, num_cores) == expected


@pytest.mark.parametrize("usage_stats", ["0", "1"])
def test_ray_is_left_as_it_was(usage_stats: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", usage_stats)
    methods = Node.start_api_server, Node.start_ray_processes

    def fail(**options: object) -> None:
        assert (Node.start_api_server is methods[0]) == (usage_stats == "1")  # who wants reports gets the process
        assert Node.start_ray_processes is not methods[1]
        raise RuntimeError("no memory")

    monkeypatch.setattr(own_ray.ray, "init", fail)
    with pytest.raises(RuntimeError, match="no memory"):
        own_ray.start(load_config())
    assert (Node.start_api_server, Node.start_ray_processes) == methods


@pytest.mark.ray
def test_actors_take_over_processes_that_have_imported_already() -> None:
    with Served("-m", "tests.deployments.own_ray_probe", env={"RAY_USAGE_STATS_ENABLED": "0"}) as server:
        assert server.ended(START_S) == 0, server.output
        found = json.loads(server.output.splitlines()[-1])
        assert found["num_beforehand"] == found["num_asked"] == 7
        assert {"ray.serve", *own_ray.PRELOADED, *preload.MODULES} <= set(found["modules"])
        assert "torch" not in found["modules"]
        assert found["logs"].startswith(str(server.ray_tmpdir))


@pytest.mark.parametrize(("seconds_later", "expected"), [(0.0, True), (9.0, True), (11.0, False)])
def test_processes_that_begin_later_import_nothing(
    seconds_later: float, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = {1: 500.0, 2: 500.0 + seconds_later}
    monkeypatch.setattr(preload, "began_s", begun.__getitem__)
    assert preload.is_beforehand(process=2, raylet=1) == expected


def test_when_a_process_began() -> None:
    before_s = time.time()
    with subprocess.Popen(["sleep", "60"]) as process:
        assert before_s - 0.1 < began_at_s(process.pid) < time.time() + 0.1  # the kernel counts hundredths
        assert began_s(process.pid) > began_s(os.getpid())
        process.kill()


@pytest.mark.parametrize(("device", "num_sessions"), [("cpu", 0), ("cuda", 1)])
def test_a_session_with_the_driver_is_for_gpus(device: str, num_sessions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []

    def begin() -> None:
        begun.append(1)
        raise own_ray.pynvml.NVMLError(own_ray.pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    def stop(**options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(own_ray.pynvml, "nvmlInit", begin)
    monkeypatch.setattr(own_ray.ray, "init", stop)
    with pytest.raises(KeyboardInterrupt):  # of ray.init: a machine without GPUs is Ray's to find
        own_ray.start(load_config(None, {"device": device}, {}))
    assert len(begun) == num_sessions
