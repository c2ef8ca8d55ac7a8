"""Tools, tool choice and text format of a request: what the model is asked, and how the response repeats it."""

from __future__ import annotations

from typing import Any

import msgspec

from pagedray.engine.errors import Unsupported, UserError
from pagedray.engine.grammar.source import GrammarSource
from pagedray.serving.limits import json_type
from pagedray.serving.openai.formats import NAME
from pagedray.serving.openai.shape import as_object, as_string, optional
from pagedray.serving.openai.tools import CHOICES, MAX_TOOLS, check_unique, existing_name, read_function
from pagedray.serving.parsers.tools import NamedTool, Tool, ToolChoice

HOSTED_FIELDS = (
    "type",
    "defer_loading",
    "output_schema",
    "allowed_callers",
    "async",
)  # of no use to a client's function
FORMAT_FIELDS = {
    "text": ("type",),
    "json_object": ("type",),
    "json_schema": ("type", "name", "schema", "description", "strict"),
}


class Tools(msgspec.Struct, frozen=True):
    offered: tuple[Tool, ...]  # to the model
    choice: ToolChoice
    shown: list[dict[str, Any]]  # `tools` of the response
    shown_choice: Any  # `tool_choice` of the response


def read_tools(tools: list[Any] | None, choice: Any) -> Tools:
    """
    Raises:
        UserError: something is malformed, or the choice names a tool that isn't there.
        Unsupported: a tool that isn't a function.
    """
    given = tools or []
    if len(given) > MAX_TOOLS:
        raise UserError(f"tools has {len(given)} tools, the limit is {MAX_TOOLS}", "tools")
    offered = tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(given))
    check_unique([tool.name for tool in offered], "tools[{}].name")
    shown = [
        {
            "type": "function",
            "name": tool.name,
            "description": wire.get("description"),
            "parameters": wire.get("parameters"),
            "strict": tool.strict,
        }
        for tool, wire in zip(offered, given, strict=True)
    ]
    if choice is None or choice == "auto" or choice == "none":
        return Tools(offered, choice or "auto", shown, choice or "auto")
    if isinstance(choice, str) and choice not in CHOICES:
        raise UserError(f"tool_choice must be one of {', '.join(CHOICES)}, or an object", "tool_choice")
    if not isinstance(choice, str | dict):
        raise UserError(f"tool_choice must be a string or an object, not {json_type(choice)}", "tool_choice")
    if not offered:
        raise UserError("tool_choice needs tools", "tool_choice")
    if isinstance(choice, str):
        return Tools(offered, "required", shown, choice)
    kind = as_string(choice.get("type"), "tool_choice.type")
    if kind == "function":
        name = existing_name({"name": choice.get("name")}, offered, "tool_choice")
        return Tools(offered, NamedTool(name), shown, {"type": "function", "name": name})
    if kind == "allowed_tools":
        return _allowed(choice, offered, shown)
    raise Unsupported(
        f"tool_choice.type {kind[:64]!r} is not implemented, only function and allowed_tools", "tool_choice.type"
    )


def _tool(tool: Any, path: str) -> Tool:
    kind = as_string(as_object(tool, path).get("type"), f"{path}.type")
    if kind != "function":
        raise Unsupported(f"{path}: tools of type {kind[:64]!r} are not implemented, only function", f"{path}.type")
    if isinstance(tool.get("function"), dict):
        raise UserError(
            f"{path}: name, description and parameters of a function stand in the tool itself here, not in a "
            "function object as in chat completions",
            f"{path}.function",
        )
    return read_function({name: value for name, value in tool.items() if name not in HOSTED_FIELDS}, path)


def _allowed(choice: dict[str, Any], offered: tuple[Tool, ...], shown: list[dict[str, Any]]) -> Tools:
    """Some of the tools: the others are not shown to the model at all."""
    mode, listed = choice.get("mode"), choice.get("tools")
    if mode != "auto" and mode != "required":
        raise UserError("tool_choice.mode must be auto or required", "tool_choice.mode")
    if not isinstance(listed, list) or not listed:
        raise UserError("tool_choice.tools must be an array of tools, with one at least", "tool_choice.tools")
    names = []
    for i, tool in enumerate(listed):
        path = f"tool_choice.tools[{i}]"
        if as_object(tool, path).get("type") != "function":
            raise Unsupported(f"{path}: tools of other types than function are not implemented", f"{path}.type")
        names.append(existing_name({"name": tool.get("name")}, offered, path))
    allowed = tuple(tool for tool in offered if tool.name in names)
    told = [{"type": "function", "name": name} for name in names]
    return Tools(allowed, mode, shown, {"type": "allowed_tools", "mode": mode, "tools": told})


def read_format(value: dict[str, Any] | None) -> tuple[GrammarSource | None, dict[str, Any]]:
    """`text.format`: the grammar that it asks for, and the format as the response repeats it. Raises UserError."""
    if value is None:
        return None, {"type": "text"}
    path = "text.format"
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in FORMAT_FIELDS:
        raise UserError(f"{path}.type must be one of {', '.join(FORMAT_FIELDS)}", f"{path}.type")
    if isinstance(value.get("json_schema"), dict):
        raise UserError(
            f"{path}: name and schema stand in format itself here, not in a json_schema object as in chat completions",
            f"{path}.json_schema",
        )
    as_object(value, path, FORMAT_FIELDS[kind])
    if kind == "text":
        return None, {"type": "text"}
    if kind == "json_object":
        return GrammarSource("json_object", "", path), {"type": "json_object"}
    name, schema = value.get("name"), as_object(value.get("schema"), f"{path}.schema")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise UserError(f"{path}.name must be 1 to 64 letters, digits, underscores and dashes", f"{path}.name")
    shown = {
        "type": "json_schema",
        "name": name,
        "description": optional(value, "description", str, path),
        "schema": schema,
        "strict": bool(optional(value, "strict", bool, path)),
    }
    return GrammarSource("json_schema", msgspec.json.encode(schema).decode(), f"{path}.schema"), shown
