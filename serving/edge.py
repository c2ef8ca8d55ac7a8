"""What surrounds every HTTP exchange: bounds of its head, the request id, the count of answers, clients that don't read
theirs, and the last resort for our own bugs.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Callable, MutableMapping
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from pagedray.engine.config import ServerConfig
from pagedray.engine.errors import PagedrayError, UserError
from pagedray.serving.disconnect import ClientStalled, StallWatch
from pagedray.serving.limits import SERVE_TIMEOUT_HEADER, TIMEOUT_HEADER, Headers, check_head, own_path

log = logging.getLogger(__name__)

MAX_ID = 128
UNSAFE = re.compile(rb"[^A-Za-z0-9._~:/+=@-]")  # no character that has a meaning in a header or a log line


class Edge:
    """ASGI middleware. Puts the request's id into `scope["state"]["request_id"]`.

    Args:
        limits: of a request's headers, and of the time that a client may not read.
        answered: told of the status of each answer.
        refuse: the answer to an error; None stands for one that nobody expected.
        adds_request_id: put X-Request-Id into answers; False where the server around the app does.
    """

    def __init__(
        self,
        app: ASGIApp,
        limits: ServerConfig,
        answered: Callable[[int], None],
        refuse: Callable[[Scope, PagedrayError | None], ASGIApp],
        adds_request_id: bool = True,
    ):
        self._app = app
        self._limits = limits
        self._answered = answered
        self._refuse = refuse
        self._adds_request_id = adds_request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        arrival_s = time.monotonic()
        request_id = client_request_id(scope["headers"]) or uuid.uuid4().hex.encode()
        scope.setdefault("state", {})["request_id"] = request_id.decode()
        path = own_path(scope)
        started = False

        async def send_with_id(message: MutableMapping[str, Any]) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self._answered(message["status"])
                message["headers"] = [*message.get("headers", ()), *self._headers(path, request_id, arrival_s)]
            await send(message)

        try:
            try:
                check_head(scope, self._limits.max_header_bytes)
                app = self._app
            except UserError as error:
                app = self._refuse(scope, error)
            await StallWatch(send_with_id, self._limits.client_stall_timeout_s).run(app, scope, receive)
        except ClientStalled:
            log.info("client stopped reading path=%r request_id=%s", path, request_id.decode())
        except Exception:
            log.exception("unexpected error path=%r request_id=%s", path, request_id.decode())
            if started:
                raise  # too late for an answer: the server closes the connection
            await self._refuse(scope, None)(scope, receive, send_with_id)

    def _headers(self, path: str, request_id: bytes, arrival_s: float) -> Headers:
        """What official clients and people look for in an answer's headers."""
        found = [(b"x-request-id", request_id)] if self._adds_request_id else []
        if is_anthropic(path):
            found.append((b"request-id", request_id))
        elif path.startswith("/v1/"):
            found.append((b"openai-processing-ms", b"%d" % round(1e3 * (time.monotonic() - arrival_s))))
        return found


class HeaderGuard:
    """ASGI middleware for the HTTP server around the app, Serve's.

    It takes it for granted that headers are UTF-8. HTTP itself allows other bytes and gives them no meaning; they are
    read as Latin-1, as they were long meant. And it ends a request whose time is over by a text that is no API's error:
    so the header that says the time reaches the app alone, under the app's name for it.
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope["headers"] = [
                (TIMEOUT_HEADER if name == SERVE_TIMEOUT_HEADER else as_utf8(name), as_utf8(value))
                for name, value in scope["headers"]
            ]
        await self._app(scope, receive, send)


def as_utf8(data: bytes) -> bytes:
    if data.isascii():
        return data
    try:
        data.decode()
    except UnicodeDecodeError:
        return data.decode("latin-1").encode()
    return data


def is_anthropic(path: str) -> bool:
    """Whether the route is Anthropic's, whose clients read other headers and errors than OpenAI's."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def session_name(headers: Headers) -> bytes | None:
    """The client's X-Session-Id: requests of one session go to one engine, as far as load allows."""
    return next((value for name, value in headers if name == b"x-session-id" and value), None)


def client_request_id(headers: Headers) -> bytes:
    """The client's X-Request-Id without characters that don't belong in one, or nothing."""
    given = next((value for name, value in headers if name == b"x-request-id"), b"")
    return UNSAFE.sub(b"", given[: 8 * MAX_ID])[:MAX_ID]
