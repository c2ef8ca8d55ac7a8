"""What a parser finds in an output as content blocks, for a stream and a whole message alike.

Blocks follow each other: a change of kind ends the open one. Blank text before a tool call or after one is no block.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import pydantic_core

from pagedray.serving.anthropic.json_prefix import JsonPrefix
from pagedray.serving.parsers.events import ContentText, Event, ReasoningText, ToolArguments, ToolStart


class BlockStart(msgspec.Struct, frozen=True):
    index: int
    kind: Literal["text", "thinking", "tool_use"]
    id: str = ""  # of a call
    name: str = ""

    @property
    def block(self) -> dict[str, Any]:
        """The block before anything is in it."""
        if self.kind == "text":
            return {"type": "text", "text": ""}
        if self.kind == "thinking":
            return {"type": "thinking", "thinking": "", "signature": ""}
        return {"type": "tool_use", "id": self.id, "name": self.name, "input": {}}


class BlockText(msgspec.Struct, frozen=True):
    """More of the open block: of its text, or of the JSON of a call's input. Never empty."""

    text: str


class BlockStop(msgspec.Struct, frozen=True):
    pass


Change = BlockStart | BlockText | BlockStop


class BlockSequence:
    """Turns parser events into changes of content blocks.

    Args:
        shows_thinking: False: a thinking block says that there was thinking, and has no text.
    """

    def __init__(self, shows_thinking: bool = True):
        self._shows_thinking = shows_thinking
        self._open: BlockStart | None = None
        self._num_blocks = 0
        self._input = JsonPrefix()  # of the open call
        self._blank = ""  # the beginning of a text that may turn out to be nothing but space
        self.num_calls = 0

    def add(self, events: list[Event]) -> list[Change]:
        changes: list[Change] = []
        for event in events:
            match event:
                case ContentText(text=text):
                    self._add_text(changes, text)
                case ReasoningText(text=text):
                    self._begin(changes, "thinking")
                    if self._shows_thinking:
                        changes.append(BlockText(text))
                case ToolStart(id=call_id, name=name):
                    self.num_calls += 1
                    self._input = JsonPrefix()
                    self._close(changes)
                    self._begin(changes, "tool_use", "toolu_" + call_id.removeprefix("call_"), name)
                case ToolArguments(text=text):
                    if text := self._input.feed(text):
                        changes.append(BlockText(text))
        return changes

    def finish(self) -> list[Change]:
        """The output ended. There is always a block, since clients read the first one without counting them."""
        changes: list[Change] = []
        if self._num_blocks == 0:
            blank = self._blank
            self._begin(changes, "text")
            if blank:
                changes.append(BlockText(blank))
        self._close(changes)
        return changes

    def _add_text(self, changes: list[Change], text: str) -> None:
        if self._open is None or self._open.kind != "text":
            self._blank += text
            if self._blank.isspace():
                return
            text = self._blank
            self._begin(changes, "text")
        changes.append(BlockText(text))

    def _begin(self, changes: list[Change], kind: Literal["text", "thinking", "tool_use"], *call: str) -> None:
        if self._open is not None and self._open.kind == kind:
            return
        self._close(changes)
        self._open = BlockStart(self._num_blocks, kind, *call)
        self._num_blocks += 1
        self._blank = ""
        changes.append(self._open)

    def _close(self, changes: list[Change]) -> None:
        if self._open is not None:
            changes.append(BlockStop())
        self._open = None


class BlockList:
    """The blocks of a whole message, from the same changes that a stream sends."""

    def __init__(self) -> None:
        self._blocks: list[tuple[BlockStart, list[str]]] = []

    def add(self, changes: list[Change]) -> None:
        for change in changes:
            if isinstance(change, BlockStart):
                self._blocks.append((change, []))
            elif isinstance(change, BlockText):
                self._blocks[-1][1].append(change.text)

    def content(self) -> list[dict[str, Any]]:
        return [self._filled(start, "".join(texts)) for start, texts in self._blocks]

    def _filled(self, start: BlockStart, text: str) -> dict[str, Any]:
        value: Any = text if start.kind != "tool_use" else parse_input(text)
        return {**start.block, {"tool_use": "input"}.get(start.kind, start.kind): value}


def parse_input(text: str) -> dict[str, Any]:
    """A call's input from what `JsonPrefix` let through: of one that was cut off, what came."""
    value: dict[str, Any] = pydantic_core.from_json(text, allow_partial=True) if text else {}
    return value
