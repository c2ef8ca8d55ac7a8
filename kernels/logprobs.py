"""Natural-log probabilities of given tokens and of the k most likely ones, with ranks.

    l = log_softmax(z)      logprob = l[target]      rank = 1 + number of v with z[v] > z[target]

Shapes   logits [N, V] any float dtype, targets [N] int64; logprob [N] float32, rank [N] int64,
         top_ids [N, k] int64 and top_logprobs [N, k] float32, most likely first, lower id first among equals.
Dtypes   float32 throughout.
Broken   see finite_logits.py for NaN and infinities on a GPU; on a CPU the caller sees to it that each row's maximum is
         finite.
Method   of the kernel: one program a row. Keys of 64 bits hold a logit and its id, so that their order is the total
         order of top_candidates.py. Each part of 128 tokens has its best key in a list; the highest of these is the
         next token, and its part's place goes to the part's next best: k looks at 128 tokens after one at the row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pagedray.kernels.case import Case
from pagedray.kernels.finite_logits import load_logits
from pagedray.kernels.jit import launch, power_of_2, tl, triton
from pagedray.kernels.top_candidates import top_candidates, top_candidates_ref

_PART, _BLOCK = 128, 4096


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


@triton.jit
def _order_key(y, ids):  # type: ignore[no-untyped-def]
    """`_order_keys` of top_candidates.py."""
    bits = tl.where(y == 0.0, 0.0, y).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0xFFFFFFFF - ids.to(tl.int64))


@triton.jit(do_not_specialize=["k"])
def _token_logprobs(  # type: ignore[no-untyped-def]
    logits_ptr,
    row_stride,
    targets_ptr,
    logprob_ptr,
    rank_ptr,
    top_ids_ptr,
    top_logprobs_ptr,
    heads_ptr,  # [N, num_parts] int64: each part's best key
    vocab,
    num_parts,
    k,
    PARTS: tl.constexpr,  # num_parts, as a power of two
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
):
    no_key: tl.constexpr = -(1 << 63)
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    heads_ptr += row * num_parts
    for start in range(0, num_parts, BLOCK // PART):
        parts = start + tl.arange(0, BLOCK // PART)
        ids = parts[:, None] * PART + tl.arange(0, PART)[None, :]
        keys = _order_key(load_logits(row_ptr, ids, vocab), ids)
        tl.store(heads_ptr + parts, tl.max(keys, 1), mask=parts < num_parts)
    tl.debug_barrier()
    part = tl.arange(0, PARTS)
    heads = tl.load(heads_ptr + part, mask=part < num_parts, other=no_key)
    best_id = 0xFFFFFFFF - (tl.max(heads, 0) & 0xFFFFFFFF)
    best = load_logits(row_ptr, best_id, vocab)
    target = load_logits(row_ptr, tl.load(targets_ptr + row), vocab)
    sums, higher = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocab, BLOCK):
        y = load_logits(row_ptr, start + tl.arange(0, BLOCK), vocab)
        sums += tl.exp(y - best)
        higher += (y > target).to(tl.int32)
    log_sum = tl.log(tl.sum(sums, 0))
    tl.store(logprob_ptr + row, target - best - log_sum)
    tl.store(rank_ptr + row, (1 + tl.sum(higher, 0)).to(tl.int64))
    for j in range(k):
        head = tl.max(heads, 0)
        top_id = 0xFFFFFFFF - (head & 0xFFFFFFFF)
        tl.store(top_ids_ptr + row * k + j, top_id)
        tl.store(top_logprobs_ptr + row * k + j, load_logits(row_ptr, top_id, vocab) - best - log_sum)
        ids = (top_id // PART) * PART + tl.arange(0, PART)
        keys = _order_key(load_logits(row_ptr, ids, vocab), ids)
        heads = tl.where(part == top_id // PART, tl.max(tl.where(keys < head, keys, no_key), 0), heads)


def token_logprobs_triton(logits: Tensor, targets: Tensor, k: int) -> Logprobs:
    num_rows, vocab = logits.shape
    assert logits.stride(1) == 1, f"logits have stride {logits.stride()}"
    k = min(k, vocab)
    num_parts = -(-vocab // _PART)
    found = Logprobs(
        logits.new_empty(num_rows, dtype=torch.float32),
        torch.empty_like(targets),
        targets.new_empty((num_rows, k)),
        logits.new_empty((num_rows, k), dtype=torch.float32),
    )
    if num_rows:
        heads = targets.new_empty((num_rows, num_parts))
        launch(
            _token_logprobs,
            (num_rows,),
            (logits, logits.stride(0), targets, *found, heads, vocab, num_parts, k),
            {"PARTS": power_of_2(num_parts), "PART": _PART, "BLOCK": _BLOCK},
            num_warps=8,
        )
    return found


def token_logprobs(logits: Tensor, targets: Tensor, k: int) -> Logprobs:
    if logits.device.type == "cuda":
        return token_logprobs_triton(logits, targets, k)
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
