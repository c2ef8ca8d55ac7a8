"""Calls as a Python list of them, [f(a=1, b="x"), g()]: Llama 4, Llama 3.2, ToolACE.

Nothing is evaluated: arguments are literals, and what is none is passed on as the string of its source text.
Arguments without a name take the names of the tool's properties, in their order. A call's arguments are handed on one
by one. The list may stand between <|python_start|> and <|python_end|>.
Source: the chat templates of meta-llama/Llama-4-Scout-17B-16E-Instruct and Team-ACE/ToolACE-8B.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Sequence
from typing import Any

from pagedray.serving.parsers.family import Format, ToolFamily
from pagedray.serving.parsers.json_text import json_text, parse_json, whole_characters
from pagedray.serving.parsers.reader import Steps, TextReader
from pagedray.serving.parsers.tool_formats import (
    arguments,
    arguments_schema,
    const,
    either,
    optional,
    properties,
    separated,
    sequence,
    tag,
    triggered,
)
from pagedray.serving.parsers.tools import Tool
from pagedray.serving.parsers.unmarked import read_unmarked
from pagedray.serving.parsers.writer import EventWriter

MARKER, END_MARKER = "<|python_start|>", "<|python_end|>"
_NAME = re.compile(r"[\w.\-]*")
_KEYWORD = re.compile(r"\w*")
_SPECIAL = re.compile(r"[\"'(){}\[\],]")
_IN_QUOTES = {quote: re.compile(rf"[{quote}\\]") for quote in "\"'"}
_CLOSES = {"(": ")", "[": "]", "{": "}"}
_JSON_NAMES = {"true": True, "false": False, "null": None}
_MAX_LISTED_OPTIONAL = 6
_PLAIN_KEYWORDS = {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "title"}
_PLAIN_KEYWORDS |= {"description", "$schema"}


def read(reader: TextReader, out: EventWriter, tools: Sequence[Tool]) -> Steps[None]:
    by_name = {tool.name: tool for tool in tools}

    def read_calls(is_marked: bool) -> Steps[bool]:
        has_called = yield from _read_list(reader, out, by_name)
        if has_called and is_marked:
            yield from reader.takes_perhaps_cut(END_MARKER)
        return has_called

    yield from read_unmarked(reader, out, read_calls, openers="[", marker=MARKER, separator=",")


def _read_list(reader: TextReader, out: EventWriter, by_name: dict[str, Tool]) -> Steps[bool]:
    reader.take()
    has_called = False
    while True:
        yield from reader.space()
        name = yield from reader.run(_NAME, 256)
        if name not in by_name or (yield from reader.takes("(")) is None:
            break
        reader.drop_record()
        has_called = True
        out.start(name)
        if not (yield from _read_arguments(reader, out, by_name[name])):
            return True
        yield from reader.space()
        if (yield from reader.takes("]")) is not None:
            return True
        reader.record()
        if (yield from reader.takes(",")) is None:
            break
    if has_called:
        out.content(reader.take_record())
    return has_called


def _read_arguments(reader: TextReader, out: EventWriter, tool: Tool) -> Steps[bool]:
    """Hand on arguments to the closing bracket; False when the output ended before."""
    names = iter(properties(tool))
    lead = "{"
    position = 0
    while True:
        yield from reader.space()
        if (yield from reader.takes(",")) is not None:
            continue
        if (yield from reader.takes(")")) is not None:
            out.arguments("{}" if lead == "{" else "}")
            return True
        key: str | None = None
        is_named = False
        parts: list[str] = []
        if (yield from reader.takes("**")) is None:
            word = (yield from reader.run(_KEYWORD)) + (yield from reader.space())
            is_named = word.strip() != "" and (yield from reader.takes("=")) is not None
            if is_named:
                key = word.strip()
            else:
                key = next(names, f"argument_{position}")
                parts.append(word)
            position += 1
        is_whole = yield from _read_expression(reader, parts)
        text = "".join(parts).strip()
        if not is_whole:
            if is_named:  # without a name it could still become one
                out.arguments(f"{lead}{json_text(key)}: {text}")
            return False
        value = _value(text)
        given = value if key is None and isinstance(value, dict) else {key or "arguments": value}
        for name, item in given.items():
            out.arguments(f"{lead}{json_text(name)}: {json_text(item)}")
            lead = ", "


def _read_expression(reader: TextReader, parts: list[str]) -> Steps[bool]:
    """Read up to the comma or bracket behind an expression; False when the output ended before."""
    stack: list[str] = []
    while True:
        char = yield from reader.up_to(_SPECIAL, parts.append)
        if char == "":
            return False
        if not stack and char in ",)]}":
            if char in ",)":
                return True
        elif char in "\"'":
            if not (yield from _read_quoted(reader, parts, char)):
                return False
            continue
        elif char in _CLOSES:
            stack.append(_CLOSES[char])
        elif stack and char == stack[-1]:
            stack.pop()
        parts.append(reader.take())


def _read_quoted(reader: TextReader, parts: list[str], quote: str) -> Steps[bool]:
    end = (yield from reader.takes(quote * 3)) or (yield from reader.takes(quote)) or quote
    parts.append(end)
    while True:
        char = yield from reader.up_to(_IN_QUOTES[quote], parts.append)
        if char == "":
            return False
        if char == "\\":
            yield from reader.peek(2)
            parts.append(reader.take(2))
        elif (yield from reader.takes(end)) is not None:
            parts.append(end)
            return True
        else:
            parts.append(reader.take())


def _value(text: str) -> Any:
    """What a literal means, JSON's or Python's; the text itself where it is neither."""
    try:
        return parse_json(text)
    except (ValueError, RecursionError):
        pass
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that mean nothing
            value = whole_characters(_of_node(ast.parse(text, mode="eval").body))
            json_text(value)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return text
    return value


def _of_node(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str() | bool() | int() | float() | None as value):
            return value
        case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
            return [_of_node(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            pairs = [(None if key is None else _of_node(key), value) for key, value in zip(keys, values, strict=True)]
            return {key if isinstance(key, str) else json_text(key): _of_node(value) for key, value in pairs}
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.Name(id=name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
    raise ValueError(f"{type(node).__name__} is no literal")


def _inside(tool: Tool) -> Format:
    """What stands between a call's brackets: arguments by name where the schema is a plain list of properties, else
    **{...}."""
    schema = arguments_schema(tool)
    schemas = properties(tool)
    listed = frozenset(schema.get("required", ())) if _is_plain(schema) else frozenset()
    required = [name for name in schemas if name in listed]
    rest = [name for name in schemas if name not in listed]
    if not _is_plain(schema) or (not required and len(rest) > _MAX_LISTED_OPTIONAL):
        return sequence(const("**"), arguments(tool))
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}

    def argument(name: str, lead: str) -> Format:
        given = schemas[name]
        own = {**definitions, **given} if isinstance(given, dict) else given
        return sequence(const(f"{lead}{name}="), {"type": "json_schema", "json_schema": own})

    def further(names: Sequence[str]) -> list[Format]:
        return [argument(name, ", ") if name in listed else optional(argument(name, ", ")) for name in names]

    if required:
        return sequence(argument(required[0], ""), *further([*required[1:], *rest]))
    beginnings = [sequence(argument(name, ""), *further(rest[i + 1 :])) for i, name in enumerate(rest)]
    return optional(either(beginnings)) if beginnings else const("")


def _is_plain(schema: dict[str, Any]) -> bool:
    """Whether an object's schema is that of its properties alone, each of which can be a keyword."""
    schemas, required = schema.get("properties"), schema.get("required", [])
    return (
        isinstance(schemas, dict)
        and isinstance(required, list)
        and schema.keys() <= _PLAIN_KEYWORDS
        and schema.get("additionalProperties", False) is False
        and all(name in schemas for name in required)
        and all(re.fullmatch(r"[^\W\d]\w*", name) for name in schemas)
        and all(ref.startswith(("#/$defs/", "#/definitions/")) for ref in _references(schema))
    )


