"""The replica's states: what it does when engines fail, when starts fail, and when it is told to stop."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import pytest

from pagedray.deployments import engine_replica
from pagedray.deployments.engine_replica import MOVES, EngineReplica, State
from pagedray.engine.config import load_config
from pagedray.engine.errors import ConfigError, EngineDead
from pagedray.engine.metrics import EngineLoad
from tests.deployments.test_gang import Steps


class Unit:
    """An EngineUnit that fails when told to. `starts` says how the next ones start: None well, else with that error."""

    starts: ClassVar[list[Exception | None]] = []
    made: ClassVar[list[Unit]] = []

    def __init__(self, *args: Any):
        self.engine_id = f"e{len(self.made)}"
        self.made.append(self)
        self.failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.log: list[str] = []
        self.load: EngineLoad | None = None

    async def start(self) -> Any:
        error = self.starts.pop(0) if self.starts else None
        if error is not None:
            raise error
        return msgspec.structs.replace(Steps(None, 0).load(lambda *args: None), engine_id=self.engine_id)

    async def failed(self) -> str:
        return await self.failure

    async def drain(self, timeout_s: float) -> None:
        self.log.append("drain")

    async def kill(self) -> None:
        self.log.append("kill")


@pytest.fixture(autouse=True)
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    Unit.starts, Unit.made = [], []
    monkeypatch.setattr(engine_replica, "EngineUnit", Unit)
    monkeypatch.setattr(engine_replica, "get_current_placement_group", lambda: "a placement group")
    monkeypatch.setattr(engine_replica.serve, "get_replica_context", lambda: SimpleNamespace(app_name="app"))
    monkeypatch.setattr(engine_replica, "log_to_serve", lambda: None)
    monkeypatch.setattr(engine_replica, "BACKOFF_S", 0.001)


async def replica() -> Any:
    made = EngineReplica.__new__(EngineReplica)
    await made.__init__(load_config(), 5.0)  # type: ignore[misc]
    return made


async def until(condition: Any) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


async def test_a_failed_engine_is_killed_and_rebuilt() -> None:
    made = await replica()
    Unit.made[0].failure.set_result("the worker died")
    await until(lambda: len(Unit.made) == 2 and made._state is State.RUNNING)
    assert Unit.made[0].log == ["kill"]
    await made.check_health()
    await made.__del__()


async def test_the_first_starts_error_is_the_replicas() -> None:
    Unit.starts = [ConfigError("model: no such thing")]
    with pytest.raises(ConfigError, match="no such thing"):
        await replica()


async def test_health_is_good_while_rebuilding_and_bad_after_too_many_failures() -> None:
    made = await replica()
    Unit.starts = [EngineDead("no memory")] * 2 + [None]
    Unit.made[0].failure.set_result("the worker died")
    await until(lambda: len(Unit.made) == 4)  # two starts failed, the third went well
    await made.check_health()
    Unit.made[3].failure.set_result("died again at once")
    await until(lambda: made._state is State.FAILED)
    with pytest.raises(EngineDead, match="4 failures in a row, the last: died again at once"):
        await made.check_health()
    await made.__del__()


async def test_an_engine_that_ran_for_a_while_ends_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_replica, "STEADY_S", -1.0)
    made = await replica()
    for number in range(10):
        Unit.made[number].failure.set_result("died")
        await until(lambda number=number: len(Unit.made) == number + 2 and made._state is State.RUNNING)
    await made.check_health()
    await made.__del__()


async def test_stopping_drains_then_kills() -> None:
    made = await replica()
    await made.__del__()
    assert Unit.made[0].log == ["drain", "kill"]
    assert made._state is State.STOPPING
    assert made.__del__() is None  # Python's own call, later


def test_every_state_leads_to_an_end() -> None:
    assert set(MOVES) == set(State)
    assert all(State.STOPPING in moves for state, moves in MOVES.items() if state is not State.STOPPING)


async def test_serve_hears_the_load_of_an_engine_that_runs() -> None:
    made = await replica()
    assert made.record_autoscaling_stats() == {}, "the engine has not told yet"
    Unit.made[0].load = EngineLoad(1.5, 0.25)
    assert made.record_autoscaling_stats() == {"batch": 1.5, "kv": 0.25}
    Unit.starts = [EngineDead("again")] * 2
    Unit.made[0].failure.set_result("gone")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert made._state is not State.RUNNING
    assert made.record_autoscaling_stats() == {}
    await made.__del__()
