"""From logits to tokens: what each row asked for, applied in one fixed order.

    raw logits → logprobs (the model's own distribution)
               → allowed, bad and min_tokens ids → logit_bias → repetition → frequency and presence penalties
               → temperature → top_k → min_p → top_p → choice                      (see kernels/sampling.py)

A token is a function of its row's logits, parameters and history and of (seed, position): not of the row, the other
rows, or a preemption. Temperatures below 1e-5 are greedy, as in vLLM: the division would only overflow.

Logits that are not numbers don't fail the step. In a row whose maximum is not finite, NaN and -inf count as -1e30 and
+inf as 1e30: without one usable logit it gets its lowest allowed id (greedy) or any of them (sampling), and its
neighbours notice nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagedray.engine.messages import NewSeq, SamplingParams, TokenLogprobs
from pagedray.engine.worker.token_history import TokenHistory
from pagedray.kernels.logit_edits import edit_logits
from pagedray.kernels.logprobs import Logprobs, token_logprobs
from pagedray.kernels.philox import uniform
from pagedray.kernels.sampling import greedy, sample_all, sample_min_p, sample_top_k, sample_top_p

MIN_TEMPERATURE = 1e-5
HUGE = 1e30  # finite in float32 even after division by the smallest temperature
LOWEST_LOGPROB = -9999.0  # instead of -inf, which JSON doesn't have
SMALLEST = float(np.finfo(np.float32).tiny)  # a positive setting below it would become 0 in float32

Method = Literal["greedy", "all", "top_k", "min_p", "top_p"]

# columns of SamplingState.floats
TEMPERATURE, TOP_P, MIN_P = 0, 1, 2
PENALTIES = slice(3, 6)  # repetition, presence, frequency


def max_rows(vocab_size: int, device: torch.device) -> int:
    """Rows computed at once. Rows are independent, so a CPU takes few enough for float32 copies to stay in its cache:
    twice as fast as all rows together, and without a page fault per 4 KiB of a temporary."""
    return max(1, (2**21 if device.type == "cpu" else 2**28) // (4 * vocab_size))


@dataclass(frozen=True)
class RowIds:
    """Ids that one row may or may not choose; an empty tensor forbids nothing."""

    keep: Tensor | None  # None: all
    forbid: Tensor


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
    slots: list[int]  # in the token history


@dataclass(frozen=True)
class Group:
    """At most `max_rows` rows of a batch that take the same way to a token."""

    method: Method
    width: int
    at: slice | Tensor  # R rows of the batch's logits
    floats: Tensor  # [R, 6] float32, see SamplingState
    top_k: Tensor  # [R] int64
    u: Tensor  # [R] float64 uniform numbers; 0 in a greedy group
    edits: Edits | None
    penalised: Penalised | None


@dataclass(frozen=True)
class SamplingBatch:
    """One step's sampling inputs, for logits [S, V]."""

    groups: tuple[Group, ...]
    num_logprobs: tuple[int | None, ...]  # per row; None: not asked


