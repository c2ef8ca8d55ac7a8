"""From logits to tokens: what each row asked for, applied in one fixed order.

    raw logits → logprobs (the model's own distribution)
               → allowed, bad and min_tokens ids → logit_bias → repetition → frequency and presence penalties
               → temperature → top_k → min_p → top_p → choice                      (see kernels/sampling.py)

A token is a function of its row's logits, parameters and history and of (seed, position): not of the row, the other
rows, or a preemption. Temperatures below 1e-5 are greedy, as in vLLM: the division would only overflow.

Logits that are not numbers don't fail the step: NaN and -inf count as -1e30 and +inf as 1e30, so that a row without
one usable logit gets its lowest allowed id (greedy) or any of them (sampling), and its neighbours notice nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from pagedray.engine.messages import NewSeq, TokenLogprobs
from pagedray.engine.worker.token_history import TokenHistory
from pagedray.kernels.logit_edits import edit_logits
from pagedray.kernels.logprobs import Logprobs, token_logprobs
from pagedray.kernels.philox import uniform
from pagedray.kernels.sampling import NUM_CANDIDATES, greedy, sample_all, sample_top_k, sample_top_p

MIN_TEMPERATURE = 1e-5
HUGE = 1e30  # finite in float32 even after division by the smallest temperature
LOWEST_LOGPROB = -9999.0  # instead of -inf, which JSON doesn't have
PROMPT_LOGPROBS_CHUNK_BYTES = 64 * 2**20

Method = Literal["greedy", "all", "top_k", "top_p"]

# columns of SamplingState.floats
TEMPERATURE, TOP_P, MIN_P = 0, 1, 2
PENALTIES = slice(3, 6)  # repetition, presence, frequency


@dataclass(frozen=True)
class RowIds:
    """Ids that one row may or may not choose; empty tensors where nothing is restricted."""

    keep: Tensor | None  # None: all
    forbid: Tensor

    @property
    def is_free(self) -> bool:
        return self.keep is None and not self.forbid.numel()


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
class Group:
    """Rows of a batch that one method serves."""

    method: Method
    width: int
    at: Tensor | None  # [R] int64 rows of the logits; None: all, in order


@dataclass(frozen=True)
class Edits:
    """Arguments of `edit_logits`, for the whole batch."""

    keep_rows: Tensor
    keep: Tensor
    forbid: Tensor
    biased: Tensor
    bias: Tensor


@dataclass(frozen=True)
class Penalised:
    at: Tensor  # [E] int64 rows of the logits
    slots: list[int]  # in the token history


@dataclass(frozen=True)
class SamplingBatch:
    """One step's sampling inputs, aligned with the rows of its logits."""

    floats: Tensor  # [S, 6] float32, see SamplingState
    top_k: Tensor  # [S] int64
    u: Tensor  # [S] float64 uniform numbers; 0 for greedy rows
    groups: tuple[Group, ...]
    edits: Edits | None
    penalised: Penalised | None
    num_logprobs: tuple[int | None, ...]  # per row: None where nobody asked


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
        method: Method = "all"
        if p.temperature < MIN_TEMPERATURE:
            method = "greedy"
        elif top_k:
            method = "top_k"
        elif p.top_p < 1 or p.min_p > 0:
            method = "top_p"
        early, late = self._row_ids(seq)
        biases: dict[int, float] = defaultdict(float)
        for token_id, bias in p.logit_bias:
            biases[token_id] += bias
        has_penalties = p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0
        self.rows[seq.row] = Row(
            seed=p.seed,
            num_prompt_tokens=seq.num_prompt_tokens,
            method=method,
            width=max(NUM_CANDIDATES, 1 << (top_k - 1).bit_length()) if method == "top_k" else 0,
            min_tokens=p.min_tokens,
            early=early,
            late=late,
            bias_ids=torch.tensor(list(biases), dtype=torch.int64, device=self.device),
            bias=torch.tensor(list(biases.values()), dtype=torch.float32, device=self.device),
            has_penalties=has_penalties,
            num_logprobs=p.logprobs,
        )
        penalties = p.repetition_penalty, p.presence_penalty, p.frequency_penalty
        self.floats[seq.row] = torch.tensor((p.temperature, p.top_p, p.min_p, *penalties), dtype=torch.float32)
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
        by_method: dict[tuple[Method, int], list[int]] = defaultdict(list)
        for i, row in enumerate(used):
            by_method[row.method, row.width].append(i)
        is_whole = len(by_method) == 1
        groups = tuple(
            Group(method, width, None if is_whole else torch.tensor(at, device=self.device))
            for (method, width), at in by_method.items()
        )
        u = np.zeros(len(rows))
        drawn = [i for i, row in enumerate(used) if row.method != "greedy"]
        if drawn:
            seeds = np.array([used[i].seed for i in drawn], dtype=np.int64)
            u[drawn] = uniform(seeds, np.array([positions[i] for i in drawn], dtype=np.int64))
        index = torch.tensor(rows, dtype=torch.int64, device=self.device)
        penalised = [i for i, row in enumerate(used) if row.has_penalties]
        return SamplingBatch(
            floats=self.floats[index],
            top_k=self.top_k[index],
            u=torch.from_numpy(u).to(self.device),
            groups=groups,
            edits=self._edits(used, positions),
            penalised=Penalised(
                torch.tensor(penalised, device=self.device), self.history.slots([rows[i] for i in penalised])
            )
            if penalised
            else None,
            num_logprobs=tuple(row.num_logprobs for row in used),
        )

    def _row(self, row: int) -> Row:
        found = self.rows[row]
        assert found is not None, f"row {row} samples without a sequence"
        return found

    def _row_ids(self, seq: NewSeq) -> tuple[RowIds, RowIds]:
        """Restrictions before and after min_tokens outputs.

        min_tokens yields where it would leave no token; bad ids do so too, though requests like that are refused.
        """
        p = seq.params
        allowed = set(p.allowed_token_ids)
        bad = set(p.bad_token_ids)
        stop = set(seq.stop_ids)
        if allowed:
            allowed = allowed - bad or allowed
            late = RowIds(self._ids(allowed), self._ids(()))
            return RowIds(self._ids(allowed - stop or allowed), self._ids(())), late
        late = RowIds(None, self._ids(bad if len(bad) < self.vocab_size else ()))
        return RowIds(None, self._ids(bad | stop)) if len(bad | stop) < self.vocab_size else late, late

    def _ids(self, ids: set[int] | tuple[int, ...]) -> Tensor:
        return torch.tensor(sorted(ids), dtype=torch.int64, device=self.device)

    def _edits(self, used: list[Row], positions: Sequence[int]) -> Edits | None:
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
        none = self._ids(())
        return Edits(
            keep_rows=torch.tensor(keep_rows, dtype=torch.int64, device=self.device),
            keep=torch.cat(keep) if keep else none,
            forbid=torch.cat(forbid) if forbid else none,
            biased=torch.cat(biased) if biased else none,
            bias=torch.cat(bias) if bias else none.float(),
        )


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
        asked = [(i, k) for i, k in enumerate(self._num_logprobs) if k is not None]
        targets = self.token_ids[torch.tensor([i for i, _ in asked], device=self.token_ids.device)].tolist()
        entries = _to_messages(targets, self._logprobs, [k for _, k in asked])
        return {i: entry for (i, _), entry in zip(asked, entries, strict=True)}


