"""Context-free grammars as this package builds them, and how xgrammar reads them.

A grammar is a `Rules`: names and what they stand for. Nodes are frozen; empty sequences match the empty text, and a
choice of nothing matches nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from pagedray.engine.errors import UserError

Ranges = tuple[tuple[int, int], ...]  # of code points, both ends included, ascending, apart from each other

MAX_CODE_POINT = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)
MAX_RULES = 4000
MAX_NODES = 100_000
# Of characters of one class. xgrammar makes a state of each repetition, with a token mask of its own; beyond this many
# a counter does the same for less.
MAX_PLAIN_REPEATS = 4

MAX_EXCLUDED = 64  # characters that are missing in a class which counts as wide


class Text(msgspec.Struct, frozen=True):
    text: str


class Chars(msgspec.Struct, frozen=True):
    """One character of a set."""

    ranges: Ranges


class Ref(msgspec.Struct, frozen=True):
    name: str


class Sequence(msgspec.Struct, frozen=True):
    items: tuple[Node, ...]


class Choice(msgspec.Struct, frozen=True):
    items: tuple[Node, ...]


class Repeat(msgspec.Struct, frozen=True):
    item: Node
    low: int
    high: int | None  # None: without bound


class UpTo(msgspec.Struct, frozen=True):
    """Any number of an item, as long as that has at most so many characters."""

    item: Node
    max_chars: int


Node = Text | Chars | Ref | Sequence | Choice | Repeat | UpTo

EMPTY = Sequence(())
NOTHING = Choice(())


def sequence(*items: Node) -> Node:
    flat: list[Node] = []
    for item in items:
        for part in item.items if isinstance(item, Sequence) else (item,):
            if part == NOTHING:
                return NOTHING
            last = flat[-1] if flat else None
            if isinstance(part, Text) and isinstance(last, Text):
                flat[-1] = Text(last.text + part.text)
            elif part != Text(""):
                flat.append(part)
    return flat[0] if len(flat) == 1 else Sequence(tuple(flat))


def choice(*items: Node) -> Node:
    flat: dict[Node, None] = {}
    for item in items:
        flat.update(dict.fromkeys(item.items if isinstance(item, Choice) else (item,)))
    return next(iter(flat)) if len(flat) == 1 else Choice(tuple(flat))


def optional(item: Node) -> Node:
    return choice(item, EMPTY)


def char_set(pairs: Iterable[tuple[int, int]]) -> Ranges:
    """Ranges in order and joined, without surrogates, which no UTF-8 text has."""
    joined: list[tuple[int, int]] = []
    for low, high in sorted(pairs):
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(high, joined[-1][1]))
        else:
            joined.append((low, high))
    first, last = SURROGATES
    kept = [part for low, high in joined for part in ((low, min(high, first - 1)), (max(low, last + 1), high))]
    return tuple((low, high) for low, high in kept if low <= high)


def complement(ranges: Ranges) -> Ranges:
    gaps, start = [], 0
    for low, high in ranges:
        gaps.append((start, low - 1))
        start = high + 1
    gaps.append((start, MAX_CODE_POINT))
    return char_set((low, high) for low, high in gaps if low <= high)


def overlap(a: Ranges, b: Ranges) -> Ranges:
    return complement(char_set((*complement(a), *complement(b))))


def chars(text: str) -> Chars:
    """One of these characters; a dash between two of them means a range."""
    pairs, i = [], 0
    while i < len(text):
        if text[i + 1 : i + 2] == "-" and i + 2 < len(text):
            pairs.append((ord(text[i]), ord(text[i + 2])))
            i += 3
        else:
            pairs.append((ord(text[i]), ord(text[i])))
            i += 1
    return Chars(char_set(pairs))


class Rules:
    """A grammar under construction; `root` is where it starts."""

    def __init__(self) -> None:
        self.by_name: dict[str, Node] = {}

    def new_name(self) -> str:
        """Reserve a name that is set later. Raises: UserError when there are too many."""
        if len(self.by_name) >= MAX_RULES:
            raise UserError(f"it needs more than {MAX_RULES} grammar rules; make it smaller")
        name = f"r{len(self.by_name)}"
        self.by_name[name] = NOTHING
        return name

    def add(self, node: Node) -> Ref:
        name = self.new_name()
        self.by_name[name] = node
        return Ref(name)

    def check_size(self) -> None:
        """Raises: UserError when it is too big to be worth compiling."""
        num = sum(1 for node in self.by_name.values() for _ in walk(node))
        if num > MAX_NODES:
            raise UserError(f"it comes to a grammar of {num} parts, the limit is {MAX_NODES}; make it smaller")

    def prune(self, root: str) -> None:
        """Take out whatever can't be completed, so that no output gets stuck in it.

        Raises:
            UserError: nothing is left of the root.
        """
        productive: set[str] = set()
        users: dict[str, list[str]] = {}
        for name, node in self.by_name.items():
            for part in walk(node):
                if isinstance(part, Ref):
                    users.setdefault(part.name, []).append(name)
        todo = list(self.by_name)
        while todo:
            name = todo.pop()
            if name not in productive and _is_productive(self.by_name[name], productive):
                productive.add(name)
                todo += users.get(name, [])
        if root not in productive:
            raise UserError(
                "no output can satisfy it: every alternative contradicts itself or needs itself without end"
            )
        self.by_name = {name: _pruned(self.by_name[name], productive) for name in self.by_name if name in productive}

    def _drop_aliases(self, root: str) -> None:
        """Let references lead to rules that are more than another reference."""

        def target(name: str) -> str:
            seen = {name}
            while isinstance(node := self.by_name[name], Ref) and node.name not in seen:
                name = node.name
                seen.add(name)
            return name

        targets = {name: target(name) for name in self.by_name}
        final = targets[root]
        self.by_name = {name: _redirected(node, targets) for name, node in self.by_name.items()}
        self.by_name[root] = self.by_name[final]

    def reachable(self, root: str) -> list[str]:
        """Names that the root needs, itself first."""
        found = {root: None}
        todo = [root]
        while todo:
            for part in walk(self.by_name[todo.pop()]):
                if isinstance(part, Ref) and part.name not in found:
                    found[part.name] = None
                    todo.append(part.name)
        return list(found)

    def to_ebnf(self, root: Node) -> str:
        """The grammar as xgrammar reads it, pruned and without what the root doesn't need.

        Raises:
            UserError: it is too big, or can't be completed.
        """
        self.check_size()
        start = self.add(root).name
        self.prune(start)
        self._drop_aliases(start)
        names = self.reachable(start)
        # xgrammar's serialization has the automaton of the whole grammar once for each rule: the fewer, the better.
        writer = _Writer({name: "root" if name == start else name for name in names})
        for name in names:
            writer.add(name, self.by_name[name])
        return "".join(f"{line}\n" for line in writer.lines)


def walk(node: Node) -> Iterator[Node]:
    """A node and all nodes in it; references aren't followed."""
    todo = [node]
    while todo:
        node = todo.pop()
        yield node
        if isinstance(node, Sequence | Choice):
            todo += node.items
        elif isinstance(node, Repeat | UpTo):
            todo.append(node.item)


