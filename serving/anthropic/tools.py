"""Tools and tool choice of the Messages API as every protocol's `Tool` and `ToolChoice`."""

from __future__ import annotations

from typing import Any

from pagedray.engine.errors import Unsupported, UserError
from pagedray.serving.anthropic.schema import (
    CustomTool,
    ToolChoiceAny,
    ToolChoiceNone,
    ToolChoiceTool,
    ToolChoiceWire,
    validated,
)
from pagedray.serving.limits import json_type
from pagedray.serving.parsers.tools import NamedTool, Tool, ToolChoice


def read_tools(tools: list[Any]) -> tuple[CustomTool, ...]:
    """The tools as the client defined them.

    Raises:
        UserError: a definition is malformed, or two have one name; `param` is the path of the part.
        Unsupported: a tool of a type that only Anthropic's models know.
    """
    out: list[CustomTool] = []
    names: set[str] = set()
    for i, value in enumerate(tools):
        path = f"tools.{i}"
        tool = _read_tool(value, path)
        if tool.name in names:
            raise UserError(f"{path}.name: tool names must be unique, {tool.name!r} came before", f"{path}.name")
        names.add(tool.name)
        out.append(tool)
    return tuple(out)


def _read_tool(value: Any, path: str) -> CustomTool:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind != "custom":
        raise Unsupported(
            f"{path}.type: tools of type {kind[:64]!r} are not implemented; define a custom tool and run it yourself",
            f"{path}.type",
        )
    tool = validated(CustomTool, value, path)
    schema_type = tool.input_schema.get("type", "object")
    if schema_type != "object":
        found = repr(schema_type[:64]) if isinstance(schema_type, str) else json_type(schema_type)
        raise UserError(f'{path}.input_schema.type: must be "object", not {found}', f"{path}.input_schema.type")
    return tool


def neutral_tool(tool: CustomTool) -> Tool:
    """Examples of the input become the schema's `examples`, which templates show and grammars pass over."""
    parameters = {"type": "object", **tool.input_schema}
    if tool.input_examples:
        parameters["examples"] = tool.input_examples
    return Tool(tool.name, tool.description or "", parameters, bool(tool.strict))


def read_choice(choice: ToolChoiceWire | None, tools: tuple[CustomTool, ...]) -> tuple[ToolChoice, bool]:
    """The choice, and whether there may be several calls. Raises UserError for a choice that the tools don't leave."""
    if choice is None:
        return "auto", True
    if isinstance(choice, ToolChoiceNone):
        return "none", True
    parallel = not choice.disable_parallel_tool_use
    if not tools:
        raise UserError("tool_choice: needs tools", "tool_choice")
    if isinstance(choice, ToolChoiceTool):
        if all(tool.name != choice.name for tool in tools):
            raise UserError(
                f"tool_choice.name: {choice.name[:128]!r} is not among the tools: "
                f"{', '.join(tool.name for tool in tools)[:512]}",
                "tool_choice.name",
            )
        return NamedTool(choice.name), parallel
    return ("required" if isinstance(choice, ToolChoiceAny) else "auto"), parallel
