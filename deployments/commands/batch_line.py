"""Lines of a batch, as OpenAI's Batch API writes them: requests in, results out."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
BEGINNING = b'{"id":"batch_req_'  # of every result
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class BatchRequest(msgspec.Struct, frozen=True):
    custom_id: str
    url: str  # one of URLS
    body: bytes  # JSON, as it was written


class Failure(msgspec.Struct, frozen=True):
    """Why a line has no answer."""

    code: str | None
    message: str
    line: int | None = None  # number of the input's line, the first is 1; of lines that no custom_id stands for


class Response(msgspec.Struct, frozen=True):
    """What the server answered, with an error too."""

    status_code: int
    request_id: str
    body: Any


class Result(msgspec.Struct, frozen=True):
    """A line of the output. Of a request that the server refused it has both a response and an error."""

    custom_id: str | None
    response: Response | None = None
    error: Failure | None = None
    id: str = msgspec.field(default_factory=lambda: f"batch_req_{uuid.uuid4().hex}")

    def encode(self) -> bytes:
        return msgspec.json.encode(
            {"id": self.id, "custom_id": self.custom_id, "response": self.response, "error": self.error}
        )


class LineError(Exception):
    """A line that no request can be made of."""

    def __init__(self, failure: Failure, custom_id: str | None):
        super().__init__(failure, custom_id)
        self.failure, self.custom_id = failure, custom_id


def read_batch(lines: Iterable[bytes]) -> Iterator[tuple[int, BatchRequest | Result]]:
    """Each line's number, and its request or the error that it comes to. Empty lines are passed over."""
    seen: dict[str, int] = {}  # custom_id → line
    for number, line in enumerate(lines, 1):
        text = (line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line).strip()
        if not text:
            continue
        try:
            request = parse_line(text, number)
            first = seen.setdefault(request.custom_id, number)
            if first != number:
                message = f"custom_id {request.custom_id!r} is line {first}'s already; each must be its line's own"
                raise LineError(Failure("duplicate_custom_id", message, number), request.custom_id)
            yield number, request
        except LineError as error:
            if error.custom_id is not None:
                seen.setdefault(error.custom_id, number)
            yield number, Result(error.custom_id, error=error.failure)


def parse_line(text: bytes, number: int) -> BatchRequest:
    """
    Args:
        number: of the line.

    Raises:
        LineError: says what is wrong with it.
    """

    def fail(code: str, message: str) -> LineError:
        return LineError(Failure(code, message, number), custom_id)

    custom_id: str | None = None
    try:
        fields = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError) as error:
        raise fail("invalid_json_line", f"the line is not a JSON object: {error}") from None
    custom_id = _text(fields.get("custom_id")) or None
    if custom_id is None:
        raise fail("invalid_custom_id", "custom_id must be a string that is not empty")
    if (method := _text(fields.get("method"))) != "POST":
        raise fail("invalid_method", f"method must be 'POST', not {method!r}")
    url = _text(fields.get("url"))
    if url not in URLS:
        raise fail("invalid_url", f"url must be one of {', '.join(URLS)}, not {url!r}")
    raw = bytes(fields.get("body", b""))
    try:
        body = msgspec.json.decode(raw, type=dict[str, Any]) if raw else None
    except (msgspec.DecodeError, RecursionError) as error:
        raise fail("invalid_body", f"body must be an object: {error}") from None
    if body is None:
        raise fail("invalid_body", "body is missing; it must be an object")
    for name in ("stream", "background"):
        if body.get(name):
            raise fail("invalid_body", f"{name} must be false or left out: a result is one line, and has all of it")
    return BatchRequest(custom_id, url, raw)


def _text(raw: msgspec.Raw | None) -> str | None:
    """A field's string; None for anything else."""
    try:
        return msgspec.json.decode(raw, type=str) if raw is not None else None
    except msgspec.DecodeError:
        return None
