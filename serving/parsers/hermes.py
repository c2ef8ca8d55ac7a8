"""Calls as <tool_call>{"name": ..., "arguments": {...}}</tool_call>: Hermes 2 and 3, Qwen2.5, Qwen3, SmolLM3.

Read generously: several objects in one pair of tags, a closing tag or brace that is missing, a brace too many.
Source: the chat templates of Qwen/Qwen3-8B and NousResearch/Hermes-3-Llama-3.1-8B.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagedray.serving.parsers.family import Format, ToolFamily
from pagedray.serving.parsers.json_call import read_call
from pagedray.serving.parsers.reader import Steps, TextReader, markers
from pagedray.serving.parsers.tool_formats import arguments, quoted, separated, tag, trailing_text, triggered
from pagedray.serving.parsers.tools import Tool
from pagedray.serving.parsers.writer import EventWriter

BEGIN = "<tool_call>"
END = "</tool_call>"


def read(reader: TextReader, out: EventWriter, tools: Sequence[Tool]) -> Steps[None]:
    is_inside = False  # between the tags, behind a call
    while True:
        marker = yield from reader.until(markers(BEGIN, END), out.content)
        if marker is None:
            return
        if marker == END:
            reader.take(len(END))
            if is_inside:
                out.markup()
            else:
                out.content(END)
            is_inside = False
            continue
        reader.record()
        reader.take(len(BEGIN))
        yield from reader.space()
        is_inside = False
        while (yield from reader.peek()) == "{":
            if not (yield from read_call(reader, out)):
                break
            is_inside = True
            while (yield from reader.space()) or (yield from reader.takes("}")):
                pass
            if (yield from reader.takes_perhaps_cut(END)):
                out.markup()
                is_inside = False
                break
            reader.record()
        # Empty behind a call; what stands behind the tag, where it isn't one.
        out.content(reader.take_record())


def _tags(tools: Sequence[Tool]) -> list[Format]:
    return [
        tag(f'{BEGIN}\n{{"name": {quoted(tool.name)}, "arguments": ', arguments(tool), f"}}\n{END}") for tool in tools
    ]


def _calls(tools: Sequence[Tool], several: bool) -> Format:
    return separated(_tags(tools), "\n", several)


def _text_with_calls(tools: Sequence[Tool], several: bool) -> Format:
    return triggered([BEGIN], _tags(tools), several)


FAMILY = ToolFamily(
    read=read,
    calls=_calls,
    text_with_calls=_text_with_calls,
    trailer=trailing_text(),
    is_used_by=lambda template: BEGIN in template,
    how_to_call=(
        "To call a function, write its name and arguments as a JSON object between <tool_call> tags, one pair of tags "
        'for each call:\n<tool_call>\n{"name": "function name", "arguments": {"argument": "value"}}\n</tool_call>'
    ),
)
