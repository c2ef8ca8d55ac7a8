"""Whether a document is a JSON schema at all: draft 2020-12's meta-schema, as far as keywords that mean something go.

The meta-schema itself, read by a general validator, takes a millisecond for each property and says what is wrong in
its own terms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from pagedray.engine.errors import UserError

TYPE_NAMES = ("array", "boolean", "integer", "null", "number", "object", "string")
MAX_DEPTH = 128  # objects and arrays inside of each other
MAX_SCHEMAS = 20_000


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and value == int(value)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value) and len(set(value)) == len(value)


def _is_type(value: Any) -> bool:
    if isinstance(value, str):
        return value in TYPE_NAMES
    return _is_names(value) and bool(value) and set(value) <= set(TYPE_NAMES)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_map(value: Any) -> bool:
    return isinstance(value, dict)


def _is_some(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


Check = tuple[Callable[[Any], bool], str]
COUNT: Check = (_is_count, "a whole number from 0")
NUMBER: Check = (_is_number, "a number")
TEXT: Check = (_is_text, "a string")
FLAG: Check = (_is_flag, "true or false")
NAMES: Check = (_is_names, "a list of different strings")
LIST: Check = (_is_list, "a list")
VALUES: dict[str, Check] = {
    "type": (_is_type, f"one of {', '.join(TYPE_NAMES)}, or a list of different ones of them"),
    "enum": LIST,
    "required": NAMES,
    "pattern": TEXT,
    "format": TEXT,
    "minLength": COUNT,
    "maxLength": COUNT,
    "minItems": COUNT,
    "maxItems": COUNT,
    "minProperties": COUNT,
    "maxProperties": COUNT,
    "uniqueItems": FLAG,
    "minimum": NUMBER,
    "maximum": NUMBER,
    "exclusiveMinimum": NUMBER,
    "exclusiveMaximum": NUMBER,
    "multipleOf": (lambda value: _is_number(value) and value > 0, "a number above 0"),
    "$ref": TEXT,
    "$anchor": TEXT,
    "$id": TEXT,
    "$schema": TEXT,
    "$comment": TEXT,
    "title": TEXT,
    "description": TEXT,
    "examples": LIST,
    "deprecated": FLAG,
    "readOnly": FLAG,
    "writeOnly": FLAG,
}
SCHEMA = ("items", "additionalProperties", "propertyNames", "unevaluatedProperties")
SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions")


def check_syntax(document: Any) -> None:
    """
    Raises:
        UserError: it isn't a schema; the message has the keyword and its path.
    """
    if _depth(document) > MAX_DEPTH:
        raise UserError(f"the schema is nested more than {MAX_DEPTH} deep")
    todo: list[tuple[Any, str, str]] = [(document, "", "$")]
    num = 0
    while todo:
        schema, keyword, path = todo.pop()
        num += 1
        if num > MAX_SCHEMAS:
            raise UserError(f"it has more than {MAX_SCHEMAS} schemas inside; make it smaller")
        if isinstance(schema, dict):
            _check_values(schema, path)
            todo += _inner(schema, path)
        elif not isinstance(schema, bool):
            what = f"a schema is an object or a boolean, got {kind_of(schema)}"
            raise UserError(f"{keyword} at {path}: {what}" if keyword else what)


def _check_values(schema: dict[str, Any], path: str) -> None:
    for keyword in schema.keys() & VALUES.keys():
        is_right, wanted = VALUES[keyword]
        if not is_right(schema[keyword]):
            _refuse(keyword, path, wanted, schema[keyword])


def _inner(schema: dict[str, Any], path: str) -> Iterator[tuple[Any, str, str]]:
    """Schemas directly inside of one, each with its keyword and path."""
    for keyword in schema:
        value = schema[keyword]
        where = f"{path}.{keyword}"
        if keyword in SCHEMA:
            yield value, keyword, where
        elif keyword in SCHEMA_LISTS:
            if not _is_some(value):
                _refuse(keyword, path, "a list of schemas, and not empty", value)
            yield from ((item, keyword, f"{where}[{i}]") for i, item in enumerate(value))
        elif keyword in SCHEMA_MAPS:
            if not _is_map(value):
                _refuse(keyword, path, "an object of schemas", value)
            yield from ((item, keyword, f"{where}.{name}") for name, item in value.items())


def _refuse(keyword: str, path: str, wanted: str, found: Any) -> NoReturn:
    shown = repr(found)[:60] if isinstance(found, str | int | float) else kind_of(found)
    raise UserError(f"{keyword} at {path}: must be {wanted}, got {shown}")


def kind_of(value: Any) -> str:
    """What kind of JSON value it is, for messages."""
    if isinstance(value, bool):
        return "a boolean"
    names = {dict: "an object", list: "an array", str: "a string", int: "a number", float: "a number"}
    return names.get(type(value), "null")


def _depth(value: Any) -> int:
    """How many objects and arrays a JSON value has inside of each other, counted as far as MAX_DEPTH + 1."""
    depth, level = 0, [value]
    while depth <= MAX_DEPTH:
        level = [item for item in level if isinstance(item, dict | list)]
        if not level:
            break
        depth += 1
        level = [child for item in level for child in (item.values() if isinstance(item, dict) else item)]
    return depth
