"""Bounds on what a client may send, checked before any work is done on it."""

from __future__ import annotations

import math
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from pagedray.engine.errors import UserError
from pagedray.serving.refusals import BodyTooLarge, HeadersTooLarge, PathTooLong, UnsupportedMedia

MAX_PATH_BYTES = 8 * 2**10  # with the query
MAX_HEADERS = 200
MAX_CONTAINERS = (
    100_000  # arrays and objects of a body: more of them than any conversation has keep the loop from others
)
MAX_TIMEOUT_S = 1e7
TIMEOUT_HEADER = b"x-request-timeout-s"
SERVE_TIMEOUT_HEADER = b"x-request-timeout-seconds"  # Serve's name for the same
BOM = b"\xef\xbb\xbf"

Headers = list[tuple[bytes, bytes]]


def own_path(scope: Scope) -> str:
    """The path below the prefix that this application is mounted at."""
    path: str = scope["path"]
    root = scope.get("root_path", "")
    return path.removeprefix(root) if root and path.startswith(root + "/") else path


def check_head(scope: Scope, max_header_bytes: int) -> None:
    """Bounds of a request's first line and headers.

    Raises:
        PathTooLong, HeadersTooLarge: beyond one of them.
    """
    size = len(scope.get("raw_path") or scope["path"].encode()) + len(scope.get("query_string", b""))
    if size > MAX_PATH_BYTES:
        raise PathTooLong(size, MAX_PATH_BYTES)
    headers: Headers = scope["headers"]
    if len(headers) > MAX_HEADERS:
        raise HeadersTooLarge(f"the request has {len(headers)} headers, the limit is {MAX_HEADERS}; send fewer")
    size = sum(len(name) + len(value) for name, value in headers)
    if size > max_header_bytes:
        raise HeadersTooLarge(
            f"the headers have {size} bytes, the limit is {max_header_bytes}; shorten them or raise max_header_bytes"
        )


def check_media(headers: Headers) -> None:
    """A body must be JSON as it is. One without a Content-Type is taken for it.

    Raises:
        UnsupportedMedia: it says that it is something else.
    """
    for name, value in headers:
        if name == b"content-type":
            kind = value.partition(b";")[0].strip().lower()
            if (
                kind
                and kind != b"application/json"
                and not (kind.startswith(b"application/") and kind.endswith(b"+json"))
            ):
                shown = kind[:100].decode("ascii", "replace")
                raise UnsupportedMedia(
                    f"content type {shown!r} is not taken, send application/json", ("accept", "application/json")
                )
        elif name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            shown = value[:100].decode("ascii", "replace")
            raise UnsupportedMedia(
                f"content encoding {shown!r} is not taken, send the body uncompressed", ("accept-encoding", "identity")
            )


def timeout_of(headers: Headers) -> float | None:
    """Seconds that the client gives the whole answer, by its X-Request-Timeout-S or -Seconds.

    Raises:
        UserError: it is no positive number.
    """
    given = [value for name, value in headers if name in (TIMEOUT_HEADER, SERVE_TIMEOUT_HEADER)]
    if not given:
        return None
    try:
        seconds = float(given[-1])
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_TIMEOUT_S:  # nan isn't either
        shown = given[-1][:100].decode("ascii", "replace")
        raise UserError(
            f"header X-Request-Timeout-S is {shown!r}; it must be seconds, above 0 and at most {MAX_TIMEOUT_S:g}"
        )
    return seconds


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The whole body, counted while it comes: a chunked one doesn't announce its length.

    Raises:
        UnsupportedMedia: it isn't plain JSON by its headers.
        BodyTooLarge: it has more than `limit` bytes.
        ClientDisconnect: the client left before its end.
    """
    check_media(scope["headers"])
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


def parse_object(body: bytes, max_depth: int = 128) -> dict[str, Any]:
    """The body's JSON object. Strict: UTF-8, no NaN or infinity, numbers in range. Of equal names the last one counts.

    Args:
        max_depth: most arrays and objects within each other, the body's own object included.
    """
    body = body.removeprefix(BOM)  # some editors and shells put one before everything
    if not body.strip():
        raise UserError("the body is empty, it must be a JSON object")
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise UserError(too_deep(max_depth)) from None
    except msgspec.DecodeError as error:
        raise UserError(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"the body must be a JSON object, not {json_type(value)}")
    if body.count(b"{") + body.count(b"[") > max_depth:  # else it can't be too deep; most bodies have few
        check_structure(value, max_depth)
    return value


def check_structure(value: Any, max_depth: int) -> None:
    """Raise UserError where arrays and objects lie too deeply within each other, or are too many."""
    level, depth, num = [value], 0, 0
    while level:
        depth, num = depth + 1, num + len(level)
        if depth > max_depth:
            raise UserError(too_deep(max_depth))
        if num > MAX_CONTAINERS:
            raise UserError(f"the body has more than {MAX_CONTAINERS} arrays and objects; send less at once")
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]


def too_deep(limit: int) -> str:
    return f"the body is nested more than {limit} deep; flatten it or raise max_json_depth"


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
