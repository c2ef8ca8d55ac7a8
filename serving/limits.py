"""Bounds on what a client may send, checked before any work is done on it."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from pagedray.engine.errors import UserError


class BodyTooLarge(UserError):
    def __init__(self, limit: int):
        super().__init__(f"the request body has more than {limit} bytes; shorten it or raise max_body_bytes")
        self.args = (limit,)


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The whole body, counted while it comes: a chunked one doesn't announce its length.

    Raises:
        BodyTooLarge: it has more than `limit` bytes.
        ClientDisconnect: the client left before its end.
    """
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and (len(value) > 20 or int(value) > limit):
            raise BodyTooLarge(limit)
    chunks, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise BodyTooLarge(limit)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


def parse_object(body: bytes) -> dict[str, Any]:
    """The body's JSON object. Strict: UTF-8, no NaN or infinity, numbers in range."""
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise UserError("the body is nested too deeply") from None
    except msgspec.DecodeError as error:
        raise UserError(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"the body must be a JSON object, not {json_type(value)}")
    return value


def json_type(value: Any) -> str:
    """What a client would call a decoded value's type."""
    names = {
        str: "a string",
        bool: "a boolean",
        int: "an integer",
        float: "a number",
        list: "an array",
        dict: "an object",
    }
    return names.get(type(value), "null")
