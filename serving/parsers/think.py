"""Reasoning between tags, as Qwen3 and DeepSeek-R1 write it: <think> ... </think>, then the answer."""

from __future__ import annotations

from pagedray.serving.parsers.reader import Steps, TextReader, markers
from pagedray.serving.parsers.writer import EventWriter

BEGIN = "<think>"
END = "</think>"


def read_think(reader: TextReader, out: EventWriter, is_open: bool) -> Steps[None]:
    """Read the reasoning and its tags; what follows is the answer.

    Reasoning stands at the very beginning or not at all: later tags are content. An opening tag is read too where the
    prompt has opened the reasoning already. Reasoning that isn't closed goes to the end of the output.
    """
    reader.record()
    yield from reader.space()
    if (yield from reader.takes(BEGIN)) is None and not is_open:
        out.content(reader.take_record())
        return
    reader.drop_record()
    out.markup()
    if (yield from reader.until(markers(END), out.reasoning)) is not None:
        reader.take(len(END))
    out.markup()
