"""Linear layers of which each (token, expert) pair uses one expert's weights

    grouped_gated_linear   h[r] = act(x[t] g^T) * (x[t] u^T)     row r is that of a pair: of token t and its expert
    grouped_sum_linear     y[t] = sum over t's pairs p of  weight[p] * (h[row of p] w^T)

Shapes   x [T, K]; gated: w [E, 2N, K] stacks each expert's g and u, h [T * k, N]; sum: h [T * k, K], w [E, N, K],
         weights [T, k] float32, y [T, N]. All contiguous. The E experts are this rank's; pairs of others have rows in h
         that nobody writes, and add nothing to y. `ExpertPairs` says which row belongs to which pair.
Dtypes   float32, bf16 or fp16; sums in float32. Gated: g's and u's outputs and act(…) are rounded to the type before
         the product, as in activation.py. Sum: rounded once, or where pairs are sorted before they are weighted, too.
Writes   returns h or y. Deterministic: a token's sum runs over its experts in their order, without atomics. Safe under
         CUDA graph capture.
Method   Few pairs: each reads its expert's weights by itself, with products in float32, and one launch sums too. Many:
         tiles of up to 128 pairs of an expert on tensor cores; programs whose tiles share weights or tokens are near
         to each other in time. The CPU takes one expert after the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pagedray.kernels import activation as gates
from pagedray.kernels.case import Case
from pagedray.kernels.jit import launch, power_of_2, tl, triton
from pagedray.kernels.sort_pairs import SortedPairs, sort_pairs, sort_pairs_ref

Activation = Literal["silu", "gelu_tanh"]
_SUM_BLOCK = 1024  # columns


@dataclasses.dataclass(frozen=True)
class ExpertPairs:
    """The pairs of a step. Row r of h belongs to pair r, or where they are sorted to pair order[r]."""

    experts: Tensor  # [T, k] int32, of all ranks; -1: none
    first: int  # this rank's first expert
    num_local: int
    in_tiles: SortedPairs | None = None
    block_m: int = 0  # most pairs of a tile


class Tile(NamedTuple):
    """What a program works on: outputs (gated: of each of the two), columns, warps, depth of the load pipeline."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


# By pairs of a tile. Products of float32 don't run on tensor cores.
GATED_16BIT = {16: Tile(64, 128, 4, 3), 32: Tile(64, 64, 4, 4), 64: Tile(128, 64, 4, 4), 128: Tile(128, 64, 8, 4)}
SUM_16BIT = {16: Tile(64, 128, 4, 4), 32: Tile(64, 128, 4, 4), 64: Tile(128, 64, 4, 4), 128: Tile(256, 64, 8, 4)}
ALL_32BIT = {16: Tile(32, 32, 4, 2), 32: Tile(32, 32, 4, 2)}
_GROUP_M = 8  # tiles that go through all outputs together, so that what they share stays in the L2 cache


def pairs_of(experts: Tensor, num_experts: int, first: int, num_local: int, dtype: torch.dtype) -> ExpertPairs:
    """
    Args:
        experts: as `route_experts` gives them.
        num_experts: of all ranks; first … first + num_local - 1 are this one's.
        dtype: of x.
    """
    num_pairs = experts.numel()
    block_m = pick_block_m(num_pairs, num_experts, dtype) if experts.is_cuda else max(num_pairs, 1)
    if block_m == 0:
        return ExpertPairs(experts, first, num_local)
    in_tiles = sort_pairs(experts, num_experts, first, num_local, block_m)
    return ExpertPairs(experts, first, num_local, in_tiles, block_m)


def pick_block_m(num_pairs: int, num_experts: int, dtype: torch.dtype) -> int:
    """Most pairs of a tile on a GPU: few experts should need a second one. 0: so few pairs that hardly any two share
    an expert, and sorting them would not pay."""
    if 2 * num_pairs <= num_experts:
        return 0
    mean = num_pairs / num_experts
    sizes = ALL_32BIT if dtype == torch.float32 else GATED_16BIT
    return next((size for size in sizes if mean <= size * 0.75), max(sizes))


