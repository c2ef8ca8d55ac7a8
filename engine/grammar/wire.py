"""What the compiler and its process say to each other: msgpack messages in frames of a length and a body, over pipes.

parent → child   Setup, once; then a Job each
child  → parent  a Result for each Job, in any order
"""

from __future__ import annotations

import struct
from typing import TypeVar

import msgspec

from pagedray.engine.grammar.source import GrammarSource
from pagedray.engine.grammar.vocabulary import Vocabulary

HEADER = struct.Struct("<I")

M = TypeVar("M")


class Setup(msgspec.Struct, frozen=True):
    vocabulary: Vocabulary
    timeout_s: float  # of one compilation


class Job(msgspec.Struct, frozen=True):
    id: int
    source: GrammarSource


class Result(msgspec.Struct, frozen=True):
    """What became of a job: `data`, or why not."""

    id: int
    data: bytes = b""  # xgrammar's serialization, compressed by zlib
    refusal: str = ""  # what is wrong with the source
    is_overload: bool = False  # nothing is wrong with it, but too many slow ones are there
    is_lasting: bool = True  # it would be the same another time, when the machine has less to do


def frame(message: msgspec.Struct) -> bytes:
    body = msgspec.msgpack.encode(message)
    return HEADER.pack(len(body)) + body


class Frames:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes, kind: type[M]) -> list[M]:
        """The messages that these bytes complete."""
        self._data += data
        messages = []
        while len(self._data) >= HEADER.size:
            end = HEADER.size + HEADER.unpack_from(self._data)[0]
            if len(self._data) < end:
                break
            messages.append(msgspec.msgpack.decode(self._data[HEADER.size : end], type=kind))
            del self._data[:end]
        return messages
