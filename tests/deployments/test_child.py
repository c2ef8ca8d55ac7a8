"""Ending processes that don't want to."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from typing import Any

import msgspec
import pytest

from pagedray.deployments.child import Child
from pagedray.deployments.place import LocalProcess, Place, kill_process
from pagedray.deployments.process_start import began_ticks
from pagedray.engine.errors import EngineDead
from pagedray.engine.messages import encode

NODE = "here"


def place_of(pid: int, node_id: str = NODE) -> Place:
    return Place(node_id, "10.0.0.9", pid, began_ticks(pid))


class Handle:
    """Of an actor, as far as asking for its place goes."""

    def __init__(self, place: Place):
        async def answer() -> bytes:
            return encode(place)

        class Method:
            remote = staticmethod(answer)

        self.place = Method


@pytest.fixture
def process() -> Any:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as running:
        yield running
        running.kill()


async def test_a_stopped_process_is_killed(process: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("ray.kill", asked.append)  # has no effect, like the real one on a stopped process
    monkeypatch.setattr("pagedray.deployments.child.KILL_GRACE_S", 0.01)
    handle = Handle(place_of(process.pid))
    child = Child("the worker", handle)
    assert child.name == "the worker"
    await child.attach(NODE)
    assert child.name == "the worker on 10.0.0.9 (node here)"
    os.kill(process.pid, signal.SIGSTOP)
    await child.kill()
    assert asked == [handle]
    assert await asyncio.to_thread(process.wait, 30) == -signal.SIGKILL


async def test_a_process_that_ends_by_itself_is_waited_for(process: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.kill", lambda handle: process.terminate())
    child = Child("the worker", Handle(place_of(process.pid)))
    await child.attach(NODE)
    await child.kill()
    await child.kill()  # twice does no harm
    assert process.wait(0) == -signal.SIGTERM


async def test_a_process_that_died_at_once_is_a_dead_engine(process: Any) -> None:
    handle = Handle(place_of(process.pid))
    process.kill()
    process.wait()
    with pytest.raises(EngineDead, match="the worker died while starting"):
        await Child("the worker", handle).attach(NODE)


def test_a_process_is_killed_where_it_runs(process: Any) -> None:
    os.kill(process.pid, signal.SIGSTOP)
    where = place_of(process.pid)
    kill_process(where, 0.01)
    assert process.wait(30) == -signal.SIGKILL
    kill_process(where, 0.01)  # gone by now


def test_a_pid_that_means_another_process_now_is_left_alone(process: Any) -> None:
    where = msgspec.structs.replace(place_of(process.pid), began=1)
    with pytest.raises(ProcessLookupError):
        LocalProcess(where)
    kill_process(where, 0.01)
    assert process.poll() is None
