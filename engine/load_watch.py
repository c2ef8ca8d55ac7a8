"""What is known of the experts' loads, for whoever asks how an engine is doing: no step ever waits for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from pagedray.engine.metrics import ExpertCounts, ExpertLoads

log = logging.getLogger(__name__)

KEPT_S = 5.0  # that an answer is given again, before the workers are asked anew
ANSWER_S = 0.5  # to wait for the workers; then what they said last is all there is


class LoadWatch:
    """
    Args:
        ask: the workers, who answer once the steps that they have are done. One question is open at a time.
        clock: in seconds.
    """

    def __init__(self, ask: Callable[[], Awaitable[ExpertCounts]], clock: Callable[[], float]):
        self._ask, self._clock = ask, clock
        self._known: ExpertLoads | None = None
        self._asking: asyncio.Task[None] | None = None
        self._asked_s = -KEPT_S
        self._is_done = False  # nothing more will be asked: the model has no experts, or the workers go

    async def read(self) -> ExpertLoads | None:
        """None: there are no experts, or nothing is known of them yet."""
        now_s = self._clock()
        if self._asking is None and not self._is_done and not 0 <= now_s - self._asked_s < KEPT_S:
            self._asked_s = now_s
            self._asking = asyncio.create_task(self._learn())
        if self._asking is not None:
            await asyncio.wait((self._asking,), timeout=ANSWER_S)
        return self._known

    def close(self) -> None:
        self._is_done = True
        if self._asking is not None:
            self._asking.cancel()

    async def _learn(self) -> None:
        try:
            counts = await self._ask()
            self._is_done = not counts
            self._known = ExpertLoads.of(counts) if counts else None
        except Exception as error:  # who needs the workers will hear of their trouble, and says so
            log.info("the workers did not tell their experts' loads: %s", error)
        finally:
            self._asking = None
