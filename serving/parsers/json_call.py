"""Calls written as JSON: {"name": ..., "arguments": {...}}, read while they come."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from pagedray.serving.parsers.reader import Sink, Steps, TextReader
from pagedray.serving.parsers.writer import EventWriter

_ARGUMENTS = ("arguments", "parameters")
_CALL_KEYS = ("name", *_ARGUMENTS, "type", "id")
_LONGEST_KEY = 64
_IN_STRING = re.compile(r'["\\]')
_IN_PLAIN = re.compile(r'[^"\\]*')
_OUTSIDE = re.compile(r'["{}\[\]<]')
_SCALAR = re.compile(r"[^\s,:{}\[\]\"]*")
_PAIRS = {"}": "{", "]": "["}
_PLAIN_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_LOW_HALF = re.compile(r"\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_HEX = re.compile(r"[0-9a-fA-F]{4}")


def read_call(reader: TextReader, out: EventWriter, accepts: Callable[[str], bool] | None = None) -> Steps[bool]:
    """Read a call, whose "{" comes next. Other keys than name and arguments (or parameters) are skipped.

    The call begins once its name is known and its arguments begin; up to there the reader must be recording, and the
    record is dropped. Arguments are handed on exactly as they are written. Where they are a string that holds an
    object, as some models write them, what it holds is handed on. Arguments that aren't valid JSON are handed on too:
    they end where their brackets do, or with the output.

    Args:
        accepts: whether a call of this name is one. Then arguments must be there, and a key that no call has
            shows that this is none. Without it any name is accepted, and no arguments mean {}.

    Returns:
        Whether a call was written. If not, the text read up to where it stopped being one is still recorded.
    """
    reader.take()
    name: str | None = None
    held: list[str] = []  # arguments that came before the name
    has_begun = has_arguments = False
    is_first = True

    def begin() -> None:
        nonlocal has_begun
        assert name is not None
        reader.drop_record()
        out.start(name)
        has_begun = True

    def write(text: str) -> None:
        if name is None:
            held.append(text)
        else:
            if not has_begun:
                begin()
            out.arguments(text)

    while True:
        yield from reader.space()
        char = yield from reader.peek()
        if char == "}" and (name is not None or not is_first):
            reader.take()
            break
        if char == "," and not is_first:
            reader.take()
            yield from reader.space()
        key = yield from read_string(reader, _LONGEST_KEY)
        if key is None or (not has_begun and accepts is not None and key not in _CALL_KEYS):
            return has_begun
        is_first = False
        yield from reader.space()
        if (yield from reader.takes(":")) is None:
            return has_begun
        yield from reader.space()
        if key == "name" and name is None:
            read = yield from read_string(reader)
            if not read or (accepts is not None and not accepts(read)):
                return has_begun
            name = read
            if held:
                begin()
                out.arguments("".join(held))
        elif key in _ARGUMENTS and not has_arguments:
            if not (yield from _read_arguments(reader, write)):
                return has_begun
            has_arguments = True
        elif not (yield from read_value(reader, lambda _: None)):
            return has_begun
    if name is None or (accepts is not None and not has_arguments):
        return False
    if not has_arguments:
        begin()
        out.arguments("{}")
    return True


def read_string(reader: TextReader, limit: int | None = None) -> Steps[str | None]:
    """Read a JSON string and give what it means; None where none stands, it isn't valid, or longer than `limit`."""
    if (yield from reader.peek()) != '"':
        return None
    parts = [reader.take()]
    left = limit
    while True:
        plain = yield from reader.run(_IN_PLAIN, left)
        parts.append(plain)
        char = yield from reader.peek()
        if left is not None:
            left -= len(plain) + (char == "\\")
        if char == "" or (left is not None and left < 0) or (left == 0 and char != '"'):
            return None
        parts.append(reader.take())
        if char == '"':
            break
        yield from reader.peek()
        parts.append(reader.take())
    try:
        text = json.loads("".join(parts), strict=False)
    except ValueError:
        return None
    return str(text)


def read_value(reader: TextReader, sink: Sink) -> Steps[bool]:
    """Hand on a JSON value as it is written, to where its brackets and quotes close. It needn't be valid inside.

    A "<" outside quotes, which JSON never has, ends it too: it belongs to markup.

    Returns:
        Whether it came to its end.
    """
    char = yield from reader.peek()
    if char == '"':
        return (yield from _read_quoted(reader, sink))
    if char not in ("{", "["):
        text = yield from reader.run(_SCALAR)
        sink(text)
        return bool(text) and (yield from reader.peek()) != ""
    stack = [char]
    sink(reader.take())
    while stack:
        char = yield from reader.up_to(_OUTSIDE, sink)
        if char in ("", "<"):
            return False
        if char == '"':
            if not (yield from _read_quoted(reader, sink)):
                return False
            continue
        sink(reader.take())
        if char in _PAIRS:
            # One that closes nothing is passed over: what follows may still end in the right place.
            if stack[-1] == _PAIRS[char]:
                stack.pop()
        else:
            stack.append(char)
    return True


def _read_quoted(reader: TextReader, sink: Sink) -> Steps[bool]:
    sink(reader.take())
    while True:
        char = yield from reader.up_to(_IN_STRING, sink)
        if char == "":
            return False
        sink(reader.take())
        if char == '"':
            return True
        if (yield from reader.peek()) == "":
            return False
        sink(reader.take())


def _read_arguments(reader: TextReader, write: Sink) -> Steps[bool]:
    """Hand on arguments; False where none stand, or when the output ended in them."""
    char = yield from reader.peek()
    if char == "{":
        return (yield from read_value(reader, write))
    if char == '"':
        return (yield from _read_object_in_string(reader, write))
    if (yield from reader.takes("null")) is not None:
        write("{}")
        return True
    return False


def _read_object_in_string(reader: TextReader, write: Sink) -> Steps[bool]:
    reader.take()
    while True:
        if (yield from reader.peek()) in ("", '"'):
            break
        char = yield from read_escaped(reader)
        if not char.isspace():
            if char != "{":
                return False
            write(char)
            return (yield from _read_unescaped(reader, write))
    if (yield from reader.takes('"')) is None:
        return False
    write("{}")
    return True


def _read_unescaped(reader: TextReader, write: Sink) -> Steps[bool]:
    while True:
        char = yield from reader.up_to(_IN_STRING, write)
        if char == "":
            return False
        if char == '"':
            reader.take()
            return True
        write((yield from read_escaped(reader)))


def read_escaped(reader: TextReader) -> Steps[str]:
    """Read one character of a JSON string, perhaps written as an escape. What is no valid escape stands for itself; one
    that the output ends in gives nothing."""
    char = yield from reader.peek()
    reader.take()
    if char != "\\":
        return char
    kind = yield from reader.peek()
    reader.take(len(kind))
    if kind != "u":
        return _PLAIN_ESCAPES.get(kind, char + kind) if kind else ""
    digits = yield from reader.peek(4)
    if len(digits) < 4:
        reader.take(len(digits))
        return ""
    if not _HEX.fullmatch(digits):
        return char + kind
    reader.take(4)
    first = int(digits, 16)
    if 0xD800 <= first < 0xDC00:
        low = yield from reader.peek(6)
        if len(low) < 6 and "\\u".startswith(low[:2]):
            reader.take(len(low))
            return ""
        if _LOW_HALF.fullmatch(low):
            reader.take(6)
            return chr(0x10000 + ((first - 0xD800) << 10) + (int(low[2:], 16) - 0xDC00))
    return "\ufffd" if 0xD800 <= first < 0xE000 else chr(first)
