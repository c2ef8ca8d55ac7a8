"""Updates on their way to one client (an ingress), kept until its next poll acknowledges them.

A poll is answered as soon as there is anything; what gathers while an answer travels goes into the next one. Every
answer also says how the engine is doing. One leaves for that alone when other clients' requests have changed a lot.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from pagedray.engine.messages import EngineNews, Request, RequestUpdate, UpdateBatch

NEWS_SHARE = 4  # a change by one part in so many of the requests of others is news


class Outbox:
    """
    Args:
        now_s: wall clock.
        news: what to tell with the answer that leaves now; what it tells counts as told.
    """

    def __init__(self, now_s: float, news: Callable[[], EngineNews | None] = lambda: None) -> None:
        self.live: dict[str, int] = {}  # the client's unfinished requests: id → tokens that it came with
        self.live_tokens = 0
        self._news = news
        self._told_others = 0
        self._has_news = False
        self._seen_s = now_s
        self._polls = 0
        self._pending: list[RequestUpdate] = []
        self._sent = UpdateBatch(0, ())
        self._changed = asyncio.Event()
        self._error: Exception | None = None

    def add(self, request: Request) -> None:
        """A request of this client was accepted, or its submission repeated."""
        if request.id in self.live:
            return
        self.live[request.id] = request.num_tokens
        self.live_tokens += request.num_tokens

    def drop(self, request_id: str) -> None:
        """It has ended."""
        self.live_tokens -= self.live.pop(request_id, 0)

    def put(self, update: RequestUpdate) -> None:
        self._pending.append(update)
        if update.finish_reason is not None:
            self.drop(update.request_id)
        self._changed.set()

    def others_have(self, num_requests: int) -> None:
        """Tell the client soon if that is far from what it knows of other clients' unfinished requests."""
        if abs(num_requests - self._told_others) >= max(1, self._told_others // NEWS_SHARE):
            self.hurry()

    def hurry(self) -> None:
        """Answer the open poll, or the next one, with no more than news."""
        self._has_news = True
        self._changed.set()

    def fail(self, error: Exception) -> None:
        """Make this and every later poll raise `error`; updates not yet fetched are void."""
        self._error = error
        self._changed.set()

    def silent_s(self, now_s: float) -> float:
        """Seconds since the client's last poll ended; 0 while one is open."""
        return 0.0 if self._polls else now_s - self._seen_s

    async def poll(self, ack: int, timeout_s: float, clock: float) -> UpdateBatch:
        """Wait for updates after batch `ack`; a batch without any when `timeout_s` passes.

        A poll that doesn't acknowledge the last batch (its answer was lost) gets that batch again.
        """
        self._polls += 1
        self._seen_s = clock
        try:
            if self._error is None and ack >= self._sent.seq and not (self._pending or self._has_news):
                self._changed.clear()
                with contextlib.suppress(TimeoutError):  # then it hears that this engine lives, and how it is doing
                    await asyncio.wait_for(self._changed.wait(), timeout_s)
            if self._error is not None:
                raise self._error
            if ack >= self._sent.seq:
                news = self._news()
                self._told_others = news.other_requests if news is not None else 0
                self._has_news = False
                self._sent = UpdateBatch(self._sent.seq + 1, tuple(self._pending), news)
                self._pending = []
            return self._sent
        finally:
            self._polls -= 1
