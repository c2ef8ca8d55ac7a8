"""Finds stop strings in text that comes in pieces."""

from __future__ import annotations

import re
from collections.abc import Sequence


class StopMatcher:
    """Looks for several strings at once; how the text is cut into pieces makes no difference.

    The match that ends first wins; of those that end together, the longest. Each string has an automaton of Knuth,
    Morris and Pratt, whose failure table grows with the longest match so far, so that a long string costs nothing until
    text resembles it. Text is skipped at C speed while no string has begun.
    """

    def __init__(self, stops: Sequence[str]):
        assert stops and all(stops), "a stop string can't be empty"
        self._stops = tuple(dict.fromkeys(stops))
        self._depths = [0] * len(self._stops)  # characters of each string that the text so far ends with
        self._failures: list[list[int]] = [[0] for _ in self._stops]
        self._first = re.compile("[" + re.escape("".join({stop[0] for stop in self._stops})) + "]")

    @property
    def num_held(self) -> int:
        """Characters at the end of the text so far that may be the beginning of a stop string."""
        return max(self._depths)

    def find(self, text: str) -> tuple[str, int] | None:
        """The first stop string that `text` completes, and where in `text` it ends; what follows is not looked at."""
        at = 0
        while at < len(text):
            if not any(self._depths):
                begin = self._first.search(text, at)
                if begin is None:
                    return None
                at = begin.start()
            found = [stop for i, stop in enumerate(self._stops) if self._advance(i, text[at])]
            at += 1
            if found:
                return max(found, key=len), at
        return None

    def skip(self, text: str) -> None:
        """Take text in which no stop string may end, though one may begin."""
        while (match := self.find(text)) is not None:
            text = text[match[1] :]

    def _advance(self, i: int, char: str) -> bool:
        """Move string i's automaton by one character; True when the string is complete."""
        stop, failures, depth = self._stops[i], self._failures[i], self._depths[i]
        while depth and stop[depth] != char:
            depth = failures[depth - 1]
        if stop[depth] == char:
            depth += 1
            if depth > len(failures):
                failures.append(self._next_failure(stop, failures))
        is_complete = depth == len(stop)
        self._depths[i] = failures[depth - 1] if is_complete else depth
        return is_complete

    @staticmethod
    def _next_failure(stop: str, failures: list[int]) -> int:
        char, border = stop[len(failures)], failures[-1]
        while border and stop[border] != char:
            border = failures[border - 1]
        return border + (stop[border] == char)
