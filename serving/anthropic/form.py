"""How the Messages API writes an answer: a message, or the events that build the same message piece by piece.

message_start, then per block content_block_start, content_block_delta ..., content_block_stop,
then message_delta with stop reason and usage, and message_stop; a ping behind the first content_block_start
"""

from __future__ import annotations

import uuid
from typing import Any

import msgspec

from pagedray.engine.errors import PagedrayError
from pagedray.serving.answer import Delta
from pagedray.serving.anthropic.content import BlockList, BlockSequence, BlockStart, BlockText, Change
from pagedray.serving.anthropic.errors import event_error
from pagedray.serving.openai.respond import Usage
from pagedray.serving.parsers.events import OutputParser

# The part of a delta that carries text, by the kind of the block.
_PIECES = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}


class MessageShape(msgspec.Struct, frozen=True, kw_only=True):
    """What the request says about how its answer looks."""

    model: str
    shows_thinking: bool = True
    tells_cached: bool = False  # usage counts cached prompt tokens apart
    length_reason: str = "max_tokens"  # why an answer of full length ended
    keeps_output: bool = True  # False: max_tokens 0
    asks_diagnostics: bool = False
    previous_message_id: str | None = None


class MessageForm:
    """Writes one message."""

    def __init__(self, shape: MessageShape, parser: OutputParser):
        self._shape = shape
        self._parser = parser
        self._id = f"msg_{uuid.uuid4().hex[:24]}"
        self._sequence = BlockSequence(shape.shows_thinking)
        self._blocks = BlockList()
        self._open: BlockStart | None = None
        self._stop_reason: str | None = None
        self._stop_sequence: str | None = None

    def begin(self, num_prompt_tokens: int) -> bytes:
        # how much of the prompt is cached isn't known yet; message_delta tells
        message = self._message([], Usage(num_prompt_tokens, 0, num_prompt_tokens, {}))
        return event({"type": "message_start", "message": message})

    def chunks(self, deltas: list[Delta], usage: Usage | None) -> bytes:
        return b"".join(self._event(change) for delta in deltas for change in self._changes(delta))

    def end(self, usage: Usage) -> bytes:
        delta = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
        return event({"type": "message_delta", "delta": delta, "usage": self._usage(usage)}) + event(
            {"type": "message_stop"}
        )

    def failed(self, error: PagedrayError | None) -> bytes:
        return event(event_error(error))

    def add(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            self._blocks.add(self._changes(delta))

    def body(self, usage: Usage) -> dict[str, Any]:
        content = self._blocks.content() if self._shape.keeps_output else []
        body = self._message(content, usage)
        if self._shape.asks_diagnostics:
            named = self._shape.previous_message_id is not None
            body["diagnostics"] = {"cache_miss_reason": {"type": "unavailable"}} if named else None
        return body

    def _changes(self, delta: Delta) -> list[Change]:
        events = self._parser.feed(delta.text) if delta.text else []
        if delta.finish_reason is None:
            return self._sequence.add(events)
        changes = self._sequence.add([*events, *self._parser.finish()])
        self._set_stop(delta)
        return changes + self._sequence.finish()

    def _set_stop(self, delta: Delta) -> None:
        if not self._shape.keeps_output:
            self._stop_reason = "max_tokens"
        elif delta.finish_reason == "length":
            self._stop_reason = self._shape.length_reason
        elif isinstance(delta.stop_reason, str):
            self._stop_reason, self._stop_sequence = "stop_sequence", delta.stop_reason
        else:
            self._stop_reason = "tool_use" if self._sequence.num_calls else "end_turn"

    def _event(self, change: Change) -> bytes:
        if isinstance(change, BlockStart):
            self._open = change
            start = event({"type": "content_block_start", "index": change.index, "content_block": change.block})
            return start + event({"type": "ping"}) if change.index == 0 else start
        assert self._open is not None
        index, kind = self._open.index, self._open.kind
        if isinstance(change, BlockText):
            delta_type, field = _PIECES[kind]
            return event(
                {"type": "content_block_delta", "index": index, "delta": {"type": delta_type, field: change.text}}
            )
        stop = event({"type": "content_block_stop", "index": index})
        if kind == "thinking":
            delta = {"type": "signature_delta", "signature": ""}
            return event({"type": "content_block_delta", "index": index, "delta": delta}) + stop
        return stop

    def _message(self, content: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._shape.model,
            "content": content,
            "stop_reason": self._stop_reason,
            "stop_sequence": self._stop_sequence,
            "usage": {**self._usage(usage), "service_tier": "standard"},
        }

    def _usage(self, usage: Usage) -> dict[str, Any]:
        cached = usage.cached_tokens if self._shape.tells_cached else 0
        return {
            "input_tokens": usage.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        }


def event(data: dict[str, Any]) -> bytes:
    """A server-sent event, named after the type of its data."""
    return b"event: %b\ndata: %b\n\n" % (data["type"].encode(), msgspec.json.encode(data))
