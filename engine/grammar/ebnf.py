"""GBNF, the grammar notation of llama.cpp, as rules: `root ::= "yes" | "no" [.!]*`, comments after #.

Escapes are \\n \\r \\t \\\\ \\" \\' \\[ \\] \\- \\^ \\xHH \\uHHHH \\UHHHHHHHH; repetition is * + ? {n} {n,} {n,m}.
Left recursion is fine. Rules that can never be completed are left out; where that leaves no root, it is refused.
"""

from __future__ import annotations

from typing import NoReturn

from pagedray.engine.errors import UserError
from pagedray.engine.grammar.rules import (
    EMPTY,
    MAX_CODE_POINT,
    Chars,
    Node,
    Ref,
    Repeat,
    Rules,
    Text,
    char_set,
    choice,
    complement,
    sequence,
)

MAX_REPEATS = 10_000
MAX_DEPTH = 100
NAME_START = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_")
NAME_CHARS = NAME_START | frozenset("0123456789-.")
ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"} | {c: c for c in "\\\"'[]-^/?"}
HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


def ebnf_node(text: str, rules: Rules, root: str = "root") -> Node:
    """Rules of a grammar; the node is its root.

    Raises:
        UserError: it is broken; the message has line and column.
    """
    return _Parser(text, rules).parse(root)


