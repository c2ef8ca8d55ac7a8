"""What surrounds every HTTP exchange: the request id, the count of answers, and the last resort for our own bugs."""

from __future__ import annotations

import itertools
import logging
import re
import uuid
from collections.abc import Callable, MutableMapping
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from pagedray.serving.openai.errors import envelope

log = logging.getLogger(__name__)

MAX_ID = 128
UNSAFE = re.compile(rb"[^A-Za-z0-9._~:/+=@-]")  # no control character gets into a header or a log line


class Edge:
    """ASGI middleware.

    Args:
        answered: told of the status of each answer.
        failure: the answer to an error that nobody expected.
        adds_request_id: put X-Request-Id into answers; False where the server around the app does.
    """

    def __init__(self, app: ASGIApp, answered: Callable[[int], None], failure: ASGIApp, adds_request_id: bool = True):
        self._app = app
        self._answered = answered
        self._failure = failure
        self._adds_request_id = adds_request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = client_request_id(scope["headers"]) or uuid.uuid4().hex.encode()
        started = False

        async def send_with_id(message: MutableMapping[str, Any]) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self._answered(message["status"])
                if self._adds_request_id:
                    message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            log.exception("unexpected error path=%s request_id=%s", scope["path"], request_id.decode())
            if started:
                raise  # too late for an answer: the server closes the connection
            await self._failure(scope, receive, send_with_id)


class HeaderGuard:
    """ASGI middleware for the HTTP server around the app, which takes it for granted that headers are UTF-8."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not all(map(_is_utf8, itertools.chain.from_iterable(scope["headers"]))):
            body = msgspec.json.encode(envelope("a header is not UTF-8", "invalid_request_error"))
            await Response(body, 400, media_type="application/json")(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def session_name(headers: list[tuple[bytes, bytes]]) -> bytes | None:
    """The client's X-Session-Id: requests of one session go to one engine, as far as load allows."""
    return next((value for name, value in headers if name == b"x-session-id" and value), None)


def client_request_id(headers: list[tuple[bytes, bytes]]) -> bytes:
    """The client's X-Request-Id without characters that don't belong in one, or nothing."""
    given = next((value for name, value in headers if name == b"x-request-id"), b"")
    return UNSAFE.sub(b"", given[: 8 * MAX_ID])[:MAX_ID]
