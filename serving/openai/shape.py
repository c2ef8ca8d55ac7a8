"""Checks of what clients write inside a field, which say where something is wrong and what belongs there."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pagedray.engine.errors import UserError
from pagedray.serving.limits import json_type

_KINDS = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}


def as_object(value: Any, path: str, known: Collection[str] | None = None) -> dict[str, Any]:
    """The value, if it is an object.

    Args:
        known: names that it may have; others must be null. None: any.
    """
    if not isinstance(value, dict):
        raise UserError(f"{path} {_instead(value, dict)}", path)
    for name, item in value.items():
        if known is not None and name not in known and item is not None:
            raise UserError(f"{path}: unknown field {name[:64]!r}", f"{path}.{name[:64]}")
    return value


def as_string(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{path} {_instead(value, str)}", path)
    return value


def optional(value: dict[str, Any], name: str, kind: type, path: str) -> Any:
    """A field that may be missing or null."""
    found = value.get(name)
    if found is not None and type(found) is not kind:
        raise UserError(f"{path}.{name} {_instead(found, kind)}", f"{path}.{name}")
    return found


def _instead(value: Any, kind: type) -> str:
    return f"must be {_KINDS[kind]}, not {json_type(value)}" if value is not None else f"must be {_KINDS[kind]}"
