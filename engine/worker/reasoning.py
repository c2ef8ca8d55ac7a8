"""The part of an output in which a model thinks: where it begins and ends, and how it is kept within its budget."""

from __future__ import annotations

import enum
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from pagedray.engine.messages import ReasoningSpan
from pagedray.engine.worker.token_index import TokenIndex
from pagedray.kernels.token_bitmask import pack_ids


class SpanTokens:
    """Which tokens of a vocabulary open a span, go on within it, and close it.

    Args:
        begin, end: as in `ReasoningSpan`.
        eos_ids: end an output, which a grammar must not let happen within the span.
    """

    def __init__(self, index: TokenIndex, begin: bytes, end: bytes, eos_ids: Iterable[int]):
        self.tokens = index.tokens
        self._index, self._begin, self._end = index, begin, end
        self._never = {*eos_ids, *(index.containing_before_more(end) if end else ())}
        self._opening: dict[int, NDArray[np.int32]] = {}
        self._inside: dict[tuple[int, ...], NDArray[np.int32]] = {}

    def opening(self, num_bytes: int) -> NDArray[np.int32]:
        """Words that allow what goes on with `begin` behind its first bytes, see kernels/token_bitmask.py."""
        words = self._opening.get(num_bytes)
        if words is None:
            words = self._opening[num_bytes] = pack_ids(self._index.along(self._begin[num_bytes:]), len(self.tokens))
        return words

    def inside(self, tail: bytes) -> NDArray[np.int32]:
        """Words that allow what may follow within a span that ends with `tail`, where a grammar holds behind it.

        A token that closes the span is the last of it: what it had behind `end`, the grammar would have to take.
        """
        begun = tuple(size for size in range(1, len(self._end)) if tail.endswith(self._end[:size]))
        words = self._inside.get(begun)
        if words is None:
            forbidden = set(self._never)
            for size in begun:
                rest = self._end[size:]
                forbidden.update(i for i in self._index.starting_with(rest) if len(self.tokens[i]) > len(rest))
            words = self._inside[begun] = ~pack_ids(forbidden, len(self.tokens))
        return words


class Place(enum.Enum):
    """Of an output's next token."""

    BEFORE = "before"  # the output may yet turn out to begin with `begin`
    INSIDE = "inside"
    AFTER = "after"  # for good


class ReasoningTracker:
    """Follows one output.

    Args:
        tokens: None where `begin` and `end` are empty and no grammar follows: then `end_ids` alone close the span.

    Raises:
        ValueError: a budget, and nothing to end the span with.
    """

    def __init__(self, span: ReasoningSpan, tokens: SpanTokens | None):
        if span.max_tokens is not None and not span.end_ids:
            raise ValueError("a budget for reasoning needs end_ids")
        self._span, self._tokens = span, tokens
        self.place = Place.INSIDE if span.is_open else Place.BEFORE if span.begin else Place.AFTER
        self._num_opened = 0  # bytes of `begin` that the output has so far
        self._num_inside = 0  # tokens
        self._tail = b""  # what `end` may have begun in

    @property
    def was_opened(self) -> bool:
        """By the output, not by the prompt."""
        return 0 < len(self._span.begin) == self._num_opened

    @property
    def forced(self) -> int | None:
        """The only token that may come next."""
        limit = self._span.max_tokens
        if self.place is not Place.INSIDE or limit is None or self._num_inside < limit:
            return None
        return self._span.end_ids[self._num_inside - limit]

    def opening(self) -> NDArray[np.int32]:
        """Of place BEFORE: words of the tokens that lead into the span."""
        assert self._tokens is not None
        return self._tokens.opening(self._num_opened)

    def inside(self) -> NDArray[np.int32]:
        """Of place INSIDE: words of the tokens that may come where a grammar holds behind the span."""
        assert self._tokens is not None
        return self._tokens.inside(self._tail)

    def feed(self, token_id: int) -> bytes:
        """Take the next token; what of it lies behind `end`."""
        text = b"" if self._tokens is None else self._tokens.tokens[token_id]
        if self.place is Place.BEFORE:
            return self._open(text)
        self._num_inside += 1
        rest = self._close(text)
        limit = self._span.max_tokens
        if limit is not None and self._num_inside == limit + len(self._span.end_ids):
            self.place = Place.AFTER
        return rest

    def _open(self, text: bytes) -> bytes:
        begin = self._span.begin
        so_far = begin[: self._num_opened] + text
        if so_far.startswith(begin):
            self.place, self._num_opened = Place.INSIDE, len(begin)
            return self._close(so_far[len(begin) :])
        if text and begin.startswith(so_far):
            self._num_opened = len(so_far)
        else:
            self.place = Place.AFTER
        return b""

    def _close(self, text: bytes) -> bytes:
        end, recent = self._span.end, self._tail + text
        at = recent.find(end) if end else -1
        if at < 0:
            self._tail = recent[max(0, len(recent) - len(end) + 1) :] if end else b""
            return b""
        self.place = Place.AFTER
        return recent[at + len(end) :]
