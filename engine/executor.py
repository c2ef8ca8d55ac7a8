"""How a planned step reaches the workers and its result comes back."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol

from pagedray.engine.config import EngineFacts
from pagedray.engine.messages import RunnerOutput, SchedulerOutput
from pagedray.engine.metrics import ExpertCounts


class Executor(Protocol):
    """The gang as the engine sees it: steps go in in order, results come out in the same order."""

    def submit(self, out: SchedulerOutput) -> None:
        """Hand a step over; returns at once. Steps run in the order of submission."""

    async def result(self) -> RunnerOutput:
        """Result of the oldest step whose result was not taken yet.

        Raises:
            EngineDead: the gang died, or the step took longer than its deadline.
        """

    async def expert_loads(self) -> ExpertCounts:
        """Of the whole model, in the steps submitted so far. Raises when a rank doesn't answer."""

    def close(self) -> None:
        """Let go of the workers; nothing may be submitted afterwards."""


class StepWorker(Protocol):
    """What computes steps, in this process or from it: one rank, or one that stands for its gang."""

    def load(self) -> EngineFacts: ...
    def submit(self, out: SchedulerOutput) -> None: ...
    def result(self, step: int) -> RunnerOutput: ...
    def expert_loads(self) -> ExpertCounts:
        """Of the layers that it stands for, in the steps submitted so far, which it waits for."""

    def close(self) -> None: ...


class RankWorker(StepWorker, Protocol):
    """One rank: `engine.worker.worker.Worker`, or a fake one in tests."""

    def load(self, on_phase: Callable[[str, float], None] = ...) -> EngineFacts: ...

    def abort(self) -> None:
        """End a step that waits for ranks which are gone."""


class LocalExecutor:
    """Without Ray: a worker that this process has itself."""

    def __init__(self, worker: StepWorker):
        self._worker = worker
        self._steps: deque[int] = deque()

    def submit(self, out: SchedulerOutput) -> None:
        self._worker.submit(out)
        self._steps.append(out.step)

    async def result(self) -> RunnerOutput:
        out = await asyncio.to_thread(self._worker.result, self._steps[0])
        self._steps.popleft()
        return out

    async def expert_loads(self) -> ExpertCounts:
        return await asyncio.to_thread(self._worker.expert_loads)

    def close(self) -> None:
        self._worker.close()
