"""Attention of prompt chunks over paged keys and values, in one pass: no score matrix is stored (flash attention).

    y = softmax(cap(q K^T * scale) + mask) V      for the last queries of each sequence, over all of its keys

A query at position p sees positions max(0, p - window + 1) … p; cap(s) = softcap * tanh(s / softcap), or s without one.

Shapes   q [T, H, D], token stride free; pages [num_blocks, 2, K, B, D] (0 keys, 1 values); block_tables [R, max_blocks]
         int32; y [T, H * D], where only the plan's tokens are written. Query head h reads key head h // (H / K).
         kv [T, 2K, D], token stride free: keys and values of the step's own tokens, as they are in the pages too.
Dtypes   q, kv, y float32, bf16 or fp16, all alike; pages too, or float8_e4m3fn (true value = stored * k_scale or
         v_scale). Products in q's type, sums and softmax in float32. scale and k_scale are positive.
Writes   `out` if given. Safe under CUDA graph capture: the grid follows the plan, known to the host.
Source   Dao 2023, arXiv:2307.08691; pages: Kwon et al. 2023, arXiv:2309.06180; the softcap: Gemma 2, arXiv:2408.00118

The plan cuts each chunk into tiles of a few queries. The G = H / K query heads that share a key head are rows of the
same tile, so keys and values are read once for all of them. Keys and values that no query of a tile sees are not read.
Where `kv` is given, tiles of sequences that begin in this step ("fresh": nothing cached) read it instead of the pages:
rows at equal distances need no block table. With float8 pages those tiles then see unrounded keys and values; leave
`kv` out if a prompt's result may not depend on how it was cut into chunks.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagedray.kernels.case import Case
from pagedray.kernels.jit import launch, power_of_2, tl, triton

_LOG2E = math.log2(math.e)
TILE_INTS = 5  # of a tile in the plan


@dataclasses.dataclass(frozen=True)
class Tile:
    """How one program works: rows (queries x heads of a group) and keys a step, warps, depth of the load pipeline."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# By padded head dim. Products of float32 don't run on tensor cores.
TILES_16BIT = {
    16: Tile(128, 64, 4, 3),
    32: Tile(128, 64, 4, 3),
    64: Tile(128, 64, 8, 3),
    128: Tile(64, 64, 4, 3),
    256: Tile(128, 64, 8, 2),
}
TILES_32BIT = {
    16: Tile(32, 64, 4, 2),
    32: Tile(32, 64, 4, 2),
    64: Tile(32, 32, 8, 2),
    128: Tile(32, 16, 8, 2),
    256: Tile(16, 16, 8, 2),
}


def pick_tile(group: int, head_dim: int, dtype: torch.dtype) -> Tile:
    """`group` query heads share a key head; at least one query of all of them must fit in a tile."""
    table = TILES_32BIT if dtype == torch.float32 else TILES_16BIT
    padded = _padded_head_dim(head_dim)
    if padded not in table:
        raise ValueError(
            f"head dim {head_dim} is larger than {max(table)}, the largest that paged_prefill has tiles for"
        )
    tile = table[padded]
    return tile if group <= tile.block_m else dataclasses.replace(tile, block_m=power_of_2(group))


