"""From logits to token ids on the host: our sampler beside plain torch (softmax, sort-based filters, multinomial).

Ours includes gathering the batch and, for rows with penalties, counting the tokens. `correct`: the tokens are those of
the definition in kernels/sampling.py, computed in float64 (greedy: torch's argmax).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks import report
from pagedray.engine.messages import NewSeq, SamplingParams
from pagedray.engine.worker.sampler import Sampler
from pagedray.engine.worker.sampling_state import SamplingState
from pagedray.kernels.philox import uniform_ref
from pagedray.kernels.sampling import sample_ref

NUM_PROMPT_TOKENS = 300
NUM_CHECKED_ROWS = 8


class Case(NamedTuple):
    name: str
    params: dict[str, float | int]
    num_rows: int = 64
    vocab: int = 49152
    dtype: torch.dtype = torch.float32
    peak: float = 5.0  # standard deviation of the logits: 5 is peaked, 1 is flat

    def __str__(self) -> str:
        dtype = "bf16" if self.dtype == torch.bfloat16 else "fp32"
        return f"{self.name} S={self.num_rows} V={self.vocab} {dtype}"


FILTERS = {"top_k": 50, "top_p": 0.9, "min_p": 0.02}
CASES = [
    Case("greedy", {"temperature": 0.0}),
    Case("greedy", {"temperature": 0.0}, dtype=torch.bfloat16),
    Case("greedy", {"temperature": 0.0}, num_rows=1),
    Case("temperature", {"temperature": 0.8}),
    Case("temperature", {"temperature": 0.8}, dtype=torch.bfloat16),
    Case("temperature", {"temperature": 0.8}, num_rows=1),
    Case("temperature", {"temperature": 0.8}, num_rows=16, vocab=262_144),
    Case("top_k", {"top_k": 50}),
    Case("top_p peaked", {"top_p": 0.9}),
    Case("top_p flat", {"top_p": 0.9}, peak=1.0),
    Case("min_p", {"min_p": 0.05}),
    Case("all filters", FILTERS),
    Case("all filters", FILTERS, num_rows=1),
    Case("all filters", FILTERS, num_rows=16, vocab=262_144, dtype=torch.bfloat16),
    Case("penalties", {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.5}),
    Case("logprobs 5", {"temperature": 0.0, "logprobs": 5}),
]


class Baseline:
    """The usual torch code, for rows that all have the same parameters."""

    def __init__(self, params: SamplingParams, history: Tensor, vocab: int):
        self.params = params
        self.counts = torch.zeros((len(history), vocab))
        self.seen = torch.zeros((len(history), vocab), dtype=torch.bool).scatter_(1, history, True)

    def __call__(self, logits: Tensor) -> list[int]:
        p = self.params
        z = logits.float()
        if p.logprobs is not None:
            logprobs = z.log_softmax(-1)
            [x.tolist() for x in logprobs.topk(p.logprobs)]
        if p.repetition_penalty != 1:
            z = torch.where(self.seen, torch.where(z > 0, z / p.repetition_penalty, z * p.repetition_penalty), z)
            z = z - p.frequency_penalty * self.counts
        tokens = z.argmax(-1) if p.temperature == 0 else self._sample(z / p.temperature)
        if p.repetition_penalty != 1:
            self.counts.scatter_add_(1, tokens.unsqueeze(1), torch.ones((len(tokens), 1)))
        return tokens.tolist()

    def _sample(self, z: Tensor) -> Tensor:
        p = self.params
        if p.min_p > 0:
            probabilities = z.softmax(-1)
            z = z.masked_fill(probabilities < p.min_p * probabilities.amax(-1, keepdim=True), -torch.inf)
        if p.top_k or p.top_p < 1:
            values, ids = z.sort(dim=-1, descending=True)
            if p.top_k:
                values[:, p.top_k :] = -torch.inf
            if p.top_p < 1:
                probabilities = values.softmax(-1)
                values = values.masked_fill(probabilities.cumsum(-1) - probabilities >= p.top_p, -torch.inf)
            z = torch.full_like(z, -torch.inf).scatter_(1, ids, values)
        return z.softmax(-1).multinomial(1).squeeze(1)


class Ours:
    def __init__(self, params: SamplingParams, history: Tensor, vocab: int):
        self.rows = list(range(len(history)))
        self.position = history.shape[1]
        self.state = SamplingState(len(history), vocab, torch.device("cpu"))
        self.sampler = Sampler(self.state)
        for row, ids in enumerate(history.tolist()):
            self.state.add(NewSeq(str(row), row, tuple(ids), len(ids), params, ()))

    def __call__(self, logits: Tensor) -> list[int]:
        batch = self.state.gather(self.rows, [self.position] * len(self.rows))
        return self.sampler.sample(logits, batch).to_messages()[0]


def correct(case: Case, params: SamplingParams, logits: Tensor, history: Tensor) -> bool:
    z = logits[:NUM_CHECKED_ROWS].float()
    tokens = Ours(params, history, case.vocab)(logits)[:NUM_CHECKED_ROWS]
    if params.temperature == 0:
        return tokens == Baseline(params, history, case.vocab)(logits)[:NUM_CHECKED_ROWS]
    u = torch.full((len(z),), uniform_ref(params.seed, history.shape[1]), dtype=torch.float64)
    settings = (params.temperature, params.top_k, params.top_p, params.min_p)
    return tokens == sample_ref(z, u, *(torch.full((len(z),), x) for x in settings)).tolist()


def main() -> None:
    report.header()
    for case in CASES:
        params = SamplingParams(max_tokens=1 << 20, seed=17, **case.params)
        generator = torch.Generator().manual_seed(1)
        logits = (torch.randn((case.num_rows, case.vocab), generator=generator) * case.peak).to(case.dtype)
        history = torch.randint(0, case.vocab, (case.num_rows, NUM_PROMPT_TOKENS), generator=generator)
        is_correct = correct(case, params, logits, history)
        ours, baseline = Ours(params, history, case.vocab), Baseline(params, history, case.vocab)
        with torch.inference_mode():
            times = report.alternate(lambda: ours(logits), lambda: baseline(logits), rounds=9)  # noqa: B023
        (median, spread), (median_baseline, _) = (report.median_and_spread(seconds) for seconds in times)
        report.row(
            "sampling",
            str(case),
            1e3 * median,
            1e3 * median_baseline,
            "torch",
            unit="ms",
            correct="yes" if is_correct else "no",
            spread=spread,
        )


if __name__ == "__main__":
    main()
