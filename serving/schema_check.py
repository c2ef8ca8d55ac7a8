"""Whether a client's JSON schema is one at all, which templates and models take for granted."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from jsonschema import Draft7Validator, Draft202012Validator, ValidationError, validators
from jsonschema.exceptions import best_match
from jsonschema_specifications import REGISTRY  # type: ignore[import-untyped]
from referencing import Registry, Specification
from referencing.jsonschema import DRAFT7, DRAFT202012

from pagedray.engine.errors import UserError

MAX_CACHED = 1024  # agents send the same tools with each turn
MAX_CACHED_BYTES = 2**14  # of one schema
THREAD_BYTES = 4096  # more is checked off the event loop, which serves all streams meanwhile
MAX_OBJECTS = 5000  # in the schemas of one request, as many properties as OpenAI takes: about a second's work
SHOWN_CHARS = 200


async def check_schemas(schemas: Mapping[str, dict[str, Any]]) -> None:
    """Raise UserError where a keyword has a value that neither draft 2020-12 nor 7 allows, and for too much of all.

    Args:
        schemas: by where each stands in the request; the path within it is appended.
    """
    num_objects = 0
    for param, schema in schemas.items():
        num_objects += _num_objects(schema)
        if num_objects > MAX_OBJECTS:
            raise UserError(f"{param}: the request's schemas have more than {MAX_OBJECTS} objects; shorten them", param)
    encoded = {param: msgspec.json.encode(schema) for param, schema in schemas.items()}
    if sum(map(len, encoded.values())) < THREAD_BYTES:
        _check(encoded)
    else:
        await asyncio.to_thread(_check, encoded)


def _num_objects(value: Any) -> int:
    num, inner = 0, [value]
    while inner:
        value = inner.pop()
        if isinstance(value, dict):
            num += 1
            inner += value.values()
        elif isinstance(value, list):
            inner += value
    return num


def _check(encoded: Mapping[str, bytes]) -> None:
    for param, data in encoded.items():
        found = _cached_error(data) if len(data) <= MAX_CACHED_BYTES else _error(data)
        if found is not None:
            path, message = found
            raise UserError(f"{param}{path} is no valid JSON schema: {message}", param + path)


@functools.lru_cache(MAX_CACHED)
def _cached_error(data: bytes) -> tuple[str, str] | None:
    return _error(data)


def _error(data: bytes) -> tuple[str, str] | None:
    """Path and message of what is wrong."""
    schema = msgspec.json.decode(data)
    if _older().is_valid(schema):  # a third of the other's work
        return None
    error = best_match(_modern().iter_errors(schema))
    if error is None:
        return None
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part[:64]}" for part in error.absolute_path)
    return path, error.message[:SHOWN_CHARS]


@functools.cache
def _modern() -> Any:
    return _quick(Draft202012Validator, DRAFT202012)


@functools.cache
def _older() -> Any:
    return _quick(Draft7Validator, DRAFT7)


def _quick(draft: Any, specification: Specification[Any]) -> Any:
    """A validator of a draft's schemas whose time doesn't grow with the square of a list's length."""
    # A metaschema that names its draft would be followed with the validator of that name.
    contents = {uri: _unnamed(REGISTRY.contents(uri)) for uri in REGISTRY}
    registry: Registry[Any] = Registry().with_contents(contents.items(), default_specification=specification)
    extend: Any = validators.extend
    return extend(draft, {"uniqueItems": _unique_texts})(_unnamed(draft.META_SCHEMA), registry=registry)


def _unnamed(schema: Any) -> Any:
    return {name: value for name, value in schema.items() if name != "$schema"}


def _unique_texts(validator: Any, wanted: bool, value: Any, schema: Any) -> Iterator[ValidationError]:
    """`uniqueItems` of the metaschemas: their lists are of strings, and of other items they say so themselves."""
    texts = [item for item in value if isinstance(item, str)] if wanted and isinstance(value, list) else []
    if len(set(texts)) < len(texts):
        yield ValidationError("has the same item twice")
