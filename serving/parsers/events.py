"""What a piece of a model's output means, and what turns pieces into that."""

from __future__ import annotations

from typing import Protocol

import msgspec


class ReasoningText(msgspec.Struct, frozen=True):
    """More of what the model thinks before it answers. Never empty."""

    text: str


class ContentText(msgspec.Struct, frozen=True):
    """More of the answer's text. Never empty."""

    text: str


class ToolStart(msgspec.Struct, frozen=True):
    """A call begins. Comes once a call, before its arguments."""

    index: int  # 0, 1, ... in order of the output
    id: str  # "call_" and 24 hex digits
    name: str


class ToolArguments(msgspec.Struct, frozen=True):
    """More of a call's arguments. All of one call join to the JSON text of an object, unless the model was cut off or
    wrote something that isn't JSON. Never empty. Arguments of one call all come before the next call begins."""

    index: int
    text: str


Event = ReasoningText | ContentText | ToolStart | ToolArguments


class OutputParser(Protocol):
    """Reads one choice's text as it comes.

    How the text is cut into pieces changes neither the joined texts nor the calls. Text that turns out not to be a call
    comes out as content, so nothing is lost and nothing raises, whatever the model writes.
    """

    def feed(self, text: str) -> list[Event]:
        """Take the next piece; what is certain by now comes out."""

    def finish(self) -> list[Event]:
        """The output ended, for whatever reason: everything that was held comes out."""
