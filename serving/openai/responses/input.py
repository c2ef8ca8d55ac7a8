"""Input items: checked, brought into the one form in which they are kept, and turned into a conversation's messages."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from pagedray.engine.errors import Unsupported, UserError
from pagedray.serving.limits import json_type
from pagedray.serving.openai.responses.store import NotStored, ResponseStore, new_id
from pagedray.serving.openai.shape import as_object, as_string

Item = dict[str, Any]

ROLES = ("user", "assistant", "system", "developer")
STATUSES = ("in_progress", "completed", "incomplete")
KNOWN = ("message", "function_call", "function_call_output", "reasoning", "item_reference")

# Items of tools that OpenAI's servers run, and of what else isn't here.
NOT_HERE = frozenset(
    (
        "additional_tools",
        "apply_patch_call",
        "apply_patch_call_output",
        "code_interpreter_call",
        "compaction",
        "compaction_trigger",
        "computer_call",
        "computer_call_output",
        "configuration_update",
        "custom_tool_call",
        "custom_tool_call_output",
        "file_search_call",
        "image_generation_call",
        "local_shell_call",
        "local_shell_call_output",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_call",
        "mcp_list_tools",
        "program",
        "program_output",
        "shell_call",
        "shell_call_output",
        "tool_search_call",
        "tool_search_output",
        "web_search_call",
    )
)
TEXT_PARTS = {"input_text": "text", "output_text": "text", "refusal": "refusal"}  # type → its field with the text
OTHER_PARTS = ("input_image", "input_file", "input_audio")


async def read_input(value: Any, store: ResponseStore) -> list[Item]:
    """A request's `input` as items.

    Raises:
        UserError: something is malformed; `param` is its path.
        Unsupported: a kind of item or content that isn't implemented.
        NotStored: an item_reference to what isn't kept.
    """
    if value is None:
        return []
    if isinstance(value, str):
        return [_message("user", [{"type": "input_text", "text": value}])]
    if not isinstance(value, list):
        raise UserError(f"input must be a string or an array of items, not {json_type(value)}", "input")
    return [await _item(item, f"input[{i}]", store) for i, item in enumerate(value)]


async def _item(item: Any, path: str, store: ResponseStore) -> Item:
    kind = as_object(item, path).get("type")
    if kind is None:
        kind = "message" if "role" in item else "item_reference"
    as_string(kind, f"{path}.type")
    if kind == "item_reference":
        return await _referred(as_string(item.get("id"), f"{path}.id"), path, store)
    if kind in READERS:
        out = READERS[kind](item, path)
        if item.get("id") is not None:
            out["id"] = as_string(item["id"], f"{path}.id")
        status = item.get("status")
        if status is not None:
            if status not in STATUSES:
                raise UserError(f"{path}.status must be one of {', '.join(STATUSES)}", f"{path}.status")
            out["status"] = status
        return out
    if kind in NOT_HERE:
        raise Unsupported(f"{path}: items of type {kind!r} are not implemented", f"{path}.type")
    raise UserError(f"{path}.type is {kind[:64]!r}, it must be one of {', '.join(KNOWN)}", f"{path}.type")


async def _referred(item_id: str, path: str, store: ResponseStore) -> Item:
    data = await store.item(item_id)
    if data is None:
        raise NotStored(
            f"no item with id {item_id[:80]!r} is stored here; items of responses with store: false are not kept, send "
            "the item itself",
            f"{path}.id",
        )
    item: Item = msgspec.json.decode(data)
    return item


def _read_message(item: Item, path: str) -> Item:
    role = item.get("role")
    if role not in ROLES:
        raise UserError(f"{path}.role must be one of {', '.join(ROLES)}", f"{path}.role")
    content = item.get("content")
    own = "output_text" if role == "assistant" else "input_text"
    if isinstance(content, str):
        parts = [{"type": own, "text": content}]
    elif isinstance(content, list):
        parts = [_part(part, role, f"{path}.content[{i}]") for i, part in enumerate(content)]
    else:
        what = "is required" if content is None else f"must be a string or an array of parts, not {json_type(content)}"
        raise UserError(f"{path}.content {what}", f"{path}.content")
    if role != "assistant":  # those come from servers, and may have fields that nobody here knows
        as_object(item, path, ("type", "id", "role", "content", "status", "phase"))
    return _message(role, parts)


def _part(part: Any, role: str, path: str) -> Item:
    kind = as_string(as_object(part, path).get("type"), f"{path}.type")
    if kind in OTHER_PARTS:
        raise Unsupported(f"{path}: parts of type {kind!r} are not implemented, only text", f"{path}.type")
    allowed = tuple(TEXT_PARTS) if role == "assistant" else ("input_text",)
    if kind not in allowed:
        raise UserError(
            f"{path}.type is {kind[:64]!r}; a part of a message of role {role} must be one of {', '.join(allowed)}",
            f"{path}.type",
        )
    if kind == "input_text":
        as_object(part, path, ("type", "text", "prompt_cache_breakpoint"))
    name = TEXT_PARTS[kind]
    return {"type": kind, name: as_string(part.get(name), f"{path}.{name}")}


def _message(role: str, parts: Sequence[Item]) -> Item:
    content = [
        {**part, "annotations": [], "logprobs": []} if part["type"] == "output_text" else dict(part) for part in parts
    ]
    return {"id": new_id("msg"), "type": "message", "status": "completed", "role": role, "content": content}


def _read_call(item: Item, path: str) -> Item:
    return {
        "id": new_id("fc"),
        "type": "function_call",
        "status": "completed",
        "call_id": _name(item, "call_id", path),
        "name": _name(item, "name", path),
        "arguments": as_string(item.get("arguments"), f"{path}.arguments"),
    }


def _read_result(item: Item, path: str) -> Item:
    output = item.get("output")
    if isinstance(output, list):
        output = [_part(part, "tool", f"{path}.output[{i}]") for i, part in enumerate(output)]
    elif not isinstance(output, str):
        what = "is required" if output is None else f"must be a string or an array of parts, not {json_type(output)}"
        raise UserError(f"{path}.output {what}", f"{path}.output")
    return {
        "id": new_id("fco"),
        "type": "function_call_output",
        "status": "completed",
        "call_id": _name(item, "call_id", path),
        "output": output,
    }


def _read_reasoning(item: Item, path: str) -> Item:
    out: Item = {"id": new_id("rs"), "type": "reasoning", "summary": [], "content": [], "status": "completed"}
    for name, kind in (("summary", "summary_text"), ("content", "reasoning_text")):
        parts = item.get(name)
        if parts is None:
            continue
        if not isinstance(parts, list):
            raise UserError(f"{path}.{name} must be an array, not {json_type(parts)}", f"{path}.{name}")
        texts = []
        for i, part in enumerate(parts):
            at = f"{path}.{name}[{i}]"
            if as_object(part, at).get("type") != kind:
                raise UserError(f"{at}.type must be {kind}", f"{at}.type")
            texts.append({"type": kind, "text": as_string(part.get("text"), f"{at}.text")})
        out[name] = texts
    return out


READERS: dict[str, Callable[[Item, str], Item]] = {
    "message": _read_message,
    "function_call": _read_call,
    "function_call_output": _read_result,
    "reasoning": _read_reasoning,
}


def _name(item: Item, name: str, path: str) -> str:
    value = as_string(item.get(name), f"{path}.{name}")
    if not value:
        raise UserError(f"{path}.{name} must not be empty", f"{path}.{name}")
    return value


def check_results(items: Sequence[Item]) -> None:
    """Raise UserError for the result of a call that nobody made: templates would write nonsense."""
    called = set()
    for item in items:
        if item["type"] == "function_call":
            called.add(item["call_id"])
        elif item["type"] == "function_call_output" and item["call_id"] not in called:
            raise UserError(
                f"function_call_output with call_id {item['call_id'][:80]!r} follows no function_call with that id; "
                "send the call too, or go on from the response that made it",
                "input",
            )


def to_messages(items: Sequence[Item]) -> list[dict[str, Any]]:
    """The conversation in the chat API's form. What the model said in one turn becomes one message."""
    messages: list[dict[str, Any]] = []
    for item in items:
        last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
        match item["type"]:
            case "message" if item["role"] != "assistant":
                messages.append({"role": item["role"], "content": _texts(item["content"])})
            case "message":
                if last is None or last["content"] is not None or "tool_calls" in last:
                    messages.append(last := {"role": "assistant", "content": None})
                last["content"] = _texts(item["content"])
            case "reasoning":
                text = "".join(part["text"] for part in item["content"])
                if text:
                    messages.append({"role": "assistant", "content": None, "reasoning_content": text})
            case "function_call":
                if last is None:
                    messages.append(last := {"role": "assistant", "content": None})
                last.setdefault("tool_calls", []).append(_tool_call(item))
            case "function_call_output":
                output = item["output"]
                content = output if isinstance(output, str) else _texts(output)
                messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
    return messages


def without_earlier_reasoning(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without what was thought before the last message of the user; a message of reasoning alone goes."""
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    out = []
    for i, message in enumerate(messages):
        if users and i < users[-1] and "reasoning_content" in message:
            message = {name: value for name, value in message.items() if name != "reasoning_content"}
            if message == {"role": "assistant", "content": None}:
                continue
        out.append(message)
    return out


def _texts(parts: Sequence[Item]) -> str | list[dict[str, str]]:
    texts = [part[TEXT_PARTS[part["type"]]] for part in parts]
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]


def _tool_call(item: Item) -> dict[str, Any]:
    arguments = item["arguments"]
    try:
        json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        # Models write such things, and agents answer them with the error: the model should see what it wrote.
        arguments = json.dumps(arguments)
    return {
        "id": item["call_id"],
        "type": "function",
        "function": {"name": item["name"], "arguments": arguments},
    }
