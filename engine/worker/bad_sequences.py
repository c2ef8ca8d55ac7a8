"""Sequences of tokens that an output must not contain. Its prompt doesn't count."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pagedray.kernels.token_bitmask import pack_ids


class BadSequences:
    """Follows one output.

    Args:
        sequences: each of one token at least.
        num_tokens: of the vocabulary.
    """

    def __init__(self, sequences: Sequence[tuple[int, ...]], num_tokens: int):
        self._num_tokens = num_tokens
        self._real = all_tokens(num_tokens)
        self._last: dict[tuple[int, ...], set[int]] = {}  # all of a sequence but its last token → such last tokens
        for sequence in sequences:
            self._last.setdefault(sequence[:-1], set()).add(sequence[-1])
        self._lengths = sorted({len(before) for before in self._last})
        self._tail: deque[int] = deque(maxlen=self._lengths[-1] if self._lengths else 0)

    def feed(self, token_id: int) -> None:
        self._tail.append(token_id)

    def forbid(self, words: NDArray[np.int32]) -> bool:
        """Take away the tokens that would complete a sequence, see kernels/token_bitmask.py, if they leave any.

        Returns:
            Whether there are such tokens.
        """
        tail, found = tuple(self._tail), set[int]()
        for length in self._lengths:
            if length <= len(tail):
                found |= self._last.get(tail[len(tail) - length :], set())
        if not found:
            return False
        left = words & self._real & ~pack_ids(sorted(found), self._num_tokens)
        if not left.any():
            return False
        words[:] = left
        return True


def all_tokens(num_tokens: int) -> NDArray[np.int32]:
    """Words that allow every token; the bits past them are 0."""
    words = np.full(-(-num_tokens // 32), -1, dtype=np.int32)
    if num_tokens % 32:
        words[-1] = (1 << num_tokens % 32) - 1
    return words
