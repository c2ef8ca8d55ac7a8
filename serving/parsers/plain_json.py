"""Calls as bare JSON: an object {"name": ..., "arguments": {...}} or a list of them, for models of no known family."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pagedray.serving.parsers.family import Format, ToolFamily
from pagedray.serving.parsers.json_call import read_call
from pagedray.serving.parsers.reader import Steps, TextReader
from pagedray.serving.parsers.tool_formats import arguments, const, quoted, separated, sequence, tag, triggered
from pagedray.serving.parsers.tools import Tool
from pagedray.serving.parsers.unmarked import read_unmarked
from pagedray.serving.parsers.writer import EventWriter

MARKER, END = "<tool_call>", "</tool_call>"  # written by some models that were never told to


def read(reader: TextReader, out: EventWriter, tools: Sequence[Tool]) -> Steps[None]:
    accepts = {tool.name for tool in tools}.__contains__

    def read_calls(is_marked: bool) -> Steps[bool]:
        if (yield from reader.peek()) == "{":
            found = yield from read_call(reader, out, None if is_marked else accepts)
        else:
            found = yield from _read_list(reader, out, accepts)
        if found and is_marked:
            yield from reader.space()
            if (yield from reader.takes_perhaps_cut(END)):
                out.markup()
        return found

    yield from read_unmarked(reader, out, read_calls, openers="{[", marker=MARKER, separator=",")


def _read_list(reader: TextReader, out: EventWriter, accepts: Callable[[str], bool]) -> Steps[bool]:
    reader.take()
    has_called = False
    while True:
        yield from reader.space()
        if (yield from reader.peek()) != "{" or not (yield from read_call(reader, out, accepts)):
            break
        has_called = True
        yield from reader.space()
        if (yield from reader.takes("]")) is not None:
            return True
        reader.record()
        if (yield from reader.takes(",")) is None:
            break
    if has_called:
        out.content(reader.take_record())
    return has_called


def _tags(tools: Sequence[Tool]) -> list[Format]:
    return [tag(f'{{"name": {quoted(tool.name)}, "arguments": ', arguments(tool), "}") for tool in tools]


def _calls(tools: Sequence[Tool], several: bool) -> Format:
    if not several:
        return separated(_tags(tools), ", ", False)
    return sequence(const("["), separated(_tags(tools), ", ", True), const("]"))


FAMILY = ToolFamily(
    read=read,
    calls=_calls,
    text_with_calls=lambda tools, several: triggered(['{"name"'], _tags(tools), several),
    is_used_by=lambda template: False,
    how_to_call=(
        "To call functions, answer with nothing but a JSON list with the name and the arguments of each:\n"
        '[{"name": "function name", "arguments": {"argument": "value"}}]'
    ),
)
