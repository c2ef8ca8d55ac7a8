"""JSON texts as grammar nodes: strings, spaces, constants.

Outputs have one space after each colon and comma and none elsewhere, as Python writes JSON, and so as models have read
most of it. Any whitespace would be JSON too, but a small model that once begins to write spaces goes on until its
budget ends. A space that may be left out doubles the size of a compiled schema, which travels with each request.
"""

from __future__ import annotations

import json
import math
from typing import Any

from pagedray.engine.errors import UserError
from pagedray.engine.grammar.rules import (
    EMPTY,
    NOTHING,
    Chars,
    Choice,
    Node,
    Ranges,
    Repeat,
    Sequence,
    Text,
    UpTo,
    chars,
    choice,
    complement,
    overlap,
    sequence,
)

QUOTE = Text('"')
COMMA = Text(", ")
COLON = Text(": ")

ESCAPED = {ord('"'): '\\"', ord("\\"): "\\\\", 8: "\\b", 9: "\\t", 10: "\\n", 12: "\\f", 13: "\\r"}
PLAIN: Ranges = complement(((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C)))  # characters that stand for themselves
NOT_PLAIN = complement(PLAIN)
USUAL = frozenset(map(ord, '"\\\n\t'))
# \u isn't offered: whatever needs it stands for itself, but for control characters. With it, xgrammar no longer sees a
# string as one automaton, and masks take 17 ms each instead of 0.01.
CHARACTER = choice(Chars(PLAIN), sequence(Text("\\"), chars('"\\/bfnrt')))


def string(low: int, high: int | None) -> Node:
    """Any string with low to high characters.

    A string of at least two characters has none that must be escaped: counting those too would take xgrammar up to a
    second for each token. A bound counts an escape as all of its characters, so that it may end a string early.
    """
    if high is not None and high < low:
        return NOTHING
    if low == 0:
        return sequence(QUOTE, Repeat(CHARACTER, 0, None) if high is None else up_to(CHARACTER, high), QUOTE)
    if low == 1:
        first = Chars(PLAIN)
        rest = Repeat(CHARACTER, 0, None) if high is None else up_to(CHARACTER, high - 1)
        return sequence(QUOTE, first, rest, QUOTE)
    return sequence(QUOTE, Repeat(Chars(PLAIN), low, high), QUOTE)


def up_to(item: Node, max_chars: int) -> Node:
    return UpTo(item, max_chars) if max_chars else EMPTY


def quoted(node: Node) -> Node:
    """A node for a text as that text stands in a JSON string, without the quotes."""
    if isinstance(node, Text):
        return Text("".join(ESCAPED.get(ord(char)) or _plain(char) for char in node.text))
    if isinstance(node, Chars):
        return quoted_chars(node)
    if isinstance(node, Sequence):
        return sequence(*map(quoted, node.items))
    if isinstance(node, Choice):
        return choice(*map(quoted, node.items))
    assert isinstance(node, Repeat)
    if isinstance(node.item, Chars) and node.high is not None:
        plain = overlap(node.item.ranges, PLAIN)
        if plain:  # for the reason that `string` gives
            return Repeat(Chars(plain), node.low, node.high)
    return Repeat(quoted(node.item), node.low, node.high)


def quoted_chars(node: Chars) -> Node:
    """One character of a set as it stands in a JSON string. Of control characters a large set keeps the usual ones."""
    plain = overlap(node.ranges, PLAIN)
    others = [code for low, high in overlap(node.ranges, NOT_PLAIN) for code in range(low, high + 1)]
    texts = [Text(ESCAPED.get(code) or f"\\u{code:04x}") for code in others if not plain or code in USUAL]
    return choice(*([Chars(plain)] if plain else []), *texts)


def constant(value: Any) -> Node:
    """A JSON value as it is. Raises: UserError when JSON or UTF-8 can't write it."""
    if isinstance(value, dict):
        members = [sequence(constant(str(name)), COLON, constant(item)) for name, item in value.items()]
        return sequence(Text("{"), *_joined(members), Text("}"))
    if isinstance(value, list):
        return sequence(Text("["), *_joined([constant(item) for item in value]), Text("]"))
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{value} is a number that JSON can't write")
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError("a string holds half a surrogate pair") from error
    return Text(text)


def _joined(items: list[Node]) -> list[Node]:
    return [part for i, item in enumerate(items) for part in ((COMMA, item) if i else (item,))]


def _plain(char: str) -> str:
    return f"\\u{ord(char):04x}" if ord(char) < 0x20 else char
