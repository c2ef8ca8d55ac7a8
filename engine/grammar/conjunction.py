"""Schemas that must all hold for one value, and what that says about its type and size."""

from __future__ import annotations

from typing import Any

import msgspec

TYPES = ("object", "array", "string", "integer", "fraction", "boolean", "null")  # number = integer or fraction
KEYWORDS_OF = {
    "object": ("properties", "required", "additionalProperties", "patternProperties", "propertyNames",
               "minProperties", "maxProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
    "string": ("pattern", "format", "minLength", "maxLength"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}  # fmt: skip


class Part(msgspec.Struct, frozen=True, eq=False):
    """A schema object and where it stands. Known by identity: the same place of a document is the same part."""

    schema: dict[str, Any]
    path: str


Parts = tuple[Part, ...]


def types_of(parts: Parts) -> tuple[str, ...]:
    """Types that a conjunction allows: those of its `type` keywords, or those that its other keywords are about."""
    left = set(TYPES)
    is_said = False
    for part in parts:
        said = part.schema.get("type")
        if said is not None:
            is_said = True
            named = {said} if isinstance(said, str) else set(said)
            left &= named | ({"integer", "fraction"} if "number" in named else set())
    if not is_said:
        about = {kind for kind, words in KEYWORDS_OF.items() for part in parts if any(w in part.schema for w in words)}
        if about:
            left = about | ({"integer", "fraction"} if "number" in about else set())
    return tuple(name for name in TYPES if name in left)


def required_of(parts: Parts) -> set[str]:
    return {name for part in parts for name in part.schema.get("required", ())}


def bounds_of(parts: Parts, low: str, high: str) -> tuple[int, int | None]:
    lows = [int(part.schema[low]) for part in parts if low in part.schema]
    highs = [int(part.schema[high]) for part in parts if high in part.schema]
    return max(lows, default=0), min(highs, default=None)


def says_something(schema: dict[str, Any]) -> bool:
    words = {word for group in KEYWORDS_OF.values() for word in group}
    words |= {"type", "enum", "const", "anyOf", "oneOf", "unevaluatedProperties"}
    return any(word in words for word in schema)
