"""`EventWriter`: what a parser found out, as events."""

from __future__ import annotations

import secrets

from pagedray.serving.parsers.events import ContentText, Event, ReasoningText, ToolArguments, ToolStart

_SPACES = " \t\r\n"


class EventWriter:
    """Gathers events between two deliveries.

    White space beside markup belongs to the markup and is dropped: before and after calls, around reasoning. Where
    content goes on behind calls, the space before them is kept after all (or that behind, where there is none before),
    so that the content's parts don't run together.

    Attributes:
        drops_content: only calls and reasoning come out.
        can_have_calls: markup may follow content, so that its last white space waits for what comes next.
    """

    def __init__(self) -> None:
        self.can_have_calls = True
        self.drops_content = False
        self._events: list[Event] = []
        self._num_calls = 0
        self._kind: type[ContentText | ReasoningText] | None = None  # of the text so far that came last
        self._space = ""  # behind that text; comes out if more of the kind does
        self._is_behind_markup = False
        self._keeps_space = False  # white space that follows is kept in _space

    def take(self) -> list[Event]:
        """Events since the last time; neighbours that are the same kind of text are joined."""
        events, self._events = self._events, []
        return events

    def content(self, text: str) -> None:
        if not self.drops_content:
            self._text(ContentText, text)

    def reasoning(self, text: str) -> None:
        self._text(ReasoningText, text)

    def markup(self) -> None:
        """Markup stands here."""
        self._keeps_space = self._kind is ContentText and self._space == ""
        self._is_behind_markup = True

    def blank_line(self) -> None:
        """Set what comes next apart from text of the same kind before the markup."""
        self._space, self._keeps_space = "\n\n", False

    def start(self, name: str) -> None:
        """A call of this tool begins."""
        self.markup()
        name = name.encode("utf-8", "replace").decode()  # half a surrogate pair can't be sent
        self._events.append(ToolStart(self._num_calls, "call_" + secrets.token_hex(12), name))
        self._num_calls += 1

    def arguments(self, text: str) -> None:
        """More arguments of the call that began last."""
        if text:
            index = self._num_calls - 1
            last = self._events[-1] if self._events else None
            if isinstance(last, ToolArguments) and last.index == index:
                self._events[-1] = ToolArguments(index, last.text + text)
            else:
                self._events.append(ToolArguments(index, text))

    def end(self) -> None:
        """The output ends: white space at the end of the content is kept, unless it stands beside markup."""
        if self._space and not self._is_behind_markup:
            self._events.append(ContentText(self._space))

    def _text(self, kind: type[ContentText | ReasoningText], text: str) -> None:
        if self._is_behind_markup:
            shown = text.lstrip(_SPACES)
            if self._keeps_space:
                self._space += text[: len(text) - len(shown)]
            if not shown:
                return
            text = shown
            self._is_behind_markup = self._keeps_space = False
            if kind is not self._kind:
                self._space = ""
        waits = self.can_have_calls or kind is ReasoningText
        shown = text.rstrip(_SPACES) if waits else text
        if not shown:
            self._space += text
            return
        kept, self._space = self._space + shown, text[len(shown) :]
        self._kind = kind
        last = self._events[-1] if self._events else None
        if isinstance(last, kind):
            self._events[-1] = kind(last.text + kept)
        else:
            self._events.append(kind(kept))
