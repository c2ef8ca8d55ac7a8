"""Whether a client's JSON schema is one at all, which templates and models take for granted."""

from __future__ import annotations

import functools
from typing import Any

import msgspec
from jsonschema import Draft7Validator, Draft202012Validator
from jsonschema.exceptions import best_match

from pagedray.engine.errors import UserError

MAX_CACHED = 1024
SHOWN_CHARS = 200


def check_schema(schema: dict[str, Any], param: str) -> None:
    """Raise UserError where a keyword has a value that draft 2020-12 doesn't allow, nor draft 7.

    Args:
        param: where the schema stands in the request; the path within it is appended.
    """
    found = _error(msgspec.json.encode(schema))  # agents send the same tools with each turn
    if found is not None:
        path, message = found
        raise UserError(f"{param}{path} is no valid JSON schema: {message}", param + path)


@functools.lru_cache(MAX_CACHED)
def _error(data: bytes) -> tuple[str, str] | None:
    """Path and message of what is wrong."""
    schema = msgspec.json.decode(data)
    error = best_match(_modern().iter_errors(schema))
    if error is None or _older().is_valid(schema):
        return None
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part[:64]}" for part in error.absolute_path)
    return path, error.message[:SHOWN_CHARS]


@functools.cache
def _modern() -> Draft202012Validator:
    return Draft202012Validator(Draft202012Validator.META_SCHEMA)


@functools.cache
def _older() -> Draft7Validator:
    return Draft7Validator(Draft7Validator.META_SCHEMA)
