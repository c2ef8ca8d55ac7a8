"""JSON that any client can read: no NaN, no infinity, no half of a surrogate pair."""

from __future__ import annotations

import json
from typing import Any


def parse_json(text: str) -> Any:
    """The value of a JSON text. Raises: ValueError, RecursionError."""
    value = whole_characters(json.loads(text, parse_constant=_refuse))
    json_text(value)
    return value


def json_text(value: Any) -> str:
    """A value as JSON. Raises: ValueError for numbers that JSON doesn't have."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def whole_characters(value: Any) -> Any:
    """The same with halves of surrogate pairs joined, or replaced where they stand alone."""
    match value:
        case str():
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        case list():
            return [whole_characters(item) for item in value]
        case dict():
            return {whole_characters(key): whole_characters(item) for key, item in value.items()}
    return value


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
