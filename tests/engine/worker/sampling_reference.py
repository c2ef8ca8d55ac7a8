"""One row's next token in numpy, written from the documentation: what the sampler is compared with; and its rows."""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch
from numpy.typing import NDArray

from pagedray.engine.messages import NewSeq, SamplingParams
from pagedray.engine.worker.sampler import SampledTokens, Sampler
from pagedray.engine.worker.sampling_state import SamplingState
from pagedray.kernels.philox import uniform_ref

VOCAB = 150
STOP_IDS = (1, 2)
CPU = torch.device("cpu")


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


def params(**settings) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 100, "seed": 1, **settings})


class Rows:
    """A sampler and the sequences that hold its rows."""

    def __init__(self, num_rows: int, vocab: int = VOCAB):
        self.state, self.sampler = self._make(num_rows, vocab)
        self.held: dict[int, ReferenceSequence] = {}

    def _make(self, num_rows: int, vocab: int) -> tuple[SamplingState, Sampler]:
        state = SamplingState(num_rows, vocab, CPU)
        return state, Sampler(state)

    def add(self, row: int, seq: ReferenceSequence) -> None:
        self.state.add(seq.new_seq(row))
        self.held[row] = seq

    def free(self, row: int) -> ReferenceSequence:
        self.state.free(row)
        return self.held.pop(row)

    def sample(self, logits: torch.Tensor, rows: list[int]) -> SampledTokens:
        batch = self.state.gather(rows, [self.held[row].position for row in rows])
        return self.sampler.sample(logits.to(self.state.device), batch)


def sample_one(logits: list[float], seq: ReferenceSequence) -> int:
    rows = Rows(1, len(logits))
    rows.add(0, seq)
    return rows.sample(torch.tensor([logits]), [0]).token_ids.item()


def step_logits(key: str, position: int, vocab: int = VOCAB, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Logits of one sequence at one position: the same wherever and with whomever it is computed."""
    rng = np.random.default_rng([position, *key.encode()])
    return torch.from_numpy(rng.normal(size=vocab).astype(np.float32) * 3).to(dtype)


def hash_seed(name: str, copy: int) -> int:
    return int.from_bytes(f"{name}{copy}".encode()[-7:], "big")
