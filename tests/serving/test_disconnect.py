"""Clients that leave: whatever the stage, nothing of their requests stays on the engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.fakes import FakeWorker, SlowFakeWorker, greedy
from tests.serving.rig import LocalLink, Rig, read_sse, text_of, texts

LONG = "x" * 600


def is_queued(link: LocalLink) -> bool:
    return link.engine.stats().scheduler.num_waiting > 0


def is_prefilling(link: LocalLink) -> bool:
    return link.worker.num_tokens_computed > 0 and link.engine.stats().generated_tokens == 0


def is_decoding(link: LocalLink) -> bool:
    return link.engine.stats().generated_tokens >= 3


STAGES: dict[str, tuple[Callable[[LocalLink], bool], dict[str, Any], dict[str, Any]]] = {
    # stage → (reached when, server settings, request fields)
    "prefilling": (is_prefilling, {"prefill_chunk_tokens": 4}, {"prompt": LONG}),
    "decoding": (is_decoding, {}, {"prompt": "x"}),
}


async def leave(rig: Rig, url: str, body: dict[str, Any], reached: Callable[[], bool]) -> None:
    """Send a request on a raw connection and close it once `reached`."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps({"model": "fake", **body}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    async with asyncio.timeout(10):
        while not reached():
            await asyncio.sleep(0.002)
    writer.close()
    await writer.wait_closed()
    del reader


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
async def test_leaving_frees_everything(stage: str, n: int, stream: bool) -> None:
    is_reached, settings, fields = STAGES[stage]
    async with Rig(SlowFakeWorker, num_kv_blocks=1024, **settings) as rig, rig.served() as url:
        link = rig.links[0]
        await leave(rig, url, {**fields, "n": n, "stream": stream, "max_tokens": 1000}, lambda: is_reached(link))
        computed = link.worker.num_tokens_computed
        await rig.idle()
        assert link.worker.num_tokens_computed - computed < 200, "it decoded on as a ghost"
        assert link.engine.stats().finished == {"abort": n}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
async def test_leaving_while_queued_frees_everything(n: int, stream: bool) -> None:
    async with Rig(SlowFakeWorker, max_num_seqs=1) as rig, rig.served() as url:
        holding = asyncio.ensure_future(rig.complete(prompt="hold", max_tokens=40))
        while not rig.links[0].engine.stats().scheduler.num_running:
            await asyncio.sleep(0.002)
        body = {"prompt": "x", "n": n, "stream": stream, "max_tokens": 1000}
        await leave(rig, url, body, lambda: rig.links[0].engine.stats().scheduler.num_waiting == n)
        async with asyncio.timeout(10):
            while is_queued(rig.links[0]):
                await asyncio.sleep(0.002)
        assert not holding.done()
        assert (await holding)["choices"][0]["text"] == text_of(greedy(b"hold", 40))
        await rig.idle()
        assert rig.links[0].engine.stats().finished == {"abort": n, "length": 1}


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
async def test_leaving_before_the_body_is_complete(path: str, caplog: pytest.LogCaptureFixture) -> None:
    async with Rig() as rig, rig.served() as url:
        host, port = url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{".encode())
        await asyncio.sleep(0.05)
        writer.close()
        await writer.wait_closed()
        await asyncio.sleep(0.05)
        assert (await rig.complete(prompt="x", max_tokens=1))["usage"]["completion_tokens"] == 1
        assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_a_cancelled_handler_frees_everything() -> None:
    """Ray Serve doesn't send http.disconnect: it cancels the handler."""
    async with Rig(SlowFakeWorker) as rig:
        for stream in (False, True):
            asking = asyncio.ensure_future(
                rig.post(
                    "/v1/completions", {"model": "fake", "prompt": "x", "max_tokens": 500, "stream": stream, "n": 2}
                )
            )
            while rig.links[0].engine.stats().scheduler.num_running < 2:
                await asyncio.sleep(0.002)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await rig.idle()


async def test_a_send_that_fails_frees_everything() -> None:
    """Some servers tell by an OSError from send that the client left."""
    async with Rig(SlowFakeWorker) as rig:
        body = json.dumps({"model": "fake", "prompt": "x", "max_tokens": 500, "stream": True}).encode()
        sent: list[Any] = []
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            if messages:
                return messages.pop()
            return await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)
            if len(sent) == 3:
                raise BrokenPipeError

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
        await rig.app(scope, receive, send)
        assert len(sent) == 3
        await rig.idle()


async def test_a_send_that_fails_ends_the_reading_of_a_background_response(caplog: pytest.LogCaptureFixture) -> None:
    async with Rig(SlowFakeWorker) as rig:
        fields = {"model": "fake", "input": "x", "max_output_tokens": 20, "stream": True, "background": True}
        messages = [{"type": "http.request", "body": json.dumps(fields).encode(), "more_body": False}]
        sent: list[Any] = []

        async def receive() -> Any:
            return messages.pop() if messages else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)
            if len(sent) == 2:
                raise BrokenPipeError

        scope = {"type": "http", "method": "POST", "path": "/v1/responses", "headers": [], "query_string": b""}
        await rig.app(scope, receive, send)
        assert len(sent) == 2 and "unexpected error" not in caplog.text
        await rig.idle()


