"""`TextParser`: a generator that reads, as an `OutputParser`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pagedray.serving.parsers.events import Event
from pagedray.serving.parsers.reader import Markers, Steps, TextReader, markers
from pagedray.serving.parsers.writer import EventWriter

Read = Callable[[TextReader, EventWriter], Steps[None]]


class TextParser:
    """Runs what reads an output.

    Args:
        read: reads to the end of the text.
        dropped: texts of special tokens that mean nothing to `read`: they vanish wherever they stand.
    """

    def __init__(self, read: Read, dropped: Sequence[str] = ()):
        self._reader = TextReader()
        self._out = EventWriter()
        self._steps = read(self._reader, self._out)
        self._filter = _Filter(markers(*dropped)) if dropped else None
        self._run()

    def feed(self, text: str) -> list[Event]:
        if self._filter is not None:
            text = self._filter.feed(text)
        if text:
            self._reader.push(text)
            self._run()
        return self._out.take()

    def finish(self) -> list[Event]:
        if self._filter is not None:
            self._reader.push(self._filter.finish())
        self._reader.end()
        self._run()
        self._out.end()
        return self._out.take()

    def _run(self) -> None:
        next(self._steps, None)


class _Filter:
    """Drops some strings from text that comes in pieces."""

    def __init__(self, dropped: Markers):
        self._dropped = dropped
        self._held = ""

    def feed(self, text: str) -> str:
        text = self._held + text
        parts: list[str] = []
        at = 0
        while True:
            stop, marker = self._dropped.split(text, at)
            parts.append(text[at:stop])
            if marker is None:
                self._held = text[stop:]
                return "".join(parts)
            at = stop + len(marker)

    def finish(self) -> str:
        text, self._held = self._held, ""
        return text
