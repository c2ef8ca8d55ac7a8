"""Requests that have no engine, and the call for one that goes on for as long as there are any."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator

from pagedray.engine.errors import Overloaded

log = logging.getLogger(__name__)

AGAIN_S = 0.5  # pause before asking again

Wake = Callable[[], Awaitable[None]]


class Demand:
    """
    Args:
        wake: asks for an engine where there may be none, and returns once that was heard. None: engines don't come on
            demand.
        limit: most requests that may wait for an engine to start.
    """

    def __init__(self, wake: Wake | None, limit: int):
        self._wake, self._limit = wake, limit
        self.num = 0  # requests that have no engine
        self._asking: asyncio.Task[None] | None = None

    @property
    def is_heard(self) -> bool:
        """Whether engines come on demand."""
        return self._wake is not None

    def check_room(self, num: int) -> None:
        """Raise Overloaded when as many more can't wait."""
        if self.num + num > self._limit:
            raise Overloaded(
                f"{self.num} requests wait for an engine to start, {num} more exceed the limit of "
                f"{self._limit} (max_queued_requests)"
            )

    @contextlib.contextmanager
    def of(self, num: int) -> Iterator[None]:
        """So many requests have no engine meanwhile. One call stands for all that wait."""
        self.num += num
        if self._wake is not None and self._asking is None:
            self._asking = asyncio.get_running_loop().create_task(self._ask(self._wake))
        try:
            yield
        finally:
            self.num -= num
            if not self.num:
                self.close()

    def close(self) -> None:
        """Stop asking."""
        if self._asking is not None:
            self._asking.cancel()
            self._asking = None

    async def _ask(self, wake: Wake) -> None:
        while True:
            try:
                await wake()
            except Exception as error:  # whatever it is, somebody still waits
                log.warning("no engine could be asked for error=%r", error)
            await asyncio.sleep(AGAIN_S)