class Sampler:
    def __init__(self, state: SamplingState):
        self.state = state

    @torch.inference_mode()
    def sample(self, logits: Tensor, batch: SamplingBatch) -> SampledTokens:
        """Choose a token for each row and count it in the row's history.

        Args:
            logits: [S, V] of any float dtype; left as they are.
        """
        raw = _usable(logits)
        z = self._edited(raw, batch)
        tokens = torch.empty(len(z), dtype=torch.int64, device=z.device)
        for group in batch.groups:
            if group.at is None:
                tokens = self._choose(z, batch.u, batch.floats, batch.top_k, group)
            else:
                at = group.at
                tokens[at] = self._choose(z[at], batch.u[at], batch.floats[at], batch.top_k[at], group)
        if batch.penalised is not None:
            self.state.history.count(batch.penalised.slots, tokens[batch.penalised.at])
        return SampledTokens(tokens, batch.num_logprobs, self._logprobs(raw, tokens, batch.num_logprobs))

    def _edited(self, raw: Tensor, batch: SamplingBatch) -> Tensor:
        if batch.edits is None and batch.penalised is None:
            return raw
        # -inf must be left to mean forbidden, or a row could end up without a choice
        z = raw.to(torch.float32, copy=True).clamp_(min=-HUGE)
        if batch.edits is not None:
            e = batch.edits
            edit_logits(z, e.keep_rows, e.keep, e.forbid, e.biased, e.bias)
        if batch.penalised is not None:
            penalties = batch.floats[batch.penalised.at, PENALTIES]
            self.state.history.penalise(z, batch.penalised.at, batch.penalised.slots, penalties)
            z.clamp_(max=HUGE)  # a repetition penalty near 0 may overflow
        return z

    def _choose(self, z: Tensor, u: Tensor, floats: Tensor, top_k: Tensor, group: Group) -> Tensor:
        if group.method == "greedy":
            return greedy(z)
        z = z.float()
        temperature, top_p, min_p = floats[:, TEMPERATURE], floats[:, TOP_P], floats[:, MIN_P]
        if group.method == "all":
            return sample_all(z, u, temperature)
        if group.method == "top_k":
            return sample_top_k(z, u, temperature, top_k, top_p, min_p, group.width)
        return sample_top_p(z, u, temperature, top_p, min_p)

    def _logprobs(self, raw: Tensor, tokens: Tensor, num_logprobs: tuple[int | None, ...]) -> Logprobs | None:
        asked = [i for i, k in enumerate(num_logprobs) if k is not None]
        if not asked:
            return None
        most = max(k for k in num_logprobs if k is not None)
        if len(asked) == len(num_logprobs):
            return token_logprobs(raw, tokens, most)
        at = torch.tensor(asked, device=raw.device)
        return token_logprobs(raw[at], tokens[at], most)