class _Parser:
    def __init__(self, text: str, rules: Rules):
        self._text = text
        self._rules = rules
        self._at = 0
        self._depth = 0
        self._names: dict[str, str] = {}  # the client's → ours
        self._defined: set[str] = set()
        self._used_at: dict[str, int] = {}

    def parse(self, root: str) -> Node:
        self._skip()
        while self._at < len(self._text):
            start = self._at
            name = self._name()
            self._skip()
            if not name or self._text[self._at : self._at + 3] != "::=":
                self._at = self._at if name else start
                self._broken(f"expected {'::=' if name else 'the name of a rule'}")
            if name in self._defined:
                self._at = start
                self._broken(f"rule {name} is there twice")
            self._defined.add(name)
            self._at += 3
            self._skip()
            self._rules.by_name[self._own(name)] = self._alternatives()
            if self._at < len(self._text) and not self._begins_rule():
                self._broken(f"unexpected {self._text[self._at]}")
        for name, position in self._used_at.items():
            if name not in self._defined:
                self._at = position
                self._broken(f"rule {name} isn't defined")
        if root not in self._defined:
            raise UserError(f"the grammar has no rule {root}, which is where it starts")
        return Ref(self._own(root))

    def _broken(self, what: str) -> NoReturn:
        before = self._text[: self._at]
        line, column = before.count("\n") + 1, self._at - before.rfind("\n")
        raise UserError(f"line {line}, column {column}: {what}")

    def _own(self, name: str) -> str:
        if name not in self._names:
            self._names[name] = self._rules.new_name()
        return self._names[name]

    def _skip(self) -> None:
        while self._at < len(self._text):
            if self._text[self._at].isspace():
                self._at += 1
            elif self._text[self._at] == "#":
                end = self._text.find("\n", self._at)
                self._at = len(self._text) if end < 0 else end
            else:
                return

    def _name(self) -> str:
        start = self._at
        if self._text[start : start + 1] in NAME_START:
            while self._text[self._at : self._at + 1] in NAME_CHARS and self._at < len(self._text):
                self._at += 1
        return self._text[start : self._at]

    def _begins_rule(self) -> bool:
        start = self._at
        name = self._name()
        self._skip()
        is_rule = bool(name) and self._text[self._at : self._at + 3] == "::="
        self._at = start
        return is_rule

    def _alternatives(self) -> Node:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self._broken(f"groups are nested more than {MAX_DEPTH} deep")
        items = [self._sequence()]
        while self._text[self._at : self._at + 1] == "|":
            self._at += 1
            self._skip()
            items.append(self._sequence())
        self._depth -= 1
        return choice(*items)

    def _sequence(self) -> Node:
        items: list[Node] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)" and not self._begins_rule():
            items.append(self._repeated())
            self._skip()
        if not items:
            self._broken('expected something to match; write "" for nothing')
        return sequence(*items)

    def _repeated(self) -> Node:
        item = self._item()
        self._skip()
        while self._at < len(self._text) and self._text[self._at] in "*+?{":
            sign = self._text[self._at]
            low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(sign) or self._counts()
            self._at += 1
            self._skip()
            item = Repeat(item, low, high) if high != 0 else EMPTY
        return item

    def _counts(self) -> tuple[int, int | None]:
        end = self._text.find("}", self._at)
        first, comma, last = self._text[self._at + 1 : max(end, 0)].partition(",")
        low, high = _count(first), _count(last)
        if end < 0 or low is None or (last.strip() and high is None):
            self._broken("expected {n}, {n,} or {n,m}")
        if not comma:
            high = low
        if max(low, high or 0) > MAX_REPEATS:
            self._broken(f"{max(low, high or 0)} repetitions, the limit is {MAX_REPEATS}")
        if high is not None and high < low:
            self._broken(f"from {low} to {high} repetitions")
        self._at = end
        return low, high

    def _item(self) -> Node:
        char = self._text[self._at]
        if char == '"':
            return Text(self._literal())
        if char == "[":
            return self._class()
        if char == ".":
            self._at += 1
            return Chars(complement(()))
        if char == "(":
            start = self._at
            self._at += 1
            if self._text[self._at : self._at + 1] == "=":
                self._broken("look-ahead (= isn't supported")
            self._skip()
            node = self._alternatives()
            if self._text[self._at : self._at + 1] != ")":
                self._at = start
                self._broken("( without )")
            self._at += 1
            return node
        start = self._at
        name = self._name()
        if not name:
            self._broken(f"unexpected {char}")
        if self._text[self._at : self._at + 1] == "(" and name[0].isupper():
            self._at = start
            self._broken(f"{name}(...) isn't supported")
        self._used_at.setdefault(name, start)
        return Ref(self._own(name))

    def _literal(self) -> str:
        start = self._at
        self._at += 1
        found = []
        while self._text[self._at : self._at + 1] not in ('"', "\n", ""):
            found.append(self._char())
        if self._text[self._at : self._at + 1] != '"':
            self._at = start
            self._broken('a literal without its closing "')
        self._at += 1
        return "".join(found)

    def _class(self) -> Node:
        start = self._at
        self._at += 1
        is_negated = self._text[self._at : self._at + 1] == "^"
        self._at += is_negated
        pairs = []
        while self._text[self._at : self._at + 1] not in ("]", "\n", ""):
            low = high = ord(self._char())
            if self._text[self._at : self._at + 1] == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                high = ord(self._char())
            if low > high:
                self._broken(f"the range {chr(low)}-{chr(high)} is backwards")
            pairs.append((low, high))
        if self._text[self._at : self._at + 1] != "]":
            self._at = start
            self._broken("[ without ]")
        if not pairs and not is_negated:
            self._broken("an empty class matches nothing")
        self._at += 1
        ranges = char_set(pairs)
        return Chars(complement(ranges) if is_negated else ranges)

    def _char(self) -> str:
        char = self._text[self._at]
        self._at += 1
        if char != "\\":
            return char
        char = self._text[self._at : self._at + 1]
        if char in HEX_DIGITS:
            digits = self._text[self._at + 1 : self._at + 1 + HEX_DIGITS[char]]
            if len(digits) == HEX_DIGITS[char] and set(digits) <= set("0123456789abcdefABCDEF"):
                code = int(digits, 16)
                if code <= MAX_CODE_POINT and not 0xD800 <= code <= 0xDFFF:
                    self._at += 1 + len(digits)
                    return chr(code)
            self._broken(f"\\{char} needs {HEX_DIGITS[char]} hexadecimal digits of a character")
        if char not in ESCAPES:
            self._broken(f"unknown escape \\{char}")
        self._at += 1
        return ESCAPES[char]


def _count(text: str) -> int | None:
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None
