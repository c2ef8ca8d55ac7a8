"""Finite automata over characters: for "matches both", "matches this but not that", "with so many characters".

Deterministic, complete only where a state says so: a character without an edge leads nowhere. Bounded in size, since
an intersection of harmless patterns may be huge.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

import msgspec

from pagedray.engine.errors import UserError
from pagedray.engine.grammar.rules import (
    EMPTY,
    MAX_CODE_POINT,
    SURROGATES,
    Chars,
    Choice,
    Node,
    Ref,
    Repeat,
    Rules,
    Text,
    UpTo,
    char_set,
    choice,
    sequence,
)
from pagedray.engine.grammar.rules import Sequence as NodeSequence

MAX_STATES = 3000
MAX_FRAGMENTS = 30_000  # states of the nondeterministic automaton between a node and its deterministic one

Edge = tuple[int, int, int]  # first and last code point, target


class Automaton(msgspec.Struct, frozen=True):
    """State 0 is the start. Edges of a state are ascending and don't overlap."""

    accepts: tuple[bool, ...]
    edges: tuple[tuple[Edge, ...], ...]

    def matches(self, text: str) -> bool:
        state = 0
        for char in text:
            code = ord(char)
            targets = [target for low, high, target in self.edges[state] if low <= code <= high]
            if not targets:
                return False
            state = targets[0]
        return self.accepts[state]

    @property
    def is_empty(self) -> bool:
        return not any(self.accepts)

    def without(self, other: Automaton) -> Automaton:
        return _combine((self, other), lambda a: a[0] and not a[1], needed=1)

    def to_node(self, rules: Rules, show: Callable[[Chars], Node]) -> Node:
        """Rules for what it matches; `show` says how a set of characters is written."""
        names = [rules.new_name() for _ in self.accepts]
        for name, accepts, edges in zip(names, self.accepts, self.edges, strict=True):
            by_target: dict[int, list[tuple[int, int]]] = {}
            for low, high, target in edges:
                by_target.setdefault(target, []).append((low, high))
            steps = {target: show(Chars(char_set(pairs))) for target, pairs in by_target.items()}
            state = names.index(name)
            loop = steps.pop(state, None)
            out = choice(*(sequence(step, Ref(names[target])) for target, step in steps.items()))
            if accepts:
                out = choice(out, EMPTY)
            rules.by_name[name] = out if loop is None else sequence(Repeat(loop, 0, None), out)
        return Ref(names[0])


def intersect(automata: Sequence[Automaton]) -> Automaton:
    """What all of them match. Raises: UserError when it gets too big."""
    return automata[0] if len(automata) == 1 else _combine(automata, all, needed=len(automata))


def classify(automata: Sequence[Automaton], chosen: Sequence[bool]) -> Automaton:
    """What exactly the chosen ones match, among all texts that the first one does; that one must be chosen."""
    return _combine(automata, lambda accepts: list(accepts) == list(chosen), needed=1)


def lengths(low: int, high: int | None) -> Automaton:
    """Texts of low to high characters."""
    last = low if high is None else high
    if last >= MAX_STATES:
        raise UserError(f"lengths up to {last} together with a pattern or format; the limit is {MAX_STATES - 1}")
    edges = [_any_to(min(n + 1, last)) if high is None or n < high else () for n in range(last + 1)]
    return Automaton(tuple(n >= low for n in range(last + 1)), tuple(edges))


def words(texts: Iterable[str]) -> Automaton:
    """Exactly these texts."""
    tree: list[dict[str, int]] = [{}]
    ends: set[int] = set()
    for text in texts:
        state = 0
        for char in text:
            if char not in tree[state]:
                tree[state][char] = len(tree)
                tree.append({})
            state = tree[state][char]
        ends.add(state)
    _check(len(tree))
    edges = tuple(tuple((ord(char), ord(char), to) for char, to in sorted(node.items())) for node in tree)
    return _minimized(Automaton(tuple(i in ends for i in range(len(tree))), edges))


