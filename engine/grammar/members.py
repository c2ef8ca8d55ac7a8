"""`Members`: what stands between the braces of an object whose members come in a fixed order."""

from __future__ import annotations

from pagedray.engine.grammar.json_text import COMMA
from pagedray.engine.grammar.rules import EMPTY, NOTHING, Node, Repeat, Rules, choice, sequence


class Members:
    """A list of members in fixed order with commas between: some required, others not, then perhaps free ones.

    Args:
        members: node, and whether it must be there.
        others: a free member, of which there may be any number at the end; None: there is none.
        low, high: how many members there are together.
    """

    def __init__(
        self,
        rules: Rules,
        members: list[tuple[Node, bool]],
        others: Node | None,
        low: int,
        high: int | None,
    ):
        self._rules = rules
        self._members = members
        self._others = others
        self._low, self._high = low, high
        num_required = sum(is_required for _, is_required in members)
        self._counts = low > num_required or high is not None

    def node(self) -> Node:
        # From the end: each state needs those behind it, and recursion would be as deep as there are members.
        top = len(self._members)
        nodes: dict[tuple[int, int], Node] = {}
        for i in reversed(range(top + 1)):
            for count in range(self._most(i) + 1):
                nodes[i, count] = self._end(count) if i == top else self._state(i, count, nodes)
        return nodes[0, 0]

    def _most(self, index: int) -> int:
        return index if self._counts else min(index, 1)

    def _state(self, index: int, count: int, nodes: dict[tuple[int, int], Node]) -> Node:
        member, is_required = self._members[index]
        following = count + 1 if self._counts else 1
        taken = sequence(*([COMMA] if count else []), member, nodes[index + 1, following])
        if self._high is not None and count >= self._high:
            taken = NOTHING
        if is_required:
            return taken
        left = nodes[index + 1, count]
        if left == NOTHING:
            return taken
        either = choice(taken, left)
        # A rule of its own, where both this member's predecessor and the one before lead here.
        return either if count == 0 else self._rules.add(either)

    def _end(self, count: int) -> Node:
        low = max(0, self._low - count) if self._counts else 0
        high = None if self._high is None else self._high - count
        if high is not None and high < low:
            return NOTHING
        if self._others is None or high == 0:
            return EMPTY if low == 0 else NOTHING
        if low > 1:  # free ones may be the same one twice, which then counts once
            return NOTHING
        if count:
            return Repeat(sequence(COMMA, self._others), low, high)
        again = Repeat(sequence(COMMA, self._others), max(0, low - 1), None if high is None else high - 1)
        some = sequence(self._others, again)
        return choice(some, EMPTY) if low == 0 else some
