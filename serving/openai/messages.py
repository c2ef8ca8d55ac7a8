"""Chat messages as they come from a client, checked, with the path of whatever is wrong."""

from __future__ import annotations

from typing import Any

from pagedray.engine.errors import Unsupported, UserError
from pagedray.serving.limits import json_type

# Fields that a role may have besides role and content. The empty ones come back from clients that send a whole earlier
# answer as history; they say nothing.
FIELDS: dict[str, tuple[str, ...]] = {
    "system": ("name",),
    "developer": ("name",),
    "user": ("name",),
    "assistant": ("name", "tool_calls", "refusal", "reasoning", "reasoning_content"),
    "tool": ("name", "tool_call_id"),
}
EMPTY_IN_HISTORY = ("annotations", "audio", "function_call", "refusal", "tool_calls", "reasoning", "reasoning_content")


def check_messages(messages: list[Any]) -> list[dict[str, Any]]:
    """The messages without what says nothing. Content is a string, a list of text parts, or null in an answer.

    Raises:
        UserError: a message is malformed; `param` is the path of the part.
        Unsupported: a kind of content that isn't implemented.
    """
    if not messages:
        raise UserError("messages must have at least one message", "messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Any, path: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise UserError(f"{path} must be an object, not {json_type(message)}", path)
    role = message.get("role")
    if not isinstance(role, str) or role not in FIELDS:
        if role == "function":
            raise Unsupported(f"{path}.role: function messages are not implemented; use tool messages", f"{path}.role")
        raise UserError(f"{path}.role must be one of {', '.join(FIELDS)}", f"{path}.role")
    out: dict[str, Any] = {"role": role, "content": _content(message, role, path)}
    for name, value in message.items():
        if name in ("role", "content") or (not value and (name in EMPTY_IN_HISTORY or value is None)):
            continue
        if name not in FIELDS[role]:
            raise UserError(f"{path}: unknown field {name[:64]!r} in a {role} message", f"{path}.{name[:64]}")
        if name == "tool_calls":
            _check_tool_calls(value, f"{path}.tool_calls")
            out[name] = value
        elif not isinstance(value, str):
            raise UserError(f"{path}.{name} must be a string, not {json_type(value)}", f"{path}.{name}")
        elif name != "refusal":
            out[name] = value
        elif not out["content"]:
            out["content"] = value
    return out


def _content(message: dict[str, Any], role: str, path: str) -> str | list[dict[str, str]] | None:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return [_part(part, role, f"{path}.content[{i}]") for i, part in enumerate(content)]
    if content is None and role == "assistant":
        return None
    what = (
        "is missing" if "content" not in message else f"must be a string or a list of parts, not {json_type(content)}"
    )
    raise UserError(f"{path}.content {what}", f"{path}.content")


def _part(part: Any, role: str, path: str) -> dict[str, str]:
    if not isinstance(part, dict):
        raise UserError(f"{path} must be an object, not {json_type(part)}", path)
    kind = part.get("type")
    if kind == "text" or (kind == "refusal" and role == "assistant"):
        text = part.get(kind)
        if not isinstance(text, str):
            raise UserError(f"{path}.{kind} must be a string, not {json_type(text)}", f"{path}.{kind}")
        unknown = [name for name, value in part.items() if name not in ("type", kind) and value is not None]
        if unknown:
            raise UserError(f"{path}: unknown field {unknown[0][:64]!r}", f"{path}.{unknown[0][:64]}")
        return {"type": "text", "text": text}
    if isinstance(kind, str):
        raise Unsupported(f"{path}: parts of type {kind[:64]!r} are not implemented, only text", f"{path}.type")
    raise UserError(f"{path}.type must be a string, not {json_type(kind)}", f"{path}.type")


def _check_tool_calls(calls: Any, path: str) -> None:
    """Calls of an earlier answer; the template reads them."""
    if not isinstance(calls, list):
        raise UserError(f"{path} must be an array, not {json_type(calls)}", path)
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise UserError(f"{path}[{i}] must have a function with a name", f"{path}[{i}]")
        if not isinstance(function.get("arguments", ""), str):
            raise UserError(f"{path}[{i}].function.arguments must be a string", f"{path}[{i}].function.arguments")