class SamplingState:
    """Sampling parameters and token histories of all rows."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device):
        self.vocab_size, self.device = vocab_size, device
        self.floats = torch.zeros((num_rows, 6), dtype=torch.float32, device=device)
        self.top_k = torch.zeros(num_rows, dtype=torch.int64, device=device)
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
            bias_ids=torch.tensor(list(biases), dtype=torch.int64, device=self.device),
            bias=torch.tensor(list(biases.values()), dtype=torch.float32, device=self.device),
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
    def gather(self, rows: Sequence[int], positions: Sequence[int]) -> SamplingBatch:
        """Inputs of one step.

        Args:
            rows: the rows that sample, in the order of the logits.
            positions: of the token each will get: the number of tokens before it.
        """
        used = [self._row(row) for row in rows]
        by_way: dict[tuple[Method, int], list[int]] = defaultdict(list)
        for i, row in enumerate(used):
            by_way[row.method, row.width].append(i)
        step = max_rows(self.vocab_size, self.device)
        groups = []
        for (method, width), members in by_way.items():
            numbers = self._uniform(used, positions, members) if method != "greedy" else np.zeros(len(members))
            for first in range(0, len(members), step):
                part = members[first : first + step]
                index = torch.tensor([rows[i] for i in part], device=self.device)
                groups.append(
                    Group(
                        method=method,
                        width=width,
                        at=_rows_at(part, self.device),
                        floats=self.floats[index],
                        top_k=self.top_k[index],
                        u=torch.from_numpy(numbers[first : first + step]).to(self.device),
                        edits=self._edits([used[i] for i in part], [positions[i] for i in part]),
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

    def _row_ids(self, seq: NewSeq) -> tuple[RowIds, RowIds]:
        """Restrictions before and after min_tokens outputs.

        min_tokens yields where it would leave no token; bad ids do so too, though requests like that are refused.
        """
        allowed, bad = set(seq.params.allowed_token_ids), set(seq.params.bad_token_ids)
        stop = set(seq.stop_ids)
        if allowed:
            allowed = allowed - bad or allowed
            return RowIds(self._ids(allowed - stop or allowed), self._ids()), RowIds(self._ids(allowed), self._ids())
        bad = bad if len(bad) < self.vocab_size else set()
        early = bad | stop if len(bad | stop) < self.vocab_size else bad
        return RowIds(None, self._ids(early)), RowIds(None, self._ids(bad))

    def _ids(self, ids: Iterable[int] = ()) -> Tensor:
        return torch.tensor(sorted(ids), dtype=torch.int64, device=self.device)

    def _edits(self, used: list[Row], positions: list[int]) -> Edits | None:
        keep_rows: list[int] = []
        keep, forbid, biased, bias = [], [], [], []
        for i, row in enumerate(used):
            ids = row.ids(positions[i])
            first = i * self.vocab_size
            if ids.keep is not None:
                keep_rows.append(i)
                keep.append(ids.keep + first)
            if ids.forbid.numel():
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


class SampledTokens:
    """Tokens of one step, on the device until somebody looks at logprobs."""

    def __init__(self, token_ids: Tensor, num_logprobs: tuple[int | None, ...], logprobs: Logprobs | None):
        self.token_ids = token_ids  # [S] int64
        self._num_logprobs = num_logprobs
        self._logprobs = logprobs  # of the rows that asked, in their order

    def logprobs(self, i: int) -> TokenLogprobs | None:
        """Row i's log-probabilities; None when it didn't ask. The first call waits for the device."""
        return self._entries.get(i)

    @cached_property
    def _entries(self) -> dict[int, TokenLogprobs]:
        if self._logprobs is None:
            return {}
        asked = {i: k for i, k in enumerate(self._num_logprobs) if k is not None}
        token_ids = self.token_ids.tolist()
        entries = _to_messages([token_ids[i] for i in asked], self._logprobs, list(asked.values()))
        return dict(zip(asked, entries, strict=True))


class Sampler:
    def __init__(self, state: SamplingState):
        self.state = state

    @torch.inference_mode()
    def sample(self, logits: Tensor, batch: SamplingBatch) -> SampledTokens:
        """Choose a token for each row and count it in the row's history.

        Args:
            logits: [S, V] of any float dtype; left as they are.
        """
        num_logits = logits.shape[1]
        assert num_logits == self.state.vocab_size, f"{num_logits} logits, the vocabulary has {self.state.vocab_size}"
        tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        for group in batch.groups:
            chosen = _choose(self._edited(_usable(logits[group.at]), group), group)
            tokens[group.at] = chosen
            if group.penalised is not None:
                self.state.history.count(group.penalised.slots, chosen[group.penalised.at])
        asked = [(i, k) for i, k in enumerate(batch.num_logprobs) if k is not None]
        logprobs = None
        if asked:
            logprobs = _logprobs(logits, [i for i, _ in asked], tokens, max(k for _, k in asked))
        return SampledTokens(tokens, batch.num_logprobs, logprobs)

    def _edited(self, z: Tensor, group: Group) -> Tensor:
        if group.edits is None and group.penalised is None:
            return z
        z = z.clamp(min=-HUGE)  # a copy, in which -inf will only mean forbidden: what is allowed stays possible
        if group.edits is not None:
            e = group.edits
            edit_logits(z, e.keep_rows, e.keep, e.forbid, e.biased, e.bias)
        if group.penalised is not None:
            at, slots = group.penalised.at, group.penalised.slots
            self.state.history.penalise(z, at, slots, group.floats[at, PENALTIES])
            z.clamp_(max=HUGE)  # a repetition penalty near 0 may overflow
        return z


@torch.inference_mode()
def prompt_logprobs(logits: Tensor, targets: Tensor, k: int) -> list[TokenLogprobs]:
    """Log-probabilities of known tokens: logits [N, V] at the positions before them, targets [N]."""
    if not len(targets):
        return []
    found = _logprobs(logits, range(len(targets)), targets, k)
    return _to_messages(targets.tolist(), found, [k] * len(targets))


def _method(p: SamplingParams, top_k: int) -> tuple[Method, int]:
    if p.temperature < MIN_TEMPERATURE:
        return "greedy", 0
    if top_k:  # the width follows from top_k alone, so that sums over candidates don't depend on the batch
        return "top_k", max(64, 1 << (top_k - 1).bit_length())
    if np.float32(p.top_p) < 1:  # as the kernel will see it
        return "top_p", 0
    return ("min_p", 0) if p.min_p > 0 else ("all", 0)


def _choose(z: Tensor, group: Group) -> Tensor:
    temperature, top_p, min_p = group.floats[:, TEMPERATURE], group.floats[:, TOP_P], group.floats[:, MIN_P]
    match group.method:
        case "greedy":
            return greedy(z)
        case "all":
            return sample_all(z, group.u, temperature)
        case "top_k":
            return sample_top_k(z, group.u, temperature, group.top_k, top_p, min_p, group.width)
        case "min_p":
            return sample_min_p(z, group.u, temperature, min_p)
        case "top_p":
            return sample_top_p(z, group.u, temperature, top_p, min_p)


def _usable(logits: Tensor) -> Tensor:
    """Float32 logits (the same tensor if they are), with finite numbers in rows that have no finite maximum."""
    z = logits.float()
    broken = ~z.amax(-1).isfinite()
    if broken.any():
        z = z.clone()
        z[broken] = torch.nan_to_num(z[broken], nan=-HUGE, posinf=HUGE, neginf=-HUGE)
    return z


def _rows_at(rows: Sequence[int], device: torch.device) -> slice | Tensor:
    """Index of ascending rows; a slice where they are neighbours, which copies nothing."""
    if rows[-1] - rows[0] == len(rows) - 1:
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows, device=device)


def _logprobs(logits: Tensor, rows: Sequence[int], targets: Tensor, k: int) -> Logprobs:
    """Of some rows, a few at a time: memory beyond the logits stays the same however many there are."""
    step = max_rows(logits.shape[1], logits.device)
    parts = []
    for first in range(0, len(rows), step):
        at = _rows_at(rows[first : first + step], logits.device)
        parts.append(token_logprobs(_usable(logits[at]), targets[at], k))
    return Logprobs(*(torch.cat(field) for field in zip(*parts, strict=True)))


def _to_messages(targets: list[int], found: Logprobs, num_top: list[int]) -> list[TokenLogprobs]:
    logprobs = found.logprob.clamp(min=LOWEST_LOGPROB).tolist()
    ranks, top_ids = found.rank.tolist(), found.top_ids.tolist()
    top_logprobs = found.top_logprobs.clamp(min=LOWEST_LOGPROB).tolist()
    return [
        TokenLogprobs(target, logprobs[i], ranks[i], tuple(top_ids[i][:k]), tuple(top_logprobs[i][:k]))
        for i, (target, k) in enumerate(zip(targets, num_top, strict=True))
    ]
