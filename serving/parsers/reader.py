"""`TextReader`: lets a parser read text that is still coming as if all of it were there.

A parser is a generator. It asks the reader for what it needs next; where that hasn't come yet, it yields and goes on
when it has. What a parser decides depends on characters and the end alone, never on where pieces were cut.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Generator
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]  # yields while it waits for text, returns a T
Sink: TypeAlias = Callable[[str], None]

_SPACE = re.compile(r"[ \t\r\n]*")


class Markers:
    """Strings that mean something, none of which is the beginning of another."""

    def __init__(self, names: tuple[str, ...]):
        self._any = re.compile("|".join(map(re.escape, names)))
        self._beginnings = {name[:size] for name in names for size in range(1, len(name))}
        self._longest = max(map(len, names)) - 1

    def split(self, text: str, at: int) -> tuple[int, str | None]:
        """Where text from `at` stops being ordinary, and the marker there; None: perhaps the beginning of one."""
        found = self._any.search(text, at)
        if found is not None:
            return found.start(), found.group()
        for begin in range(max(at, len(text) - self._longest), len(text)):
            if text[begin:] in self._beginnings:
                return begin, None
        return len(text), None


@functools.lru_cache(maxsize=64)
def markers(*names: str) -> Markers:
    return Markers(names)


class TextReader:
    """Text to read: pushed at one end, taken at the other."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._has_ended = False
        self._record: list[str] | None = None

    def push(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self) -> None:
        """No more will be pushed."""
        self._has_ended = True

    def record(self) -> None:
        """Keep what is read from now on, until it is taken or dropped."""
        self._record = []

    def take_record(self) -> str:
        """What was read since `record`."""
        text = "".join(self._record or ())
        self._record = None
        return text

    def drop_record(self) -> None:
        self._record = None

    def more(self) -> Steps[bool]:
        """Wait for more text; False when there won't be any."""
        if self._has_ended:
            return False
        yield
        return True

    def peek(self, size: int = 1) -> Steps[str]:
        """The next so many characters, or what there is before the end."""
        while len(self._text) - self._at < size and (yield from self.more()):
            pass
        return self._text[self._at : self._at + size]

    def take(self, size: int = 1) -> str:
        """Read characters that were seen to be there; fewer before the end."""
        text = self._text[self._at : self._at + size]
        self._at += len(text)
        if self._record is not None:
            self._record.append(text)
        return text

    def sees(self, *names: str) -> Steps[str | None]:
        """The name that comes next, without reading it; None: none of them."""
        while True:
            rest = self._text[self._at : self._at + max(map(len, names))]
            for name in names:
                if rest.startswith(name):
                    return name
            if not any(name.startswith(rest) for name in names) or not (yield from self.more()):
                return None

    def takes(self, *names: str) -> Steps[str | None]:
        """The same, and reads it."""
        name = yield from self.sees(*names)
        if name is not None:
            self.take(len(name))
        return name

    def takes_perhaps_cut(self, name: str) -> Steps[bool]:
        """Whether the name comes next, or a beginning of it and then the end; reads it."""
        if (yield from self.takes(name)) is not None:
            return True
        rest = self._text[self._at :]
        is_cut = self._has_ended and rest != "" and name.startswith(rest)
        if is_cut:
            self.take(len(rest))
        return is_cut

    def space(self) -> Steps[str]:
        """Read white space, if any."""
        return (yield from self.run(_SPACE))

    def run(self, pattern: re.Pattern[str], limit: int | None = None) -> Steps[str]:
        """Read characters as long as they match.

        Args:
            pattern: matches any number of characters of one class.
            limit: read at most so many.
        """
        parts: list[str] = []
        size = 0
        while True:
            found = pattern.match(self._text, self._at)
            length = found.end() - self._at if found else 0
            if limit is not None:
                length = min(length, limit - size)
            size += length
            parts.append(self.take(length))
            if self._at < len(self._text) or size == limit or not (yield from self.more()):
                return "".join(parts)

    def rest(self, sink: Sink) -> Steps[None]:
        """Hand on everything to the end."""
        while True:
            if self._at < len(self._text):
                sink(self.take(len(self._text) - self._at))
            elif not (yield from self.more()):
                return

    def until(self, found: Markers, sink: Sink) -> Steps[str | None]:
        """Hand on text up to the next marker, without reading that; None at the end."""
        while True:
            stop, marker = found.split(self._text, self._at)
            if stop > self._at:
                sink(self.take(stop - self._at))
            if marker is not None:
                return marker
            if not (yield from self.more()):
                if self._at < len(self._text):
                    sink(self.take(len(self._text) - self._at))
                return None

    def up_to(self, pattern: re.Pattern[str], sink: Sink) -> Steps[str]:
        """Hand on text up to the next character that matches, without reading that; "" at the end."""
        while True:
            found = pattern.search(self._text, self._at)
            stop = found.start() if found else len(self._text)
            if stop > self._at:
                sink(self.take(stop - self._at))
            if found is not None:
                return found.group()
            if not (yield from self.more()):
                return ""
