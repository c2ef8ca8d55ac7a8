"""Output parsers for what needs no more: only the first call, or no calls and no reasoning at all."""

from __future__ import annotations

from pagedray.serving.parsers.events import ContentText, Event, OutputParser, ToolArguments, ToolStart


class OneCall:
    """An `OutputParser` that drops calls after the first, for clients that asked for no more."""

    def __init__(self, parser: OutputParser):
        self._parser = parser

    def feed(self, text: str) -> list[Event]:
        return _first(self._parser.feed(text))

    def finish(self) -> list[Event]:
        return _first(self._parser.finish())


class PlainText:
    """An `OutputParser` to which everything is content."""

    def feed(self, text: str) -> list[Event]:
        return [ContentText(text)] if text else []

    def finish(self) -> list[Event]:
        return []


def _first(events: list[Event]) -> list[Event]:
    return [event for event in events if not (isinstance(event, ToolStart | ToolArguments) and event.index > 0)]
