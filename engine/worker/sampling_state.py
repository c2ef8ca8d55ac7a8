"""What outlives steps in sampling: each row's parameters and history; and the inputs of one step made from them."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagedray.engine.messages import NewSeq, SamplingParams
from pagedray.engine.worker.token_history import Slots, TokenHistory
from pagedray.kernels.philox import uniform
from pagedray.kernels.token_bitmask import pack_ids

MIN_TEMPERATURE = 1e-5
SMALLEST = float(np.finfo(np.float32).tiny)  # a positive setting below it would become 0 in float32

Method = Literal["greedy", "all", "top_k", "min_p", "top_p"]

# columns of SamplingState.floats
TEMPERATURE, TOP_P, MIN_P = 0, 1, 2
PENALTIES = slice(3, 6)  # repetition, presence, frequency


@dataclass(frozen=True)
class RowIds:
    """Ids that one row may or may not choose; an empty tensor forbids nothing."""

    keep: Tensor | None  # None: all
    forbid: Tensor
    vocab_size: int

    @property
    def is_all(self) -> bool:
        return self.keep is None and not self.forbid.numel()

    @functools.cached_property
    def words(self) -> NDArray[np.int32]:
        """The same as bits, see kernels/token_bitmask.py."""
        forbidden = pack_ids(self.forbid.tolist(), self.vocab_size)
        return ~forbidden if self.keep is None else pack_ids(self.keep.tolist(), self.vocab_size) & ~forbidden


@dataclass(frozen=True)
class TokenMasks:
    """What the constrained rows of a step may choose: all that counts for them, beside biases and penalties."""

    at: NDArray[np.int64]  # [M] rows of the step's logits, ascending
    words: NDArray[np.int32]  # [M, ceil(V / 32)], see kernels/token_bitmask.py

    @functools.cached_property
    def rows(self) -> frozenset[int]:
        return frozenset(self.at.tolist())

    def of(self, part: Sequence[int] | NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """The same of some rows of the logits, by their places in `part`."""
        chosen, order = np.isin(self.at, part), np.argsort(part)
        return order[np.searchsorted(part, self.at[chosen], sorter=order)], self.words[chosen]


@dataclass(frozen=True)
class Row:
    """What the host knows of one row."""

    seed: int
    num_prompt_tokens: int
    method: Method
    width: int  # of the candidate list, for method top_k
    min_tokens: int
    early: RowIds  # while there are fewer than min_tokens outputs
    late: RowIds
    bias_ids: Tensor
    bias: Tensor
    has_penalties: bool
    num_logprobs: int | None

    def ids(self, position: int) -> RowIds:
        return self.early if position - self.num_prompt_tokens < self.min_tokens else self.late

    def is_edited(self, position: int) -> bool:
        """Whether anything changes its logits before temperature."""
        return self.has_penalties or not self.ids(position).is_all or self.bias_ids.numel() > 0


@dataclass(frozen=True)
class Edits:
    """Arguments of `edit_logits`, whose positions are within one group's logits."""

    keep_rows: Tensor
    keep: Tensor
    forbid: Tensor
    biased: Tensor
    bias: Tensor


@dataclass(frozen=True)
class Penalised:
    at: Tensor  # [E] int64 rows of the group's logits
    slots: Slots  # in the token history


@dataclass(frozen=True)
class Masked:
    """Arguments of `mask_tokens`."""

    at: Tensor  # [E] int64 rows of the group's logits
    words: Tensor  # [E, ceil(V / 32)] int32


@dataclass(frozen=True)
class Group:
    """Rows of a batch that take the same way to a token; at most `max_rows` where that way makes copies of logits."""

    method: Method
    width: int
    at: slice | Tensor  # R rows of the batch's logits
    floats: Tensor  # [R, 6] float32, see SamplingState
    top_k: Tensor  # [R] int64
    u: Tensor  # [R] float64 uniform numbers; 0 in a greedy group
    masked: Masked | None
    edits: Edits | None
    penalised: Penalised | None

    @property
    def is_edited(self) -> bool:
        """Whether anything changes logits before temperature."""
        return not (self.masked is None and self.edits is None and self.penalised is None)


