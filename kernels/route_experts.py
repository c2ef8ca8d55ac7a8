"""The experts of each token and their weights:  p = softmax(z);  the k experts with the highest z, weighted by p

    renormalise: the weights of a token's experts are divided by their sum. Among equal logits the lower expert wins.

Shapes   z [T, E], last dim contiguous, row stride free; returns weights [T, k] float32 and experts [T, k] int32, the
         likeliest first. loads [E] int64. slots [T] int64, where a token's keys and values go: tokens that only pad a
         batch have slots below num_null, in the null page, and get experts -1 and weights 0. E <= 4096.
Dtypes   float32, bf16 or fp16; softmax in float32.
Writes   loads, which counts each expert's tokens, in place; integers, so in any order. Safe under CUDA graph capture.
         A row with NaN gets weights NaN and k experts that exist.
Source   Shazeer et al. 2017, arXiv:1701.06538; Jiang et al. 2024, arXiv:2401.04088
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagedray.kernels.case import Case
from pagedray.kernels.jit import launch, power_of_2, tl, triton
from pagedray.kernels.top_candidates import top_candidates

_LOGITS = 1024  # of one program


def route_experts_ref(
    logits: Tensor,
    top_k: int,
    renormalise: bool,
    loads: Tensor | None = None,
    slots: Tensor | None = None,
    num_null: int = 0,
) -> tuple[Tensor, Tensor]:
    z = logits.float()
    experts = z.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = z.softmax(-1).gather(1, experts)
    return _finished(weights, experts, renormalise, loads, slots, num_null)


@triton.jit(do_not_specialize=["T", "num_null"])
def _route_experts(  # type: ignore[no-untyped-def]
    logits_ptr,
    weights_ptr,
    experts_ptr,
    loads_ptr,  # or None
    slots_ptr,  # or None
    row_stride,
    T,
    E,
    num_null,
    TOP_K: tl.constexpr,
    TOP_K_PAD: tl.constexpr,
    RENORMALISE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """BLOCK_T tokens a program, all of their experts at once."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert = tl.arange(0, BLOCK_E)[None, :]
    ptrs = logits_ptr + t.to(tl.int64)[:, None] * row_stride + expert
    z = tl.load(ptrs, mask=(t < T)[:, None] & (expert < E), other=float("-inf")).to(tl.float32)
    z = tl.where((t < T)[:, None], z, 0.0)  # rows past the end stay free of NaN
    is_real = t < T
    if slots_ptr is not None:
        is_real &= tl.load(slots_ptr + t, mask=t < T, other=0) >= num_null
    top = tl.max(z, 1)
    total = tl.sum(tl.exp(z - top[:, None]), 1)
    place = tl.arange(0, TOP_K_PAD)[None, :]
    weights = tl.zeros([BLOCK_T, TOP_K_PAD], tl.float32)
    chosen = tl.zeros([BLOCK_T, TOP_K_PAD], tl.int32)
    for i in tl.static_range(TOP_K):
        best = tl.max(z, 1)
        first = tl.min(tl.where(z == best[:, None], expert, E - 1), 1)  # E - 1: no logit equals a NaN
        weights = tl.where(place == i, tl.exp(best - top)[:, None], weights)
        chosen = tl.where(place == i, first[:, None], chosen)
        z = tl.where(expert == first[:, None], float("-inf"), z)
    if RENORMALISE:
        weights = weights / tl.sum(weights, 1)[:, None] + (total - total)[:, None]  # NaN of any logit stays NaN
    else:
        weights = weights / total[:, None]
    if loads_ptr is not None:
        ones = tl.full([BLOCK_T, TOP_K_PAD], 1, tl.int64)
        tl.atomic_add(loads_ptr + chosen, ones, mask=is_real[:, None] & (place < TOP_K), sem="relaxed")
    at = t.to(tl.int64)[:, None] * TOP_K + place
    mask = (t < T)[:, None] & (place < TOP_K)
    tl.store(weights_ptr + at, tl.where(is_real[:, None], weights, 0.0), mask=mask)
    tl.store(experts_ptr + at, tl.where(is_real[:, None], chosen, -1), mask=mask)


def route_experts(
    logits: Tensor,
    top_k: int,
    renormalise: bool,
    loads: Tensor | None = None,
    slots: Tensor | None = None,
    num_null: int = 0,
) -> tuple[Tensor, Tensor]:
    if logits.is_cuda:
        return route_experts_triton(logits, top_k, renormalise, loads, slots, num_null)
    z = logits.float()
    values, experts = top_candidates(z, top_k)
    weights = (values - z.logsumexp(-1, keepdim=True)).exp_()
    return _finished(weights, experts, renormalise, loads, slots, num_null)


def _finished(
    weights: Tensor, experts: Tensor, renormalise: bool, loads: Tensor | None, slots: Tensor | None, num_null: int
) -> tuple[Tensor, Tensor]:
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    counted = experts
    if slots is not None:
        is_real = slots >= num_null
        counted = experts[is_real]
        weights, experts = weights.where(is_real[:, None], 0.0), experts.where(is_real[:, None], -1)
    if loads is not None:
        loads += torch.bincount(counted.flatten(), minlength=len(loads))
    return weights, experts.int()


def route_experts_triton(
    logits: Tensor,
    top_k: int,
    renormalise: bool,
    loads: Tensor | None = None,
    slots: Tensor | None = None,
    num_null: int = 0,
) -> tuple[Tensor, Tensor]:
    num_tokens, num_experts = logits.shape
    assert 1 <= top_k <= num_experts <= 4096 and logits.stride(1) == 1
    weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device=logits.device)
    experts = torch.empty(num_tokens, top_k, dtype=torch.int32, device=logits.device)
    block_e = power_of_2(num_experts)
    block_t = max(_LOGITS // block_e, 1) if block_e >= 32 else 32
    constants = {
        "TOP_K": top_k,
        "TOP_K_PAD": power_of_2(top_k),
        "RENORMALISE": renormalise,
        "BLOCK_T": block_t,
        "BLOCK_E": block_e,
    }
    args = logits, weights, experts, loads, slots, logits.stride(0), num_tokens, num_experts, num_null
    if num_tokens:
        launch(_route_experts, (-(-num_tokens // block_t),), args, constants)
    return weights, experts


def make_inputs(case: Case) -> tuple[Tensor | int | bool | None, ...]:
    """Logits in steps of a quarter where `ties` is set; where `padded` is, every third token only pads."""
    num_tokens, num_experts = case["T"], case["E"]
    logits = case.randn(num_tokens, num_experts + case.get("gap"), seed=1)[:, :num_experts]
    if case.get("ties"):
        logits = (logits * 4).round() / 4
    slots = torch.tensor([16, 15, 400]).repeat(num_tokens)[:num_tokens] if case.get("padded") else None
    loads = torch.arange(num_experts) if case.get("counted", 1) else None
    return logits, case["k"], bool(case.get("renormalise")), loads, slots, 16


CASES = [
    Case("route_experts", T=1, E=8, k=2, renormalise=1, dtype=torch.bfloat16),
    Case("route_experts", T=5, E=8, k=2),
    Case("route_experts", T=40, E=8, k=2, renormalise=1, padded=1),
    Case("route_experts", T=9, E=128, k=8, renormalise=1, ties=1, dtype=torch.bfloat16),
    Case("route_experts", T=17, E=60, k=4, ties=1, gap=3, dtype=torch.float16),
    Case("route_experts", T=3, E=5, k=5, renormalise=1, counted=0),
    Case("route_experts", T=2, E=300, k=6),
    Case("route_experts", T=4, E=6, k=1, renormalise=1, padded=1),
]
