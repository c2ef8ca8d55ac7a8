"""Parts of structural tags, in the form that xgrammar reads (its module structural_tag names the fields)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pagedray.serving.parsers.family import Format
from pagedray.serving.parsers.tools import Tool


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """The JSON schema of a call's arguments, which are an object in any case."""
    return {**tool.parameters, "type": "object"}


def properties(tool: Tool) -> dict[str, Any]:
    """The schemas of a tool's arguments by name; empty where its own schema lists none."""
    given = tool.parameters.get("properties")
    return given if isinstance(given, dict) else {}


def arguments(tool: Tool) -> Format:
    return {"type": "json_schema", "json_schema": arguments_schema(tool)}


def const(text: str) -> Format:
    return {"type": "const_string", "value": text}


def sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def either(elements: Sequence[Format]) -> Format:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": list(elements)}


def optional(content: Format) -> Format:
    return {"type": "optional", "content": content}


def tag(begin: str, content: Format, end: str) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def separated(tags: Sequence[Format], separator: str, several: bool) -> Format:
    """One of the tags or, if several, any number of them."""
    return {
        "type": "tags_with_separator",
        "tags": list(tags),
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": not several,
    }


def trailing_text() -> Format:
    """A new line and a few words behind calls on lines of their own, which are dropped.

    A model that has made its calls often begins a line with words. Bound to what calls are, it would have to make of
    that line another call, and again, to the end of its context.
    """
    return sequence(const("\n"), {"type": "regex", "pattern": "[^<]{0,16}"})


def triggered(triggers: Sequence[str], tags: Sequence[Format], several: bool) -> Format:
    """Free text, in which each trigger begins one of the tags. With one call only, nothing follows it."""
    return {
        "type": "triggered_tags",
        "triggers": list(triggers),
        "tags": list(tags),
        "at_least_one": False,
        "stop_after_first": not several,
    }


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def any_text() -> Format:
    return {"type": "any_text"}
