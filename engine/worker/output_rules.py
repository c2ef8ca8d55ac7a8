"""The constraint of one output: fed with its tokens in order, it says which ones may come next.

reasoning span, if there is one    anything but the end of the output; the budget's tokens when that is spent
grammar, if there is one           what it takes; an end of the output only where it is complete
bad sequences                      no token that completes one, as long as the rules above leave another
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pagedray.engine.worker.bad_sequences import BadSequences
from pagedray.engine.worker.reasoning import Place, ReasoningTracker

if TYPE_CHECKING:
    import xgrammar


class BrokenRules(Exception):
    """An output that can't go on: its grammar takes no token, or not the one that came."""


class OutputRules:
    """
    Args:
        matcher: of the grammar, at its beginning; None: there is no grammar.
        bad: None: there are no bad sequences.
    """

    def __init__(
        self,
        reasoning: ReasoningTracker | None,
        matcher: xgrammar.GrammarMatcher | None,
        bad: BadSequences | None = None,
    ):
        self._reasoning, self._matcher, self._bad = reasoning, matcher, bad
        self._is_stuck = False  # the output begins as the reasoning does, and as the grammar does not
        self._num_tokens = 0

    @property
    def place(self) -> Place:
        return Place.AFTER if self._reasoning is None else self._reasoning.place

    @property
    def is_over(self) -> bool:
        """Nothing restricts the output any more: it has ended, or only its reasoning was restricted."""
        if self.place is not Place.AFTER:
            return False
        return self._bad is None if self._matcher is None else self._matcher.is_terminated()

    @property
    def next_matcher(self) -> xgrammar.GrammarMatcher | None:
        """The grammar's, where it alone decides on the next token; `fill` needn't be called then."""
        decides_alone = self._bad is None and self.place is Place.AFTER and not self.is_over
        return self._matcher if decides_alone else None

    def feed(self, token_id: int) -> None:
        """Take the next token. Raises: BrokenRules: it isn't one of those that may come."""
        self._num_tokens += 1
        if self._bad is not None:
            self._bad.feed(token_id)
        reasoning, matcher = self._reasoning, self._matcher
        place = self.place
        if place is Place.AFTER:
            if matcher is not None and not matcher.accept_token(token_id):
                raise BrokenRules(f"the grammar doesn't take token {token_id}, number {self._num_tokens} of the output")
            return
        assert reasoning is not None
        rest = reasoning.feed(token_id)
        if matcher is None:
            return
        if place is Place.BEFORE:
            if not reasoning.was_opened:
                return self._feed_undecided(matcher, token_id)
            matcher.reset()
        if rest and not matcher.accept_string(rest):
            raise BrokenRules(
                f"the token that ends the reasoning goes on with {rest!r}, which the grammar doesn't take"
            )

    def _feed_undecided(self, matcher: xgrammar.GrammarMatcher, token_id: int) -> None:
        """The output may go on to open its reasoning, or be what the grammar asks for."""
        self._is_stuck = self._is_stuck or not matcher.accept_token(token_id)
        if self._is_stuck and self.place is Place.AFTER:
            raise BrokenRules(f"neither the reasoning nor the grammar begins with token {token_id}")

    def fill(self, words: NDArray[np.int32]) -> bool:
        """Write which tokens may come next, see kernels/token_bitmask.py; False: all may."""
        is_filled = self._fill_allowed(words)
        if self._bad is None:
            return is_filled
        if not is_filled:
            words[:] = -1
        return self._bad.forbid(words) or is_filled

    def _fill_allowed(self, words: NDArray[np.int32]) -> bool:
        reasoning, matcher = self._reasoning, self._matcher
        if self.place is Place.AFTER:
            if matcher is None or matcher.is_terminated():
                return False
            matcher.fill_next_token_bitmask(words[None])
            return True
        assert reasoning is not None
        forced = reasoning.forced
        if forced is not None:
            words[:] = 0
            words.view(np.uint32)[forced // 32] = 1 << forced % 32
            return True
        if matcher is None:
            return False
        if self.place is Place.INSIDE:
            words[:] = reasoning.inside()
            return True
        words[:] = 0
        if not self._is_stuck and not matcher.is_terminated():
            matcher.fill_next_token_bitmask(words[None])
        words |= reasoning.opening()
        return True
