"""Updates on their way to one client (an ingress), kept until its next poll acknowledges them.

A poll is answered as soon as there is anything; what gathers while an answer travels goes into the next one.
"""

from __future__ import annotations

import asyncio

from pagedray.engine.messages import RequestUpdate, UpdateBatch


class Outbox:
    def __init__(self, now_s: float) -> None:
        self.live: set[str] = set()  # ids of the client's unfinished requests
        self._seen_s = now_s
        self._polls = 0
        self._pending: list[RequestUpdate] = []
        self._sent = UpdateBatch(0, ())
        self._changed = asyncio.Event()
        self._error: Exception | None = None

    def put(self, update: RequestUpdate) -> None:
        self._pending.append(update)
        if update.finish_reason is not None:
            self.live.discard(update.request_id)
        self._changed.set()

    def fail(self, error: Exception) -> None:
        """Make this and every later poll raise `error`; updates not yet fetched are void."""
        self._error = error
        self._changed.set()

    def silent_s(self, now_s: float) -> float:
        """Seconds since the client's last poll ended; 0 while one is open."""
        return 0.0 if self._polls else now_s - self._seen_s

    async def poll(self, ack: int, timeout_s: float, clock: float) -> UpdateBatch:
        """Wait for updates after batch `ack`; an empty batch when `timeout_s` passes without any.

        A poll that doesn't acknowledge the last batch (its answer was lost) gets that batch again.
        """
        self._polls += 1
        self._seen_s = clock
        try:
            if self._error is None and ack >= self._sent.seq and not self._pending:
                self._changed.clear()
                try:
                    await asyncio.wait_for(self._changed.wait(), timeout_s)
                except TimeoutError:
                    return UpdateBatch(self._sent.seq, ())
            if self._error is not None:
                raise self._error
            if ack >= self._sent.seq:
                self._sent = UpdateBatch(self._sent.seq + 1, tuple(self._pending))
                self._pending = []
            return self._sent
        finally:
            self._polls -= 1
