"""Two engine replicas behind HAProxy: load on both, streams that move at once, and Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator

import httpx
import pytest
import ray

from pagedray.deployments.build import APP
from pagedray.deployments.directory import Directory
from pagedray.engine.config import load_config
from tests.deployments.requests import PROMPT, Stream, expected
from tests.deployments.served import REBUILD_S, Served, wait_for

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served("-m", "tests.deployments.serve_fakes", "--port", "0", "--num-engine-replicas", "2") as server:
        server.wait_until_ready()
        yield server


def running(served: Served) -> dict[str, float]:
    """Sequences in each engine's batch."""
    text = httpx.get(f"{served.url}/metrics", timeout=60).text
    found = re.findall(r'^pagedray:num_requests_running\{engine="(\w+)"\} (\S+)$', text, re.MULTILINE)
    return {engine: float(value) for engine, value in found}


def test_streams_of_a_dead_engine_go_on_at_the_other(served: Served) -> None:
    wait_for(lambda: len(running(served)) == 2, "second engine", REBUILD_S, lambda: served.output)
    streams = [Stream(served, 200) for _ in range(8)]
    for stream in streams:
        stream.wait_for_text()
    assert list(running(served).values()) == [4.0, 4.0]
    served.join_ray()
    victim, worker = next(iter(Directory(APP, load_config().model).find("worker").items()))
    ray.kill(worker)
    ray.shutdown()  # a driver must not outlive its Ray
    for stream in streams:
        stream.check()
    wait_for(lambda: len(running(served)) == 2 and victim not in running(served), "successor", REBUILD_S)


def test_control_c_lets_running_requests_end(served: Served) -> None:
    """A terminal sends SIGINT to every process of the group: HAProxy, replicas and workers must not care."""
    body = {"model": "fake", "prompt": PROMPT, "max_tokens": 100, "stream": True}
    text = ""
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=60) as response:
        for number, line in enumerate(response.iter_lines()):
            if number == 5:
                os.killpg(served.process.pid, signal.SIGINT)
            if line.startswith("data: {"):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
    assert text == expected(100)
    assert served.ended() == 0
    assert served.left_over() == []
