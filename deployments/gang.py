"""The worker gang of one engine: one actor per rank, those of a stage in one bundle of the replica's placement group.

`RayExecutor` drives rank 0. A call `step(n)` queues step n behind step n − 1 and answers with the result of n − 1, so
that the device has its next step already while the scheduler reads the last one's tokens; behind the last planned step,
`flush(n)` fetches the result. Steps carry ids, a repeated call answers the same, and calls may overtake each other.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine
from typing import Any

import msgspec
import ray
from ray import ObjectRef
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pagedray.deployments.calls import Actor, answer
from pagedray.deployments.child import Child
from pagedray.deployments.directory import Directory
from pagedray.deployments.worker_actor import CONCURRENCY_GROUPS, NO_STEP, WorkerActor
from pagedray.engine.config import Config, EngineFacts
from pagedray.engine.messages import RunnerOutput, SchedulerOutput, decode, encode
from pagedray.engine.metrics import ExpertCounts
from pagedray.engine.worker.control import PeersLost
from pagedray.engine.worker.layout import Layout

BLAME_S = 5.0
LAST_WORDS_S = 1.0  # for the rank at fault, where another one has only lost it


class Gang:
    """
    Args:
        placement: bundle 0 is the replica's and the scheduler's, bundle 1 + stage that of a pipeline stage's ranks.
        directory, engine_id: give the actors their names.
        worker_class: what does the work, see `WorkerActor`.
    """

    def __init__(
        self, config: Config, placement: PlacementGroup, directory: Directory, engine_id: str, worker_class: str
    ):
        layout = Layout(config.worker.tensor_parallel_size, config.worker.pipeline_parallel_size)
        # Ray takes concurrency groups here alone, not in options(); its types don't know them.
        actor_class: Any = ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(WorkerActor)  # type: ignore[call-overload]
        self.ranks: list[Child] = []
        for rank in range(layout.size):
            index = 1 + layout.stage(rank)
            bundle = placement.bundle_specs[index]
            handle: Actor = actor_class.options(
                name=directory.name("worker", engine_id, rank),
                namespace=directory.namespace,
                num_cpus=bundle.get("CPU", 0) / layout.tp_size,
                num_gpus=bundle.get("GPU", 0) / layout.tp_size,
                scheduling_strategy=PlacementGroupSchedulingStrategy(placement, index),
            ).remote(config, rank, worker_class)
            self.ranks.append(Child(f"worker rank {rank}", handle, handle.watch.remote()))

    async def load(self) -> EngineFacts:
        """Load every rank's share, in lockstep; what rank 0 learned. Ranks above 0 follow it from then on.

        Raises:
            PagedrayError: a rank can't load, or died.
        """
        lead, *others = self.ranks
        address = (await answer(lead.handle.listen.remote(), None, lead.name),) if others else ()
        facts = await _all_or_the_cause(
            [answer(rank.handle.load.remote(*address), None, rank.name) for rank in self.ranks]
        )
        for rank in others:
            rank.life = rank.handle.follow.remote()
        return decode(EngineFacts, facts[0])


async def _all_or_the_cause(loads: list[Coroutine[Any, Any, bytes]]) -> list[bytes]:
    """What all of them give, or the error of one that fails for a reason of its own, if there is one."""
    tasks = [asyncio.ensure_future(load) for load in loads]
    try:
        done, open_ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if open_:
            done |= (await asyncio.wait(open_, timeout=LAST_WORDS_S))[0]
    finally:
        for task in tasks:
            task.cancel()
    errors = [error for task in tasks if task in done and (error := task.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, PeersLost)):
        raise error
    return [task.result() for task in tasks]


def answer_timeout_s(config: Config) -> float:
    """Longest wait for rank 0 to answer with a step. One of several is given time to find out who is late."""
    limit_s = config.failure.step_timeout_s
    return limit_s if config.worker.num_ranks == 1 else limit_s + BLAME_S


class _Step(msgspec.Struct):
    id: int
    answer: ObjectRef[bytes] | None  # the call that brings its result


class RayExecutor:
    """`engine.executor.Executor` over the actor of rank 0, which hands plans to the other ranks itself.

    Args:
        rank0: its handle.
        step_timeout_s: longest wait for the oldest step once its turn has come.
    """

    def __init__(self, rank0: Actor, step_timeout_s: float):
        self._rank0 = rank0
        self._step_timeout_s = step_timeout_s
        self._steps: deque[_Step] = deque()  # in flight, oldest first
        self._last = NO_STEP

    def submit(self, out: SchedulerOutput) -> None:
        call = self._rank0.step.remote(encode(out), self._last)
        if self._steps and self._steps[-1].answer is None:
            self._steps[-1].answer = call
        self._steps.append(_Step(out.step, None))
        self._last = out.step

    async def result(self) -> RunnerOutput:
        step = self._steps[0]
        if step.answer is None:
            step.answer = self._rank0.flush.remote(step.id)
        data = await answer(step.answer, self._step_timeout_s, "the worker (rank 0)")
        self._steps.popleft()
        return decode(RunnerOutput, data)

    async def expert_loads(self) -> ExpertCounts:
        data = await answer(self._rank0.expert_loads.remote(), self._step_timeout_s, "worker rank 0")
        return msgspec.msgpack.decode(data, type=ExpertCounts)

    def close(self) -> None:
        """Drop the steps in flight. The actors are the replica's to kill."""
        self._steps.clear()
