"""Natural-log probabilities of given tokens and of the k most likely ones, with ranks.

    l = log_softmax(z)      logprob = l[target]      rank = 1 + number of v with z[v] > z[target]

Shapes   logits [N, V] any float dtype, targets [N] int64; logprob [N] float32, rank [N] int64,
         top_ids [N, k] int64 and top_logprobs [N, k] float32, most likely first, lower id first among equals.
Dtypes   float32 throughout.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pagedray.kernels.case import Case
from pagedray.kernels.top_candidates import top_candidates, top_candidates_ref


class Logprobs(NamedTuple):
    logprob: Tensor  # [N] float32
    rank: Tensor  # [N] int64
    top_ids: Tensor  # [N, k] int64
    top_logprobs: Tensor  # [N, k] float32


def token_logprobs_ref(logits: Tensor, targets: Tensor, k: int) -> Logprobs:
    z = logits.float()
    logprobs = z - torch.logsumexp(z, dim=-1, keepdim=True)
    at = targets.unsqueeze(1)
    _, top_ids = top_candidates_ref(z, k)
    rank = 1 + (z > z.gather(1, at)).sum(-1)
    return Logprobs(logprobs.gather(1, at).squeeze(1), rank, top_ids, logprobs.gather(1, top_ids))


def token_logprobs(logits: Tensor, targets: Tensor, k: int) -> Logprobs:
    z = logits.float()
    # log_softmax works row by row, so that a value doesn't depend on how many rows were computed together.
    logprobs = torch.log_softmax(z, dim=-1)
    at = targets.unsqueeze(1)
    top_ids = top_candidates(z, k)[1] if k else targets.new_empty((targets.shape[0], 0))
    # Counting float ones is exact below 2^24, and three times as fast as counting booleans.
    higher = torch.gt(z, z.gather(1, at), out=torch.empty_like(z))
    rank = 1 + higher.sum(-1).to(torch.int64)
    return Logprobs(logprobs.gather(1, at).squeeze(1), rank, top_ids, logprobs.gather(1, top_ids))


def make_inputs(case: Case) -> tuple[Tensor, Tensor, int]:
    targets = torch.randint(0, case["V"], (case["N"],), generator=torch.Generator().manual_seed(7))
    return case.randn(case["N"], case["V"]), targets, case["k"]


CASES = [
    Case("token_logprobs", N=1, V=7, k=3),
    Case("token_logprobs", N=5, V=5003, k=20),
    Case("token_logprobs", N=64, V=49152, k=0),
    Case("token_logprobs", N=10, V=49152, k=5, dtype=torch.bfloat16, rtol=2e-5),
]
