"""`ToolFamily`: how one family of models writes calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pagedray.serving.parsers.reader import Steps, TextReader
from pagedray.serving.parsers.tools import Tool
from pagedray.serving.parsers.writer import EventWriter

Format = dict[str, Any]  # a format of xgrammar's structural tags


@dataclass(frozen=True)
class ToolFamily:
    """What there is to know about a way of writing calls. One per file of this folder.

    Attributes:
        read: reads content and calls to the end of the output.
        calls: grammar of one call or, when its second argument is true, several; nothing before or behind them.
        text_with_calls: grammar of free text in which calls follow their schemas.
        is_used_by: whether a chat template writes calls like this.
        how_to_call: a sentence that tells a model how, for templates that don't.
        trailer: grammar of what may stand behind calls without being one, where calls must come; None: nothing.
        markup: special tokens among what it reads.
    """

    read: Callable[[TextReader, EventWriter, Sequence[Tool]], Steps[None]]
    calls: Callable[[Sequence[Tool], bool], Format]
    text_with_calls: Callable[[Sequence[Tool], bool], Format]
    is_used_by: Callable[[str], bool]
    how_to_call: str
    trailer: Format | None = None
    markup: tuple[str, ...] = ()
