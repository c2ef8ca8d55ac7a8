"""Calls as XML: Qwen3-Coder, Qwen3.5.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

Values are text. The tool's schema says which stay text and which are JSON; where it says nothing, what can be read as
JSON is. One newline beside each tag of a value is not part of it. Source: the chat template of Qwen3-Coder-30B-A3B.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from pagedray.serving.parsers.family import Format, ToolFamily
from pagedray.serving.parsers.json_call import read_value
from pagedray.serving.parsers.json_text import json_text, parse_json
from pagedray.serving.parsers.reader import Steps, TextReader, markers
from pagedray.serving.parsers.tool_formats import arguments, properties, separated, tag, trailing_text, triggered
from pagedray.serving.parsers.tools import Tool
from pagedray.serving.parsers.writer import EventWriter

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_NAME = re.compile(r"[^\s<>]*")
_TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "null": type(None),
}


def read(reader: TextReader, out: EventWriter, tools: Sequence[Tool]) -> Steps[None]:
    by_name = {tool.name: tool for tool in tools}
    is_inside = False  # behind a call whose outer tag is open
    while (marker := (yield from reader.until(markers(BEGIN, END, FUNCTION), out.content))) is not None:
        if marker == END:
            reader.take(len(END))
            if is_inside:
                out.markup()
            else:
                out.content(END)
            is_inside = False
            continue
        reader.record()
        if marker == BEGIN:
            reader.take(len(BEGIN))
            yield from reader.space()
        name = ""
        if (yield from reader.takes(FUNCTION)) is not None:
            name = yield from reader.run(_NAME, 256)
        if not name or (yield from reader.takes(">")) is None:
            out.content(reader.take_record())
            continue
        reader.drop_record()
        out.start(name)
        yield from _read_parameters(reader, out, by_name.get(name))
        yield from reader.space()
        is_inside = marker == BEGIN and not (yield from reader.takes_perhaps_cut(END))
        out.markup()


def _read_parameters(reader: TextReader, out: EventWriter, tool: Tool | None) -> Steps[None]:
    """Hand on arguments up to the end of the function, or to what can't belong to it."""
    schemas = properties(tool) if tool is not None else {}
    lead = "{"
    while True:
        yield from reader.space()
        if (yield from reader.takes(PARAMETER)) is None:
            break
        key = yield from reader.run(_NAME, 256)
        if (yield from reader.takes(">")) is None:
            break
        out.arguments(f"{lead}{json_text(key)}: ")
        lead = ", "
        if not (yield from _read_parameter(reader, out, schemas.get(key))):
            return
    if (yield from reader.takes_perhaps_cut(FUNCTION_END)) or (yield from reader.peek()):
        out.arguments("{}" if lead == "{" else "}")


def _read_parameter(reader: TextReader, out: EventWriter, schema: Any) -> Steps[bool]:
    """Hand on a value; False when the output ended in it."""
    held = ""  # a newline that may be the last
    parts: list[str] = []
    is_text = _is_text(schema)

    def write(text: str) -> None:
        nonlocal held
        if not is_text:
            parts.append(text)
            return
        text = held + text
        held = "\n" if text.endswith("\n") else ""
        out.arguments(json_text(text.removesuffix("\n"))[1:-1])

    if is_text:
        yield from reader.takes("\n")
        out.arguments('"')
    else:
        yield from reader.space()
        if _is_json(schema) and (yield from reader.peek()) in ("{", "["):
            yield from read_value(reader, write)  # its strings may hold tags
    marker = yield from reader.until(markers(PARAMETER_END, FUNCTION_END), write)
    if not is_text:
        text = "".join(parts)
        out.arguments(json_text(_value(text.removesuffix("\n"), schema)) if marker is not None else text)
    elif marker is not None:
        out.arguments('"')
    else:
        out.arguments(json_text(held)[1:-1])
    if marker == PARAMETER_END:
        reader.take(len(PARAMETER_END))
    return marker is not None


def _kinds(schema: Any) -> list[str]:
    """The types that a schema allows; empty where it doesn't say."""
    kinds = schema.get("type", []) if isinstance(schema, dict) else []
    return kinds if isinstance(kinds, list) else [kinds]


def _options(schema: Any) -> list[Any]:
    """The values that a schema lists; empty where it doesn't."""
    if not isinstance(schema, dict):
        return []
    options = [schema["const"]] if "const" in schema else schema.get("enum", [])
    return options if isinstance(options, list) else []


def _is_text(schema: Any) -> bool:
    """Whether a value can be any string and nothing else."""
    return _kinds(schema) == ["string"] and not _options(schema)


def _is_json(schema: Any) -> bool:
    """Whether a value is surely no bare text."""
    return isinstance(schema, dict) and bool(schema) and "string" not in _kinds(schema)


def _value(text: str, schema: Any) -> Any:
    """What a value means: one that the schema lists, or JSON, if the schema doesn't exclude it, else the text."""
    for option in _options(schema):
        if text.strip() in (option, json_text(option)):
            return option
    try:
        value = parse_json(text)
    except (ValueError, RecursionError):
        return {"True": True, "False": False, "None": None}.get(text.strip(), text)
    kinds = _kinds(schema)
    fits = any(
        isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))
        for kind in kinds
        if kind in _TYPES
    )
    return value if fits or "string" not in kinds else text


def _tags(tools: Sequence[Tool]) -> list[Format]:
    return [
        tag(
            f"{BEGIN}\n{FUNCTION}{tool.name}>\n",
            {**arguments(tool), "style": "qwen_xml"},
            f"\n{FUNCTION_END}\n{END}",
        )
        for tool in tools
    ]


FAMILY = ToolFamily(
    read=read,
    calls=lambda tools, several: separated(_tags(tools), "\n", several),
    text_with_calls=lambda tools, several: triggered([BEGIN], _tags(tools), several),
    trailer=trailing_text(),
    is_used_by=lambda template: FUNCTION in template and PARAMETER in template,
    how_to_call=(
        "To call a function, write its name and arguments in this form, once for each call:\n"
        "<tool_call>\n<function=name>\n<parameter=argument>\nvalue\n</parameter>\n</function>\n</tool_call>"
    ),
)
