"""Reading server-sent events.

Not through httpx's `iter_lines`, which also splits at characters that JSON allows inside its strings (U+2028, U+0085).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def event_data(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The data of each event. Lines end with LF or CR LF; names, ids and comments are passed over.

    Args:
        chunks: of the body, cut anywhere.
    """
    data: list[bytes] = []
    for line in _lines(chunks):
        if line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
        elif not line and data:
            yield b"\n".join(data)
            data.clear()
    if data:  # a server that ends without the last empty line has said it all the same
        yield b"\n".join(data)


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        yield from (line.removesuffix(b"\r") for line in lines)
    if rest:
        yield rest
