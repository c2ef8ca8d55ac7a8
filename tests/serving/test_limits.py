"""Bounds of what a client may send: the first line, headers, media types, and what a body may look like."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pagedray.serving import limits
from pagedray.serving.limits import check_structure, parse_object
from tests.serving.rig import Rig
from tests.serving.test_bad_requests import TEXT, check

PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with Rig() as rig:
        yield rig
        await rig.idle()


def sent(**fields: Any) -> bytes:
    return json.dumps({**TEXT, "max_tokens": 1, **fields}).encode()


# First line and headers


async def test_long_paths_and_queries(rig: Rig) -> None:
    for path in ("/" + "a" * 10_000, "/v1/models?" + "a" * 10_000, "/v1/models/" + "%41" * 4000):
        error = check(await rig.http.get(path), 414, code="url_too_long")
        assert str(limits.MAX_PATH_BYTES) in error["message"]
    assert (await rig.http.get("/v1/models?" + "a=1&" * 1000)).status_code == 200
    error = check(await rig.http.get("/v1/models/" + "a" * 5000), 404, "model", "model_not_found")
    assert len(error["message"]) < 400
    assert len(check(await rig.http.get("/" + "a" * 5000), 404, code="unknown_url")["message"]) < 400


async def test_many_and_large_headers() -> None:
    async with Rig(max_header_bytes=4000) as rig:
        many = {f"x-{i}": "y" for i in range(limits.MAX_HEADERS)}
        error = check(await rig.http.get("/v1/models", headers=many), 431, code="headers_too_large")
        assert str(limits.MAX_HEADERS) in error["message"]
        for headers in ({"x-large": "a" * 5000}, {"a" * 5000: "x"}, {f"x-{i}": "a" * 50 for i in range(100)}):
            response = await rig.http.get("/v1/models", headers=headers)
            error = check(response, 431, code="headers_too_large")
            assert "max_header_bytes" in error["message"] and "4000" in error["message"]
            assert response.headers["x-request-id"]
        assert (await rig.http.get("/v1/models", headers={"x-large": "a" * 3000})).status_code == 200


# Media types


@pytest.mark.parametrize(
    "kind",
    [
        None,
        "",
        "application/json",
        "Application/JSON; charset=utf-8",
        "application/json;charset=UTF-8",
        "application/x+json",
    ],
)
async def test_json_is_taken_whatever_it_is_called(rig: Rig, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    assert (await rig.post("/v1/completions", content=sent(), headers=headers)).status_code == 200


@pytest.mark.parametrize(
    "kind",
    ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "text/json", "json", "é"],
)
async def test_other_media_are_refused_by_name(rig: Rig, kind: str) -> None:
    for path in PATHS:
        response = await rig.post(path, content=sent(), headers={"content-type": kind.encode()})
        error = check(response, 415, code="unsupported_content_type")
        assert kind.partition(";")[0].encode().decode("ascii", "replace") in error["message"]
        assert response.headers["accept"] == "application/json"


@pytest.mark.parametrize("coding", ["gzip", "br", "deflate", "zstd", "identity, gzip", "x"])
async def test_compressed_bodies_are_refused_by_name(rig: Rig, coding: str) -> None:
    for path in PATHS:
        response = await rig.post(path, content=b"\x1f\x8b" + bytes(100), headers={"content-encoding": coding})
        error = check(response, 415, code="unsupported_content_type")
        assert coding in error["message"] and "uncompressed" in error["message"]
        assert response.headers["accept-encoding"] == "identity"
    assert (
        await rig.post("/v1/completions", content=sent(), headers={"content-encoding": "identity"})
    ).status_code == 200


# Bodies


def nested(depth: int, around: str = "[]") -> bytes:
    """A body whose `note` makes it `depth` deep."""
    left, right = (around[0], around[1]) if around == "[]" else ('{"a":', "}")
    middle = b"" if around == "[]" else b"1"
    deep = left.encode() * (depth - 1) + middle + right.encode() * (depth - 1)
    return b'{"model":"fake","prompt":"x","note":' + deep + b"}"


@pytest.mark.parametrize("around", ["[]", "{}"])
async def test_depth_is_a_setting(around: str) -> None:
    async with Rig(max_json_depth=10) as rig:
        for path in PATHS:
            assert "deep" not in (await rig.post(path, content=nested(10, around))).json()["error"]["message"]
            for depth in (11, 100, 900, 5000, 100_000):
                error = check(await rig.post(path, content=nested(depth, around)), 400)
                assert "10 deep" in error["message"] and "max_json_depth" in error["message"]


def test_depth_counts_what_is_inside_and_not_brackets_of_texts() -> None:
    assert parse_object(b'{"a": "' + b"[" * 1000 + b'"}', 8) == {"a": "[" * 1000}
    assert parse_object(json.dumps({"a": [[]] * 1000}).encode(), 8) == {"a": [[]] * 1000}


def test_a_body_has_a_bound_of_arrays_and_objects() -> None:
    with pytest.raises(Exception, match="more than 100000 arrays and objects"):
        check_structure({"messages": [{}] * 100_000}, 8)
    check_structure({"messages": [{}] * 99_000, "prompt": list(range(10**6))}, 8)


async def test_the_last_of_equal_names_counts(rig: Rig) -> None:
    body = b'{"model":"no","model":"fake","prompt":"x","max_tokens":3,"prompt":"y","max_tokens":1}'
    response = await rig.post("/v1/completions", content=body)
    assert response.json()["usage"]["completion_tokens"] == 1


async def test_a_byte_order_mark_is_skipped(rig: Rig) -> None:
    assert (await rig.post("/v1/completions", content=b"\xef\xbb\xbf" + sent())).status_code == 200
    check(await rig.post("/v1/completions", content=b"\xef\xbb\xbf\xef\xbb\xbf" + sent()), 400)
    check(await rig.post("/v1/completions", content=sent().decode().encode("utf-16")), 400)
    assert (await rig.post("/v1/completions", content=b" \r\n\t" + sent() + b"\n\n ")).status_code == 200


@pytest.mark.parametrize("body", [b"", b"  \n", b"\xef\xbb\xbf"])
async def test_an_empty_body_is_called_that(rig: Rig, body: bytes) -> None:
    for path in PATHS:
        assert "empty" in check(await rig.post(path, content=body), 400)["message"]


@pytest.mark.parametrize(
    "text",
    [
        '"max_tokens": 15e-1',
        '"max_tokens": 100000000000000000000000',
        '"max_tokens": -1.0',
        '"top_k": 1e400',
        '"user": "\\ud83d"',
        '"user": "\\udc00\\ud800"',
        '"user": "\x01"',
        '"user": "\\x41"',
        "'user': 1",
        '"user": undefined',
        '"user": TRUE',
        '"user": 01',
        '"user": .5',
        '"user": "a",',
        '"user": "a" /* c */',
    ],
)
async def test_what_json_or_the_api_has_not(rig: Rig, text: str) -> None:
    response = await rig.post("/v1/completions", content=b'{"model":"fake","prompt":"x",' + text.encode() + b"}")
    assert response.status_code == 400
    assert response.json()["error"]["message"]


async def test_any_character_that_json_can_write_is_taken(rig: Rig) -> None:
    prompt = "\u0000\u001f\ufeff\uffff\U0010ffff👩‍👩‍👧é"
    for body in (sent(prompt=prompt), json.dumps({**TEXT, "prompt": prompt}, ensure_ascii=False).encode()):
        response = await rig.post("/v1/completions", content=body)
        assert response.json()["usage"]["prompt_tokens"] == len(prompt.encode())


async def test_large_bodies_of_small_values_hold_nobody_up() -> None:
    """The loop serves all streams: no body within the limits may keep it for long."""
    async with Rig(max_body_bytes=4 * 2**20) as rig:
        bodies = {
            "messages": b'{"model":"fake","messages":[' + b"{}," * 1_000_000 + b"{}]}",
            "arrays": b'{"model":"fake","prompt":[' + b"[]," * 1_000_000 + b"[]]}",
            "ids": b'{"model":"fake","prompt":[' + b"1," * 1_500_000 + b"1]}",
            "bias": b'{"model":"fake","prompt":"x","logit_bias":{'
            + b",".join(b'"%d":1' % i for i in range(300_000))
            + b"}}",
            "fields": b"{" + b",".join(b'"%d":1' % i for i in range(300_000)) + b"}",
            "stop": b'{"model":"fake","prompt":"x","stop":[' + b'"a",' * 900_000 + b'"a"]}',
        }
        for name, body in bodies.items():
            path = "/v1/chat/completions" if name == "messages" else "/v1/completions"
            begun = time.process_time()
            response = await rig.post(path, content=body)
            assert response.status_code == 400, name
            assert time.process_time() - begun < 3.0, name
            assert len(response.content) < 3000