def _is_productive(node: Node, productive: set[str]) -> bool:
    if isinstance(node, Ref):
        return node.name in productive
    if isinstance(node, Sequence):
        return all(_is_productive(item, productive) for item in node.items)
    if isinstance(node, Choice):
        return any(_is_productive(item, productive) for item in node.items)
    if isinstance(node, Repeat):
        return node.low == 0 or _is_productive(node.item, productive)
    return not isinstance(node, Chars) or bool(node.ranges)


def _pruned(node: Node, productive: set[str]) -> Node:
    """A productive node without its unproductive parts."""
    if isinstance(node, Sequence):
        return sequence(*(_pruned(item, productive) for item in node.items))
    if isinstance(node, Choice):
        return choice(*(_pruned(item, productive) for item in node.items if _is_productive(item, productive)))
    if isinstance(node, Repeat | UpTo):
        if not _is_productive(node.item, productive):
            return EMPTY
        return msgspec.structs.replace(node, item=_pruned(node.item, productive))
    return node


def _redirected(node: Node, targets: dict[str, str]) -> Node:
    if isinstance(node, Ref):
        return Ref(targets[node.name])
    if isinstance(node, Sequence):
        return Sequence(tuple(_redirected(item, targets) for item in node.items))
    if isinstance(node, Choice):
        return choice(*(_redirected(item, targets) for item in node.items))
    if isinstance(node, Repeat | UpTo):
        return msgspec.structs.replace(node, item=_redirected(node.item, targets))
    return node


