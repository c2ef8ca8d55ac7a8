"""Constrained outputs of a worker's rows: which tokens a step may choose, from the tokens that came before.

A step's forward is queued first. Then `masks` waits for the tokens that its constrained rows sampled last, which an
earlier step left on its way to the host, and sampling is queued with what it returns: so steps still run ahead. Steps
in which nobody is constrained wait for nothing. Whatever goes wrong with a row's constraint fails that row alone.

Every rank that samples does all of this, with the same outcome: it follows from the plan and the tokens alone.
"""

from __future__ import annotations

import dataclasses
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pagedray.engine.errors import ConfigError
from pagedray.engine.grammar.vocabulary import Vocabulary
from pagedray.engine.messages import Constraint, NewSeq
from pagedray.engine.worker.bad_sequences import BadSequences
from pagedray.engine.worker.grammar_tables import GrammarTables
from pagedray.engine.worker.output_rules import BrokenRules, OutputRules
from pagedray.engine.worker.reasoning import ReasoningTracker
from pagedray.engine.worker.sampling_state import TokenMasks
from pagedray.engine.worker.step_plan import StepPlan

if TYPE_CHECKING:
    import xgrammar

NEVER = np.iinfo(np.int64).max  # beyond every position
MOST_PENDING = 8  # steps whose tokens nobody needed yet: as a rule more than are in flight, so the oldest is done
MOST_THREADS = 8  # that fill masks at once


class PendingTokens(Protocol):
    def wait_for_tokens(self) -> list[int]:
        """Those that a step sampled, in the order of `StepPlan.sampled`."""


@dataclasses.dataclass(eq=False)
class _Row:
    """A constrained output that holds a row."""

    seq_id: str
    row: int
    made: Future[OutputRules]  # as they are behind the output that the sequence came with
    is_live: bool = True