def queries_per_tile(num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """`block_m_tokens` of `plan_prefill` for layers of this shape."""
    group = num_heads // num_kv_heads
    return pick_tile(group, head_dim, dtype).block_m // power_of_2(group)


def _padded_head_dim(head_dim: int) -> int:
    return max(16, power_of_2(head_dim))


@dataclasses.dataclass(frozen=True)
class PrefillPlan:
    """Tiles of one step, for all layers of equal shape whatever their window."""

    tiles: Tensor  # [num_tiles * 5] int32 on the device: what plan_prefill returned
    num_tiles: int
    num_fresh: int  # tiles of sequences with nothing cached; they come first
    block_m_tokens: int  # most queries a tile

    @staticmethod
    def of(planned: NDArray[np.int32], tiles: Tensor, block_m_tokens: int) -> PrefillPlan:
        """`tiles` is `planned` on the device."""
        num_fresh = int(np.count_nonzero(planned[4::TILE_INTS] == 0))
        return PrefillPlan(tiles, len(planned) // TILE_INTS, num_fresh, block_m_tokens)


def plan_prefill(
    rows: NDArray[np.integer], query_start: NDArray[np.integer], lengths: NDArray[np.integer], block_m_tokens: int
) -> NDArray[np.int32]:
    """Cut the queries of P sequences into tiles: fresh ones first, then those that need pages; longest first in both.

    Args:
        rows: [P] row in block_tables of each sequence.
        query_start: [P + 1] first query of each sequence in q.
        lengths: [P] tokens of each sequence, its queries included.
        block_m_tokens: most queries a tile, see `queries_per_tile`.

    Returns:
        Flat, five numbers a tile: row in block_tables, index of the first query in q, number of queries, position of
        the first query in its sequence, number of tokens its sequence had before this step.
    """
    num_queries = np.diff(query_start)
    cached = lengths - num_queries
    num_tiles = -(-num_queries // block_m_tokens)
    seq = np.repeat(np.arange(len(num_tiles)), num_tiles)
    offset = (np.arange(len(seq)) - (np.cumsum(num_tiles) - num_tiles)[seq]) * block_m_tokens
    size = np.minimum(num_queries[seq] - offset, block_m_tokens)
    position = cached[seq] + offset
    tiles = np.stack((rows[seq], query_start[seq] + offset, size, position, cached[seq]), axis=1)
    planned: NDArray[np.int32] = tiles[np.lexsort((-position - size, cached[seq] > 0))].astype(np.int32).ravel()
    return planned


def paged_prefill_ref(
    q: Tensor,
    pages: Tensor,
    block_tables: Tensor,
    plan: PrefillPlan,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: Tensor | None = None,
    kv: Tensor | None = None,
) -> Tensor:
    """Reads everything from the pages: `kv` has the same keys and values."""
    num_kv_heads, block_size = pages.shape[2:4]
    group = q.shape[1] // num_kv_heads
    y = q.new_empty(len(q), q.shape[1] * q.shape[2]) if out is None else out
    for row, first, size, position, _ in plan.tiles.view(-1, TILE_INTS).tolist():
        key = torch.arange(position + size, device=q.device)
        query = key[position:, None]
        seen = pages[block_tables[row, key // block_size].long(), :, :, key % block_size].float()  # [L, 2, K, D]
        keys, values = seen.repeat_interleave(group, dim=2).unbind(1)
        scores = torch.einsum("qhd,lhd->hql", q[first : first + size].float(), keys * k_scale) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        hidden = key > query
        if window is not None:
            hidden |= key <= query - window
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        y[first : first + size] = torch.einsum("hql,lhd->qhd", weights, values * v_scale).flatten(1).to(y.dtype)
    return y


@triton.jit
def _blocks_of(table_ptr, start, n, end, B: tl.constexpr, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Block ids of keys start + n; those from `end` on are not looked up."""
    if BLOCK_N % B == 0:
        index = start // B + n // B
    else:
        index = (start + n) // B
    return tl.load(table_ptr + index, mask=start + n < end, other=0)


# Tiles lie anywhere in the integers of a step: one kernel for all their alignments.
@triton.jit(do_not_specialize_on_alignment=["tiles_ptr"])
def _paged_prefill(  # type: ignore[no-untyped-def]
    q_ptr,
    kv_ptr,  # PAGED: pages, else kv
    table_ptr,
    tiles_ptr,
    y_ptr,
    q_stride,
    kv_stride,  # of a block, or of a token
    v_offset,  # from a key to its value
    table_stride,
    y_stride,
    scale,  # what makes a product a power of two, or the double argument of a tanh
    cap,
    v_scale,
    window,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    PAGED: tl.constexpr,
    WIDE: tl.constexpr,  # float32 products, because Triton's interpreter can't multiply bf16
    G: tl.constexpr,
    G_PAD: tl.constexpr,
    B: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    kv_head = tl.program_id(0)
    tile_ptr = tiles_ptr + tl.program_id(1) * 5
    table_row, first, size = tl.load(tile_ptr), tl.load(tile_ptr + 1), tl.load(tile_ptr + 2)
    position = tl.load(tile_ptr + 3)
    end = position + size  # keys from here on are seen by no query

    m, n, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, D_PAD)
    token, head = m // G_PAD, m % G_PAD
    column = (kv_head * G + head)[:, None] * D + d[None, :]
    valid = ((token < size) & (head < G))[:, None] & (d < D)[None, :]
    row = (first + token).to(tl.int64)[:, None]
    q = tl.load(q_ptr + row * q_stride + column, mask=valid, other=0.0)
    if WIDE:
        q = q.to(tl.float32)
    query = position + token

    # Keys low … high - 1 are seen by all rows, those before and after by some.
    begin = 0
    low = 0
    high = (position + 1) // BLOCK_N * BLOCK_N
    if HAS_WINDOW:
        first_key = tl.maximum(position - window + 1, 0)  # keys before it are seen by no query
        begin = first_key // BLOCK_N * BLOCK_N
        low = tl.cdiv(tl.maximum(end - window, 0), BLOCK_N) * BLOCK_N

    if PAGED:
        table_ptr += table_row.to(tl.int64) * table_stride
        k_ptr = kv_ptr + kv_head * (B * D)
        # Looked up one step ahead, so that loads of keys never wait for a block table.
        block = _blocks_of(table_ptr, begin, n, end, B, BLOCK_N)
    else:
        first_token = first - position  # of this sequence, in kv
        k_ptr = kv_ptr + kv_head * D
    v_ptr = k_ptr + v_offset
    total = tl.zeros([BLOCK_M], tl.float32)
    # The largest score so far, in units of log 2. Finite, as hidden scores of -inf less a top of -inf would be NaN.
    top = tl.full([BLOCK_M], -1e30, tl.float32)
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    for start in range(begin, end, BLOCK_N):
        start = tl.multiple_of(start, BLOCK_N)
        key = start + n
        # A zero weight would not keep out a NaN or infinity of another sequence: no query, no load.
        used = key < end
        if HAS_WINDOW:
            used &= key >= first_key
        if PAGED:
            inner = n % B if BLOCK_N % B == 0 else key % B
            offset = block.to(tl.int64) * kv_stride + inner * D
        else:
            offset = (first_token + start).to(tl.int64) * kv_stride + n * kv_stride
        offset = offset[:, None] + d[None, :]
        mask = used[:, None] & (d < D)[None, :]
        k = tl.load(k_ptr + offset, mask=mask, other=0.0)
        s = tl.dot(q, k.to(q.dtype).T, input_precision="ieee")
        if HAS_CAP:
            s = cap - 2 * cap / (tl.exp2(s * scale) + 1)  # cap * tanh
        if (start < low) | (start >= high):
            seen = key[None, :] <= query[:, None]
            if HAS_WINDOW:
                seen &= key[None, :] > query[:, None] - window
            # Not a large finite number: the multiply-add below would turn the rounding of its product into an exponent
            # of thousands, in rows whose keys so far are all hidden.
            s = tl.where(seen, s, float("-inf"))
        if HAS_CAP:
            new_top = tl.maximum(top, tl.max(s, 1))
            weights = tl.exp2(s - new_top[:, None])
        else:  # one multiply-add an element
            new_top = tl.maximum(top, tl.max(s, 1) * scale)
            weights = tl.exp2(s * scale - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, 1)
        top = new_top
        v = tl.load(v_ptr + offset, mask=mask, other=0.0)
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * shrink[:, None], input_precision="ieee")
        if PAGED:
            block = _blocks_of(table_ptr, start + BLOCK_N, n, end, B, BLOCK_N)
    y = acc * (v_scale / total)[:, None]
    tl.store(y_ptr + row * y_stride + column, y.to(y_ptr.dtype.element_ty), mask=valid)


def paged_prefill_triton(
    q: Tensor,
    pages: Tensor,
    block_tables: Tensor,
    plan: PrefillPlan,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: Tensor | None = None,
    kv: Tensor | None = None,
) -> Tensor:
    y = q.new_empty(len(q), q.shape[1] * q.shape[2]) if out is None else out
    options = q, pages.shape, block_tables, plan, scale, window, softcap, y
    num_fresh = 0 if kv is None else plan.num_fresh
    if kv is not None and num_fresh > 0:
        _launch(*options, slice(0, num_fresh), kv, kv.stride(0), kv.shape[1] // 2 * kv.stride(1), 1.0, 1.0)
    if num_fresh < plan.num_tiles:
        paged = slice(num_fresh, plan.num_tiles)
        _launch(*options, paged, pages, pages.stride(0), pages.stride(1), k_scale, v_scale)
    return y


def _launch(
    q: Tensor,
    pages_shape: torch.Size,
    block_tables: Tensor,
    plan: PrefillPlan,
    scale: float,
    window: int | None,
    softcap: float | None,
    y: Tensor,
    tiles: slice,
    source: Tensor,
    kv_stride: int,
    v_offset: int,
    k_scale: float,
    v_scale: float,
) -> None:
    """Some of the plan's tiles, with keys and values from `source`: pages, which have five dimensions, or kv."""
    is_paged = source.dim() == 5
    (_, num_heads, head_dim), (num_kv_heads, block_size) = q.shape, pages_shape[2:4]
    group = num_heads // num_kv_heads
    tile = pick_tile(group, head_dim, q.dtype)
    group_padded, padded = power_of_2(group), _padded_head_dim(head_dim)
    assert plan.block_m_tokens * group_padded <= tile.block_m, "the plan was made for larger tiles"
    score_scale = scale * k_scale * _LOG2E * (1.0 if softcap is None else 2 / softcap)
    cap = (softcap or 0.0) * _LOG2E
    launch(
        _paged_prefill,
        (num_kv_heads, tiles.stop - tiles.start),
        (
            *(q, source, block_tables, plan.tiles[tiles.start * TILE_INTS :] if tiles.start else plan.tiles, y),
            *(q.stride(0), kv_stride, v_offset, block_tables.stride(0), y.stride(0)),
            *(score_scale, cap, v_scale, window or 0),
        ),
        {
            "HAS_CAP": softcap is not None,
            "HAS_WINDOW": window is not None,
            "PAGED": is_paged,
            "WIDE": q.dtype == torch.bfloat16 and not isinstance(_paged_prefill, triton.JITFunction),
            "G": group,
            "G_PAD": group_padded,
            "B": block_size,
            "D": head_dim,
            "D_PAD": padded,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def paged_prefill(
    q: Tensor,
    pages: Tensor,
    block_tables: Tensor,
    plan: PrefillPlan,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: Tensor | None = None,
    kv: Tensor | None = None,
) -> Tensor:
    num_heads, head_dim = q.shape[1:]
    assert pages.shape[4] == head_dim and num_heads % pages.shape[2] == 0, (q.shape, pages.shape)
    assert q.stride()[1:] == (head_dim, 1) and block_tables.stride(1) == 1
    assert pages.stride()[2:] == (pages.shape[3] * head_dim, head_dim, 1), pages.stride()
    assert out is None or (out.shape[1] == num_heads * head_dim and out.stride(1) == 1)
    assert kv is None or (kv.dtype == q.dtype and kv.stride()[1:] == (head_dim, 1))
    op = paged_prefill_triton if q.is_cuda else paged_prefill_ref
    return op(q, pages, block_tables, plan, scale, window, softcap, k_scale, v_scale, out, kv)


def make_inputs(case: Case) -> tuple[object, ...]:
    """`P` sequences with up to `T` queries each, every other one after up to `L` cached tokens, in shuffled blocks.

    T=1: each has one query and all have cached tokens. fp8=1: float8 pages. kv=1: fresh sequences needn't read pages.
    """
    rng = np.random.default_rng(case["P"] + case["L"] + case["T"])
    num_seqs, block_size, num_kv_heads, head_dim = case["P"], case["B"], case["K"], case["D"]
    num_queries = rng.integers(max(case["T"] // 2, 1), case["T"] + 1, num_seqs)
    cached = rng.integers(min(case["L"], 1), case["L"] + 1, num_seqs)
    if case["T"] > 1:
        cached[::2] = 0
    lengths = cached + num_queries
    width = -(-int(lengths.max()) // block_size)
    num_rows = num_seqs + 2
    tables = torch.from_numpy(rng.permutation(np.arange(1, num_rows * width + 1)).reshape(num_rows, width))
    rows = rng.permutation(num_rows)[:num_seqs]
    query_start = np.concatenate([[0], np.cumsum(num_queries)])
    pages = case.randn(num_rows * width + 1, 2, num_kv_heads, block_size, head_dim, seed=1)
    qkv = case.randn(int(query_start[-1]), case["H"] + 2 * num_kv_heads, head_dim, seed=2)
    q, kv = qkv.split((case["H"], 2 * num_kv_heads), dim=1)
    for seq, row in enumerate(rows):
        key = torch.arange(int(cached[seq]), int(lengths[seq]))
        own = kv[int(query_start[seq]) : int(query_start[seq + 1])].unflatten(1, (2, num_kv_heads))
        pages[tables[row, key // block_size], :, :, key % block_size] = own
    k_scale, v_scale = (0.5, 0.25) if case.get("fp8") else (1.0, 1.0)
    if case.get("fp8"):
        pages = (pages / torch.tensor([k_scale, v_scale]).view(2, 1, 1, 1)).to(torch.float8_e4m3fn)
    block_m_tokens = queries_per_tile(case["H"], num_kv_heads, head_dim, case.dtype)
    planned = plan_prefill(rows, query_start, lengths, block_m_tokens)
    plan = PrefillPlan.of(planned, torch.from_numpy(planned), block_m_tokens)
    window, softcap = case.get("W") or None, float(case.get("softcap")) or None
    scale = head_dim**-0.5
    return q, pages, tables.int(), plan, scale, window, softcap, k_scale, v_scale, None, kv if case.get("kv") else None


CASES = [
    Case("paged_prefill", P=1, T=300, L=0, H=4, K=2, D=64, B=16, dtype=torch.bfloat16),
    Case("paged_prefill", P=1, T=300, L=0, H=4, K=2, D=64, B=16, kv=1, dtype=torch.bfloat16),
    Case("paged_prefill", P=3, T=90, L=300, H=8, K=2, D=128, B=16, dtype=torch.bfloat16),
    Case("paged_prefill", P=3, T=90, L=300, H=8, K=2, D=128, B=16, kv=1, dtype=torch.bfloat16),
    Case("paged_prefill", P=4, T=40, L=200, H=9, K=3, D=64, B=16, kv=1, dtype=torch.float16),
    Case("paged_prefill", P=5, T=1, L=300, H=9, K=3, D=64, B=16, dtype=torch.bfloat16),
    Case("paged_prefill", P=3, T=60, L=200, H=4, K=4, D=80, B=32, kv=1, dtype=torch.bfloat16),
    Case("paged_prefill", P=3, T=60, L=200, H=7, K=1, D=96, B=16, kv=1, dtype=torch.float16),
    Case("paged_prefill", P=2, T=40, L=150, H=8, K=1, D=256, B=16, kv=1, dtype=torch.bfloat16),
    Case("paged_prefill", P=4, T=80, L=200, W=70, H=4, K=2, D=64, B=16, kv=1, dtype=torch.bfloat16),
    Case("paged_prefill", P=3, T=200, L=300, W=300, H=6, K=3, D=128, B=16, kv=1, softcap=2, dtype=torch.bfloat16),
    Case("paged_prefill", P=2, T=60, L=200, H=8, K=2, D=128, B=16, fp8=1, dtype=torch.bfloat16),
    Case("paged_prefill", P=3, T=60, L=100, W=50, H=9, K=3, D=64, B=32, fp8=1, dtype=torch.float16),
    Case("paged_prefill", P=4, T=40, L=100, H=6, K=2, D=16, B=1),
    Case("paged_prefill", P=4, T=40, L=100, H=6, K=2, D=8, B=4, kv=1),
    Case("paged_prefill", P=3, T=30, L=60, W=7, H=5, K=1, D=32, B=4, softcap=2, kv=1),
    Case("paged_prefill", P=3, T=30, L=60, H=4, K=2, D=64, B=24),
    Case("paged_prefill", P=2, T=20, L=60, W=1, H=2, K=2, D=80, B=16, kv=1),
    Case("paged_prefill", P=2, T=20, L=60, H=8, K=1, D=128, B=32, kv=1),
    Case("paged_prefill", P=2, T=20, L=40, H=4, K=2, D=256, B=16, kv=1),
]
