"""The client's system prompt and messages as chat messages, checked, with the path of whatever is wrong.

| block | becomes |
| --- | --- |
| text | content |
| document, search_result | content, see documents.py |
| tool_use | a tool call of the assistant's message |
| tool_result | a tool message before the rest of the turn; "Error: " goes before one with is_error |
| thinking | reasoning_content |
| redacted_thinking | nothing: its data is readable where it was made, and none is made here |

Messages of one role in a row are one turn. A last message of the assistant's is continued (prefill).
"""

from __future__ import annotations

from typing import Any

import msgspec

from pagedray.engine.errors import Unsupported, UserError
from pagedray.serving.anthropic.documents import document_text, search_result_text
from pagedray.serving.anthropic.schema import CacheControl, validated
from pagedray.serving.limits import json_type

MAX_MESSAGES = 100_000
ROLES = ("user", "assistant", "system")

# block type → fields it may have besides type. Those that aren't read say nothing to a model that has only text.
FIELDS: dict[str, tuple[str, ...]] = {
    "text": ("text", "cache_control", "citations"),
    "tool_use": ("id", "name", "input", "cache_control", "caller", "toolset_name"),
    "tool_result": ("tool_use_id", "content", "is_error", "cache_control", "toolset_name"),
    "thinking": ("thinking", "signature"),
    "redacted_thinking": ("data",),
    "document": ("source", "title", "context", "citations", "cache_control"),
    "search_result": ("source", "title", "content", "citations", "cache_control"),
}
BLOCKS = {
    "user": ("text", "tool_result", "document", "search_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
    "system": ("text",),
    "tool_result": ("text", "document", "search_result"),
}
NOT_OFFERED = (
    "image",
    "tool_reference",
    "browser_state",
    "container_upload",
    "server_tool_use",
    "web_search_tool_result",
    "web_fetch_tool_result",
    "code_execution_tool_result",
    "bash_code_execution_tool_result",
    "text_editor_code_execution_tool_result",
    "tool_search_tool_result",
    "mcp_tool_use",
    "mcp_tool_result",
    "mcp_tool_listing",
    "advisor_tool_result",
    "compaction",
    "connector_text",
    "fallback",
    "tool_addition",
    "tool_removal",
)


class History(msgspec.Struct, frozen=True):
    messages: list[dict[str, Any]]
    is_prefilled: bool  # the answer goes on with the last message
    marks_cache: bool  # a block has cache_control


def read_history(system: str | list[Any] | None, messages: list[Any]) -> History:
    """Chat messages in the form of the OpenAI API.

    Raises:
        UserError: something is malformed; `param` is the path of the part.
        Unsupported: a kind of block that isn't implemented.
    """
    if not messages:
        raise UserError("messages: at least one message is required", "messages")
    if len(messages) > MAX_MESSAGES:
        raise UserError(f"messages: at most {MAX_MESSAGES}, got {len(messages)}", "messages")
    reader = _Reader()
    if system:
        reader.start_turn("system", "system")
        reader.add_content(system, "system")
    for i, message in enumerate(messages):
        reader.add_message(message, f"messages.{i}")
    return reader.finish()


class _Turn:
    """Blocks of messages of one role in a row."""

    def __init__(self, role: str, path: str):
        self.role = role
        self.path = path  # of its first message
        self.texts: list[str] = []
        self.thoughts: list[str] = []
        self.calls: dict[str, dict[str, Any]] = {}  # by id, in order
        self.results: dict[str, str] = {}  # by the id of the call


class _Reader:
    def __init__(self) -> None:
        self._turns: list[_Turn] = []
        self._marks_cache = False

    def add_message(self, message: Any, path: str) -> None:
        if not isinstance(message, dict):
            raise UserError(f"{path}: must be an object, not {json_type(message)}", path)
        role = message.get("role")
        if not isinstance(role, str) or role not in ROLES:
            found = "is required" if "role" not in message else f"must be one of {', '.join(ROLES)}"
            raise UserError(f"{path}.role: {found}", f"{path}.role")
        for name, value in message.items():
            if name not in ("role", "content") and value is not None:
                raise UserError(f"{path}.{name[:64]}: unknown field", f"{path}.{name[:64]}")
        if message.get("content") is None:
            raise UserError(f"{path}.content: is required", f"{path}.content")
        self.start_turn(role, path)
        turn = self._turns[-1]
        before = len(turn.texts), len(turn.results)
        self.add_content(message["content"], f"{path}.content")
        if role == "user" and not any(turn.texts[before[0] :]) and len(turn.results) == before[1]:
            raise UserError(f"{path}.content: a user message must have content", f"{path}.content")

    def start_turn(self, role: str, path: str) -> None:
        if self._turns and self._turns[-1].role == role:
            return
        self._check_results_are_complete()
        self._turns.append(_Turn(role, path))

    def add_content(self, content: Any, path: str) -> None:
        turn = self._turns[-1]
        if isinstance(content, str):
            turn.texts.append(content)
            return
        if not isinstance(content, list):
            raise UserError(f"{path}: must be a string or an array of blocks, not {json_type(content)}", path)
        for i, block in enumerate(content):
            self._add_block(turn, block, f"{path}.{i}")

    def finish(self) -> History:
        last = self._turns[-1]
        is_prefilled = False
        if last.role == "assistant":
            if last.calls:
                raise UserError(
                    f"{last.path}: the last message has tool_use blocks; their tool_result blocks must follow in a "
                    "user message",
                    last.path,
                )
            is_prefilled = any(last.texts)
            if not is_prefilled and not last.thoughts:
                self._turns.pop()  # an empty beginning: the same as none
        else:
            self._check_results_are_complete()
        messages = [message for turn in self._turns for message in _chat_messages(turn)]
        if not messages or (self._turns[-1].role == "assistant" and not is_prefilled):
            raise UserError("messages: there is nothing to answer; end with a user message or a prefill", "messages")
        return History(messages, is_prefilled, self._marks_cache)

    def _add_block(self, turn: _Turn, block: Any, path: str) -> None:
        kind = self._check_block(block, turn.role, path)
        if kind in ("text", "document", "search_result"):
            turn.texts.append(_block_text(kind, block, path))
        elif kind == "thinking":
            turn.thoughts.append(_string(block, "thinking", path))
        elif kind == "tool_use":
            self._add_call(turn, block, path)
        elif kind == "tool_result":
            self._add_result(turn, block, path)

    def _check_block(self, block: Any, where: str, path: str) -> str:
        """The block's type, once it may stand here and has fields of its type only."""
        if not isinstance(block, dict):
            raise UserError(f"{path}: must be an object, not {json_type(block)}", path)
        kind = block.get("type")
        if not isinstance(kind, str):
            raise UserError(f"{path}.type: {'is required' if kind is None else 'must be a string'}", f"{path}.type")
        if kind not in BLOCKS[where]:
            if kind in NOT_OFFERED:
                raise Unsupported(f"{path}.type: blocks of type {kind!r} are not implemented", f"{path}.type")
            allowed = ", ".join(BLOCKS[where])
            at = f"a {where} block" if where == "tool_result" else f"{where} content"
            raise UserError(f"{path}.type: {kind[:64]!r} can't stand in {at}, only {allowed}", f"{path}.type")
        for name, value in block.items():
            if name != "type" and name not in FIELDS[kind] and value is not None:
                raise UserError(f"{path}.{name[:64]}: unknown field of a {kind} block", f"{path}.{name[:64]}")
        if block.get("cache_control") is not None:
            validated(CacheControl, block["cache_control"], f"{path}.cache_control")
            self._marks_cache = True
        return kind

    def _add_call(self, turn: _Turn, block: dict[str, Any], path: str) -> None:
        call_id, name = _string(block, "id", path), _string(block, "name", path)
        arguments = block.get("input")
        if not isinstance(arguments, dict):
            found = "is required" if "input" not in block else f"must be an object, not {json_type(arguments)}"
            raise UserError(f"{path}.input: {found}", f"{path}.input")
        if not call_id or not name:
            field = "name" if call_id else "id"
            raise UserError(f"{path}.{field}: must not be empty", f"{path}.{field}")
        if call_id in turn.calls:
            raise UserError(f"{path}.id: tool_use ids must be unique, {call_id[:64]!r} came before", f"{path}.id")
        function = {"name": name, "arguments": msgspec.json.encode(arguments).decode()}
        turn.calls[call_id] = {"id": call_id, "type": "function", "function": function}

    def _add_result(self, turn: _Turn, block: dict[str, Any], path: str) -> None:
        call_id = _string(block, "tool_use_id", path)
        if call_id not in self._open_calls():
            raise UserError(
                f"{path}.tool_use_id: there is no tool_use block with the id {call_id[:64]!r} in the previous message",
                f"{path}.tool_use_id",
            )
        if call_id in turn.results:
            raise UserError(f"{path}.tool_use_id: {call_id[:64]!r} has a result already", f"{path}.tool_use_id")
        if turn.texts:
            raise UserError(f"{path}: tool_result blocks must come before text", path)
        is_error = block.get("is_error")
        if is_error is not None and not isinstance(is_error, bool):
            raise UserError(f"{path}.is_error: must be a boolean, not {json_type(is_error)}", f"{path}.is_error")
        content = block.get("content")
        if isinstance(content, list):
            texts = []
            for i, part in enumerate(content):
                kind = self._check_block(part, "tool_result", f"{path}.content.{i}")
                texts.append(_block_text(kind, part, f"{path}.content.{i}"))
            content = "\n".join(texts)
        elif content is not None and not isinstance(content, str):
            raise UserError(
                f"{path}.content: must be a string or an array of blocks, not {json_type(content)}", f"{path}.content"
            )
        turn.results[call_id] = f"Error: {content or ''}".rstrip() if is_error else content or ""

    def _open_calls(self) -> dict[str, dict[str, Any]]:
        """Calls of the assistant's turn before this one."""
        return self._turns[-2].calls if len(self._turns) > 1 else {}

    def _check_results_are_complete(self) -> None:
        """The turn that ends here has a result for every call of the turn before it."""
        missing = [call_id for call_id in self._open_calls() if call_id not in self._turns[-1].results]
        if missing:
            at = self._turns[-1].path
            raise UserError(
                f"{at}: tool_use blocks without tool_result blocks right after them: {', '.join(missing)[:256]}", at
            )


def _block_text(kind: str, block: dict[str, Any], path: str) -> str:
    if kind == "document":
        return document_text(block, path)
    if kind == "search_result":
        return search_result_text(block, path)
    return _string(block, "text", path)


def _string(block: dict[str, Any], name: str, path: str) -> str:
    value = block.get(name)
    if isinstance(value, str):
        return value
    found = "is required" if value is None else f"must be a string, not {json_type(value)}"
    raise UserError(f"{path}.{name}: {found}", f"{path}.{name}")


def _chat_messages(turn: _Turn) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = [
        {"role": "tool", "tool_call_id": call_id, "content": text} for call_id, text in turn.results.items()
    ]
    if turn.role == "assistant":
        message: dict[str, Any] = {"role": "assistant", "content": _content(turn.texts) if turn.texts else None}
        if turn.thoughts:
            message["reasoning_content"] = "\n".join(turn.thoughts)
        if turn.calls:
            message["tool_calls"] = list(turn.calls.values())
        out.append(message)
    elif turn.texts:
        out.append({"role": turn.role, "content": _content(turn.texts)})
    return out


def _content(texts: list[str]) -> str | list[dict[str, str]]:
    """One text as it is; several as parts, which each template joins in its own way."""
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]
