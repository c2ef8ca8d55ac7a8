"""The channels of gpt-oss (OpenAI's harmony format): reasoning, calls and answer are messages of their own.

    <|channel|>analysis<|message|>...<|end|>                                            reasoning
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>      a call
    <|start|>assistant<|channel|>final<|message|>...<|return|>                          the answer

The prompt ends with <|start|>assistant. The recipient may stand before the channel too. A commentary without recipient
is content. Read as text: openai_harmony's own parser takes token ids, and downloads its vocabulary when it is made.
Source: OpenAI's harmony guide, cookbook.openai.com/articles/openai-harmony.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from pagedray.serving.parsers.family import Format, ToolFamily
from pagedray.serving.parsers.reader import Sink, Steps, TextReader, markers
from pagedray.serving.parsers.tool_formats import any_text, arguments, const, either, sequence, tag
from pagedray.serving.parsers.tools import Tool
from pagedray.serving.parsers.writer import EventWriter

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
REASONING_BEGIN = f"{CHANNEL}analysis{MESSAGE}"
REASONING_END = f"{END}{START}assistant"  # what follows is written as behind a prompt
_FINAL = f"{CHANNEL}final{MESSAGE}"
_PREAMBLE = f"{CHANNEL}commentary{MESSAGE}"
_ENDS = (END, CALL, RETURN)
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_FUNCTIONS = "functions."


def read_channels(reader: TextReader, out: EventWriter, *, has_reasoning: bool, has_tools: bool) -> Steps[None]:
    """Read messages to the end of the output. Messages of the same kind that follow each other are set apart by an
    empty line. Text outside of messages is content; a header that the output ends in is dropped.

    Args:
        has_reasoning: analysis is reasoning; else content.
        has_tools: messages to functions are calls; else content.
    """
    last: Sink | None = None
    while True:
        if (yield from reader.sees(CHANNEL, START, " to=")) is None:
            marker = yield from reader.until(markers(CHANNEL, START, MESSAGE, *_ENDS), out.content)
            if marker is None:
                return
            if marker not in (CHANNEL, START):
                reader.take(len(marker))
                continue
        header: list[str] = []
        if (yield from reader.until(markers(MESSAGE), header.append)) is None:
            return
        reader.take(len(MESSAGE))
        out.markup()
        text = "".join(header)
        recipient = _RECIPIENT.search(text)
        if recipient is not None and has_tools:
            yield from _read_call(reader, out, recipient.group(1).removeprefix(_FUNCTIONS))
            last = None
        else:
            is_reasoning = has_reasoning and f"{CHANNEL}analysis" in text
            sink = out.reasoning if is_reasoning else out.content
            if sink == last:
                out.blank_line()
            last = sink
            yield from reader.until(markers(START, CHANNEL, *_ENDS), sink)
            out.markup()
        yield from reader.takes(*_ENDS)


def _read_call(reader: TextReader, out: EventWriter, name: str) -> Steps[None]:
    size = 0

    def write(text: str) -> None:
        nonlocal size
        size += len(text)
        out.arguments(text)

    out.start(name)
    yield from reader.space()
    marker = yield from reader.until(markers(START, CHANNEL, *_ENDS), write)
    if marker is not None and size == 0:
        out.arguments("{}")


def _calls(tools: Sequence[Tool], several: bool) -> Format:
    """One call, whatever is asked for: the token that ends it ends the turn."""
    return either(
        [
            sequence(const(f"{CHANNEL}commentary to={_FUNCTIONS}{tool.name} {CONSTRAIN}json{MESSAGE}"), arguments(tool))
            for tool in tools
        ]
    )


def _text_with_calls(tools: Sequence[Tool], several: bool) -> Format:
    calls = _calls(tools, several)
    preamble = tag(_PREAMBLE, any_text(), END)
    return either([calls, sequence(preamble, const(f"{START}assistant"), calls), final_message(any_text())])


def final_message(content: Format) -> Format:
    """An output that is an answer with this content."""
    return sequence(const(_FINAL), content)


def read(reader: TextReader, out: EventWriter, tools: Sequence[Tool]) -> Steps[None]:
    return read_channels(reader, out, has_reasoning=False, has_tools=True)


FAMILY = ToolFamily(
    read=read,
    calls=_calls,
    text_with_calls=_text_with_calls,
    is_used_by=lambda template: CHANNEL in template and MESSAGE in template,
    how_to_call=(
        "To call a function, write a message to it in the commentary channel, with a JSON object of its arguments:\n"
        f'{CHANNEL}commentary to=functions.NAME {CONSTRAIN}json{MESSAGE}{{"argument": "value"}}{CALL}'
    ),
    markup=(START, CHANNEL, MESSAGE, CONSTRAIN, *_ENDS),
)
