"""Clients that don't read their answers: given up in time, memory bounded, neighbours unharmed."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import socket
import time
from typing import Any

import pytest

from pagedray.serving.client import Generation
from pagedray.serving.disconnect import ClientStalled, StallWatch
from tests.fakes import FakeWorker, greedy
from tests.serving.rig import Rig, read_sse, text_of, texts

# Much at a time: what the kernel takes for a reader, some megabytes, is soon full.
HUGE = {"model": "fake", "prompt": "x", "max_tokens": 900, "stream": True, "logprobs": 20, "n": 32}
SETTINGS: dict[str, Any] = {"num_kv_blocks": 8192}


class QuickWorker(FakeWorker):
    step_s = 0.0005


def ask_and_never_read(url: str, body: dict[str, Any]) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((host, int(port)))
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    client.sendall(head.encode() + b"\r\n\r\n" + data)
    return client


async def test_a_client_that_never_reads_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    """And until then, what waits for them is bounded by the time."""
    caplog.set_level(logging.INFO)
    async with Rig(QuickWorker, **SETTINGS, client_stall_timeout_s=1.0) as rig, rig.served() as url:
        client = await asyncio.to_thread(ask_and_never_read, url, HUGE)
        begun, most, near = time.monotonic(), 0, text_of(greedy(b"near", 3))
        while "client stopped reading" not in caplog.text:
            assert time.monotonic() - begun < 60
            assert (await rig.complete(prompt="near", max_tokens=3))["choices"][0]["text"] == near
            generations = [found for found in gc.get_objects() if isinstance(found, Generation)]
            most = max([most, *(len(generation._arrived) for generation in generations)])
            await asyncio.sleep(0.1)
        await rig.idle()
        assert rig.links[0].engine.stats().finished["abort"] == 32
        assert 0 < most <= 32 * 2 * 1.0 / QuickWorker.step_s  # updates
        assert [record for record in caplog.records if record.levelname == "ERROR" and "pagedray" in record.name] == []
        client.close()


async def test_a_slow_reader_that_goes_on_reading_is_kept() -> None:
    async with Rig(client_stall_timeout_s=0.2) as rig:
        body = json.dumps({"model": "fake", "prompt": "x", "max_tokens": 300, "stream": True}).encode()
        messages = [{"type": "http.request", "body": body, "more_body": False}]
        sent: list[bytes] = []

        async def receive() -> Any:
            return messages.pop() if messages else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            await asyncio.sleep(0.1)
            sent.append(message.get("body", b""))

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
        await rig.app(scope, receive, send)
        assert texts(read_sse(b"".join(sent).decode())) == {0: text_of(greedy(b"x", 300))}


async def test_work_that_takes_long_is_no_stall() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.3)
        await send({"type": "done"})

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await StallWatch(send, 0.1).run(app, {}, send)  # type: ignore[arg-type]
    assert sent == [{"type": "done"}]


async def test_a_stall_is_told_once_the_app_has_cleaned_up() -> None:
    cleaned = False

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal cleaned
        try:
            await send({})
        finally:
            await asyncio.sleep(0.01)
            cleaned = True

    async def send(message: Any) -> None:
        await asyncio.Event().wait()

    begun = time.monotonic()
    with pytest.raises(ClientStalled):
        await StallWatch(send, 0.1).run(app, {}, send)  # type: ignore[arg-type]
    assert cleaned and 0.1 <= time.monotonic() - begun < 1


async def test_other_timeouts_pass() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise TimeoutError("mine")

    with pytest.raises(TimeoutError, match="mine"):
        await StallWatch(app, 0.1).run(app, {}, app)  # type: ignore[arg-type]