class Constraints:
    """
    Args:
        num_rows: most sequences that run at once.
        load_vocabulary: of the model; called once, in a thread of its own.
    """

    def __init__(self, num_rows: int, vocab_size: int, load_vocabulary: Callable[[], Vocabulary]):
        self._vocab_size, self._load_vocabulary = vocab_size, load_vocabulary
        self._rows: dict[int, _Row] = {}
        # Tokens at lower positions may be any: those of prompts, and of reasoning that has budget left.
        self._masked_from = np.full(num_rows, NEVER, dtype=np.int64)
        self._pending: deque[tuple[PendingTokens, list[tuple[_Row, int]]]] = deque()  # not fed to rules, oldest first
        self._failed: list[tuple[str, str]] = []
        self._thread: ThreadPoolExecutor | None = None
        self._tables: Future[GrammarTables] | None = None
        self._filler: xgrammar.BatchGrammarMatcher | None = None

    def start(self) -> None:
        """Begin to load what every constraint needs; returns at once."""
        if self._tables is None:
            self._tables = self._submit(self._load)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def add(self, seq: NewSeq) -> None:
        """Take over a row, for a new sequence or for one that comes back with its output so far."""
        constraint = seq.params.constraint
        masked_from = NEVER if constraint is None else _first_masked(constraint)
        if constraint is None or masked_from == NEVER:
            return
        if _needs_tables(constraint):
            self.start()
        output = seq.token_ids[seq.num_prompt_tokens :]
        made = self._submit(lambda: self._make(constraint, seq.stop_ids, output))
        self._rows[seq.row] = _Row(seq.seq_id, seq.row, made)
        self._masked_from[seq.row] = seq.num_prompt_tokens + masked_from

    def free(self, row: int) -> None:
        found = self._rows.pop(row, None)
        if found is not None:
            found.is_live = False
            self._masked_from[row] = NEVER
            if not self._rows:
                self._pending.clear()

    def will_mask(self, step: StepPlan) -> bool:
        """Whether `masks` may return any."""
        return bool(self._rows) and bool(self._masked(step).any())

    def masks(self, step: StepPlan) -> TokenMasks | None:
        """What the step's constrained rows may choose; waits until their last tokens are known. None: nobody is."""
        if not self._rows:
            return None
        wanted = {i: self._rows[step.sampling_rows[i]] for i in self._masked(step).nonzero()[0].tolist()}
        if not wanted:
            return None
        self._catch_up(set(wanted.values()))
        words = np.empty((len(wanted), -(-self._vocab_size // 32)), dtype=np.int32)
        is_masked = self._fill(words, [*wanted.values()])
        if self._vocab_size % 32:
            words[:, -1] &= (1 << self._vocab_size % 32) - 1  # xgrammar sets the bits past the vocabulary
        for k, row in enumerate(wanted.values()):
            if is_masked[k] and not words[k].any():
                self._fail(
                    row, BrokenRules("no token of the model's vocabulary goes on with what the grammar asks for")
                )
                is_masked[k] = False
        if not is_masked.any():
            return None
        return TokenMasks(np.array([*wanted], dtype=np.int64)[is_masked], words[is_masked])

    def await_tokens(self, step: StepPlan, pending: PendingTokens) -> None:
        """The step's tokens will be in `pending`."""
        if not self._rows or not step.sampled:
            return
        found = [(self._rows[row], i) for i, row in enumerate(step.sampling_rows) if row in self._rows]
        if found:
            self._pending.append((pending, found))
            if len(self._pending) > MOST_PENDING:
                self._feed(*self._pending.popleft())

    def take_failed(self) -> tuple[tuple[str, str], ...]:
        """Sequences that can't go on, and why, since the last call."""
        if not self._failed:
            return ()
        failed, self._failed = tuple(self._failed), []
        return failed

    def _masked(self, step: StepPlan) -> NDArray[np.bool_]:
        is_masked: NDArray[np.bool_] = step.sampling_position >= self._masked_from[step.sampling_row]
        return is_masked

    def _catch_up(self, rows: set[_Row]) -> None:
        """Feed rules as far as these rows need it."""
        needed = [k for k, (_, found) in enumerate(self._pending) if any(row in rows for row, _ in found)]
        for _ in range(needed[-1] + 1 if needed else 0):
            if self._pending:  # what a token ends is free, and of no rows no steps are pending
                self._feed(*self._pending.popleft())

    def _feed(self, pending: PendingTokens, found: list[tuple[_Row, int]]) -> None:
        live = [(row, i) for row, i in found if row.is_live]
        token_ids = pending.wait_for_tokens() if live else []
        for row, i in live:
            try:
                rules = row.made.result()
                rules.feed(token_ids[i])
            except Exception as error:  # of whatever kind, of xgrammar's or ours: the neighbours go on
                self._fail(row, error)
            else:
                if rules.is_over:
                    self.free(row.row)

    def _fill(self, words: NDArray[np.int32], rows: list[_Row]) -> NDArray[np.bool_]:
        """Write what each of them may choose; whether it is restricted at all."""
        is_masked = np.zeros(len(rows), dtype=np.bool_)
        alone: dict[int, xgrammar.GrammarMatcher] = {}  # grammars that decide alone: filled together
        for k, row in enumerate(rows):
            if not row.is_live:
                continue
            try:
                rules = row.made.result()
                if (matcher := rules.next_matcher) is not None:
                    alone[k] = matcher
                    is_masked[k] = True
                else:
                    is_masked[k] = rules.fill(words[k])
            except Exception as error:
                self._fail(row, error)
        if alone:
            try:
                self._batch().batch_fill_next_token_bitmask([*alone.values()], words, [*alone])
            except Exception:  # it doesn't say whose
                for k, matcher in alone.items():
                    try:
                        matcher.fill_next_token_bitmask(words, k)
                    except Exception as error:
                        self._fail(rows[k], error)
                        is_masked[k] = False
        return is_masked

    def _batch(self) -> xgrammar.BatchGrammarMatcher:
        if self._filler is None:
            import xgrammar

            threads = min(MOST_THREADS, max(1, len(os.sched_getaffinity(0)) // 2))
            self._filler = xgrammar.BatchGrammarMatcher(threads)
        return self._filler

    def _fail(self, row: _Row, error: Exception) -> None:
        self._failed.append((row.seq_id, f"its constraint failed: {str(error).strip() or type(error).__name__}"))
        self.free(row.row)

    def _make(self, constraint: Constraint, stop_ids: tuple[int, ...], output: tuple[int, ...]) -> OutputRules:
        if self._tables is None or not _needs_tables(constraint):
            span, bad = constraint.reasoning, constraint.bad_sequences
            rules = OutputRules(
                None if span is None else ReasoningTracker(span, None),
                None,
                BadSequences(bad, self._vocab_size) if bad else None,
            )
        else:
            rules = self._tables.result().rules(constraint, stop_ids)
        for token_id in output:
            rules.feed(token_id)
        return rules

    def _load(self) -> GrammarTables:
        try:
            return GrammarTables(self._load_vocabulary())
        except ConfigError as error:
            raise BrokenRules(f"this model's outputs can't be constrained: {error}") from error

    def _submit(self, function: Callable[[], Any]) -> Future[Any]:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pagedray-constraints")
        return self._thread.submit(function)


def _first_masked(constraint: Constraint) -> int:
    """Number of the first output token that may be restricted; the ones before need not be known to choose it."""
    span, bad = constraint.reasoning, constraint.bad_sequences
    if constraint.grammar is not None:
        return 0
    first = NEVER if span is None or span.max_tokens is None else span.max_tokens
    return min(first, *(len(sequence) - 1 for sequence in bad)) if bad else first


def _needs_tables(constraint: Constraint) -> bool:
    """Unless ids alone end its reasoning, and nothing holds behind it."""
    span = constraint.reasoning
    return constraint.grammar is not None or (span is not None and bool(span.begin or span.end))
