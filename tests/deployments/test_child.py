"""Ending processes that don't want to."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from pagedray.deployments.child import Child
from pagedray.engine.errors import EngineDead


class Handle:
    """Of an actor in this process."""

    def __init__(self, pid: int):
        async def answer() -> int:
            return pid

        class Method:
            remote = staticmethod(answer)

        self.pid = Method


@pytest.fixture
def process() -> Any:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as running:
        yield running
        running.kill()


async def test_a_stopped_process_is_killed(process: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("ray.kill", asked.append)  # has no effect, like the real one on a stopped process
    monkeypatch.setattr("pagedray.deployments.child.KILL_GRACE_S", 0.01)
    handle = Handle(process.pid)
    child = Child("the worker", handle)
    await child.attach()
    os.kill(process.pid, signal.SIGSTOP)
    await child.kill()
    assert asked == [handle]
    assert await asyncio.to_thread(process.wait, 30) == -signal.SIGKILL


async def test_a_process_that_ends_by_itself_is_waited_for(process: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.kill", lambda handle: process.terminate())
    child = Child("the worker", Handle(process.pid))
    await child.attach()
    await child.kill()
    await child.kill()  # twice does no harm
    assert process.wait(0) == -signal.SIGTERM


async def test_a_process_that_died_at_once_is_a_dead_engine(process: Any) -> None:
    process.kill()
    process.wait()
    with pytest.raises(EngineDead, match="the worker died while starting"):
        await Child("the worker", Handle(process.pid)).attach()