def by_tile(pairs: ExpertPairs) -> Iterator[tuple[int, slice, Tensor]]:
    """Expert of this rank, its rows of h and their pairs, a tile after the other; on the CPU."""
    if pairs.in_tiles is None:
        for pair, expert in enumerate((pairs.experts.flatten() - pairs.first).tolist()):
            if 0 <= expert < pairs.num_local:
                yield expert, slice(pair, pair + 1), torch.tensor([pair])
        return
    order, tiles = pairs.in_tiles
    for expert, place, size in tiles.tolist():
        if size:
            yield expert, slice(place, place + size), order[place : place + size]


def grouped_gated_linear_ref(x: Tensor, w: Tensor, pairs: ExpertPairs, activation: Activation = "silu") -> Tensor:
    act = gates.silu_and_mul_ref if activation == "silu" else gates.gelu_tanh_and_mul_ref
    h = x.new_zeros(pairs.experts.numel(), w.shape[1] // 2)
    for expert, rows, members in by_tile(pairs):
        tokens = members // pairs.experts.shape[1]
        h[rows] = act((x[tokens].float() @ w[expert].float().T).to(x.dtype))
    return h


def grouped_sum_linear_ref(h: Tensor, w: Tensor, weights: Tensor, pairs: ExpertPairs) -> Tensor:
    num_tokens, top_k = weights.shape
    outputs = h.new_zeros(num_tokens * top_k, w.shape[1], dtype=torch.float32)
    for expert, rows, members in by_tile(pairs):
        outputs[members] = h[rows].float() @ w[expert].float().T
    local = pairs.experts - pairs.first
    weights = weights.where((local >= 0) & (local < pairs.num_local), 0.0)
    return (outputs.view(num_tokens, top_k, -1) * weights[:, :, None]).sum(1).to(h.dtype)


def grouped_gated_linear(x: Tensor, w: Tensor, pairs: ExpertPairs, activation: Activation = "silu") -> Tensor:
    if x.is_cuda:
        return grouped_gated_linear_triton(x, w, pairs, activation)
    act = gates.silu_and_mul if activation == "silu" else gates.gelu_tanh_and_mul
    h = x.new_empty(pairs.experts.numel(), w.shape[1] // 2)
    for expert, rows, members in by_tile(pairs):
        h[rows] = act(F.linear(x[members // pairs.experts.shape[1]], w[expert]))
    return h


def grouped_sum_linear(h: Tensor, w: Tensor, weights: Tensor, pairs: ExpertPairs) -> Tensor:
    if h.is_cuda:
        return grouped_sum_linear_triton(h, w, weights, pairs)
    num_tokens, top_k = weights.shape
    y, weights = h.new_zeros(num_tokens, w.shape[1], dtype=torch.float32), weights.view(-1, 1)
    for expert, rows, members in by_tile(pairs):
        y.index_add_(0, members // top_k, F.linear(h[rows], w[expert]) * weights[members])
    return y.to(h.dtype)


@triton.jit
def _gated(gate, up, ACTIVATION: tl.constexpr, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """act(gate) * up of float32 sums, with the roundings of separate passes."""
    gate = gate.to(dtype).to(tl.float32)
    if ACTIVATION == "silu":
        z = gate
    else:  # gelu by tanh:  (1 + tanh z) / 2 = sigmoid(2z)
        z = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    act = (gate / (1 + tl.exp(-z))).to(dtype).to(tl.float32)
    return (act * up.to(dtype).to(tl.float32)).to(dtype)


@triton.jit
def _lane_sums(  # type: ignore[no-untyped-def]
    w_ptrs,
    x_ptrs,
    inside,
    K,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """Products of rows of w [BLOCK_N, PARTS, K] with x, added up by the lanes that load them: [.., .., lanes] float32.

    inside [1, PARTS, 1]: other parts count as zeros, and are not read.
    """
    VECTOR: tl.constexpr = 128 // w_ptrs.dtype.element_ty.primitive_bitwidth  # elements of a 16-byte load
    k = tl.arange(0, BLOCK_K)[None, None, :]
    sums = tl.zeros([BLOCK_N, PARTS, BLOCK_K // VECTOR], tl.float32)
    for start in range(0, K, BLOCK_K):
        mask = inside
        if not EVEN_K:
            mask = inside & (k < K - start)
        w = tl.load(w_ptrs + start, mask=mask, other=0, eviction_policy="evict_first")
        x = tl.load(x_ptrs + start, mask=mask, other=0)
        products = w.to(tl.float32) * x.to(tl.float32)
        sums += tl.sum(tl.reshape(products, [BLOCK_N, PARTS, BLOCK_K // VECTOR, VECTOR]), 3)
    return sums


@triton.jit(do_not_specialize=["first", "num_local"])
def _gated_by_pair(  # type: ignore[no-untyped-def]
    x_ptr,
    w_ptr,
    h_ptr,
    experts_ptr,
    first,
    num_local,
    N,
    K,
    TOP_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """BLOCK_N outputs of a pair a program; programs of the same outputs are neighbours, some with the same expert."""
    pair = tl.program_id(0)
    expert = tl.load(experts_ptr + pair) - first
    if (expert < 0) | (expert >= num_local):
        return
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Gate and up of an output lie side by side in the second axis. Past the end the last output stands in.
    row = tl.minimum(n, N - 1)[:, None, None] + tl.arange(0, 2)[None, :, None] * N
    k = tl.arange(0, BLOCK_K)[None, None, :]
    w_ptrs = w_ptr + (expert.to(tl.int64) * (2 * N) + row) * K + k
    x_ptrs = x_ptr + (pair // TOP_K).to(tl.int64) * K + k
    inside = tl.full([1, 1, 1], 1, tl.int1)
    sums = _lane_sums(w_ptrs, x_ptrs, inside, K, BLOCK_N, 2, BLOCK_K, EVEN_K)
    gate, up = tl.split(tl.sum(sums, 2))
    h = _gated(gate, up, ACTIVATION, h_ptr.dtype.element_ty)
    tl.store(h_ptr + pair.to(tl.int64) * N + n, h, mask=n < N)


@triton.jit(do_not_specialize=["first", "num_local"])
def _sum_by_token(  # type: ignore[no-untyped-def]
    h_ptr,
    w_ptr,
    weights_ptr,
    y_ptr,
    experts_ptr,
    first,
    num_local,
    N,
    K,
    TOP_K: tl.constexpr,
    TOP_K_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """BLOCK_N outputs of a token a program, of all its experts at once."""
    token = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    j = tl.arange(0, TOP_K_PAD)
    pair = token * TOP_K + tl.minimum(j, TOP_K - 1)
    expert = tl.load(experts_ptr + pair) - first
    is_local = (expert >= 0) & (expert < num_local) & (j < TOP_K)
    weight = tl.where(is_local, tl.load(weights_ptr + pair), 0.0)
    expert = tl.where(is_local, expert, 0)
    k = tl.arange(0, BLOCK_K)[None, None, :]
    row = expert.to(tl.int64)[None, :, None] * N + tl.minimum(n, N - 1)[:, None, None]
    x_ptrs = h_ptr + pair.to(tl.int64)[None, :, None] * K + k
    inside = is_local[None, :, None]
    sums = _lane_sums(w_ptr + row * K + k, x_ptrs, inside, K, BLOCK_N, TOP_K_PAD, BLOCK_K, EVEN_K)
    y = tl.sum(tl.sum(sums, 2) * weight[None, :], 1)
    tl.store(y_ptr + token.to(tl.int64) * N + n, y.to(y_ptr.dtype.element_ty), mask=n < N)


@triton.jit(do_not_specialize=["num_tiles"])
def _multiply_tiles(  # type: ignore[no-untyped-def]
    x_ptr,  # gated: of tokens; else h
    w_ptr,
    out_ptr,  # gated: h; else outputs of pairs
    order_ptr,
    tiles_ptr,
    num_tiles,
    N,
    K,
    TOP_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """BLOCK_N outputs of a tile a program, gated if there is an ACTIVATION."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    in_group = GROUP_M * tl.cdiv(N, BLOCK_N)
    group = tl.program_id(0) // in_group
    group_size = tl.minimum(num_tiles - group * GROUP_M, GROUP_M)
    tile = group * GROUP_M + tl.program_id(0) % in_group % group_size
    n_block = tl.program_id(0) % in_group // group_size
    tile_ptr = tiles_ptr + tile * 3
    expert, place, size = tl.load(tile_ptr), tl.load(tile_ptr + 1), tl.load(tile_ptr + 2)
    if size == 0:
        return
    m = tl.arange(0, BLOCK_M)
    at = place + tl.minimum(m, size - 1)  # past the end the last one stands in, so that loads need no mask
    n = n_block * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    pair = tl.load(order_ptr + at)
    x_row = at
    num_rows = N
    if ACTIVATION is not None:
        x_row = pair // TOP_K
        num_rows = 2 * N
    x_ptrs = x_ptr + x_row.to(tl.int64)[:, None] * K + k[None, :]
    w_row = expert.to(tl.int64) * num_rows + tl.minimum(n, N - 1)
    w_ptrs = w_ptr + w_row[:, None] * K + k[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if ACTIVATION is not None:
        up_ptrs = w_ptr + (w_row + N)[:, None] * K + k[None, :]
        up_acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        if EVEN_K:
            x = tl.load(x_ptrs + start)
            w = tl.load(w_ptrs + start)
        else:
            inside = (k < K - start)[None, :]
            x = tl.load(x_ptrs + start, mask=inside, other=0)
            w = tl.load(w_ptrs + start, mask=inside, other=0)
        if INTERPRETED:  # where tl.dot takes the bits of bf16 for integers
            x, w = x.to(tl.float32), w.to(tl.float32)
        acc = tl.dot(x, w.T, acc, input_precision="ieee")
        if ACTIVATION is not None:
            if EVEN_K:
                up = tl.load(up_ptrs + start)
            else:
                up = tl.load(up_ptrs + start, mask=inside, other=0)
            if INTERPRETED:
                up = up.to(tl.float32)
            up_acc = tl.dot(x, up.T, up_acc, input_precision="ieee")
    mask = (m < size)[:, None] & (n < N)[None, :]
    if ACTIVATION is not None:
        out = _gated(acc, up_acc, ACTIVATION, dtype)
        out_row = at
    else:
        out = acc.to(dtype)
        out_row = pair
    tl.store(out_ptr + out_row.to(tl.int64)[:, None] * N + n[None, :], out, mask=mask)


@triton.jit(do_not_specialize=["first", "num_local"])
def _sum_outputs(  # type: ignore[no-untyped-def]
    outputs_ptr, weights_ptr, y_ptr, experts_ptr, first, num_local, N, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):
    """BLOCK columns of a token a program."""
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP_K):
        pair = token * TOP_K + j
        expert = tl.load(experts_ptr + pair) - first
        is_local = (expert >= 0) & (expert < num_local)
        end = tl.where(is_local, N, 0)
        output = tl.load(outputs_ptr + pair * N + n, mask=n < end, other=0).to(tl.float32)
        y += output * tl.where(is_local, tl.load(weights_ptr + pair), 0.0)
    tl.store(y_ptr + token * N + n, y.to(y_ptr.dtype.element_ty), mask=n < N)


def grouped_gated_linear_triton(
    x: Tensor, w: Tensor, pairs: ExpertPairs, activation: Activation = "silu", *, tile: Tile | None = None
) -> Tensor:
    """tile: other than the usual one, where pairs are sorted."""
    num_pairs, top_k = pairs.experts.numel(), pairs.experts.shape[1]
    num_local, num_rows, width = w.shape
    assert x.shape == (len(pairs.experts), width) and num_local == pairs.num_local and num_rows % 2 == 0
    assert x.is_contiguous() and w.is_contiguous() and x.dtype == w.dtype
    size = num_rows // 2
    h = x.new_empty(num_pairs, size)
    if num_pairs == 0:
        return h
    if pairs.in_tiles is not None:
        table = ALL_32BIT if x.dtype == torch.float32 else GATED_16BIT
        _launch_tiles(x, w, h, pairs.in_tiles, size, top_k, activation, pairs.block_m, tile or table[pairs.block_m])
        return h
    block_n, block_k, num_warps = _rows_at_once(2, size, width, x.dtype)
    args = x, w, h, pairs.experts, pairs.first, num_local, size, width
    constants = {"TOP_K": top_k, "ACTIVATION": activation, **_blocks(block_n, block_k, width)}
    launch(_gated_by_pair, (num_pairs, -(-size // block_n)), args, constants, num_warps=num_warps)
    return h


def grouped_sum_linear_triton(
    h: Tensor, w: Tensor, weights: Tensor, pairs: ExpertPairs, *, tile: Tile | None = None
) -> Tensor:
    """tile: other than the usual one, where pairs are sorted."""
    num_tokens, top_k = pairs.experts.shape
    num_local, size, width = w.shape
    assert h.shape == (num_tokens * top_k, width) and num_local == pairs.num_local and h.dtype == w.dtype
    assert weights.shape == pairs.experts.shape and weights.dtype == torch.float32
    assert h.is_contiguous() and w.is_contiguous() and weights.is_contiguous()
    y = h.new_empty(num_tokens, size)
    if num_tokens == 0:
        return y
    if pairs.in_tiles is not None:
        outputs = h.new_empty(num_tokens * top_k, size)
        table = ALL_32BIT if h.dtype == torch.float32 else SUM_16BIT
        _launch_tiles(h, w, outputs, pairs.in_tiles, size, top_k, None, pairs.block_m, tile or table[pairs.block_m])
        args = outputs, weights, y, pairs.experts, pairs.first, num_local, size
        grid = num_tokens, -(-size // _SUM_BLOCK)
        launch(_sum_outputs, grid, args, {"TOP_K": top_k, "BLOCK": _SUM_BLOCK})
        return y
    top_k_pad = power_of_2(top_k)
    block_n, block_k, num_warps = _rows_at_once(top_k_pad, size, width, h.dtype)
    constants = {"TOP_K": top_k, "TOP_K_PAD": top_k_pad, **_blocks(block_n, block_k, width)}
    by_token = h, w, weights, y, pairs.experts, pairs.first, num_local, size, width
    launch(_sum_by_token, (num_tokens, -(-size // block_n)), by_token, constants, num_warps=num_warps)
    return y


def _rows_at_once(num_parts: int, num_out: int, width: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """block_n, block_k, num_warps for programs that ask for num_parts rows of w an output, 8 to 16 rows at once."""
    lanes = 32 * 16 // dtype.itemsize  # elements that a warp loads with 16 bytes a lane
    num_warps = next((n for n in (4, 2) if width % (n * lanes) == 0), 1)
    block_n = max(8 // num_parts, 1) if num_warps > 1 else max(16 // num_parts, 1)
    return min(block_n, power_of_2(num_out)), num_warps * lanes, num_warps


def _blocks(block_n: int, block_k: int, width: int) -> dict[str, Any]:
    return {"BLOCK_N": block_n, "BLOCK_K": block_k, "EVEN_K": width % block_k == 0}


def _launch_tiles(
    x: Tensor,
    w: Tensor,
    out: Tensor,
    in_tiles: SortedPairs,
    num_out: int,
    top_k: int,
    activation: Activation | None,
    block_m: int,
    tile: Tile,
) -> None:
    width, num_tiles = x.shape[1], len(in_tiles.tiles)
    args = x, w, out, in_tiles.order, in_tiles.tiles, num_tiles, num_out, width
    constants = {
        "TOP_K": top_k,
        "ACTIVATION": activation,
        "GROUP_M": _GROUP_M,
        "BLOCK_M": block_m,
        **_blocks(tile.block_n, tile.block_k, width),
        "INTERPRETED": not x.is_cuda,
    }
    grid = (num_tiles * -(-num_out // tile.block_n),)
    if num_tiles:  # none where this rank has no experts
        launch(_multiply_tiles, grid, args, constants, num_warps=tile.num_warps, num_stages=tile.num_stages)


def make_inputs(case: Case) -> tuple[Any, ...]:
    """M: pairs of a tile, 0: not sorted. Where `padded` is set, every third token has no experts."""
    num_tokens, top_k, num_experts = case["T"], case["k"], case["E"]
    first, num_local = case.get("first"), case.get("local", num_experts)
    generator = torch.Generator().manual_seed(3)
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    experts = scores.topk(top_k).indices.int()
    if case.get("padded"):
        experts[1::3] = -1
    pairs = ExpertPairs(experts, first, num_local)
    if case["M"]:
        in_tiles = sort_pairs_ref(experts, num_experts, first, num_local, case["M"])
        pairs = dataclasses.replace(pairs, in_tiles=in_tiles, block_m=case["M"])
    if case.op == "grouped_gated_linear":
        w = case.randn(num_local, 2 * case["N"], case["K"], seed=2) * case["K"] ** -0.5
        return case.randn(num_tokens, case["K"], seed=1), w, pairs, "gelu_tanh" if case.get("gelu") else "silu"
    w = case.randn(num_local, case["N"], case["K"], seed=2) * case["K"] ** -0.5
    weights = torch.rand(num_tokens, top_k, generator=generator)
    return case.randn(num_tokens * top_k, case["K"], seed=1), w, weights, pairs


CASES = [
    Case("grouped_gated_linear", T=1, k=2, E=8, K=256, N=96, M=0, dtype=torch.bfloat16),
    Case("grouped_gated_linear", T=2, k=3, E=4, K=67, N=37, M=0, gelu=1),
    Case("grouped_gated_linear", T=2, k=2, E=4, K=1024, N=20, M=0, dtype=torch.float16),
    Case("grouped_gated_linear", T=9, k=2, E=4, K=128, N=96, M=16, dtype=torch.bfloat16),
    Case("grouped_gated_linear", T=20, k=3, E=4, K=67, N=37, M=16),
    Case("grouped_gated_linear", T=40, k=2, E=3, K=96, N=70, M=32, gelu=1, dtype=torch.float16),
    Case("grouped_gated_linear", T=150, k=2, E=3, K=64, N=128, M=128, dtype=torch.bfloat16),
    Case("grouped_sum_linear", T=1, k=2, E=8, K=256, N=96, M=0, dtype=torch.bfloat16),
    Case("grouped_sum_linear", T=2, k=3, E=4, K=67, N=37, M=0),
    Case("grouped_sum_linear", T=3, k=8, E=16, first=4, local=6, K=768, N=50, M=0, dtype=torch.float16),
    Case("grouped_sum_linear", T=9, k=2, E=4, K=128, N=96, M=16, padded=1, dtype=torch.bfloat16),
    Case("grouped_sum_linear", T=20, k=3, E=6, first=2, local=3, K=67, N=37, M=16),
    Case("grouped_sum_linear", T=40, k=2, E=3, K=96, N=70, M=32, padded=1, dtype=torch.float16),
    Case("grouped_sum_linear", T=150, k=2, E=3, K=64, N=300, M=128, dtype=torch.bfloat16),
]
