"""One step on the host: which tokens of which rows, in the order in which they lie in the batch."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
from numpy.typing import NDArray

from pagedray.engine.messages import SchedulerOutput
from pagedray.engine.worker.row_state import RowState

LAST_SAMPLE = -1  # in token_ids: what the row sampled last, which the device alone may know


@dataclasses.dataclass(frozen=True)
class PromptSpan:
    """Where to find the log-probabilities of a sequence's prompt tokens start … start + len(targets) - 1."""

    index: int  # in SchedulerOutput.scheduled
    start: int
    tokens: slice  # of the batch: their logits are about the targets
    targets: NDArray[np.int64]  # [N]
    num_top: int


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """Sequences with one token come first, whatever their order in the scheduler's plan: attention wants them so.

    Attributes:
        sampled: index in SchedulerOutput.scheduled of each sequence that samples, in that order.
        sampling_row: of each of them.
        sampling_position: of the token to be sampled.
        sampling_tokens: the token of the batch that each of them samples after.
    """

    row: NDArray[np.int64]  # [S]
    start: NDArray[np.int64]  # [S]: position of the first token
    query_start: NDArray[np.int64]  # [S + 1]: first token of each sequence in the batch
    lengths: NDArray[np.int64]  # [S]: tokens of each sequence, this step's included
    num_decoding: int  # sequences with one token
    positions: NDArray[np.int64]  # [T]
    token_ids: NDArray[np.int64]  # [T]
    sampled: tuple[int, ...]
    sampling_row: NDArray[np.int64]
    sampling_position: NDArray[np.int64]
    sampling_tokens: NDArray[np.int64]
    prompt_spans: tuple[PromptSpan, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.positions)

    @property
    def num_seqs(self) -> int:
        return len(self.row)

    @functools.cached_property
    def sampling_rows(self) -> tuple[int, ...]:
        return tuple(self.sampling_row.tolist())

    @functools.cached_property
    def sampling_positions(self) -> tuple[int, ...]:
        return tuple(self.sampling_position.tolist())

    @functools.cached_property
    def wanted_tokens(self) -> NDArray[np.int64] | None:
        """Whose hidden states are wanted, in the order of `sampled`. None: all, as they lie.

        Where nobody's are there is one all the same: a negative index, which finds the first token and says so.
        """
        sampling, num_tokens = self.sampling_tokens, self.num_tokens
        if self.prompt_spans or (len(sampling) == num_tokens and (sampling == np.arange(num_tokens)).all()):
            return None
        return self.sampling_tokens if self.sampled else np.full(1, -num_tokens)

    @property
    def token_rows(self) -> NDArray[np.int64]:
        """[T]: the row of each token."""
        return self.row if self.num_tokens == self.num_seqs else np.repeat(self.row, np.diff(self.query_start))

    @staticmethod
    def of_nothing() -> StepPlan:
        """A step without sequences, such as captured steps hold at first."""
        none = np.zeros(0, np.int64)
        return StepPlan(none, none, np.zeros(1, np.int64), none, 0, none, none, (), none, none, none, ())

    @staticmethod
    def of(rows: RowState, out: SchedulerOutput, by_length: bool) -> StepPlan:
        """
        Args:
            by_length: order sequences with one token by length; else as they are in `out`.
        """
        parts = out.scheduled
        columns = (
            [part.row for part in parts],
            [part.start for part in parts],
            [part.num_tokens for part in parts],
            [part.samples for part in parts],
        )
        row, start, num_tokens, samples = np.array(columns, dtype=np.int64)
        sampled = samples.nonzero()[0]
        sampling_row, sampling_position = row[sampled], (start + num_tokens)[sampled]
        is_chunk = num_tokens > 1
        num_decoding = len(parts) - int(np.count_nonzero(is_chunk))
        if by_length or num_decoding < len(parts):
            key = np.where(is_chunk, np.iinfo(np.int64).max, start if by_length else 0)
            order = np.argsort(key, kind="stable")
            row, start, num_tokens = row[order], start[order], num_tokens[order]
            query_start = np.concatenate([[0], np.cumsum(num_tokens)])
            positions = np.arange(query_start[-1]) + np.repeat(start - query_start[:-1], num_tokens)
            last_token = np.empty(len(order), dtype=np.int64)
            last_token[order] = query_start[1:] - 1
        else:  # a token each, as they are: most steps
            query_start = np.arange(len(parts) + 1)
            positions, last_token = start, query_start[:-1]
        return StepPlan(
            row=row,
            start=start,
            query_start=query_start,
            lengths=start + num_tokens,
            num_decoding=num_decoding,
            positions=positions,
            token_ids=_token_ids(rows, row, start, query_start),
            sampled=tuple(sampled.tolist()),
            sampling_row=sampling_row,
            sampling_position=sampling_position,
            sampling_tokens=last_token[sampled],
            prompt_spans=_prompt_spans(rows, out, last_token) if rows.num_prompt_logprobs else (),
        )


def _token_ids(
    rows: RowState, row: NDArray[np.int64], start: NDArray[np.int64], query_start: NDArray[np.int64]
) -> NDArray[np.int64]:
    token_ids = np.full(int(query_start[-1]), LAST_SAMPLE, dtype=np.int64)
    for i in (start < rows.num_known_cpu[row]).nonzero()[0]:
        first, last = query_start[i : i + 2]
        token_ids[first:last] = rows.token_ids_cpu[row[i]][start[i] : start[i] + last - first]
    return token_ids


def _prompt_spans(rows: RowState, out: SchedulerOutput, last_token: NDArray[np.int64]) -> tuple[PromptSpan, ...]:
    """The logits at position p are about the token at p + 1; what follows the prompt is sampled, not scored."""
    found = []
    for index, seq in enumerate(out.scheduled):
        num_top = rows.num_prompt_logprobs.get(seq.row)
        end = min(seq.start + seq.num_tokens, int(rows.num_prompt_cpu[seq.row]) - 1)
        if num_top is not None and seq.start < end:
            first = int(last_token[index]) - seq.num_tokens + 1
            targets = rows.token_ids_cpu[seq.row][seq.start + 1 : end + 1]
            found.append(PromptSpan(index, seq.start + 1, slice(first, first + end - seq.start), targets, num_top))
    return tuple(found)