@torch.inference_mode()
def prompt_logprobs(logits: Tensor, targets: Tensor, k: int) -> list[TokenLogprobs]:
    """Log-probabilities of known tokens: logits [N, V] at the positions before them, targets [N].

    Works in chunks, so that memory beyond the logits stays the same however long the prompt is.
    """
    chunk = max(1, PROMPT_LOGPROBS_CHUNK_BYTES // (4 * logits.shape[1]))
    entries: list[TokenLogprobs] = []
    for start in range(0, len(targets), chunk):
        part = targets[start : start + chunk]
        found = token_logprobs(_usable(logits[start : start + chunk]), part, k)
        entries += _to_messages(part.tolist(), found, [k] * len(part))
    return entries


def _usable(logits: Tensor) -> Tensor:
    """The same logits, with numbers in place of NaN and infinities in the rows that have no finite maximum."""
    broken = ~logits.amax(-1).isfinite()
    if not broken.any():
        return logits
    logits = logits.to(torch.float32, copy=True)
    logits[broken] = torch.nan_to_num(logits[broken], nan=-HUGE, posinf=HUGE, neginf=-HUGE)
    return logits


def _to_messages(targets: list[int], found: Logprobs, num_top: list[int]) -> list[TokenLogprobs]:
    logprobs = found.logprob.clamp(min=LOWEST_LOGPROB).tolist()
    ranks, top_ids = found.rank.tolist(), found.top_ids.tolist()
    top_logprobs = found.top_logprobs.clamp(min=LOWEST_LOGPROB).tolist()
    return [
        TokenLogprobs(target, logprobs[i], ranks[i], tuple(top_ids[i][:k]), tuple(top_logprobs[i][:k]))
        for i, (target, k) in enumerate(zip(targets, num_top, strict=True))
    ]
