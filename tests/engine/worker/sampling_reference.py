"""One row's next token in numpy, written from the documentation: what the sampler is compared with."""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from pagedray.engine.messages import NewSeq, SamplingParams
from pagedray.kernels.philox import uniform_ref


def edited_logits(
    logits: NDArray[np.float32], params: SamplingParams, prompt: list[int], output: list[int], stop_ids: tuple[int, ...]
) -> NDArray[np.float32]:
    """Logits after masks, biases and penalties."""
    z = logits.astype(np.float32).copy()
    vocab = set(range(len(z)))
    possible = (set(params.allowed_token_ids) or vocab) - set(params.bad_token_ids)
    if len(output) < params.min_tokens and possible - set(stop_ids):
        possible -= set(stop_ids)
    z[list(vocab - possible)] = -np.inf
    for token_id, bias in params.logit_bias:
        z[token_id] += np.float32(bias)
    for token_id in {*prompt, *output}:
        r = np.float32(params.repetition_penalty)
        z[token_id] = z[token_id] / r if z[token_id] > 0 else z[token_id] * r
    for token_id, count in Counter(output).items():
        z[token_id] -= np.float32(params.frequency_penalty) * np.float32(count)
        z[token_id] -= np.float32(params.presence_penalty)
    return z


def distribution(z: NDArray[np.float32], params: SamplingParams) -> NDArray[np.float64]:
    """Probabilities by id after temperature and filters; one 1.0 when greedy."""
    order = sorted(range(len(z)), key=lambda i: (-z[i], i))
    if params.temperature < 1e-5:
        p = np.zeros(len(z))
        p[order[0]] = 1.0
        return p
    scaled = z.astype(np.float64) / params.temperature
    p = np.exp(scaled - scaled.max())
    if params.top_k:
        p[order[params.top_k :]] = 0
    p[p < params.min_p * p.max()] = 0
    if params.top_p < 1:
        reached = np.cumsum(p[order]) / p.sum()
        num_kept = 1 + int(np.sum(reached < params.top_p))
        p[order[num_kept:]] = 0
    return p / p.sum()


class ReferenceSequence:
    """One sequence whose every token is checked against the distribution it should have come from."""

    def __init__(self, params: SamplingParams, prompt: list[int], stop_ids: tuple[int, ...] = ()):
        self.params, self.prompt, self.stop_ids = params, prompt, stop_ids
        self.output: list[int] = []

    @property
    def position(self) -> int:
        return len(self.prompt) + len(self.output)

    def new_seq(self, row: int) -> NewSeq:
        return NewSeq("seq", row, (*self.prompt, *self.output), len(self.prompt), self.params, self.stop_ids)

    def expected(self, logits: NDArray[np.float32]) -> NDArray[np.float64]:
        return distribution(edited_logits(logits, self.params, self.prompt, self.output, self.stop_ids), self.params)

    def check_and_append(self, logits: NDArray[np.float32], token_id: int) -> None:
        """The token is the one whose share of [0, 1) holds this step's number; 1e-6 is float32's blur of the edges."""
        p = self.expected(logits)
        assert p[token_id] > 0, f"token {token_id} is impossible"
        if self.params.temperature >= 1e-5:
            u = uniform_ref(self.params.seed, self.position)
            below, above = p[:token_id].sum(), p[: token_id + 1].sum()
            assert below - 1e-6 <= u <= above + 1e-6, f"token {token_id} covers {below}…{above}, the number was {u}"
        self.output.append(token_id)
