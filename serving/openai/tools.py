"""`tools` and `tool_choice` of chat completions, and the `functions` and `function_call` that came before them."""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from pagedray.engine.errors import Unsupported, UserError
from pagedray.serving.limits import json_type
from pagedray.serving.openai.shape import as_object, as_string, optional
from pagedray.serving.parsers.tools import NamedTool, Tool, ToolChoice

MAX_TOOLS = 128
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
CHOICES = ("none", "auto", "required")
FUNCTION_FIELDS = ("name", "description", "parameters", "strict")


class Offer(msgspec.Struct, frozen=True):
    """What the model may call."""

    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = "auto"
    is_legacy: bool = False  # asked for by `functions`: a call is answered as `function_call`


def read_tools(tools: list[Any] | None, choice: Any) -> Offer:
    """The tools and the choice among them.

    Raises:
        UserError: something is malformed, or the choice names a tool that isn't there.
        Unsupported: a tool that isn't a function.
    """
    if tools is not None and len(tools) > MAX_TOOLS:
        raise UserError(f"tools has {len(tools)} tools, the limit is {MAX_TOOLS}", "tools")
    offered = tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools or ()))
    check_unique([tool.name for tool in offered], "tools[{}].function.name")
    if choice is None or choice == "none":
        return Offer(offered, choice or "auto")
    if not offered:
        raise UserError("tool_choice needs tools", "tool_choice")
    if isinstance(choice, str):
        if choice not in CHOICES:
            raise UserError(f"tool_choice must be one of {', '.join(CHOICES)}, or an object", "tool_choice")
        return Offer(offered, choice)  # type: ignore[arg-type]
    if not isinstance(choice, dict):
        raise UserError(f"tool_choice must be a string or an object, not {json_type(choice)}", "tool_choice")
    kind = choice.get("type")
    if kind == "function":
        as_object(choice, "tool_choice", ("type", "function"))
        return Offer(offered, NamedTool(existing_name(choice.get("function"), offered, "tool_choice.function")))
    if kind == "allowed_tools":
        as_object(choice, "tool_choice", ("type", "allowed_tools"))
        return _allowed(choice.get("allowed_tools"), offered, "tool_choice.allowed_tools")
    if isinstance(kind, str):
        raise Unsupported(
            f"tool_choice.type {kind[:64]!r} is not implemented, only function and allowed_tools", "tool_choice.type"
        )
    raise UserError("tool_choice.type must be function or allowed_tools", "tool_choice.type")


def read_functions(functions: list[Any] | None, choice: Any) -> Offer:
    """The same in the form that came before tools. Raises as `read_tools` does."""
    if functions is not None and len(functions) > MAX_TOOLS:
        raise UserError(f"functions has {len(functions)} functions, the limit is {MAX_TOOLS}", "functions")
    offered = tuple(read_function(function, f"functions[{i}]") for i, function in enumerate(functions or ()))
    check_unique([tool.name for tool in offered], "functions[{}].name")
    if choice is None or choice == "none":
        return Offer(offered, choice or "auto", is_legacy=True)
    if not offered:
        raise UserError("function_call needs functions; with tools use tool_choice", "function_call")
    if choice == "auto":
        return Offer(offered, "auto", is_legacy=True)
    if not isinstance(choice, dict):
        raise UserError('function_call must be none, auto or {"name": ...}', "function_call")
    return Offer(offered, NamedTool(existing_name(choice, offered, "function_call")), is_legacy=True)


def _tool(value: Any, path: str) -> Tool:
    kind = as_string(as_object(value, path).get("type"), f"{path}.type")
    if kind != "function":
        raise Unsupported(f"{path}: tools of type {kind[:64]!r} are not implemented, only function", f"{path}.type")
    as_object(value, path, ("type", "function"))
    return read_function(value.get("function"), f"{path}.function")


def read_function(value: Any, path: str) -> Tool:
    """A function's name, description, parameters and strictness. Raises UserError."""
    name = as_object(value, path, FUNCTION_FIELDS).get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        found = repr(name[:80]) if isinstance(name, str) else json_type(name)
        raise UserError(
            f"{path}.name must be 1 to 64 letters, digits, underscores and dashes, not {found}", f"{path}.name"
        )
    parameters = optional(value, "parameters", dict, path) or {}
    if parameters.get("type", "object") != "object":
        raise UserError(f'{path}.parameters.type must be "object"', f"{path}.parameters.type")
    return Tool(
        name, optional(value, "description", str, path) or "", parameters, bool(optional(value, "strict", bool, path))
    )


def check_unique(names: list[str], path: str) -> None:
    """Raise UserError for a second tool of a name. `path` of a name has {} for its number."""
    seen: set[str] = set()
    for i, name in enumerate(names):
        if name in seen:
            raise UserError(f"{path.format(i)}: there is another one named {name!r}", path.format(i))
        seen.add(name)


def existing_name(value: Any, offered: tuple[Tool, ...], path: str) -> str:
    """The name in {"name": ...}, of one of the tools."""
    name = as_string(as_object(value, path, ("name",)).get("name"), f"{path}.name")
    if all(tool.name != name for tool in offered):
        known = ", ".join(tool.name for tool in offered)[:512]
        raise UserError(f"{path}.name: {name[:64]!r} is not offered; there are {known}", f"{path}.name")
    return name


def _allowed(value: Any, offered: tuple[Tool, ...], path: str) -> Offer:
    mode: Literal["auto", "required"] | None = as_object(value, path, ("mode", "tools")).get("mode")
    if mode not in ("auto", "required"):
        raise UserError(f"{path}.mode must be auto or required", f"{path}.mode")
    listed = value.get("tools")
    if not isinstance(listed, list) or not listed:
        raise UserError(f"{path}.tools must be an array of tools, with one at least", f"{path}.tools")
    names: set[str] = set()
    for i, tool in enumerate(listed):
        at = f"{path}.tools[{i}]"
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise UserError(f'{at} must be {{"type": "function", "function": {{"name": ...}}}}', at)
        names.add(existing_name(tool.get("function"), offered, f"{at}.function"))
    return Offer(tuple(tool for tool in offered if tool.name in names), mode)
