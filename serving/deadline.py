"""The time that a client gives its answer, by X-Request-Timeout-S."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from pagedray.engine.errors import DeadlineExceeded
from pagedray.serving.client import Generation
from pagedray.serving.limits import Headers, timeout_of


class Deadline:
    """Begins when it is made. It is kept here and not by the engine, whose clock may be another machine's: so it also
    covers what comes before an engine has the request.

    Args:
        headers: of the request.

    Raises:
        UserError: the header is no time.
    """

    def __init__(self, headers: Headers):
        self._timeout_s = timeout_of(headers)
        self._at_s = None if self._timeout_s is None else asyncio.get_running_loop().time() + self._timeout_s

    @asynccontextmanager
    async def for_start(self) -> AsyncIterator[None]:
        """Checking, compiling and submitting. Raises DeadlineExceeded."""
        limit = asyncio.timeout_at(self._at_s)
        try:
            async with limit:
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            raise self._error() from None

    @contextmanager
    def for_answer(self, generation: Generation) -> Iterator[None]:
        """Reading the answer: past the deadline `generation.next` raises DeadlineExceeded, and nothing is computed."""
        if self._at_s is None:
            yield
            return
        timer = asyncio.get_running_loop().call_at(self._at_s, lambda: generation.give_up(self._error()))
        try:
            yield
        finally:
            timer.cancel()

    def _error(self) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"the answer was not complete within the {self._timeout_s:g} s that X-Request-Timeout-S gave it; "
            "give it more time, or ask for less"
        )
