"""How a planned step reaches the workers and its result comes back."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

from pagedray.engine.config import EngineFacts
from pagedray.engine.messages import RunnerOutput, SchedulerOutput


class Executor(Protocol):
    """The gang as the engine sees it: steps go in in order, results come out in the same order."""

    def submit(self, out: SchedulerOutput) -> None:
        """Hand a step over; returns at once. Steps run in the order of submission."""

    async def result(self) -> RunnerOutput:
        """Result of the oldest step whose result was not taken yet.

        Raises:
            EngineDead: the gang died, or the step took longer than its deadline.
        """

    def close(self) -> None:
        """Let go of the workers; nothing may be submitted afterwards."""


class StepWorker(Protocol):
    """One rank in this process: `engine.worker.worker.Worker`, or a fake one in tests."""

    def load(self) -> EngineFacts: ...
    def submit(self, out: SchedulerOutput) -> None: ...
    def result(self, step: int) -> RunnerOutput: ...
    def close(self) -> None: ...


class LocalExecutor:
    """A gang of one rank in this process, without Ray."""

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

    def close(self) -> None:
        self._worker.close()
