from __future__ import annotations

import json
from typing import Any

import pytest

from pagedray.deployments.commands.batch_line import BatchRequest, Result, read_batch

GOOD: dict[str, Any] = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}


def lines(*values: Any) -> list[bytes]:
    return [json.dumps(value).encode() + b"\n" for value in values]


def errors(batch: list[bytes]) -> list[tuple[int, str | None, str | None]]:
    return [
        (number, line.custom_id, line.error.code)
        for number, line in read_batch(batch)
        if isinstance(line, Result) and line.error is not None and line.error.line == number
    ]


@pytest.mark.parametrize("url", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
def test_a_body_is_passed_on_as_it_was_written(url: str) -> None:
    body = b'{"x":  1.50, "y": 123456789012345678901234567890, "stream": false, "z": "\\u00e9"}'
    text = b'{"body": %b, "custom_id": "1", "method": "POST", "url": "%b", "more": 1}' % (body, url.encode())
    assert list(read_batch([b"\xef\xbb\xbf" + text + b"\r\n"])) == [(1, BatchRequest("1", url, body))]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"custom_id": None}, "invalid_custom_id"),
        ({"custom_id": ""}, "invalid_custom_id"),
        ({"custom_id": 7}, "invalid_custom_id"),
        ({"method": "GET"}, "invalid_method"),
        ({"method": None}, "invalid_method"),
        ({"url": "/v1/embeddings"}, "invalid_url"),
        ({"url": "completions"}, "invalid_url"),
        ({"url": 1}, "invalid_url"),
        ({"body": None}, "invalid_body"),
        ({"body": []}, "invalid_body"),
        ({"body": {"stream": True}}, "invalid_body"),
        ({"body": {"background": True}}, "invalid_body"),
    ],
)
def test_a_wrong_field_has_its_code(change: dict[str, Any], code: str) -> None:
    custom_id = None if "custom_id" in change else "a"
    assert errors(lines({**GOOD, **change})) == [(1, custom_id, code)]


@pytest.mark.parametrize("name", list(GOOD))
def test_a_missing_field_is_an_error(name: str) -> None:
    assert len(errors(lines({key: value for key, value in GOOD.items() if key != name}))) == 1


@pytest.mark.parametrize("text", [b"x", b"{", b"[]", b"1", b'"a"', b"\xff", b"[" * 10_000, b'{"a": ' * 10_000, b"{}x"])
def test_what_is_no_object_is_an_error_of_its_line_alone(text: bytes) -> None:
    batch = [*lines(GOOD), text + b"\n", b"\n", *lines({**GOOD, "custom_id": "b"})]
    found = list(read_batch(batch))
    assert [number for number, _ in found] == [1, 2, 4]
    assert errors(batch) in ([(2, None, "invalid_json_line")], [(2, None, "invalid_custom_id")])


def test_a_custom_id_is_its_first_lines_alone() -> None:
    batch = lines(GOOD, {**GOOD, "custom_id": "b", "url": "?"}, GOOD, {**GOOD, "custom_id": "b"})
    assert errors(batch) == [(2, "b", "invalid_url"), (3, "a", "duplicate_custom_id"), (4, "b", "duplicate_custom_id")]
