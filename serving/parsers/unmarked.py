"""Calls that no markup sets apart: where in a text one may begin."""

from __future__ import annotations

import re
from collections.abc import Callable

from pagedray.serving.parsers.reader import Steps, TextReader
from pagedray.serving.parsers.writer import EventWriter

_BRACKETS = re.compile(r"[{}\[\]<]")


def read_unmarked(
    reader: TextReader,
    out: EventWriter,
    read_calls: Callable[[bool], Steps[bool]],
    *,
    openers: str,
    marker: str,
    separator: str,
) -> Steps[None]:
    """Read content and calls to the end of the output.

    Calls may begin where content begins, behind another call, at the start of a line outside all brackets, and behind
    the marker. So the objects of an answer that is itself JSON aren't taken for calls.

    Args:
        read_calls: reads calls, whose opener comes next; told whether the marker stands before it. False: there was
            none, and what was read of it is recorded.
        openers: characters that a call may begin with.
        marker: may stand before calls.
        separator: may stand between calls.
    """
    has_called = False
    while True:
        reader.record()
        yield from reader.space()
        if has_called and (yield from reader.takes(separator)) is not None:
            yield from reader.space()
        is_marked = (yield from reader.takes(marker)) is not None
        if is_marked:
            yield from reader.space()
        char = yield from reader.peek()
        if char and char in openers and (yield from read_calls(is_marked)):
            has_called = True
            continue
        has_called = False
        text = reader.take_record()
        out.content(text)
        if not (yield from _to_next_place(reader, out, openers, marker, text)):
            return


def _to_next_place(reader: TextReader, out: EventWriter, openers: str, marker: str, before: str) -> Steps[bool]:
    """Hand on content up to where a call may begin; False at the end."""
    depth = 0
    for char in before:
        depth = _depth(depth, char)
    last = before[-1:]

    def write(text: str) -> None:
        nonlocal last
        last = text[-1]
        out.content(text)

    while True:
        char = yield from reader.up_to(_BRACKETS, write)
        if char == "":
            return False
        if char == "<":
            if (yield from reader.sees(marker)) is not None:
                return True
        elif char in openers and depth == 0 and last == "\n":
            return True
        depth = _depth(depth, char)
        write(reader.take())


def _depth(depth: int, char: str) -> int:
    if char in "{[":
        return depth + 1
    return max(depth - 1, 0) if char in "}]" else depth
