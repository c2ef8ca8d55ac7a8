"""What a batch has come to: a bar while it runs, a sentence at its end."""

from __future__ import annotations

import sys
import time
from typing import Any

from tqdm import tqdm

from pagedray.deployments.commands.batch_line import Result
from pagedray.deployments.commands.batch_sender import num_output_tokens

BAR_S, LOG_BAR_S = 0.1, 10.0  # between redrawings, on a terminal and elsewhere


class BatchProgress:
    """
    Args:
        total: lines of the input.
        num_kept: those whose results were there.
        is_shown: whether there is a bar.
    """

    def __init__(self, total: int, num_kept: int, is_shown: bool):
        self._total, self._num_kept, self._is_shown = total, num_kept, is_shown
        self._num_written = self._num_failed = self._num_tokens = 0
        self._began_s = time.monotonic()
        self._bar: tqdm[Any] | None = None

    def begin(self) -> None:
        """From now on requests are sent: what came before is not their time."""
        self._began_s = time.monotonic()
        self._bar = tqdm(
            desc="batch",
            unit="req",
            total=self._total,
            initial=self._num_kept,
            smoothing=0,
            mininterval=BAR_S if sys.stderr.isatty() else LOG_BAR_S,
            disable=not self._is_shown,
        )

    def wrote(self, result: Result) -> None:
        self._num_written += 1
        self._num_failed += result.error is not None
        self._num_tokens += num_output_tokens(result)
        if self._bar is not None:
            self._bar.set_postfix_str(self._figures, refresh=False)
            self._bar.update()

    def waits(self, reason: str) -> None:
        """A request will be sent again."""
        if self._bar is not None:
            self._bar.set_postfix_str(f"{self._figures}; {reason}, trying again")

    def end(self) -> None:
        if self._bar is not None:
            self._bar.close()

    @property
    def summary(self) -> str:
        kept = f", {self._num_kept} were there already" if self._num_kept else ""
        return f"{self._num_written} results written{kept}; {self._figures}, {self._num_tokens} tokens"

    @property
    def _figures(self) -> str:
        rate = self._num_tokens / max(1e-9, time.monotonic() - self._began_s)
        return f"{self._num_failed} failed, {rate:.1f} tok/s"
