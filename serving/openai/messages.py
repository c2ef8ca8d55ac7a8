"""Chat messages as they come from a client, checked, with the path of whatever is wrong."""

from __future__ import annotations

from typing import Any

import msgspec

from pagedray.engine.errors import Unsupported, UserError
from pagedray.serving.limits import json_type
from pagedray.serving.openai.shape import as_object, as_string

# Fields that a role may have besides role and content.
FIELDS: dict[str, tuple[str, ...]] = {
    "system": ("name",),
    "developer": ("name",),
    "user": ("name",),
    "assistant": ("name", "refusal", "reasoning", "reasoning_content", "tool_calls", "function_call"),
    "tool": ("name", "tool_call_id"),
    "function": ("name",),
}
# These come back, empty, from clients that send a whole earlier answer as history; they say nothing. So does what the
# official client's helpers add: parsed, parsed_arguments.
# Marks for prompt caches, OpenAI's and Anthropic's: the prefix cache finds equal beginnings by itself.
CACHE_MARKS = ("prompt_cache_breakpoint", "cache_control")
EMPTY_IN_HISTORY = ("annotations", "audio", "function_call", "refusal", "tool_calls", "reasoning", "reasoning_content")


def check_messages(messages: list[Any]) -> list[dict[str, Any]]:
    """The messages without what says nothing.

    Content is a string, a list of text parts, or null in an answer. `reasoning`, the other name of `reasoning_content`,
    becomes the latter. `function_call` and messages of the role function become tool calls and their results.

    Raises:
        UserError: a message is malformed; `param` is the path of the part.
        Unsupported: a kind of content that isn't implemented.
    """
    if not messages:
        raise UserError("messages must have at least one message", "messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Any, path: str) -> dict[str, Any]:
    role = as_object(message, path).get("role")
    if not isinstance(role, str) or role not in FIELDS:
        raise UserError(f"{path}.role must be one of {', '.join(FIELDS)}", f"{path}.role")
    out: dict[str, Any] = {"role": role, "content": _content(message, role, path)}
    for name, value in message.items():
        if name in ("role", "content", "parsed", *CACHE_MARKS) or (
            not value and (name in EMPTY_IN_HISTORY or value is None)
        ):
            continue
        at = f"{path}.{name[:64]}"
        if name == "audio" and role == "assistant":
            raise Unsupported(f"{at}: audio is not implemented", at)
        if name not in FIELDS[role]:
            raise UserError(f"{path}: unknown field {name[:64]!r} in a {role} message", at)
        if name == "tool_calls":
            out[name] = _tool_calls(value, at)
        elif name == "function_call":
            out["tool_calls"] = [{"id": legacy_id(_function(value, at)["name"]), "type": "function", "function": value}]
        elif name == "refusal":
            out["content"] = out["content"] or as_string(value, at)
        else:
            out["reasoning_content" if name == "reasoning" else name] = as_string(value, at)
    if role == "tool" and "tool_call_id" not in out:
        raise UserError(
            f"{path}.tool_call_id is required: the id of the call that this answers", f"{path}.tool_call_id"
        )
    if role == "function":
        name = as_string(message.get("name"), f"{path}.name")
        return {**out, "role": "tool", "tool_call_id": legacy_id(name), "content": out["content"] or ""}
    return out


def legacy_id(name: str) -> str:
    """The id of a call that has none: results are told apart by the function's name."""
    return f"call_{name}"


def _content(message: dict[str, Any], role: str, path: str) -> str | list[dict[str, str]] | None:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        if not content:
            raise UserError(f"{path}.content must have at least one part", f"{path}.content")
        return [_part(part, role, f"{path}.content[{i}]") for i, part in enumerate(content)]
    if content is None and role in ("assistant", "function"):
        return None
    what = (
        "is missing" if "content" not in message else f"must be a string or a list of parts, not {json_type(content)}"
    )
    raise UserError(f"{path}.content {what}", f"{path}.content")


def _part(part: Any, role: str, path: str) -> dict[str, str]:
    kind = as_string(as_object(part, path).get("type"), f"{path}.type")
    if kind != "text" and (kind != "refusal" or role != "assistant"):
        raise Unsupported(f"{path}: parts of type {kind[:64]!r} are not implemented, only text", f"{path}.type")
    as_object(part, path, ("type", kind, *CACHE_MARKS))
    return {"type": "text", "text": as_string(part.get(kind), f"{path}.{kind}")}


def _tool_calls(calls: Any, path: str) -> list[dict[str, Any]]:
    """Calls of an earlier answer, which the template shows. Streamed ones may still have their index."""
    if not isinstance(calls, list):
        raise UserError(f"{path} must be an array, not {json_type(calls)}", path)
    out = []
    for i, call in enumerate(calls):
        at = f"{path}[{i}]"
        kind = as_object(call, at, ("id", "type", "function", "index", "custom")).get("type")
        if kind not in (None, "function"):
            raise Unsupported(f"{at}.type: calls other than of functions are not implemented", f"{at}.type")
        function = _function(call.get("function"), f"{at}.function")
        out.append({"id": as_string(call.get("id"), f"{at}.id"), "type": "function", "function": function})
    return out


def _function(function: Any, path: str) -> dict[str, str]:
    as_object(function, path, ("name", "arguments", "parsed_arguments"))
    name = as_string(function.get("name"), f"{path}.name")
    arguments = as_string(function.get("arguments", ""), f"{path}.arguments")
    try:
        msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError) as error:
        raise UserError(f"{path}.arguments must be JSON: {error}", f"{path}.arguments") from None
    return {"name": name, "arguments": arguments}
