"""What is told of expert loads, by a clock that the test moves."""

from __future__ import annotations

import asyncio
import time

import pytest

from pagedray.engine import load_watch
from pagedray.engine.load_watch import KEPT_S, LoadWatch
from pagedray.engine.metrics import ExpertCounts, ExpertLoads, LayerLoad


class Workers:
    """Answers with how often they were asked, when they may."""

    def __init__(self, counts: ExpertCounts | None = None):
        self.num_asked = 0
        self.now_s = 0.0
        self.counts = counts
        self.error: Exception | None = None
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.watch = LoadWatch(self._ask, lambda: self.now_s)

    async def _ask(self) -> ExpertCounts:
        self.num_asked += 1
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        return {1: (self.num_asked, 3)} if self.counts is None else self.counts

    async def told(self) -> int | None:
        loads = await self.watch.read()
        return None if loads is None else loads.experts[0]


def test_a_summary_has_a_few_numbers_a_layer_and_one_an_expert() -> None:
    loads = ExpertLoads.of({5: (1, 0, 5), 2: (4, 4, 1)})
    assert loads.layers == (LayerLoad(2, 4, 3.0), LayerLoad(5, 5, 2.0))
    assert loads.experts == (5, 4, 6)


async def test_an_answer_is_kept_for_a_while() -> None:
    workers = Workers()
    assert [await workers.told() for _ in range(3)] == [1, 1, 1]
    workers.now_s = KEPT_S - 0.01
    assert await workers.told() == 1
    workers.now_s = KEPT_S
    assert await workers.told() == 2
    workers.now_s = 1.0  # clocks are set back
    assert await workers.told() == 3


async def test_several_that_ask_at_once_are_one_question() -> None:
    workers = Workers()
    assert await asyncio.gather(*(workers.told() for _ in range(20))) == [1] * 20


async def test_a_dense_model_is_asked_once() -> None:
    workers = Workers(counts={})
    for workers.now_s in (0.0, 100.0, 200.0):
        assert await workers.told() is None
    assert workers.num_asked == 1


async def test_slow_workers_hold_nobody_up_and_are_not_asked_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_watch, "ANSWER_S", 0.02)
    workers = Workers()
    assert await workers.told() == 1
    workers.may_answer.clear()
    begun_s = time.monotonic()
    for workers.now_s in (10.0, 20.0, 30.0):
        assert await workers.told() == 1  # what they said last
    assert time.monotonic() - begun_s < 5 and workers.num_asked == 2
    workers.may_answer.set()
    assert await workers.told() == 2


async def test_workers_that_fail_are_asked_again_later() -> None:
    workers = Workers()
    workers.error = RuntimeError("gone")
    assert await workers.told() is None
    workers.error = None
    assert await workers.told() is None
    workers.now_s = KEPT_S
    assert await workers.told() == 2


async def test_closing_ends_an_open_question() -> None:
    workers = Workers()
    workers.may_answer.clear()
    reading = asyncio.create_task(workers.told())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    workers.watch.close()
    assert await reading is None
    assert await workers.told() is None and workers.num_asked == 1
