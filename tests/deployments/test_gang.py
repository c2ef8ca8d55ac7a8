"""Steps between executor and worker actor, without Ray: what is called, what answers, what a lost order does."""

from __future__ import annotations

import asyncio
import io
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from pagedray.deployments.gang import RayExecutor
from pagedray.deployments.worker_actor import NO_STEP, LoadProgress, WorkerActor
from pagedray.engine.config import EngineFacts, load_config
from pagedray.engine.errors import EngineDead
from pagedray.engine.messages import RunnerOutput, SchedulerOutput, decode, encode


def plan(step: int) -> SchedulerOutput:
    return SchedulerOutput(step, (), (), ())


class Steps:
    """A worker whose steps end when a test says so."""

    def __init__(self, config: Any, rank: int):
        self.submitted: list[int] = []
        self.ended: dict[int, threading.Event] = {}
        self.refuse: int | None = None

    def load(self, on_phase: Any) -> EngineFacts:
        on_phase("weights", 1.5)
        return EngineFacts(
            model_names=("m",),
            vocab_size=1,
            max_model_len=2,
            block_size=1,
            num_blocks=1,
            block_groups=(None,),
            kv_capacity_tokens=1,
            eos_ids=(),
            enable_prefix_caching=False,
            dtype="float32",
            device="cpu",
            attention_backend="none",
            attention_backend_reason="",
        )

    def submit(self, out: SchedulerOutput) -> None:
        if out.step == self.refuse:
            raise ValueError(f"step {out.step} is bad")
        self.submitted.append(out.step)
        self.ended[out.step] = threading.Event()

    def result(self, step: int) -> RunnerOutput:
        assert self.ended[step].wait(30)
        return RunnerOutput(step, (step,))

    def expert_loads(self) -> dict[int, tuple[int, ...]]:
        return {4: (5, 6)}


class LocalActor:
    """A WorkerActor whose calls run in threads, as Ray runs those of concurrency groups."""

    def __init__(self) -> None:
        self.actor = WorkerActor(load_config(), 0, f"{__name__}:Steps")
        self.actor.load()
        self.worker: Steps = self.actor._worker  # type: ignore[assignment]
        self.pool = ThreadPoolExecutor(8)
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.actor, name)

        class Remote:
            @staticmethod
            def remote(*args: Any) -> Any:
                self.calls.append((name, *[a for a in args if isinstance(a, int)]))
                return asyncio.wrap_future(self.pool.submit(method, *args))

        return Remote


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("sys.stderr", io.StringIO())  # the actor puts its own around it
    local = LocalActor()
    yield local
    for event in local.worker.ended.values():
        event.set()
    local.pool.shutdown()


async def until(condition: Any) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


async def test_the_next_call_brings_a_steps_result(actor: LocalActor) -> None:
    executor = RayExecutor(actor, 30)
    executor.submit(plan(1))
    executor.submit(plan(2))
    first = asyncio.create_task(executor.result())
    await until(lambda: actor.worker.submitted == [1, 2])  # step 2 is queued while step 1 runs
    assert not first.done()
    actor.worker.ended[1].set()
    assert (await first).step == 1
    assert actor.calls == [("step", NO_STEP), ("step", 1)]


async def test_behind_the_last_step_flush_brings_the_result(actor: LocalActor) -> None:
    executor = RayExecutor(actor, 30)
    executor.submit(plan(1))
    last = asyncio.create_task(executor.result())
    await until(lambda: actor.worker.submitted == [1])
    actor.worker.ended[1].set()
    assert (await last).step == 1
    assert actor.calls == [("step", NO_STEP), ("flush", 1)]


async def test_a_step_planned_while_flush_waits_changes_nothing(actor: LocalActor) -> None:
    executor = RayExecutor(actor, 30)
    executor.submit(plan(1))
    first = asyncio.create_task(executor.result())
    await until(lambda: ("flush", 1) in actor.calls)
    executor.submit(plan(2))
    await until(lambda: actor.worker.submitted == [1, 2])
    actor.worker.ended[1].set()
    assert (await first).step == 1
    actor.worker.ended[2].set()
    assert (await executor.result()).step == 2
    assert actor.calls == [("step", NO_STEP), ("flush", 1), ("step", 1), ("flush", 2)]


async def test_a_step_without_an_end_is_a_dead_engine(actor: LocalActor) -> None:
    executor = RayExecutor(actor, 0.05)
    executor.submit(plan(1))
    with pytest.raises(EngineDead, match=r"not answered within 0\.05 s"):
        await executor.result()


def start(actor: LocalActor, step: int, after: int) -> Future[bytes]:
    return actor.pool.submit(actor.actor.step, encode(plan(step)), after)


def test_calls_that_overtake_each_other_are_put_in_order(actor: LocalActor) -> None:
    third, second = start(actor, 3, 2), start(actor, 2, 1)
    flush = actor.pool.submit(actor.actor.flush, 3)
    assert actor.worker.submitted == []
    assert start(actor, 1, NO_STEP).result(30) == b""
    while actor.worker.submitted != [1, 2, 3]:
        assert not flush.done()
    for step in (1, 2, 3):
        actor.worker.ended[step].set()
    assert [decode(RunnerOutput, call.result(30)).step for call in (second, third, flush)] == [1, 2, 3]


def test_a_repeated_call_is_not_run_again(actor: LocalActor) -> None:
    start(actor, 1, NO_STEP).result(30)
    actor.worker.ended[1].set()
    answers = [start(actor, 2, 1).result(30) for _ in range(2)]
    assert answers[0] == answers[1]
    assert actor.worker.submitted == [1, 2]


def test_a_refused_step_ends_every_call_that_waits_for_it(actor: LocalActor) -> None:
    actor.worker.refuse = 2
    start(actor, 1, NO_STEP).result(30)
    waiting = [actor.pool.submit(actor.actor.flush, 2), start(actor, 3, 2)]
    with pytest.raises(ValueError, match="step 2 is bad"):
        start(actor, 2, 1).result(30)
    for call in waiting:
        with pytest.raises(EngineDead, match="step 2 is bad"):
            call.result(30)


def test_progress_shows_phases_and_the_bar_being_drawn(actor: LocalActor) -> None:
    bar = actor.actor._bar
    bar.write("a line\n")
    bar.write("\rloading  50%")
    bar.write("\r             ")
    progress = decode(LoadProgress, actor.actor.progress())
    assert [phase.name for phase in progress.phases] == ["imports", "weights"]
    assert progress.bar == "loading  50%"
    actor.actor._on_phase("more", 0.1)
    assert decode(LoadProgress, actor.actor.progress()).phases[-1].bar == "loading  50%"
    assert decode(LoadProgress, actor.actor.progress()).bar == ""


async def test_loads_of_experts_are_asked_of_rank_0(actor: Any) -> None:
    executor = RayExecutor(actor, 30.0)
    executor.submit(plan(0))
    assert await executor.expert_loads() == {4: (5, 6)}
    assert not actor.worker.ended[0].is_set()  # a thread of its own: no step waits
