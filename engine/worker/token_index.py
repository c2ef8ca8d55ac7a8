"""Which tokens are, begin or continue a given text."""

from __future__ import annotations

import bisect
from collections.abc import Sequence


class TokenIndex:
    """
    Args:
        tokens: the bytes of each id; empty ones are left out.
    """

    def __init__(self, tokens: Sequence[bytes]):
        self.tokens = tokens
        self._ids = sorted((i for i, text in enumerate(tokens) if text), key=tokens.__getitem__)
        self._texts = [tokens[i] for i in self._ids]

    def starting_with(self, text: bytes) -> list[int]:
        """Ids of tokens that begin with all of `text`, or are it."""
        size = len(text)
        first = bisect.bisect_left(self._texts, text)
        return self._ids[first : bisect.bisect_right(self._texts, text, first, key=lambda token: token[:size])]

    def that_are(self, text: bytes) -> list[int]:
        first = bisect.bisect_left(self._texts, text)
        return self._ids[first : bisect.bisect_right(self._texts, text, first)]

    def along(self, text: bytes) -> list[int]:
        """Ids of tokens that `text` begins with, or that begin with it."""
        shorter = [i for size in range(1, len(text)) for i in self.that_are(text[:size])]
        return shorter + self.starting_with(text)

    def containing_before_more(self, text: bytes) -> list[int]:
        """Ids of tokens with `text` somewhere and something behind it."""
        return [i for i in self._ids if (at := self.tokens[i].find(text)) >= 0 and at + len(text) < len(self.tokens[i])]
