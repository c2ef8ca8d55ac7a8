"""Regular expressions as grammar nodes: the part that ECMAScript and Python read alike.

Where the two differ, the nodes match what both do: `.` no line end of either, \\d and \\w ASCII, \\D no digit of any
script, \\W ASCII only. Capturing makes no difference and laziness none either, since all that counts is which texts
match. Back references, look-around and word boundaries have no grammar and are refused with their position.
"""

from __future__ import annotations

import functools
import sys
from typing import NoReturn

import msgspec

from pagedray.engine.errors import UserError
from pagedray.engine.grammar.rules import (
    EMPTY,
    MAX_CODE_POINT,
    Chars,
    Choice,
    Node,
    Ranges,
    Repeat,
    Sequence,
    Text,
    char_set,
    choice,
    complement,
    overlap,
    sequence,
    walk,
)

MAX_REPEATS = 10_000  # in one quantifier
MAX_DEPTH = 100
MAX_BRANCHES = 64  # of alternatives with anchors of their own

DIGITS: Ranges = ((0x30, 0x39),)
WORD = char_set([(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)])
SPACES = char_set([(0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029),
                   (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000)])  # fmt: skip
NO_SPACES = complement(char_set([*SPACES, (0x1C, 0x1F), (0x85, 0x85), (0xFEFF, 0xFEFF)]))
NO_WORD = overlap(complement(WORD), ((0, 0x7F),))
DOT = complement(char_set([(0x0A, 0x0A), (0x0D, 0x0D), (0x85, 0x85), (0x2028, 0x2029)]))
ANY = complement(())

CONTROLS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "0": 0}
LITERALS = frozenset("^$\\.*+?()[]{}|/-\"'`~!@#%&=:;<>, _")
LOOK = {
    "?=": "look-ahead (?=",
    "?!": "negative look-ahead (?!",
    "?<=": "look-behind (?<=",
    "?<!": "negative look-behind (?<!",
    "?>": "atomic group (?>",
    "?#": "comment (?#",
    "?(": "conditional (?(",
    "?P=": "back reference (?P=",
}


class Anchor(msgspec.Struct, frozen=True):
    """Where a text begins or ends. Only in parsed patterns; `whole` and `search` take it out."""

    is_end: bool
    position: int


Pattern = Node | Anchor


def whole(pattern: str) -> Node:
    """What matches a pattern from beginning to end, with or without anchors there.

    Raises:
        UserError: the pattern is broken or uses what isn't supported; the message has the position.
    """
    return choice(*(core for _, _, core in _branches(pattern)))


def search(pattern: str) -> Node:
    """Texts in which a pattern matches somewhere, as JSON schema's `pattern` asks. Raises: as `whole`."""
    around = Repeat(Chars(ANY), 0, None)
    return choice(
        *(
            sequence(EMPTY if at_start else around, core, EMPTY if at_end else around)
            for at_start, at_end, core in _branches(pattern)
        )
    )


def _branches(pattern: str) -> list[tuple[bool, bool, Node]]:
    """Alternatives without anchors: whether one is tied to the start, whether to the end, and what it matches."""
    node = _Parser(pattern).parse()
    branches = []
    for at_start, rest in _strip(node, False):
        for at_end, core in _strip(rest, True):
            for part in walk(core):
                if isinstance(part, Anchor):
                    sign = "$" if part.is_end else "^"
                    _refuse(part.position, f"{sign} in the middle of a pattern, where it never matches")
            branches.append((at_start, at_end, core))
    return branches


def _strip(node: Pattern, is_end: bool) -> list[tuple[bool, Node]]:
    """Alternatives of a node, each with whether an anchor stood at its start (or end), and the rest of it."""
    if isinstance(node, Anchor):
        return [(True, EMPTY)] if node.is_end == is_end else [(False, node)]  # type: ignore[list-item]
    if not any(isinstance(part, Anchor) and part.is_end == is_end for part in walk(node)):
        return [(False, node)]
    if isinstance(node, Choice):
        found = [branch for item in node.items for branch in _strip(item, is_end)]
    elif isinstance(node, Sequence):
        first, rest = (node.items[-1], node.items[:-1]) if is_end else (node.items[0], node.items[1:])
        found = []
        for is_tied, core in _strip(first, is_end):
            # ^ may follow ^: what an anchor leaves is empty, and the next item is the first one then.
            if is_tied and core == EMPTY and rest:
                found += [(True, more) for _, more in _strip(Sequence(rest), is_end)]
            else:
                found.append((is_tied, sequence(*rest, core) if is_end else sequence(core, *rest)))
    else:
        return [(False, node)]
    if len(found) > MAX_BRANCHES:
        raise UserError(f"the pattern has more than {MAX_BRANCHES} alternatives with anchors of their own")
    return found