def _references(value: Any) -> list[str]:
    if isinstance(value, list):
        return [ref for item in value for ref in _references(item)]
    if not isinstance(value, dict):
        return []
    own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
    return own + [ref for item in value.values() for ref in _references(item)]


def _calls(tools: Sequence[Tool], several: bool) -> Format:
    tags = [tag(f"{tool.name}(", _inside(tool), ")") for tool in tools]
    return sequence(const("["), separated(tags, ", ", several), const("]"))


def _text_with_calls(tools: Sequence[Tool], several: bool) -> Format:
    """Free text, or a list of calls: it begins with a bracket and a tool's name."""
    others = [tag(f", {tool.name}(", _inside(tool), ")") for tool in tools]
    more: list[Format] = [{"type": "star", "content": either(others)}] if several else []
    tags = [tag(f"[{tool.name}(", sequence(_inside(tool), const(")"), *more), "]") for tool in tools]
    return triggered([f"[{tool.name}(" for tool in tools], tags, False)


FAMILY = ToolFamily(
    read=read,
    calls=_calls,
    text_with_calls=_text_with_calls,
    is_used_by=lambda template: MARKER in template or "[func_name1(" in template,
    how_to_call=(
        "To call functions, answer with nothing but a Python list of calls whose arguments are literals, like\n"
        '[function_name(argument="value", other=1)]'
    ),
    markup=(MARKER, END_MARKER),
)