class _Writer:
    """Writes rules in xgrammar's EBNF.

    Args:
        names: of rules, ours → as written.
    """

    def __init__(self, names: dict[str, str]) -> None:
        self._names = names
        self.lines: list[str] = []
        self._counters: dict[Node, str] = {}
        self._excluded: dict[Node, str] = {}

    def add(self, name: str, node: Node) -> None:
        self.lines.append(f"{self._names[name]} ::= {self._text(node)}")

    def _text(self, node: Node) -> str:
        if isinstance(node, Text):
            return '"' + "".join(map(_escaped, node.text)) + '"'
        if isinstance(node, Chars):
            return "[" + "".join(_range(low, high) for low, high in node.ranges) + "]"
        if isinstance(node, Ref):
            return self._names[node.name]
        if isinstance(node, Sequence):
            return " ".join(map(self._grouped, node.items)) if node.items else '""'
        if isinstance(node, Choice):
            return " | ".join(map(self._text, node.items))
        if isinstance(node, UpTo):
            return self._counter(node)
        return self._repeat(node)

    def _repeat(self, node: Repeat) -> str:
        if isinstance(node.item, Chars) and node.low > 1 and _is_wide(node.item):
            item = self._excluding(node.item)
        else:
            item = self._grouped(node.item)
        if isinstance(node.item, Chars) and node.high is not None and node.high - node.low > MAX_PLAIN_REPEATS:
            if node.low > 1 and _is_wide(node.item):
                return f"{item}{{{node.low},{node.high}}}"
            rest = self._counter(UpTo(node.item, node.high - node.low))
            return f"({self._count(item, node.low)} {rest})" if node.low else rest
        if node.high is None:
            return f"{item}*" if node.low == 0 else f"{item}+" if node.low == 1 else f"{item}{{{node.low},}}"
        if node.high == 0:
            return '""'
        if (node.low, node.high) == (0, 1):
            return f"{item}?"
        return self._count(item, node.low) if node.low == node.high else f"{item}{{{node.low},{node.high}}}"

    @staticmethod
    def _count(item: str, count: int) -> str:
        return item if count == 1 else f"{item}{{{count}}}"

    def _counter(self, node: UpTo) -> str:
        name = self._counters.get(node)
        if name is None:
            name = self._counters[node] = f"up_to{len(self._counters)}"
            self.lines.append(f"{name}[max_chars={node.max_chars}] ::= {self._grouped(node.item)}*")
        return name

    def _excluding(self, node: Chars) -> str:
        """A rule of one character that is none of a few. Only in this form can xgrammar count it for nearly nothing."""
        name = self._excluded.get(node)
        if name is None:
            name = self._excluded[node] = f"except{len(self._excluded)}"
            ranges = "".join(_range(low, high) for low, high in (*complement(node.ranges), SURROGATES))
            self.lines.append(f"{name} ::= [^{ranges}]")
        return name

    def _grouped(self, node: Node) -> str:
        text = self._text(node)
        is_single = isinstance(node, Text | Chars | Ref | UpTo) or (
            isinstance(node, Repeat) and not text.endswith(("*", "+", "?", "}"))
        )
        return text if is_single else f"({text})"


def _is_wide(node: Chars) -> bool:
    left = complement(node.ranges)
    return len(left) <= MAX_EXCLUDED and sum(high - low + 1 for low, high in left) <= MAX_EXCLUDED


def _escaped(char: str) -> str:
    code = ord(char)
    if char in '"\\':
        return "\\" + char
    return char if 0x20 <= code < 0x7F else f"\\U{code:08X}"


def _range(low: int, high: int) -> str:
    return _in_class(low) if low == high else f"{_in_class(low)}-{_in_class(high)}"


def _in_class(code: int) -> str:
    char = chr(code)
    return char if char.isascii() and char.isalnum() else f"\\U{code:08X}"
