"""Calls as DeepSeek writes them, between tokens of their own.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>...           V3.1
    ... <｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME, a fence of ```json around {...}, ...        V3, R1

and <｜tool▁calls▁end｜> behind the last. Either is read whatever the model's own form is; grammars are in the model's.
Source: the chat templates of deepseek-ai/DeepSeek-V3-0324, DeepSeek-R1-0528 and DeepSeek-V3.1.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from pagedray.serving.parsers.family import Format, ToolFamily
from pagedray.serving.parsers.json_call import read_value
from pagedray.serving.parsers.reader import Steps, TextReader, markers
from pagedray.serving.parsers.tool_formats import arguments, separated, tag, triggered
from pagedray.serving.parsers.tools import Tool
from pagedray.serving.parsers.writer import EventWriter

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
FENCE_BEGIN, FENCE_END = "```json\n", "\n```"
_NAME = re.compile(r"[^\s<{`]*")
_MARKUP = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR)


def read(reader: TextReader, out: EventWriter, tools: Sequence[Tool]) -> Steps[None]:
    has_called = False
    while True:
        marker = yield from reader.until(markers(CALLS_BEGIN, CALL_BEGIN, CALL_END, CALLS_END), out.content)
        if marker is None:
            return
        reader.record()
        reader.take(len(marker))
        if marker == CALLS_BEGIN:
            yield from reader.space()
            if (yield from reader.takes(CALL_BEGIN)) is None:
                out.content(reader.take_record())
                continue
            marker = CALL_BEGIN
        if marker == CALL_BEGIN and (yield from _read_call(reader, out)):
            has_called = True
        elif marker != CALL_BEGIN and has_called:
            reader.drop_record()
            out.markup()
        else:
            out.content(reader.take_record())


def _read_call(reader: TextReader, out: EventWriter) -> Steps[bool]:
    """Read a call behind its opening token, to the end of its arguments."""
    first = yield from reader.run(_NAME, 256)
    if (yield from reader.takes(SEPARATOR)) is None or not first:
        return False
    yield from reader.space()
    name = yield from reader.run(_NAME, 256)  # only V3 has one here: before it stands the kind of the call
    yield from reader.space()
    is_fenced = (yield from reader.takes(FENCE_BEGIN)) is not None
    yield from reader.space()
    if (yield from reader.peek()) != "{":
        return False
    reader.drop_record()
    out.start(name or first)
    yield from read_value(reader, out.arguments)
    if is_fenced:
        yield from reader.space()
        yield from reader.takes_perhaps_cut(FENCE_END.strip())
    return True


def _fenced_tags(tools: Sequence[Tool]) -> list[Format]:
    return [
        tag(f"{CALL_BEGIN}function{SEPARATOR}{tool.name}\n{FENCE_BEGIN}", arguments(tool), f"{FENCE_END}{CALL_END}")
        for tool in tools
    ]


def _bare_tags(tools: Sequence[Tool]) -> list[Format]:
    return [tag(f"{CALL_BEGIN}{tool.name}{SEPARATOR}", arguments(tool), CALL_END) for tool in tools]


def _fenced(tools: Sequence[Tool], several: bool) -> Format:
    return tag(CALLS_BEGIN, separated(_fenced_tags(tools), "\n", several), CALLS_END)


def _bare(tools: Sequence[Tool], several: bool) -> Format:
    return tag(CALLS_BEGIN, separated(_bare_tags(tools), "", several), CALLS_END)


FENCED = ToolFamily(
    read=read,
    calls=_fenced,
    text_with_calls=lambda tools, several: triggered([CALLS_BEGIN], [_fenced(tools, several)], False),
    is_used_by=lambda template: CALLS_BEGIN in template and "```json" in template,
    how_to_call=(
        "To call functions, write all calls in this form, each with its name and a JSON object of its arguments:\n"
        f'{CALLS_BEGIN}{CALL_BEGIN}function{SEPARATOR}function name\n{FENCE_BEGIN}{{"argument": "value"}}{FENCE_END}'
        f"{CALL_END}{CALLS_END}"
    ),
    markup=_MARKUP,
)
BARE = ToolFamily(
    read=read,
    calls=_bare,
    text_with_calls=lambda tools, several: triggered([CALLS_BEGIN], [_bare(tools, several)], False),
    is_used_by=lambda template: CALLS_BEGIN in template and "```json" not in template,
    how_to_call=(
        "To call functions, write all calls in this form, each with its name and a JSON object of its arguments:\n"
        f'{CALLS_BEGIN}{CALL_BEGIN}function name{SEPARATOR}{{"argument": "value"}}{CALL_END}{CALLS_END}'
    ),
    markup=_MARKUP,
)
