"""What a model says, as output items, and the events that tell of it while it comes.

Items follow each other: one is open at a time, and what opens the next closes it. The order of events of an item is

    message        output_item.added, content_part.added, output_text.delta …, output_text.done, content_part.done,
                   output_item.done
    reasoning      the same with reasoning_text
    function_call  output_item.added, function_call_arguments.delta …, function_call_arguments.done, output_item.done
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from pagedray.serving.openai.responses.store import new_id
from pagedray.serving.parsers.events import ContentText, Event, ReasoningText, ToolArguments, ToolStart

ApiEvent = tuple[str, dict[str, Any]]  # type without "response.", fields without type and sequence number
Logprobs = list[dict[str, Any]]  # as output_text has them
ItemStatus = Literal["completed", "incomplete"]


class _Item(Protocol):
    def begin(self) -> list[ApiEvent]: ...
    def end(self, status: ItemStatus) -> list[ApiEvent]: ...
    def whole(self, status: ItemStatus) -> dict[str, Any]:
        """The item as the response has it."""


class OutputWriter:
    """Takes what a parser makes of the model's words, gives events, and gathers the items.

    White space alone between items is not a message: it waits until more text comes, and is dropped if none does.
    """

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []  # those that have ended
        self._open: _Item | None = None
        self._blank = ""
        self._logprobs: Logprobs = []  # of tokens whose text has not come

    def feed(self, events: Sequence[Event], logprobs: Logprobs) -> list[ApiEvent]:
        """What one delivery brings.

        Args:
            events: of the parser.
            logprobs: of the delivery's tokens. They go to the message if any of their text does.
        """
        self._logprobs += logprobs
        if events and not any(isinstance(event, ContentText) for event in events):
            self._logprobs = []
        out: list[ApiEvent] = []
        for event in events:
            match event:
                case ContentText(text):
                    out += self._content(text)
                case ReasoningText(text):
                    if not isinstance(self._open, _Reasoning):
                        out += self._next(_Reasoning(self._num_items))
                    assert isinstance(self._open, _Reasoning)
                    out.append(self._open.add(text))
                case ToolStart():
                    out += self._next(_Call(self._num_items, event))
                case ToolArguments(_, text):
                    assert isinstance(self._open, _Call)
                    out.append(self._open.add(text))
        return out

    def close(self, status: ItemStatus, *, needs_item: bool = True) -> list[ApiEvent]:
        """Nothing more comes: the open item ends like this. Where there is none at all, an empty message is made."""
        out: list[ApiEvent] = []
        text = ""
        if needs_item and self._open is None and not self.items:
            text = self._blank
            out += self._next(_Message(0))
        if isinstance(self._open, _Message) and (text or self._logprobs):
            out.append(self._open.add(text, self._logprobs))
        return out + self._end_open(status)

    @property
    def _num_items(self) -> int:
        return len(self.items) + (self._open is not None)

    def _content(self, text: str) -> list[ApiEvent]:
        out: list[ApiEvent] = []
        if not isinstance(self._open, _Message):
            self._blank += text
            if self._blank.isspace():
                return out
            text = self._blank
            out += self._next(_Message(self._num_items))
        assert isinstance(self._open, _Message)
        out.append(self._open.add(text, self._logprobs))
        self._logprobs = []
        return out

    def _next(self, item: _Item) -> list[ApiEvent]:
        out = self._end_open("completed")
        self._open, self._blank = item, ""
        return out + item.begin()

    def _end_open(self, status: ItemStatus) -> list[ApiEvent]:
        if self._open is None:
            return []
        item, self._open = self._open, None
        self.items.append(item.whole(status))
        return item.end(status)


class _Message:
    def __init__(self, index: int):
        self._id, self._index = new_id("msg"), index
        self._text: list[str] = []
        self._logprobs: Logprobs = []

    def begin(self) -> list[ApiEvent]:
        item = {"id": self._id, "type": "message", "status": "in_progress", "role": "assistant", "content": []}
        return [
            ("output_item.added", {"output_index": self._index, "item": item}),
            ("content_part.added", {**self._place(), "part": _text_part("", [])}),
        ]

    def add(self, text: str, logprobs: Logprobs) -> ApiEvent:
        self._text.append(text)
        self._logprobs += logprobs
        return "output_text.delta", {**self._place(), "delta": text, "logprobs": logprobs}

    def end(self, status: ItemStatus) -> list[ApiEvent]:
        text = "".join(self._text)
        return [
            ("output_text.done", {**self._place(), "text": text, "logprobs": self._logprobs}),
            ("content_part.done", {**self._place(), "part": _text_part(text, self._logprobs)}),
            ("output_item.done", {"output_index": self._index, "item": self.whole(status)}),
        ]

    def whole(self, status: ItemStatus) -> dict[str, Any]:
        part = _text_part("".join(self._text), self._logprobs)
        return {"id": self._id, "type": "message", "status": status, "role": "assistant", "content": [part]}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._id, "output_index": self._index, "content_index": 0}


class _Reasoning:
    def __init__(self, index: int):
        self._id, self._index = new_id("rs"), index
        self._text: list[str] = []

    def begin(self) -> list[ApiEvent]:
        item = {"id": self._id, "type": "reasoning", "summary": [], "content": [], "status": "in_progress"}
        return [
            ("output_item.added", {"output_index": self._index, "item": item}),
            ("content_part.added", {**self._place(), "part": {"type": "reasoning_text", "text": ""}}),
        ]

    def add(self, text: str) -> ApiEvent:
        self._text.append(text)
        return "reasoning_text.delta", {**self._place(), "delta": text}

    def end(self, status: ItemStatus) -> list[ApiEvent]:
        text = "".join(self._text)
        return [
            ("reasoning_text.done", {**self._place(), "text": text}),
            ("content_part.done", {**self._place(), "part": {"type": "reasoning_text", "text": text}}),
            ("output_item.done", {"output_index": self._index, "item": self.whole(status)}),
        ]

    def whole(self, status: ItemStatus) -> dict[str, Any]:
        content = [{"type": "reasoning_text", "text": "".join(self._text)}]
        return {"id": self._id, "type": "reasoning", "summary": [], "content": content, "status": status}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._id, "output_index": self._index, "content_index": 0}


class _Call:
    def __init__(self, index: int, start: ToolStart):
        self._id, self._index = new_id("fc"), index
        self._start = start
        self._text: list[str] = []

    def begin(self) -> list[ApiEvent]:
        return [("output_item.added", {"output_index": self._index, "item": self.whole("in_progress")})]

    def add(self, text: str) -> ApiEvent:
        self._text.append(text)
        return "function_call_arguments.delta", {"item_id": self._id, "output_index": self._index, "delta": text}

    def end(self, status: ItemStatus) -> list[ApiEvent]:
        done = {
            "item_id": self._id,
            "output_index": self._index,
            "name": self._start.name,
            "arguments": "".join(self._text),
        }
        return [
            ("function_call_arguments.done", done),
            ("output_item.done", {"output_index": self._index, "item": self.whole(status)}),
        ]

    def whole(self, status: ItemStatus | Literal["in_progress"]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "function_call",
            "status": status,
            "call_id": self._start.id,
            "name": self._start.name,
            "arguments": "".join(self._text),
        }


def _text_part(text: str, logprobs: Logprobs) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
