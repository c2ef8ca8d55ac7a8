"""Calls as bare JSON objects {"name": ..., "parameters": {...}}: Llama 3.1, 3.2, 3.3.

Several are separated by ";" or nothing. Behind <|python_tag|>, where the model puts one, any name is a call's.
Source: the chat template of meta-llama/Llama-3.3-70B-Instruct and Meta's model card of Llama 3.1.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagedray.serving.parsers.family import Format, ToolFamily
from pagedray.serving.parsers.json_call import read_call
from pagedray.serving.parsers.reader import Steps, TextReader
from pagedray.serving.parsers.tool_formats import arguments, quoted, separated, tag, triggered
from pagedray.serving.parsers.tools import Tool
from pagedray.serving.parsers.unmarked import read_unmarked
from pagedray.serving.parsers.writer import EventWriter

MARKER = "<|python_tag|>"
_TURN = "<|start_header_id|>"


def read(reader: TextReader, out: EventWriter, tools: Sequence[Tool]) -> Steps[None]:
    names = {tool.name for tool in tools}

    def read_calls(is_marked: bool) -> Steps[bool]:
        return read_call(reader, out, None if is_marked else names.__contains__)

    yield from read_unmarked(reader, out, read_calls, openers="{", marker=MARKER, separator=";")


def _tags(tools: Sequence[Tool]) -> list[Format]:
    return [tag(f'{{"name": {quoted(tool.name)}, "parameters": ', arguments(tool), "}") for tool in tools]


FAMILY = ToolFamily(
    read=read,
    calls=lambda tools, several: separated(_tags(tools), "; ", several),
    text_with_calls=lambda tools, several: triggered(['{"name"'], _tags(tools), several),
    is_used_by=lambda template: MARKER in template or (_TURN in template and '"parameters": ' in template),
    how_to_call=(
        "To call a function, answer with nothing but a JSON object of its name and arguments; write several with a "
        'semicolon between them:\n{"name": "function name", "parameters": {"argument": "value"}}'
    ),
    markup=(MARKER,),
)
