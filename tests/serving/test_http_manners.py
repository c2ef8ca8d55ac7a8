"""HTTP itself, over a socket: methods, versions, bodies in pieces, connections that live on after errors, headers."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from tests.serving.rig import Rig
from tests.serving.test_bad_requests import CHAT, TEXT, check

POST_PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
GET_PATHS = ("/health", "/load", "/version", "/metrics", "/v1/models", "/v1/models/fake")


class Raw:
    """A connection, and answers as they come over it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader, self.writer = reader, writer

    async def ask(self, *parts: bytes, pause_s: float = 0.0) -> tuple[int, dict[str, str], bytes]:
        for part in parts:
            self.writer.write(part)
            await self.writer.drain()
            await asyncio.sleep(pause_s)
        return await self.answer()

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        async with asyncio.timeout(10):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            status = int(head[0].split()[1])
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
            if status == 100:
                return status, headers, b""
            if "content-length" in headers:
                return status, headers, await self.reader.readexactly(int(headers["content-length"]))
            if headers.get("transfer-encoding") == "chunked":
                body = b""
                while size := int(await self.reader.readline(), 16):
                    body += await self.reader.readexactly(size)
                    await self.reader.readline()
                await self.reader.readline()
                return status, headers, body
            return status, headers, await self.reader.read()


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Raw]:
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield Raw(reader, writer)
    finally:
        writer.close()


