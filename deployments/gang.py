"""The worker gang of one engine: one actor per rank, each in its bundle of the replica's placement group.

`RayExecutor` drives rank 0. A call `step(n)` queues step n behind step n − 1 and answers with the result of n − 1, so
that the device has its next step already while the scheduler reads the last one's tokens; behind the last planned step,
`flush(n)` fetches the result. Steps carry ids, a repeated call answers the same, and calls may overtake each other.
"""

from __future__ import annotations

import asyncio
from collections import deque
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


class Gang:
    """
    Args:
        placement: bundle 0 is the replica's and the scheduler's, bundle 1 + rank the rank's.
        directory, engine_id: give the actors their names.
        worker_class: what does the work, see `WorkerActor`.
    """

    def __init__(
        self, config: Config, placement: PlacementGroup, directory: Directory, engine_id: str, worker_class: str
    ):
        world_size = config.worker.tensor_parallel_size * config.worker.pipeline_parallel_size
        self.ranks: list[Child] = []
        for rank in range(world_size):
            bundle = placement.bundle_specs[1 + rank]
            # Ray takes concurrency groups here alone, not in options(); its types don't know them.
            actor_class: Any = ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(WorkerActor)  # type: ignore[call-overload]
            handle: Actor = actor_class.options(
                name=directory.name("worker", engine_id, rank),
                namespace=directory.namespace,
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(placement, 1 + rank),
            ).remote(config, rank, worker_class)
            self.ranks.append(Child(f"worker rank {rank}", handle, handle.watch.remote()))

    async def load(self) -> EngineFacts:
        """Load every rank's shard; what rank 0 learned.

        Raises:
            PagedrayError: a rank can't load, or died.
        """
        facts = await asyncio.gather(*(answer(rank.handle.load.remote(), None, rank.name) for rank in self.ranks))
        return decode(EngineFacts, facts[0])


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

    def close(self) -> None:
        """Drop the steps in flight. The actors are the replica's to kill."""
        self._steps.clear()