@functools.cache
def _not_digits() -> Ranges:
    """No digit of any script: Python's \\d has them all."""
    digits = char_set((code, code) for code in range(sys.maxunicode + 1) if chr(code).isdecimal())
    return complement(digits)


def _refuse(position: int, what: str) -> NoReturn:
    raise UserError(f"{what} at character {position} of the pattern isn't supported")


class _Parser:
    """Recursive descent over one pattern."""

    def __init__(self, pattern: str):
        self._text = pattern
        self._at = 0
        self._depth = 0

    def parse(self) -> Node:
        node = self._alternatives()
        if self._at < len(self._text):
            self._broken("unmatched )")
        return node

    def _broken(self, what: str) -> NoReturn:
        raise UserError(f"the pattern is broken at character {self._at}: {what}")

    def _peek(self, length: int = 1) -> str:
        return self._text[self._at : self._at + length]

    def _take(self) -> str:
        char = self._peek()
        if not char:
            self._broken("it ends too early")
        self._at += 1
        return char

    def _alternatives(self) -> Node:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self._broken(f"groups are nested more than {MAX_DEPTH} deep")
        items = [self._sequence()]
        while self._peek() == "|":
            self._at += 1
            items.append(self._sequence())
        self._depth -= 1
        return choice(*items)

    def _sequence(self) -> Node:
        items: list[Node] = []
        while self._peek() not in ("", "|", ")"):
            items.append(self._quantified())
        # Not flattened: anchors must stay where they are.
        return sequence(*items)

    def _quantified(self) -> Node:
        position = self._at
        item = self._atom()
        bounds = self._quantifier()
        if bounds is None:
            return item
        if isinstance(item, Anchor):
            _refuse(position, "a repeated anchor")
        if any(isinstance(part, Anchor) for part in walk(item)):
            _refuse(position, "a repeated group with an anchor in it")
        low, high = bounds
        for bound in (low, high or 0):
            if bound > MAX_REPEATS:
                self._broken(f"{bound} repetitions, the limit is {MAX_REPEATS}")
        if high is not None and high < low:
            self._broken(f"from {low} to {high} repetitions")
        if self._peek() == "?":
            self._at += 1
        elif self._peek() == "+":
            _refuse(self._at, "a possessive quantifier")
        elif self._quantifier() is not None:
            self._broken("two quantifiers in a row")
        return Repeat(item, low, high) if high != 0 else EMPTY

    def _quantifier(self) -> tuple[int, int | None] | None:
        char = self._peek()
        if char in ("*", "+", "?") and char:
            self._at += 1
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[char]
        if char == "{":
            end = self._text.find("}", self._at)
            low, comma, high = self._text[self._at + 1 : max(end, 0)].partition(",")
            if end < 0 or not _is_number(low) or (high and not _is_number(high)):
                self._broken("{ that begins no number of repetitions; write \\{ for the character")
            self._at = end + 1
            return int(low), (int(high) if high else None) if comma else int(low)
        return None

    def _atom(self) -> Node:
        char = self._take()
        if char == "(":
            return self._group()
        if char == "[":
            return Chars(self._class())
        if char == ".":
            return Chars(DOT)
        if char in "^$":
            return Anchor(char == "$", self._at - 1)  # type: ignore[return-value]
        if char == "\\":
            found = self._escape(False)
            return Chars(found) if isinstance(found, tuple) else found
        if char in "*+?":
            self._at -= 1
            self._broken(f"{char} repeats nothing")
        if char in "{}]":
            self._at -= 1
            self._broken(f"{char} without its partner; write \\{char} for the character")
        return self._literal(char)

    def _literal(self, char: str) -> Text:
        if 0xD800 <= ord(char) <= 0xDFFF:
            self._broken("half a surrogate pair")
        return Text(char)

    def _group(self) -> Node:
        start = self._at - 1
        if self._peek() == "?":
            for sign, name in sorted(LOOK.items(), key=lambda item: -len(item[0])):
                if self._peek(len(sign)) == sign:
                    _refuse(start, name)
            if self._peek(2) == "?:":
                self._at += 2
            elif self._peek(2) == "?<" or self._peek(3) == "?P<":
                end = self._text.find(">", self._at)
                name = self._text[self._at : max(end, 0)].partition("<")[2]
                if not name.isidentifier():
                    self._broken("a group's name must be an identifier between < and >")
                self._at = end + 1
            else:
                _refuse(start, f"({self._peek(2)} (flags and extensions)")
        node = self._alternatives()
        if self._peek() != ")":
            self._at = start
            self._broken("( without )")
        self._at += 1
        return node

    def _escape(self, in_class: bool) -> Ranges | Text:
        start = self._at - 1
        char = self._take()
        sets = {"d": DIGITS, "w": WORD, "s": SPACES, "W": NO_WORD, "S": NO_SPACES}
        if char in sets:
            return sets[char]
        if char == "D":
            return _not_digits()
        if char == "b" and in_class:
            return Text("\b")
        names = {"b": "word boundary \\b", "B": "word boundary \\B", "A": "anchor \\A", "Z": "anchor \\Z",
                 "z": "anchor \\z", "G": "anchor \\G", "k": "back reference \\k", "p": "property class \\p",
                 "P": "property class \\P", "R": "line end \\R", "X": "grapheme \\X", "c": "control \\c"}  # fmt: skip
        if char in names:
            _refuse(start, names[char])
        if char in "123456789":
            _refuse(start, f"back reference \\{char}")
        if char == "0" and self._peek().isdigit():
            _refuse(start, "octal escape \\0")
        if char in CONTROLS:
            return Text(chr(CONTROLS[char]))
        if char == "x":
            return Text(self._code_point(2))
        if char == "u":
            if self._peek() == "{":
                self._broken("\\u{...}; write \\uXXXX")
            return Text(self._code_point(4))
        if char == "U":
            return Text(self._code_point(8))
        if char in LITERALS or not char.isascii():
            return self._literal(char)
        self._at = start
        self._broken(f"unknown escape \\{char}")

    def _code_point(self, num_digits: int) -> str:
        code = self._hex(num_digits)
        if 0xD800 <= code <= 0xDBFF and self._peek(2) == "\\u":
            self._at += 2
            low = self._hex(4)
            if 0xDC00 <= low <= 0xDFFF:
                code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00)
        if code > MAX_CODE_POINT or 0xD800 <= code <= 0xDFFF:
            self._broken(f"U+{code:04X} is no character")
        return chr(code)

    def _hex(self, num_digits: int) -> int:
        digits = self._peek(num_digits)
        if len(digits) < num_digits or not set(digits) <= set("0123456789abcdefABCDEF"):
            self._broken(f"{num_digits} hexadecimal digits expected")
        self._at += num_digits
        return int(digits, 16)

    def _class(self) -> Ranges:
        start = self._at - 1
        is_negated = self._peek() == "^"
        self._at += is_negated
        pairs: list[tuple[int, int]] = []
        excluded: list[Ranges] = []  # what a negated class leaves, for sets whose complement isn't theirs
        if self._peek() == "]":
            self._broken("an empty class; write \\] for the character")
        while self._peek() != "]":
            if not self._peek():
                self._at = start
                self._broken("[ without ]")
            if self._peek() == "[" and self._peek(2) in ("[:", "[.", "[="):
                _refuse(self._at, f"{self._peek(2)} in a class")
            low = self._class_item()
            if self._peek() == "-" and self._peek(2)[1:] not in ("", "]"):
                self._at += 1
                high = self._class_item()
                if not (isinstance(low, str) and isinstance(high, str)):
                    self._broken("a range needs a character on both sides")
                if ord(low) > ord(high):
                    self._broken(f"the range {low}-{high} is backwards")
                pairs.append((ord(low), ord(high)))
            elif isinstance(low, str):
                pairs.append((ord(low), ord(low)))
            else:
                pairs += low
                excluded.append(_opposite(low))
        self._at += 1
        if not is_negated:
            return char_set(pairs)
        left = complement(char_set(pairs))
        for ranges in excluded:
            left = overlap(left, ranges)
        return left

    def _class_item(self) -> str | Ranges:
        char = self._take()
        if char != "\\":
            return self._literal(char).text
        found = self._escape(True)
        return found.text if isinstance(found, Text) else found


def _opposite(ranges: Ranges) -> Ranges:
    """What [^...] leaves of a set like \\d, for both of the languages."""
    return {DIGITS: _not_digits(), WORD: NO_WORD, SPACES: NO_SPACES}.get(ranges) or complement(ranges)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10
