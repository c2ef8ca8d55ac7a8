"""Input of tool calls that every client can read, whatever the model wrote.

Official clients parse a call's input after each piece of it, and raise at the first character that can't be JSON.
"""

from __future__ import annotations

import re

MAX_DEPTH = 128  # the clients' parser gives up at 200
MAX_SCALAR = 1000  # characters of a number; Python refuses integers of 4300 digits

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_NUMBER_SO_FAR = re.compile(r"-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?(?:(?<=[0-9])[eE][+-]?[0-9]*)?)?")
_LITERALS = ("true", "false", "null")
_HIGH = re.compile(r"\\u[dD][89abAB]")
# Halves of a surrogate pair must stand together.
_ESCAPE = re.compile(
    r'\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4}|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})'
)


class JsonPrefix:
    """Lets through the longest beginning of a text that can still become the JSON of an object.

    What it let through doesn't depend on how the text is cut, but that an escape in a string comes out when it is
    complete.
    """

    def __init__(self) -> None:
        self._stack: list[str] = []  # open brackets
        self._expects = "object"
        self._in_string = False
        self._is_key = False
        self._escape = ""  # an escape that isn't complete
        self._scalar = ""  # a number or literal that may go on
        self._is_broken = False

    def feed(self, text: str) -> str:
        out: list[str] = []
        at = 0
        while at < len(text) and not self._is_broken:
            if self._escape:
                out.append(self._go_on_with_escape(text[at]))
                at += 1
            elif self._in_string and (plain := _PLAIN.match(text, at)):
                out.append(plain[0])
                at = plain.end()
            else:
                out.append(self._take(text[at]))
                at += 1
        return "".join(out)

    def _take(self, char: str) -> str:
        """One character; gives what of it may stand there."""
        if self._in_string:
            return self._take_in_string(char)
        if self._scalar:
            longer = self._scalar + char
            if _is_scalar_so_far(longer):
                self._scalar = longer
                return char
            self._is_broken = self._scalar not in _LITERALS and not _NUMBER.fullmatch(self._scalar)
            self._scalar = ""
            self._end_value()
        if char in " \t\n\r":
            return char if self._stack and not self._is_broken else ""
        self._is_broken = self._is_broken or not self._takes_token(char)
        return "" if self._is_broken else char

    def _take_in_string(self, char: str) -> str:
        if char == "\\":
            self._escape = char
            return ""
        if char != '"':
            self._is_broken = True  # a control character
            return ""
        self._in_string = False
        if self._is_key:
            self._expects = "colon"
        else:
            self._end_value()
        return char

    def _go_on_with_escape(self, char: str) -> str:
        self._escape += char
        if len(self._escape) < _escape_length(self._escape):
            return ""
        escape, self._escape = self._escape, ""
        self._is_broken = _ESCAPE.fullmatch(escape) is None
        return "" if self._is_broken else escape

    def _takes_token(self, char: str) -> bool:
        closes = bool(self._stack) and self._stack[-1] + char in ("{}", "[]")
        match self._expects:
            case "object" | "value" | "value or end" if char == "{":
                self._expects = "key or end"
                self._stack.append(char)
            case "value" | "value or end" if char == "[":
                self._expects = "value or end"
                self._stack.append(char)
            case "value" | "value or end" if char == '"':
                self._in_string, self._is_key = True, False
            case "value" | "value or end" if _is_scalar_so_far(char):
                self._scalar = char
            case "key" | "key or end" if char == '"':
                self._in_string, self._is_key = True, True
            case "colon" if char == ":":
                self._expects = "value"
            case "comma or end" if char == ",":
                self._expects = "key" if self._stack[-1] == "{" else "value"
            case "comma or end" | "key or end" | "value or end" if closes:
                self._stack.pop()
                self._end_value()
            case _:
                return False
        return len(self._stack) <= MAX_DEPTH

    def _end_value(self) -> None:
        self._expects = "comma or end" if self._stack else "nothing"


def _is_scalar_so_far(text: str) -> bool:
    if text[0].isalpha():
        return any(literal.startswith(text) for literal in _LITERALS)
    return len(text) <= MAX_SCALAR and _NUMBER_SO_FAR.fullmatch(text) is not None


def _escape_length(escape: str) -> int:
    """How long an escape that begins like this is."""
    if len(escape) < 2 or escape[1] != "u":
        return 2
    return 12 if _HIGH.match(escape) else 6