@dataclass(frozen=True)
class SamplingBatch:
    """One step's sampling inputs, for logits [S, V]."""

    groups: tuple[Group, ...]
    num_logprobs: tuple[int | None, ...]  # per row; None: not asked


class SamplingState:
    """Sampling parameters of all rows, on the host, and token histories, on the device."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device):
        self.vocab_size, self.device = vocab_size, device
        self.floats = torch.zeros((num_rows, 6), dtype=torch.float32)
        self.top_k = torch.zeros(num_rows, dtype=torch.int64)
        self.history = TokenHistory(device)
        self.rows: list[Row | None] = [None] * num_rows

    @torch.inference_mode()
    def add(self, seq: NewSeq) -> None:
        """Take over a row, for a new sequence or for one that comes back with its output so far."""
        self.free(seq.row)
        p = seq.params
        top_k = p.top_k if 0 < p.top_k < self.vocab_size else 0
        method, width = _method(p, top_k)
        early, late = self._row_ids(seq)
        biases: dict[int, float] = defaultdict(float)
        for token_id, bias in p.logit_bias:
            biases[token_id] += bias
        has_penalties = p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0
        self.rows[seq.row] = Row(
            seed=p.seed,
            num_prompt_tokens=seq.num_prompt_tokens,
            method=method,
            width=width,
            min_tokens=p.min_tokens,
            early=early,
            late=late,
            bias_ids=torch.tensor(list(biases), dtype=torch.int64),
            bias=torch.tensor(list(biases.values()), dtype=torch.float32),
            has_penalties=has_penalties,
            num_logprobs=p.logprobs,
        )
        penalties = max(p.repetition_penalty, SMALLEST), p.presence_penalty, p.frequency_penalty
        floats = (p.temperature, max(p.top_p, SMALLEST), p.min_p, *penalties)
        self.floats[seq.row] = torch.tensor(floats, dtype=torch.float32)
        self.top_k[seq.row] = top_k
        if has_penalties:
            prompt, output = seq.token_ids[: seq.num_prompt_tokens], seq.token_ids[seq.num_prompt_tokens :]
            self.history.add(seq.row, prompt if p.repetition_penalty != 1 else (), output)

    def free(self, row: int) -> None:
        self.rows[row] = None
        self.history.free(row)

    @torch.inference_mode()
    def gather(self, rows: Sequence[int], positions: Sequence[int], masks: TokenMasks | None = None) -> SamplingBatch:
        """Inputs of one step on a CPU.

        Args:
            rows: the rows that sample, in the order of the logits.
            positions: of the token each will get: the number of tokens before it.
            masks: what constraints let them choose.
        """
        used = [self._row(row) for row in rows]
        masks = masks and self._with_row_ids(masks, used, positions)
        masked = masks.rows if masks else frozenset()
        by_way: dict[tuple[Method, int, bool], list[int]] = defaultdict(list)
        for i, row in enumerate(used):
            by_way[row.method, row.width, i in masked or row.is_edited(positions[i])].append(i)
        groups = []
        for (method, width, is_edited), members in by_way.items():
            copies = is_edited or method != "greedy"
            step = max_rows(self.vocab_size, self.device) if copies else len(members)
            numbers = self._uniform(used, positions, members) if method != "greedy" else np.zeros(len(members))
            for first in range(0, len(members), step):
                part = members[first : first + step]
                index = torch.tensor([rows[i] for i in part])
                at, words = masks.of(part) if masks and is_edited else (np.arange(0), None)
                groups.append(
                    Group(
                        method=method,
                        width=width,
                        at=rows_at(part, self.device),
                        floats=self.floats[index],
                        top_k=self.top_k[index],
                        u=torch.from_numpy(numbers[first : first + step]),
                        masked=Masked(torch.from_numpy(at), torch.from_numpy(words)) if len(at) else None,
                        edits=self._edits([used[i] for i in part], [positions[i] for i in part], at),
                        penalised=self._penalised([rows[i] for i in part]),
                    )
                )
        return SamplingBatch(tuple(groups), tuple(row.num_logprobs for row in used))

    def _row(self, row: int) -> Row:
        found = self.rows[row]
        assert found is not None, f"row {row} samples without a sequence"
        return found

    def _uniform(self, used: list[Row], positions: Sequence[int], members: list[int]) -> NDArray[np.float64]:
        seeds = np.array([used[i].seed for i in members], dtype=np.int64)
        return uniform(seeds, np.array([positions[i] for i in members], dtype=np.int64))

    def _with_row_ids(self, masks: TokenMasks, used: list[Row], positions: Sequence[int]) -> TokenMasks:
        """With the restrictions of the rows' own parameters, as far as these leave a token: first min_tokens yields."""
        words = None
        for k, i in enumerate(masks.at.tolist()):
            row = used[i]
            for ids in (row.ids(positions[i]), row.late):
                if ids.is_all:
                    break
                both = masks.words[k] & ids.words
                if both.any():
                    words = masks.words.copy() if words is None else words
                    words[k] = both
                    break
        return masks if words is None else replace(masks, words=words)

    def _row_ids(self, seq: NewSeq) -> tuple[RowIds, RowIds]:
        """Restrictions before and after min_tokens outputs.

        min_tokens yields where it would leave no token; bad ids do so too, though requests like that are refused.
        """
        allowed, bad = set(seq.params.allowed_token_ids), set(seq.params.bad_token_ids)
        stop = set(seq.stop_ids)
        if allowed:
            allowed = allowed - bad or allowed
            early = allowed - stop or allowed
            return self._allowing(early), self._allowing(allowed)
        bad = bad if len(bad) < self.vocab_size else set()
        early = bad | stop if len(bad | stop) < self.vocab_size else bad
        return RowIds(None, self._ids(early), self.vocab_size), RowIds(None, self._ids(bad), self.vocab_size)

    def _allowing(self, ids: set[int]) -> RowIds:
        return RowIds(self._ids(ids), self._ids(), self.vocab_size)

    def _ids(self, ids: Iterable[int] = ()) -> Tensor:
        return torch.tensor(sorted(ids), dtype=torch.int64)

    def _edits(self, used: list[Row], positions: list[int], masked: NDArray[np.int64]) -> Edits | None:
        """
        Args:
            masked: those whose masks say what they may choose: only their biases are left.
        """
        is_masked = frozenset(masked.tolist())
        keep_rows: list[int] = []
        keep, forbid, biased, bias = [], [], [], []
        for i, row in enumerate(used):
            ids = row.ids(positions[i])
            first = i * self.vocab_size
            if ids.keep is not None and i not in is_masked:
                keep_rows.append(i)
                keep.append(ids.keep + first)
            if ids.forbid.numel() and i not in is_masked:
                forbid.append(ids.forbid + first)
            if row.bias_ids.numel():
                biased.append(row.bias_ids + first)
                bias.append(row.bias)
        if not (keep or forbid or biased):
            return None
        none = self._ids()
        return Edits(
            keep_rows=self._ids(keep_rows),
            keep=torch.cat(keep) if keep else none,
            forbid=torch.cat(forbid) if forbid else none,
            biased=torch.cat(biased) if biased else none,
            bias=torch.cat(bias) if bias else none.float(),
        )

    def _penalised(self, rows: list[int]) -> Penalised | None:
        at = [i for i, row in enumerate(rows) if self._row(row).has_penalties]
        return Penalised(self._ids(at), self.history.slots([rows[i] for i in at])) if at else None


def max_rows(vocab_size: int, device: torch.device) -> int:
    """Rows computed at once. Rows are independent, so a CPU takes few enough for float32 copies to stay in its cache:
    twice as fast as all rows together, and without a page fault per 4 KiB of a temporary."""
    return max(1, (2**21 if device.type == "cpu" else 2**28) // (4 * vocab_size))


def rows_at(rows: Sequence[int], device: torch.device) -> slice | Tensor:
    """Index of ascending rows; a slice where they are neighbours, which copies nothing."""
    if rows[-1] - rows[0] == len(rows) - 1:
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows, device=device)


def _method(p: SamplingParams, top_k: int) -> tuple[Method, int]:
    if p.temperature < MIN_TEMPERATURE:
        return "greedy", 0
    if top_k:  # the width follows from top_k alone, so that sums over candidates don't depend on the batch
        return "top_k", max(64, 1 << (top_k - 1).bit_length())
    if np.float32(p.top_p) < 1:  # as the kernel will see it
        return "top_p", 0
    return ("min_p", 0) if p.min_p > 0 else ("all", 0)