def remainders(divisor: int) -> Automaton:
    """Decimal numbers without leading zeros that an integer divides, with a minus sign or not."""
    _check(divisor + 3)
    # 0 start, 1 after a sign, 2 after a zero at the front, 3 + r: remainder r
    digits = [tuple((48 + d, 48 + d, 3 + (r * 10 + d) % divisor) for d in range(10)) for r in range(divisor)]
    first = tuple((48 + d, 48 + d, 3 + d % divisor) for d in range(1, 10))
    edges = (((45, 45, 1), (48, 48, 2), *first), first, (), *digits)
    return _minimized(Automaton((False, False, True, True, *[False] * (divisor - 1)), edges))


def from_node(node: Node) -> Automaton:
    """The automaton of a node without references. Raises: UserError when it gets too big."""
    build = _Fragments()
    end = build.state()
    start = build.node(node, end)
    return _minimized(build.determinized(start, end))


def _any_to(state: int) -> tuple[Edge, ...]:
    first, last = SURROGATES
    return ((0, first - 1, state), (last + 1, MAX_CODE_POINT, state))


def _check(num_states: int) -> None:
    if num_states > MAX_STATES:
        raise UserError(
            f"patterns, formats and lengths that hold together come to more than {MAX_STATES} states; make them simpler"
        )


class _Fragments:
    """A nondeterministic automaton, built from the end to the start."""

    def __init__(self) -> None:
        self.jumps: list[list[int]] = []  # without a character
        self.edges: list[list[Edge]] = []

    def state(self) -> int:
        if len(self.jumps) >= MAX_FRAGMENTS:
            raise UserError("a pattern together with another one, a format or a length is too big; make it simpler")
        self.jumps.append([])
        self.edges.append([])
        return len(self.jumps) - 1

    def node(self, node: Node, end: int) -> int:
        """A state from which a node leads to `end`."""
        if isinstance(node, Text):
            for char in reversed(node.text):
                state = self.state()
                self.edges[state].append((ord(char), ord(char), end))
                end = state
            return end
        if isinstance(node, Chars):
            state = self.state()
            self.edges[state] += [(low, high, end) for low, high in node.ranges]
            return state
        if isinstance(node, NodeSequence):
            for item in reversed(node.items):
                end = self.node(item, end)
            return end
        if isinstance(node, Choice):
            state = self.state()
            self.jumps[state] += [self.node(item, end) for item in node.items]
            return state
        assert isinstance(node, Repeat) and not isinstance(node, UpTo | Ref)
        if node.high is None:
            loop = self.state()
            self.jumps[loop] += [end, self.node(node.item, loop)]
            end = loop
        else:
            last = end
            for _ in range(node.high - node.low):
                state = self.state()
                self.jumps[state] += [last, self.node(node.item, end)]
                end = state
        for _ in range(node.low):
            end = self.node(node.item, end)
        return end

    def determinized(self, start: int, end: int) -> Automaton:
        first = self._closure([start])
        numbers, order = {first: 0}, [first]
        accepts, all_edges = [], []
        for states in order:
            accepts.append(end in states)
            pieces: list[tuple[int, int, frozenset[int]]] = []
            for low, high, targets in _split([edge for state in states for edge in self.edges[state]]):
                pieces.append((low, high, self._closure(targets)))
            for _, _, targets_closed in pieces:
                if targets_closed not in numbers:
                    numbers[targets_closed] = len(order)
                    order.append(targets_closed)
                    _check(len(order))
            all_edges.append(tuple((low, high, numbers[closed]) for low, high, closed in pieces))
        return Automaton(tuple(accepts), tuple(all_edges))

    def _closure(self, states: Iterable[int]) -> frozenset[int]:
        found = set(states)
        todo = list(found)
        while todo:
            for state in self.jumps[todo.pop()]:
                if state not in found:
                    found.add(state)
                    todo.append(state)
        return frozenset(found)


