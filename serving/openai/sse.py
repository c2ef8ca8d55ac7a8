"""Server-sent events: the headers, and chunks whose equal parts are encoded once per stream."""

from __future__ import annotations

from typing import Any

import msgspec

from pagedray.engine.errors import PagedrayError
from pagedray.serving.openai.errors import error_envelope

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold tokens back
]
DONE = b"data: [DONE]\n\n"


def event(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def failure(error: PagedrayError | None) -> bytes:
    """How a stream ends after an error. None: our own bug."""
    return event(error_envelope(error)) + DONE


class ChunkFrame:
    """Puts encoded choices into chunks of one stream.

    Args:
        constants: the fields that all chunks share.
        usage: chunks say `"usage": null` where the client asked for usage at the end, as OpenAI's do.
    """

    def __init__(self, constants: dict[str, Any], usage: bool):
        self._head = b"data: " + msgspec.json.encode(constants)[:-1] + b',"choices":['
        self._tail = b',"usage":null}\n\n' if usage else b"}\n\n"

    def chunk(self, choice: bytes, fields: bytes = b"", usage: Any = None) -> bytes:
        """An event. `choice` is encoded, or empty for the chunk that only brings usage; so are further `fields`."""
        if usage is not None:
            fields += b',"usage":%b' % msgspec.json.encode(usage)
            return b"%b%b]%b}\n\n" % (self._head, choice, fields)
        return b"%b%b]%b%b" % (self._head, choice, fields, self._tail)
