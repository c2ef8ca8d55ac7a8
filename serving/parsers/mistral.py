"""Calls behind [TOOL_CALLS], in both of Mistral's forms.

    [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]      Mistral 7B v0.3 to Mistral Small 3.1
    [TOOL_CALLS]name[ARGS]{...}[TOOL_CALLS]name[ARGS]{...}    later ones; perhaps with [CALL_ID]id before [ARGS]

Either is read whatever the model's own form is; grammars are written in the model's.
Source: mistral-common's tokenizers v3 to v13.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from pagedray.serving.parsers.family import Format, ToolFamily
from pagedray.serving.parsers.json_call import read_call, read_value
from pagedray.serving.parsers.reader import Steps, TextReader, markers
from pagedray.serving.parsers.tool_formats import arguments, quoted, separated, tag, triggered
from pagedray.serving.parsers.tools import Tool
from pagedray.serving.parsers.writer import EventWriter

BEGIN = "[TOOL_CALLS]"
ARGS = "[ARGS]"
CALL_ID = "[CALL_ID]"
_NAME = re.compile(r"[^\s\[\]{}\"]*")
_CALL_ID_TEXT = re.compile(r"[A-Za-z0-9_-]*")


def read(reader: TextReader, out: EventWriter, tools: Sequence[Tool]) -> Steps[None]:
    while (yield from reader.until(markers(BEGIN), out.content)) is not None:
        reader.record()
        reader.take(len(BEGIN))
        yield from reader.space()
        if (yield from reader.takes("[")) is not None:
            yield from _read_list(reader, out)
        elif (yield from reader.peek()) == "{":
            yield from read_call(reader, out)
        else:
            yield from _read_named(reader, out)
        out.content(reader.take_record())


def _read_list(reader: TextReader, out: EventWriter) -> Steps[None]:
    while True:
        yield from reader.space()
        if (yield from reader.peek()) != "{" or not (yield from read_call(reader, out)):
            return
        yield from reader.space()
        if (yield from reader.takes("]")) is not None:
            return
        reader.record()
        if (yield from reader.takes(",")) is None:
            return


def _read_named(reader: TextReader, out: EventWriter) -> Steps[None]:
    name = yield from reader.run(_NAME, 256)
    if not name:
        return
    if (yield from reader.takes(CALL_ID)) is not None:
        yield from reader.run(_CALL_ID_TEXT)
    yield from reader.takes(ARGS)
    yield from reader.space()
    if (yield from reader.peek()) == "{":
        reader.drop_record()
        out.start(name)
        yield from read_value(reader, out.arguments)


def _list_items(tools: Sequence[Tool]) -> list[Format]:
    return [tag(f'{{"name": {quoted(tool.name)}, "arguments": ', arguments(tool), "}") for tool in tools]


def _list(tools: Sequence[Tool], several: bool) -> Format:
    return tag(f"{BEGIN}[", separated(_list_items(tools), ", ", several), "]")


def _named(tools: Sequence[Tool]) -> list[Format]:
    return [tag(f"{BEGIN}{tool.name}{ARGS}", arguments(tool), "") for tool in tools]


LISTED = ToolFamily(
    read=read,
    calls=_list,
    text_with_calls=lambda tools, several: triggered([BEGIN], [_list(tools, several)], False),
    is_used_by=lambda template: BEGIN in template and ARGS not in template,
    how_to_call=(
        "To call functions, write [TOOL_CALLS] and behind it a JSON list with the name and the arguments of each:\n"
        '[TOOL_CALLS][{"name": "function name", "arguments": {"argument": "value"}}]'
    ),
    markup=(BEGIN, ARGS, CALL_ID),
)
NAMED = ToolFamily(
    read=read,
    calls=lambda tools, several: separated(_named(tools), "", several),
    text_with_calls=lambda tools, several: triggered([BEGIN], _named(tools), several),
    is_used_by=lambda template: BEGIN in template and ARGS in template,
    how_to_call=(
        "To call a function, write [TOOL_CALLS], its name, [ARGS] and its arguments as a JSON object, for each call:\n"
        '[TOOL_CALLS]function name[ARGS]{"argument": "value"}'
    ),
    markup=(BEGIN, ARGS, CALL_ID),
)
