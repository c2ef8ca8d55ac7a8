"""A server of the OpenAI API that answers what a test tells it to, over HTTP on a loopback port."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Asked:
    """A request that came."""

    path: str
    headers: dict[str, str]
    body: Any = None


@dataclass
class Reply:
    """
    pieces: of the body. A number pauses for so many seconds, None breaks the connection.
    """

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    pieces: Iterable[bytes | float | None] = ()


MODELS = Reply(pieces=[b'{"object": "list", "data": [{"id": "first"}, {"id": "second"}]}'])


def json_reply(value: Any, status: int = 200, **headers: str) -> Reply:
    return Reply(status, {name.replace("_", "-"): text for name, text in headers.items()}, [json.dumps(value).encode()])


def error_reply(status: int, message: str, **headers: str) -> Reply:
    return json_reply({"error": {"message": message, "type": "some_error", "code": None}}, status, **headers)


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


def chat_event(finish_reason: str | None = None, **delta: str) -> bytes:
    return event({"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]})


DONE = b"data: [DONE]\n\n"


def chat_reply(*texts: str) -> Reply:
    return Reply(pieces=[*(chat_event(content=text) for text in texts), chat_event("stop"), DONE])


class FakeApi:
    """
    Args:
        answer: what to reply, from the request.
        models: the reply of /models.
    """

    def __init__(self, answer: Callable[[Asked], Reply], models: Reply = MODELS):
        self._answer, self._models = answer, models
        self.asked: list[Asked] = []
        self.num_now = self.most_at_once = 0
        self._lock = threading.Lock()
        self._leaving = threading.Event()

    def __enter__(self) -> FakeApi:
        api = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                api._serve(self)

            do_POST = do_GET

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda *args: None  # type: ignore[method-assign]  # clients that leave
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._leaving.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    @property
    def posted(self) -> list[Any]:
        """Bodies of the POSTs, in the order in which they came."""
        return [asked.body for asked in self.asked if asked.body is not None]

    def _serve(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("content-length", 0)))
        headers = {name.lower(): value for name, value in handler.headers.items()}
        asked = Asked(handler.path, headers, json.loads(body) if body else None)
        with self._lock:
            self.asked.append(asked)
            self.num_now += 1
            self.most_at_once = max(self.most_at_once, self.num_now)
        try:
            self._reply(handler, self._models if asked.path.endswith("/models") else self._answer(asked))
        finally:
            with self._lock:
                self.num_now -= 1

    def _reply(self, handler: BaseHTTPRequestHandler, reply: Reply) -> None:
        handler.send_response(reply.status)
        for name, value in reply.headers.items():
            handler.send_header(name, value)
        handler.send_header("connection", "close")
        handler.end_headers()
        handler.close_connection = True
        for piece in reply.pieces:
            if isinstance(piece, float):
                self._leaving.wait(piece)
            elif piece is None:
                handler.wfile.flush()
                handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset
                handler.connection.close()
                return
            else:
                handler.wfile.write(piece)
                handler.wfile.flush()


def free_url() -> str:
    """Of a port where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}/v1"


def wait_until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it has not come true in time"
        time.sleep(0.01)