def post(path: str, body: bytes, *headers: str, version: str = "1.1") -> bytes:
    lines = [f"POST {path} HTTP/{version}", "Host: x", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


def body_of(**fields: Any) -> bytes:
    return json.dumps({**TEXT, "max_tokens": 2, **fields}).encode()


async def test_methods() -> None:
    async with Rig() as rig:
        for path in POST_PATHS:
            for method in ("GET", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW"):
                response = await rig.http.request(method, path)
                check(response, 405, code="method_not_allowed")
                assert response.headers["allow"] == "POST"
            assert (await rig.http.head(path)).status_code == 405
        for path in GET_PATHS:
            for method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS"):
                response = await rig.http.request(method, path)
                error = check(response, 405, code="method_not_allowed")
                assert response.headers["allow"] == "GET, HEAD" and "GET" in error["message"]
            assert (await rig.http.head(path)).status_code == 200


async def test_paths() -> None:
    async with Rig() as rig:
        for path in (
            "/",
            "/v1",
            "/v2/models",
            "/V1/models",
            "//v1/models",
            "/v1/models%2f",
            "/v1//models",
            "/%00",
            "/é",
        ):
            check(await rig.http.get(path), 404, code="unknown_url")
        for path in (*POST_PATHS, "/health"):
            error = check(await rig.post(path + "/", {}), 404, code="unknown_url")
            assert "slash" in error["message"]


@pytest.mark.parametrize(
    ("path", "status", "hint"),
    [
        ("/v1/embeddings", 400, "pooling"),
        ("/v1/rerank", 400, "pooling"),
        ("/v1/moderations", 404, "moderation"),
        ("/v1/audio/speech", 404, "text only"),
        ("/v1/audio/transcriptions", 404, "text only"),
        ("/v1/images/generations", 404, "text only"),
        ("/v1/files", 404, "no files"),
        ("/v1/files/file-1/content", 404, "no files"),
        ("/v1/batches", 404, "run-batch"),
        ("/v1/fine_tuning/jobs", 404, "--model"),
        ("/v1/assistants", 404, "/v1/responses"),
        ("/v1/threads/t/runs", 404, "/v1/responses"),
        ("/v1/chat/completions/chatcmpl-1", 404, "not stored"),
    ],
)
async def test_routes_of_the_api_that_are_not_here_say_why(path: str, status: int, hint: str) -> None:
    async with Rig() as rig:
        for method in ("POST", "GET"):
            response = await rig.http.request(method, path, json={"model": "fake", "input": "x"})
            error = check(response, status, code="unsupported_endpoint" if status == 400 else "unknown_url")
            assert hint in error["message"] and path in error["message"]


async def test_anthropics_routes_have_anthropics_errors() -> None:
    async with Rig(max_body_bytes=2000, max_header_bytes=4000) as rig:
        cases = [
            (await rig.http.get("/v1/messages"), 405, "invalid_request_error"),
            (await rig.post("/v1/messages/nothing", {}), 404, "not_found_error"),
            (await rig.post("/v1/messages/batches", {}), 404, "not_found_error"),
            (await rig.post("/v1/messages", content=b"{}" + b" " * 3000), 413, "request_too_large"),
            (await rig.post("/v1/messages", {}, headers={"x": "y" * 5000}), 431, "invalid_request_error"),
            (
                await rig.post("/v1/messages", content=b"{}", headers={"content-encoding": "br"}),
                415,
                "invalid_request_error",
            ),
            (await rig.post("/v1/messages", {"model": "fake"}), 400, "invalid_request_error"),
        ]
        for response, status, kind in cases:
            assert response.status_code == status, response.text
            body = response.json()
            assert body["type"] == "error" and set(body) == {"type", "error", "request_id"}
            assert set(body["error"]) == {"type", "message"} and body["error"]["type"] == kind
            assert body["request_id"] == response.headers["request-id"]
        assert cases[0][0].headers["allow"] == "POST"


async def test_what_clients_read_in_headers() -> None:
    async with Rig() as rig:
        response = await rig.post("/v1/completions", TEXT, headers={"x-request-id": "mine"})
        assert response.headers["x-request-id"] == "mine"
        assert 0 <= int(response.headers["openai-processing-ms"]) < 60_000
        assert "request-id" not in response.headers
        assert response.headers["content-type"] == "application/json"
        assert int(response.headers["content-length"]) == len(response.content)
        assert "openai-processing-ms" not in (await rig.http.get("/health")).headers
        async with rig.openai() as client:
            made = await client.completions.create(model="fake", prompt="x", extra_headers={"X-Request-Id": "mine"})
            assert made._request_id == "mine"


async def test_a_connection_lives_on_after_errors() -> None:
    async with Rig() as rig, rig.served() as url, connected(url) as raw:
        good = post("/v1/completions", body_of())
        for request, status in [
            (good, 200),
            (post("/v1/completions", b"{"), 400),
            (good, 200),
            (post("/v1/nothing", body_of()), 404),
            (good, 200),
            (post("/v1/completions", body_of(model="no")), 404),
            (post("/health", body_of()), 405),
            (good, 200),
            (post("/v1/completions", body_of(), "Content-Encoding: gzip"), 415),
            (good, 200),
        ]:
            assert (await raw.ask(request))[0] == status


async def test_requests_sent_at_once_over_one_connection_are_answered_in_order() -> None:
    async with Rig() as rig, rig.served() as url, connected(url) as raw:
        for num in (3, 1, 2):
            raw.writer.write(post("/v1/completions", body_of(max_tokens=num)))
        got = [json.loads((await raw.answer())[2])["usage"]["completion_tokens"] for _ in range(3)]
        assert got == [3, 1, 2]


async def test_bodies_in_pieces() -> None:
    async with Rig() as rig, rig.served() as url, connected(url) as raw:
        whole = post("/v1/completions", body_of())
        status, _, body = await raw.ask(*[whole[i : i + 17] for i in range(0, len(whole), 17)], pause_s=0.001)
        assert status == 200 and json.loads(body)["choices"]
        data = body_of()
        chunks = b"".join(
            b"%x;ext=1\r\n%b\r\n" % (len(data[i : i + 9]), data[i : i + 9]) for i in range(0, len(data), 9)
        )
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        assert (await raw.ask(head, chunks + b"0\r\n\r\n"))[0] == 200


async def test_expect_100_continue() -> None:
    async with Rig(max_body_bytes=2000) as rig, rig.served() as url:
        async with connected(url) as raw:
            data = body_of()
            head, _ = post("/v1/completions", data, "Expect: 100-continue").split(b"\r\n\r\n", 1)
            assert (await raw.ask(head + b"\r\n\r\n"))[0] == 100
            assert (await raw.ask(data))[0] == 200
        async with connected(url) as raw:  # refused before the body is asked for
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 99999\r\n\r\n"
            assert (await raw.ask(head))[0] == 413


async def test_http_1_0() -> None:
    async with Rig() as rig, rig.served() as url:
        for stream in (False, True):
            async with connected(url) as raw:
                status, _, body = await raw.ask(post("/v1/completions", body_of(stream=stream), version="1.0"))
                assert status == 200
                assert body.endswith(b"[DONE]\n\n") if stream else json.loads(body)["choices"]
                assert await raw.reader.read() == b""  # it was closed


@pytest.mark.parametrize(
    "request_",
    [
        b"NONSENSE\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1x\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\nbad header: \x00\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
async def test_what_is_no_http_harms_nobody(request_: bytes) -> None:
    async with Rig() as rig, rig.served() as url:
        async with connected(url) as raw:
            raw.writer.write(request_)
            raw.writer.write_eof()
            async with asyncio.timeout(10):
                answer = await raw.reader.read()
            assert not answer or re.match(rb"HTTP/1.1 4\d\d ", answer)
        async with httpx.AsyncClient() as http:
            assert (await http.post(f"{url}/v1/completions", json=TEXT)).status_code == 200


async def test_a_head_request_has_no_body() -> None:
    async with Rig() as rig, rig.served() as url, connected(url) as raw:
        raw.writer.write(b"HEAD /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        head = await raw.reader.readuntil(b"\r\n\r\n")
        assert b" 200 " in head
        assert (await raw.ask(post("/v1/chat/completions", json.dumps({**CHAT, "max_tokens": 1}).encode())))[0] == 200
