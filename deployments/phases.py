"""What a start shows: each phase with its seconds, and what the running one is doing."""

from __future__ import annotations

import time
from typing import TextIO

WIDTH = 34


class Phases:
    """Phases follow each other without gaps, so that they add up to the whole.

    Args:
        out: where lines go; on a terminal the running phase is drawn as well.
        begun_s: wall clock at which the first phase began.
    """

    def __init__(self, out: TextIO, begun_s: float):
        self._out = out
        self._begun_s = self._since_s = begun_s
        self._drawn = False

    def end(self, name: str, detail: str = "", seconds: float | None = None, ago_s: float = 0.0) -> None:
        """Everything since the last phase was `name`.

        Args:
            detail: printed behind the seconds.
            seconds: how long it took, where its owner measured that.
            ago_s: else, how long ago it ended.
        """
        now = time.time()
        ended_s = min(now, self._since_s + seconds) if seconds is not None else max(self._since_s, now - ago_s)
        self._line(f"  {name:<{WIDTH}} {ended_s - self._since_s:6.1f} s  {detail}".rstrip())
        self._since_s = ended_s

    def draw(self, text: str) -> None:
        """Show what is going on, until the next line."""
        if self._out.isatty():
            seconds = time.time() - self._since_s
            self._out.write(f"\r\x1b[K  {text:<{WIDTH}} {seconds:6.1f} s")
            self._out.flush()
            self._drawn = True

    def say(self, text: str) -> None:
        self._line(text)

    @property
    def total_s(self) -> float:
        return self._since_s - self._begun_s

    def _line(self, text: str) -> None:
        self._out.write(("\r\x1b[K" if self._drawn else "") + text + "\n")
        self._out.flush()
        self._drawn = False