def _split(edges: list[Edge]) -> list[tuple[int, int, tuple[int, ...]]]:
    """Edges that may overlap as ranges that don't, each with all of its targets."""
    cuts = sorted({low for low, _, _ in edges} | {high + 1 for _, high, _ in edges})
    begins: dict[int, list[int]] = {}
    ends: dict[int, list[int]] = {}
    for low, high, target in edges:
        begins.setdefault(low, []).append(target)
        ends.setdefault(high + 1, []).append(target)
    count: dict[int, int] = {}
    pieces = []
    for cut, following in itertools.pairwise(cuts):
        for target in ends.get(cut, ()):
            count[target] -= 1
            if not count[target]:
                del count[target]
        for target in begins.get(cut, ()):
            count[target] = count.get(target, 0) + 1
        if count:
            pieces.append((cut, following - 1, tuple(sorted(count))))
    return pieces


def _combine(automata: Sequence[Automaton], accept: Callable[[Sequence[bool]], bool], needed: int) -> Automaton:
    """The product. The first `needed` automata must each have an edge for a character; others may be lost (-1)."""
    first = (0,) * len(automata)
    numbers, order = {first: 0}, [first]
    accepts, all_edges = [], []
    for states in order:
        accepts.append(accept([s >= 0 and a.accepts[s] for a, s in zip(automata, states, strict=True)]))
        parts = []
        for i, state in enumerate(states):
            if state >= 0:
                parts += [(low, high, i * 2**32 + target) for low, high, target in automata[i].edges[state]]
        edges = []
        for low, high, found in _split(parts):
            targets = [-1] * len(automata)
            for code in found:
                targets[code >> 32] = code & (2**32 - 1)
            if min(targets[:needed]) < 0:
                continue
            key = tuple(targets)
            if key not in numbers:
                numbers[key] = len(order)
                order.append(key)
                _check(len(order))
            edges.append((low, high, numbers[key]))
        all_edges.append(tuple(edges))
    return _minimized(Automaton(tuple(accepts), tuple(all_edges)))


def _minimized(automaton: Automaton) -> Automaton:
    """The smallest one for the same texts: without states that lead to no end, equal ones merged."""
    useful = _useful(automaton)
    if 0 not in useful:
        return Automaton((False,), ((),))
    edges = [
        [edge for edge in edges if edge[2] in useful] if i in useful else [] for i, edges in enumerate(automaton.edges)
    ]
    group = [int(accepts) for accepts in automaton.accepts]
    num_groups = 0
    while True:
        signatures: dict[tuple[int, tuple[Edge, ...]], int] = {}
        new = []
        for i, own in enumerate(edges):
            signature = (group[i], _joined([(low, high, group[to]) for low, high, to in own]))
            new.append(signatures.setdefault(signature, len(signatures)))
        group = new
        if len(signatures) == num_groups:
            break
        num_groups = len(signatures)
    numbers, order = {group[0]: 0}, [0]
    result = []
    for i in order:
        merged = _joined([(low, high, group[to]) for low, high, to in edges[i]])
        for _, _, to in merged:
            if to not in numbers:
                numbers[to] = len(order)
                order.append(group.index(to))
        result.append(tuple((low, high, numbers[to]) for low, high, to in merged))
    return Automaton(tuple(automaton.accepts[i] for i in order), tuple(result))


def _useful(automaton: Automaton) -> set[int]:
    """States from which an end can be reached."""
    sources: dict[int, list[int]] = {}
    for i, edges in enumerate(automaton.edges):
        for _, _, target in edges:
            sources.setdefault(target, []).append(i)
    found = {i for i, accepts in enumerate(automaton.accepts) if accepts}
    todo = list(found)
    while todo:
        for source in sources.get(todo.pop(), ()):
            if source not in found:
                found.add(source)
                todo.append(source)
    return found


def _joined(edges: list[Edge]) -> tuple[Edge, ...]:
    joined: list[Edge] = []
    for low, high, target in edges:
        if joined and joined[-1][2] == target and joined[-1][1] == low - 1:
            joined[-1] = (joined[-1][0], high, target)
        else:
            joined.append((low, high, target))
    return tuple(joined)
