"""From logits to tokens: what each row asked for, applied in one fixed order.

    raw logits → logprobs (the model's own distribution)
               → constraint, allowed, bad, min_tokens ids → logit_bias → repetition → frequency and presence penalties
               → temperature → top_k → min_p → top_p → choice                      (see kernels/sampling.py)

A token is a function of its row's logits, parameters and history and of (seed, position): not of the row, the other
rows, or a preemption. Temperatures below 1e-5 are greedy, as in vLLM: the division would only overflow.

Logits that are not numbers don't fail the step. In a row whose maximum is not finite, NaN and -inf count as -1e30 and
+inf as 1e30: without one usable logit it gets its lowest allowed id (greedy) or any of them (sampling), and its
neighbours notice nothing.

gpu_sampler.py does all this on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pagedray.engine.messages import TokenLogprobs
from pagedray.engine.worker.sampling_state import (
    MIN_P,
    PENALTIES,
    TEMPERATURE,
    TOP_P,
    Group,
    SamplingBatch,
    SamplingState,
    max_rows,
    rows_at,
)
from pagedray.engine.worker.threads import one_thread
from pagedray.kernels.logit_edits import edit_logits
from pagedray.kernels.logprobs import Logprobs, token_logprobs
from pagedray.kernels.sampling import greedy, sample_all, sample_min_p, sample_top_k, sample_top_p
from pagedray.kernels.token_bitmask import mask_tokens

__all__ = ["SampledTokens", "Sampler", "SamplingBatch", "SamplingState", "ScoredTokens", "score_tokens"]

HUGE = 1e30  # finite in float32 even after division by the smallest temperature
LOWEST_LOGPROB = -9999.0  # instead of -inf, which JSON doesn't have


class ScoredTokens:
    """Log-probabilities of some tokens: [N], each with num_top alternatives. They lie where they were computed."""

    def __init__(self, targets: Tensor, num_top: list[int], found: Logprobs):
        self._targets, self._num_top, self._found = targets, num_top, found

    def to_host(self, copy: Callable[[Tensor], Tensor]) -> ScoredTokens:
        """The same, made by `copy`, which may still be under way when it returns."""
        return ScoredTokens(copy(self._targets), self._num_top, Logprobs(*map(copy, self._found)))

    def to_messages(self) -> list[TokenLogprobs]:
        """Of tensors on the host, whose copies are done."""
        found = self._found
        logprobs = found.logprob.clamp(min=LOWEST_LOGPROB).tolist()
        ranks, top_ids = found.rank.tolist(), found.top_ids.tolist()
        top_logprobs = found.top_logprobs.clamp(min=LOWEST_LOGPROB).tolist()
        return [
            TokenLogprobs(target, logprobs[i], ranks[i], tuple(top_ids[i][:k]), tuple(top_logprobs[i][:k]))
            for i, (target, k) in enumerate(zip(self._targets.tolist(), self._num_top, strict=True))
        ]


class SampledTokens:
    """Tokens of one step; like ScoredTokens, on the device or copied to the host."""

    def __init__(self, token_ids: Tensor, asked: list[int], scores: ScoredTokens | None):
        self.token_ids = token_ids  # [S] int64
        self._asked, self._scores = asked, scores  # rows that asked for logprobs, and those of their tokens

    def to_host(self, copy: Callable[[Tensor], Tensor]) -> SampledTokens:
        """The same, made by `copy`, which may still be under way when it returns."""
        return SampledTokens(copy(self.token_ids), self._asked, self._scores and self._scores.to_host(copy))

    def read(self) -> list[int]:
        """Token ids alone."""
        found: list[int] = self.token_ids.tolist()
        return found

    def to_messages(self) -> tuple[list[int], dict[int, TokenLogprobs]]:
        """Of tensors on the host, whose copies are done: token ids, and by row the log-probabilities asked for."""
        entries = self._scores.to_messages() if self._scores else []
        return self.read(), dict(zip(self._asked, entries, strict=True))


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
        with one_thread(logits.device):
            return self._sample(logits, batch)

    def _sample(self, logits: Tensor, batch: SamplingBatch) -> SampledTokens:
        tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        for group in batch.groups:
            if group.method == "greedy" and not group.is_edited:
                chosen = _argmax(logits[group.at])
            else:
                chosen = _choose(self._edited(_usable(logits[group.at]), group), group)
            tokens[group.at] = chosen
            if group.penalised is not None:
                self.state.history.count(group.penalised.slots, chosen[group.penalised.at])
        asked = {i: k for i, k in enumerate(batch.num_logprobs) if k is not None}
        scores = _score(logits, [*asked], tokens, [*asked.values()]) if asked else None
        return SampledTokens(tokens, [*asked], scores)

    def _edited(self, z: Tensor, group: Group) -> Tensor:
        if not group.is_edited:
            return z
        z = z.clamp(min=-HUGE)  # a copy, in which -inf will only mean forbidden: what is allowed stays possible
        if group.masked is not None:
            mask_tokens(z, group.masked.at, group.masked.words)
        if group.edits is not None:
            e = group.edits
            edit_logits(z, e.keep_rows, e.keep, e.forbid, e.biased, e.bias)
        if group.penalised is not None:
            at, slots = group.penalised.at, group.penalised.slots
            self.state.history.penalise(z, at, slots, group.floats[at, PENALTIES])
            z.clamp_(max=HUGE)  # a repetition penalty near 0 may overflow
        return z


@torch.inference_mode()
def score_tokens(logits: Tensor, targets: Tensor, k: int) -> ScoredTokens:
    """Log-probabilities of known tokens: logits [N, V] at the positions before them, targets [N]."""
    num_top = [k] * len(targets)
    if logits.device.type == "cuda":
        return ScoredTokens(targets, num_top, token_logprobs(logits, targets, k))
    if not num_top:
        return ScoredTokens(targets, [], Logprobs(*[targets] * 4))
    with one_thread(logits.device):
        return _score(logits, range(len(targets)), targets, num_top)


def _argmax(logits: Tensor) -> Tensor:
    """Greedy tokens of logits as they come. A row is usable if its choice is: NaN and inf would have been chosen."""
    tokens = greedy(logits)
    is_usable = logits.gather(1, tokens.unsqueeze(1)).isfinite().all()
    return tokens if is_usable else greedy(_usable(logits))


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


def _score(logits: Tensor, rows: Sequence[int], targets: Tensor, num_top: list[int]) -> ScoredTokens:
    """Of some rows, a few at a time: memory beyond the logits stays the same however many there are."""
    step = max_rows(logits.shape[1], logits.device)
    parts, scored = [], []
    for first in range(0, len(rows), step):
        at = rows_at(rows[first : first + step], logits.device)
        scored.append(targets[at])
        parts.append(token_logprobs(_usable(logits[at]), scored[-1], max(num_top)))
    return ScoredTokens(torch.cat(scored), num_top, Logprobs(*(torch.cat(field) for field in zip(*parts, strict=True))))
