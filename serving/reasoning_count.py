"""How many tokens of an output are reasoning."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pagedray.engine.messages import ReasoningSpan


class ReasoningCount:
    """Counts one choice's tokens up to the one that completes the closing text, markup included.

    Args:
        span: where the model reasons; None: nowhere.
        token_bytes: id → its bytes.
    """

    def __init__(self, span: ReasoningSpan | None, token_bytes: Callable[[int], bytes]):
        self._span, self._token_bytes = span, token_bytes
        self._is_over = span is None
        self._is_open = span is not None and span.is_open
        self._tail = b""  # of the reasoning; before it, all there is
        self._num_before = 0
        self.num_tokens = 0

    def add(self, token_ids: Iterable[int]) -> None:
        if not self._is_over:
            for token_id in token_ids:
                self._take(token_id)

    def _take(self, token_id: int) -> None:
        span = self._span
        if self._is_over or span is None:
            return
        self._tail += self._token_bytes(token_id)
        if not self._is_open:
            self._num_before += 1
            begun = self._tail.lstrip()
            if begun.startswith(span.begin):
                self._is_open, self.num_tokens = True, self._num_before - 1
                self._tail = begun[len(span.begin) :]
            else:
                self._is_over = not span.begin.startswith(begun)
                return
        self.num_tokens += 1
        if span.end in self._tail:
            self._is_over = True
        else:
            self._tail = self._tail[-len(span.end) :]
