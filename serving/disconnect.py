"""Clients that leave while their request is being worked on, or stop reading its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, MutableMapping
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`; cancel it, and wait until it has cleaned up, as soon as the client leaves.

    The body must have been read: the next message is the client's leaving.

    Raises:
        ClientDisconnect: the client left first.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        working.result()
    finally:
        watching.cancel()
        working.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class ClientStalled(Exception):
    """The client doesn't read what it asked for."""


class StallWatch:
    """Runs an exchange, and gives it up when one part of its answer waits for the client for too long.

    A server's `send` returns while its buffer has room and waits when it is full, so what an answer gathers meanwhile
    is bounded by this time. One timer watches the whole exchange: nothing is set up for each part.

    Args:
        send: the server's.
        timeout_s: how long one part may wait.
    """

    def __init__(self, send: Send, timeout_s: float):
        self._send, self._timeout_s = send, timeout_s
        self._loop = asyncio.get_running_loop()
        self._limit = asyncio.timeout(None)
        self._since_s: float | None = None  # when the send that is going on began

    async def run(self, app: ASGIApp, scope: Scope, receive: Receive) -> None:
        """Raises ClientStalled, once the app has cleaned up."""
        self._timer = self._loop.call_later(self._timeout_s, self._look)
        try:
            async with self._limit:
                await app(scope, receive, self._watched)
        except TimeoutError:
            if not self._limit.expired():
                raise
            raise ClientStalled from None
        finally:
            self._timer.cancel()

    async def _watched(self, message: MutableMapping[str, Any]) -> None:
        self._since_s = self._loop.time()
        try:
            await self._send(message)
        finally:
            self._since_s = None

    def _look(self) -> None:
        now = self._loop.time()
        since_s = now if self._since_s is None else self._since_s
        if now - since_s >= self._timeout_s:
            self._limit.reschedule(now)
        else:
            self._timer = self._loop.call_at(since_s + self._timeout_s, self._look)