async def test_a_reader_that_stops_holds_up_nobody_and_loses_nothing() -> None:
    async with Rig() as rig:
        body = json.dumps({"model": "fake", "prompt": "x", "max_tokens": 300, "stream": True}).encode()
        messages = [{"type": "http.request", "body": body, "more_body": False}]
        reads = asyncio.Event()
        sent: list[bytes] = []

        async def receive() -> Any:
            return messages.pop() if messages else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            await reads.wait()
            sent.append(message.get("body", b""))

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
        slow = asyncio.ensure_future(rig.app(scope, receive, send))
        for i in range(5):
            got = await rig.complete(prompt=f"fast{i}", max_tokens=100)
            assert got["choices"][0]["text"] == text_of(greedy(f"fast{i}".encode(), 100))
        await rig.idle()  # the engine is done with the slow one too
        assert not slow.done()
        reads.set()
        await slow
        assert texts(read_sse(b"".join(sent).decode())) == {0: text_of(greedy(b"x", 300))}
        assert len(sent) < 10, "what gathered must go out at once"


async def test_a_flood_gets_429_and_the_accepted_ones_their_answers() -> None:
    async with Rig(SlowFakeWorker, max_num_seqs=2, max_queued_requests=6) as rig, rig.served() as url:
        async with httpx.AsyncClient(timeout=60) as http:
            asks = [
                http.post(f"{url}/v1/completions", json={"model": "fake", "prompt": f"p{i}", "max_tokens": 5, "n": 2})
                for i in range(20)
            ]
            responses = await asyncio.gather(*asks)
        codes = [response.status_code for response in responses]
        assert set(codes) == {200, 429}
        assert codes.count(429) >= 12
        for i, response in enumerate(responses):
            if response.status_code == 429:
                assert int(response.headers["retry-after"]) >= 1
                assert response.json()["error"]["type"] == "rate_limit_error"
            else:
                got = [choice["text"] for choice in response.json()["choices"]]
                assert got == [text_of(greedy(f"p{i}".encode(), 5))] * 2
        await rig.idle()
        assert rig.links[0].engine.stats().rejected == 2 * codes.count(429)


class PacedWorker(FakeWorker):
    step_s = 0.002


async def test_64_mixed_streams_with_the_official_client() -> None:
    """Streams and whole answers, chat and text, several choices, stop strings; every fourth one leaves midway."""
    async with Rig(PacedWorker, num_engines=2, max_num_seqs=24, num_kv_blocks=400) as rig, rig.openai() as client:

        async def one(i: int) -> str:
            prompt = f"prompt {i}"
            num = 20 + i
            if i % 4 == 0:
                stream = await client.completions.create(model="fake", prompt=prompt, max_tokens=400, n=2, stream=True)
                seen = 0
                async for _ in stream:
                    seen += 1
                    if seen > i // 4:
                        break
                await stream.close()
                return "left"
            if i % 4 == 1:
                whole = await client.completions.create(model="fake", prompt=prompt, max_tokens=num, n=3)
                assert whole.usage is not None
                assert whole.usage.completion_tokens == 3 * num
                assert [c.text for c in whole.choices] == [text_of(greedy(prompt.encode(), num))] * 3
                assert {c.finish_reason for c in whole.choices} == {"length"}
                return "whole"
            if i % 4 == 2:
                text = f"answer {i} END rest"
                extra = {"allowed_token_ids": list(text.encode())}
                answer = await client.chat.completions.create(
                    model="fake",
                    messages=[{"role": "user", "content": prompt}],
                    max_completion_tokens=num,
                    stop=["END"],
                    extra_body=extra,
                )
                assert answer.usage is not None
                assert answer.choices[0].message.content == f"answer {i} "
                assert answer.usage.completion_tokens == len(f"answer {i} END")
                assert answer.choices[0].finish_reason == "stop"
                return "stopped"
            chat = await client.chat.completions.create(
                model="fake",
                messages=[{"role": "user", "content": prompt}],
                max_tokens=num,
                stream=True,
                stream_options={"include_usage": True},
                logprobs=True,
            )
            text, entries, reasons, usages = "", 0, [], []
            async for chunk in chat:
                usages += [chunk.usage] if chunk.usage else []
                for choice in chunk.choices:
                    text += choice.delta.content or ""
                    entries += len(choice.logprobs.content or []) if choice.logprobs else 0
                    reasons += [choice.finish_reason] if choice.finish_reason else []
            assert text == text_of(greedy(f"user:{prompt}\nassistant:".encode(), num))
            assert reasons == ["length"]
            assert [u.completion_tokens for u in usages] == [num]
            assert entries == num
            return "streamed"

        kinds = await asyncio.gather(*(one(i) for i in range(64)))
        assert {kind: kinds.count(kind) for kind in kinds} == {"left": 16, "whole": 16, "stopped": 16, "streamed": 16}
        await rig.idle()
        for link in rig.links:
            assert link.num_used_blocks == 0
