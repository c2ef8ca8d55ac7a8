"""Attention of one query per sequence over paged keys and values, long sequences split over many programs.

    y = softmax(cap(q K^T * scale) + mask) V  over the positions max(0, length - window) … length - 1 of a sequence

cap(s) = softcap * tanh(s / softcap), or s without one. The query stands at position length - 1; its own key and value
are in the pages already. Pages of float8 hold key / k_scale and value / v_scale.

Shapes   q [S, H, D], heads side by side, row stride free; pages [num_blocks, 2, K, B, D]; block_tables [R, max_blocks];
         y [S, H * D]. Query head h reads key head h // (H / K).
Dtypes   q, y float32, bf16 or fp16; pages of q's type or float8_e4m3fn; block_tables int32. Sums in float32.
Writes   y, zeros where a sequence is empty; the plan's scratch. Safe under CUDA graph capture.
Source   Flash-Decoding, https://pytorch.org/blog/flash-decoding; online softmax: Milakov and Gimelshein 2018,
         arXiv:1805.02867; Kwon et al. 2023, arXiv:2309.06180; the softcap: Gemma 2, arXiv:2408.00118

The host cuts a step's sequences into about equal items once (`plan_decode`); every layer uses that plan. One program
takes an item and a key head, whose query heads are the rows of its products. Programs that share a sequence leave
partial sums in the scratch, and whichever comes last adds them up.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagedray.kernels.case import Case
from pagedray.kernels.jit import launch, power_of_2, tl, triton

# Items are a multiple of it long, so that the last tile alone of a sequence is ragged.
GRANULE = 64
# (tokens a tile, warps, stages of the pipeline) by (padded head dim, bytes a number of the pages), where the rule of
# `choose_tile` is not the fastest; set by tuning scripts.
TILES: dict[tuple[int, int], tuple[int, int, int]] = {}
_FEW_SEQS = 32
# Numbers of partial sums that are merged at once: they must fit into registers.
_MERGE = 4096
_LOG2E = 1.4426950408889634
# row of the block table, sequence, first position, end, items of the sequence, slot of its first item, own slot, 0
_FIELDS = 8


class DecodeScratch:
    """Partial sums of split sequences; made once, shared by all layers and steps of a stream."""

    def __init__(self, max_items: int, num_heads: int, head_dim: int, device: torch.device):
        self.sums = torch.empty(max_items, num_heads, head_dim, dtype=torch.float32, device=device)
        self.stats = torch.empty(max_items, 2, num_heads, dtype=torch.float32, device=device)  # maximum, denominator
        self.arrived = torch.zeros(max_items, num_heads, dtype=torch.int32, device=device)  # zeros again after a launch


@dataclasses.dataclass(frozen=True)
class DecodePlan:
    """What the programs of a step do, for one group of layers."""

    items: Tensor  # [num_items, 8] int32, see _FIELDS; sequence -1: nothing to do
    rows: Tensor  # [S] int32: row of block_tables of each sequence
    lengths: Tensor  # [S] int32: tokens of each sequence, this step's included; 0: padding
    window: int | None
    scratch: DecodeScratch | None = None

    @property
    def num_items(self) -> int:
        return len(self.items)

    @property
    def num_seqs(self) -> int:
        return len(self.rows)


def num_decode_items(num_seqs: int, num_kv_heads: int, num_sms: int = 132) -> int:
    """One for each sequence, and as many again as give every multiprocessor four programs."""
    return num_seqs + -(-4 * num_sms // num_kv_heads)


def plan_size(num_seqs: int, num_items: int) -> int:
    """Length of `plan_decode`'s array."""
    return num_items * _FIELDS + 2 * num_seqs


def plan_decode(
    rows: NDArray[np.int32], lengths: NDArray[np.int32], window: int | None, num_items: int
) -> NDArray[np.int32]:
    """All that the programs need from the host, in one array of `plan_size`: items, rows, lengths.

    Args:
        rows: [S]; row of the block tables of each sequence.
        lengths: [S]; tokens of each sequence, this step's included; 0 for padding, whose output is zeros.
        num_items: at least S; see `num_decode_items`.
    """
    num_seqs = len(rows)
    assert num_items >= num_seqs, f"{num_items} items can't hold {num_seqs} sequences"
    stops = lengths.astype(np.int64)
    visible = stops if window is None else np.minimum(stops, window)
    counts = _num_pieces(visible, _piece_size(visible, num_items))
    sizes = np.maximum(-(-visible // (counts * GRANULE)), 1) * GRANULE
    counts = _num_pieces(visible, sizes)
    slots = np.cumsum(counts) - counts
    used = int(counts.sum())
    seq = np.repeat(np.arange(num_seqs), counts)
    own = np.arange(used)
    first = (stops - visible)[seq] + (own - slots[seq]) * sizes[seq]
    end = np.minimum(first + sizes[seq], stops[seq])
    # Longest first: what starts last should not take long.
    order = np.argsort(first - end, kind="stable")
    plan = np.full(plan_size(num_seqs, num_items), -1, np.int32)
    items = plan[: used * _FIELDS].reshape(used, _FIELDS)
    for field, values in enumerate((rows[seq], seq, first, end, counts[seq], slots[seq], own)):
        items[:, field] = values[order]
    plan[num_items * _FIELDS : -num_seqs] = rows
    plan[-num_seqs:] = lengths
    return plan


def _piece_size(visible: NDArray[np.int64], num_items: int) -> int:
    """An even share of all positions for each item beyond one a sequence, rounded up to GRANULE.

    That is never too small: a sequence fills length / size items and begins at most one more.
    """
    spare = num_items - len(visible)
    share = int(visible.max()) if spare == 0 else -(-int(visible.sum()) // spare)
    return max(-(-share // GRANULE), 1) * GRANULE


def _num_pieces(visible: NDArray[np.int64], size: int | NDArray[np.int64]) -> NDArray[np.int64]:
    """An empty sequence has one too: somebody must write its zeros."""
    pieces: NDArray[np.int64] = np.maximum(-(-visible // size), 1)
    return pieces


def decode_plan_views(
    buffer: Tensor, num_seqs: int, num_items: int, window: int | None = None, scratch: DecodeScratch | None = None
) -> DecodePlan:
    """`buffer` holds, or will hold before the launch, what `plan_decode` returned for the same numbers."""
    split = num_items * _FIELDS
    items, rows, lengths = buffer[: split + 2 * num_seqs].split([split, num_seqs, num_seqs])
    return DecodePlan(items.view(num_items, _FIELDS), rows, lengths, window, scratch)


def choose_tile(head_dim: int, page_bytes: int, num_seqs: int) -> tuple[int, int, int]:
    """Tokens a tile, warps, pipeline stages.

    Up to 32 KiB are under way while a tile is computed; a multiprocessor's registers and memory hold three programs.
    Few sequences are cut into many short pieces, which small tiles suit better (measured on an H200).
    """
    padded = max(power_of_2(head_dim), 16)
    if (padded, page_bytes) in TILES:
        return TILES[padded, page_bytes]
    if page_bytes == 2 and num_seqs <= _FEW_SEQS:
        return min(max(4096 // padded, 16), 128), 2, 4
    numbers, num_stages = {1: (8192, 4), 2: (8192, 2), 4: (2048, 3)}[page_bytes]
    return min(max(numbers // padded, 16), 128), 4, num_stages


def paged_decode_ref(
    q: Tensor,
    pages: Tensor,
    block_tables: Tensor,
    plan: DecodePlan,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    num_seqs, num_heads, head_dim = q.shape
    num_kv_heads, block_size = pages.shape[2:4]
    y = q.new_zeros(num_seqs, num_heads * head_dim) if out is None else out.zero_()
    for seq, (row, length) in enumerate(zip(plan.rows.tolist(), plan.lengths.tolist(), strict=True)):
        if length == 0:
            continue
        low = 0 if window is None else max(0, length - window)
        position = torch.arange(low, length, device=q.device)
        blocks = block_tables[row, position // block_size].long()
        seen = pages.transpose(2, 3)[blocks, :, position % block_size].float()  # [L, 2, K, D]
        keys, values = seen.repeat_interleave(num_heads // num_kv_heads, dim=2).unbind(1)
        scores = torch.einsum("hd,lhd->hl", q[seq].float(), keys * k_scale) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        y[seq] = torch.einsum("hl,lhd->hd", scores.softmax(-1), values * v_scale).flatten()
    return y


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["tables_ptr", "items_ptr"])
def _paged_decode(  # type: ignore[no-untyped-def]
    q_ptr,
    pages_ptr,
    tables_ptr,
    items_ptr,
    y_ptr,
    sums_ptr,
    stats_ptr,
    arrived_ptr,
    q_stride,
    page_stride,
    table_stride,
    score_scale,  # with log2(e), unless there is a softcap
    softcap,
    v_scale,
    K: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    B: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MERGE_N: tl.constexpr,
    MERGE_G: tl.constexpr,
):
    # Key heads vary fastest: programs that run together read whole blocks, and unused items come last.
    head = tl.program_id(0)
    item_ptr = items_ptr + tl.program_id(1) * 8
    row = tl.load(item_ptr)
    seq = tl.load(item_ptr + 1)
    first = tl.load(item_ptr + 2)
    end = tl.load(item_ptr + 3)
    count = tl.load(item_ptr + 4)
    first_slot = tl.load(item_ptr + 5)
    slot = tl.load(item_ptr + 6)
    if seq < 0:
        return

    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    heads = head * G + g
    real = (g < G)[:, None] & (d < D)[None, :]
    q = tl.load(q_ptr + seq * q_stride + heads[:, None] * D + d[None, :], mask=real, other=0.0)
    if INTERPRETED:  # where tl.dot takes the bits of bf16 for integers; all products are in q's type
        q = q.to(tl.float32)
    table_ptr = tables_ptr + row.to(tl.int64) * table_stride
    keys_ptr = pages_ptr + head * B * D + d[None, :]
    values_ptr = keys_ptr + K * B * D

    maximum = tl.full([BLOCK_G], float("-inf"), tl.float32)
    denominator = tl.zeros([BLOCK_G], tl.float32)
    sums = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    # Blocks are looked up one tile ahead: loads whose addresses are loaded in the same turn are pipelined less deeply.
    block = tl.load(table_ptr + (first + n).to(tl.uint32) // B, mask=first + n < end, other=0)
    for start in range(first, end, BLOCK_N):
        position = start + n
        seen = position < end
        offset = block.to(tl.int64) * page_stride + (position.to(tl.uint32) % B) * D
        block = tl.load(table_ptr + (position + BLOCK_N).to(tl.uint32) // B, mask=position + BLOCK_N < end, other=0)
        mask = seen[:, None] & (d < D)[None, :]
        k = tl.load(keys_ptr + offset[:, None], mask=mask, other=0.0)
        v = tl.load(values_ptr + offset[:, None], mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * score_scale
        if HAS_SOFTCAP:
            # tanh(x) = 1 - 2 / (1 + e^2x), right at both ends
            tanh = 1.0 - 2.0 / (1.0 + tl.exp2(scores * (2.0 * 1.4426950408889634 / softcap)))
            scores = tanh * (softcap * 1.4426950408889634)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.exp2(scores - new_maximum[:, None])
        shrink = tl.exp2(maximum - new_maximum)
        denominator = denominator * shrink + tl.sum(weights, 1)
        sums = tl.dot(weights.to(q.dtype), v.to(q.dtype), sums * shrink[:, None], input_precision="ieee")
        maximum = new_maximum

    y_start = y_ptr + seq * (K * G * D)
    if count == 1:
        y = sums * (v_scale / tl.where(first < end, denominator, 1.0))[:, None]
        tl.store(y_start + heads[:, None] * D + d[None, :], y.to(y_ptr.dtype.element_ty), mask=real)
    else:
        tl.store(sums_ptr + slot * (K * G * D) + heads[:, None] * D + d[None, :], sums, mask=real)
        tl.store(stats_ptr + slot * (2 * K * G) + heads, maximum, mask=g < G)
        tl.store(stats_ptr + slot * (2 * K * G) + K * G + heads, denominator, mask=g < G)
        # All threads' stores come before one thread's release; what it acquires is passed on by the next barrier.
        tl.debug_barrier()
        arrived_ptr += first_slot * (K * G) + head
        before = tl.atomic_add(arrived_ptr, 1, sem="acq_rel", scope="gpu")
        if before == count - 1:
            tl.debug_barrier()
            tl.store(arrived_ptr, 0)
            _merge(
                sums_ptr + first_slot * (K * G * D) + head * G * D,
                stats_ptr + first_slot * (2 * K * G) + head * G,
                y_start + head * G * D,
                count,
                v_scale,
                K * G,
                G,
                D,
                BLOCK_D,
                MERGE_N,
                MERGE_G,
            )


@triton.jit
def _merge(  # type: ignore[no-untyped-def]
    sums_ptr,
    stats_ptr,
    y_ptr,
    count,
    v_scale,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MERGE_N: tl.constexpr,
    MERGE_G: tl.constexpr,
):
    """y = sum of 2^maximum * sums over the items / sum of 2^maximum * denominator, for one key head of a sequence."""
    n = tl.arange(0, MERGE_N)
    g = tl.arange(0, MERGE_G)
    d = tl.arange(0, BLOCK_D)
    real = (g < G)[:, None] & (d < D)[None, :]
    maximum = tl.full([MERGE_G], float("-inf"), tl.float32)
    denominator = tl.zeros([MERGE_G], tl.float32)
    sums = tl.zeros([MERGE_G, BLOCK_D], tl.float32)
    for start in range(0, count, MERGE_N):
        item = start + n
        there = (item < count)[:, None] & (g < G)[None, :]
        # .cg: other multiprocessors wrote it, and the first-level cache may hold what was there before.
        stat_ptrs = stats_ptr + item[:, None] * (2 * H) + g[None, :]
        item_maximum = tl.load(stat_ptrs, mask=there, other=0.0, cache_modifier=".cg")
        item_maximum = tl.where((item < count)[:, None], item_maximum, float("-inf"))
        item_denominator = tl.load(stat_ptrs + H, mask=there, other=1.0, cache_modifier=".cg")
        item_sums = tl.load(
            sums_ptr + item[:, None, None] * (H * D) + g[None, :, None] * D + d[None, None, :],
            mask=(item < count)[:, None, None] & real[None, :, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_maximum = tl.maximum(maximum, tl.max(item_maximum, 0))
        weights = tl.exp2(item_maximum - new_maximum[None, :])
        shrink = tl.exp2(maximum - new_maximum)
        denominator = denominator * shrink + tl.sum(weights * item_denominator, 0)
        sums = sums * shrink[:, None] + tl.sum(weights[:, :, None] * item_sums, 0)
        maximum = new_maximum
    y = sums * (v_scale / denominator)[:, None]
    tl.store(y_ptr + g[:, None] * D + d[None, :], y.to(y_ptr.dtype.element_ty), mask=real)


def paged_decode_triton(
    q: Tensor,
    pages: Tensor,
    block_tables: Tensor,
    plan: DecodePlan,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    num_seqs, num_heads, head_dim = q.shape
    num_kv_heads, block_size = pages.shape[2:4]
    group, scratch = num_heads // num_kv_heads, plan.scratch
    assert scratch is not None, "programs that share a sequence need a scratch"
    assert scratch.sums.shape[1:] == q.shape[1:] and len(scratch.sums) >= plan.num_items
    assert window == plan.window and num_seqs == plan.num_seqs
    assert q.stride()[1:] == (head_dim, 1) and block_tables.stride(1) == 1
    rows = block_size * head_dim
    assert pages.stride()[1:] == (num_kv_heads * rows, rows, head_dim, 1), pages.stride()
    y = q.new_empty(num_seqs, num_heads * head_dim) if out is None else out
    assert y.is_contiguous() and y.dtype == q.dtype
    block_n, num_warps, num_stages = choose_tile(head_dim, pages.element_size(), num_seqs)
    block_d, merge_g = max(power_of_2(head_dim), 16), power_of_2(group)
    score_scale = scale * k_scale * (_LOG2E if softcap is None else 1.0)
    launch(
        _paged_decode,
        (num_kv_heads, plan.num_items),
        (
            *(q, pages, block_tables, plan.items, y, scratch.sums, scratch.stats, scratch.arrived),
            *(q.stride(0), pages.stride(0), block_tables.stride(0), score_scale, float(softcap or 1.0), v_scale),
        ),
        {
            "K": num_kv_heads,
            "G": group,
            "D": head_dim,
            "B": block_size,
            "HAS_SOFTCAP": softcap is not None,
            "INTERPRETED": not q.is_cuda,
            "BLOCK_N": block_n,
            "BLOCK_G": max(merge_g, 16),
            "BLOCK_D": block_d,
            "MERGE_N": min(max(_MERGE // (merge_g * block_d), 1), 32),
            "MERGE_G": merge_g,
        },
        num_warps=num_warps,
        num_stages=num_stages,
    )
    return y


def paged_decode(
    q: Tensor,
    pages: Tensor,
    block_tables: Tensor,
    plan: DecodePlan,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    op = paged_decode_triton if q.is_cuda else paged_decode_ref
    return op(q, pages, block_tables, plan, scale, window, softcap, k_scale, v_scale, out)


def make_inputs(case: Case) -> tuple[Tensor | DecodePlan | float | None, ...]:
    """`S` sequences of up to `L` tokens, one of `long` and `P` of none among them, in shuffled rows and blocks."""
    rng = np.random.default_rng(case["L"] + case["S"])
    block_size, num_heads, num_kv_heads = case.get("B", 16), case["H"], case["K"]
    lengths = rng.integers(1, case["L"] + 1, case["S"]).astype(np.int32)
    lengths[-1] = case.get("long", case["L"])
    lengths = rng.permutation(np.concatenate([lengths, np.zeros(case.get("P"), np.int32)]))
    num_seqs = len(lengths)
    rows = rng.permutation(num_seqs + 2)[:num_seqs].astype(np.int32)
    num_blocks = -(-lengths // block_size)
    tables = np.zeros((num_seqs + 2, int(num_blocks.max()) + 1), np.int32)
    blocks = rng.permutation(np.arange(1, int(num_blocks.sum()) + 1))
    for row, ids in zip(rows, np.split(blocks, np.cumsum(num_blocks)[:-1]), strict=True):
        tables[row, : len(ids)] = ids
    window = case.get("W") or None
    num_items = case.get("items") or num_decode_items(num_seqs, num_kv_heads, num_sms=2)
    buffer = torch.from_numpy(plan_decode(rows, lengths, window, num_items))
    pages = case.randn(len(blocks) + 1, 2, num_kv_heads, block_size, case["D"], seed=1)
    q = case.randn(num_seqs, num_heads + 2 * num_kv_heads, case["D"], seed=2)[:, :num_heads]
    scales = 1.0, 1.0
    if case.get("fp8"):
        pages, scales = (pages * 4).to(torch.float8_e4m3fn), (0.25, 0.5)
    plan = decode_plan_views(buffer, num_seqs, num_items, window)
    softcap = float(case.get("softcap")) or None
    return q, pages, torch.from_numpy(tables), plan, case["D"] ** -0.5, window, softcap, *scales


def kernel_inputs(op: str, inputs: tuple[Tensor | DecodePlan | float | None, ...]) -> tuple[object, ...]:
    q, pages, block_tables, plan, *rest = inputs
    assert isinstance(q, Tensor) and isinstance(plan, DecodePlan)
    scratch = DecodeScratch(plan.num_items, q.shape[1], q.shape[2], q.device)
    return q, pages, block_tables, dataclasses.replace(plan, scratch=scratch), *rest


CASES = [
    Case("paged_decode", S=1, L=20, H=9, K=3, D=64, dtype=torch.bfloat16),
    Case("paged_decode", S=1, L=1, H=4, K=4, D=16),
    Case("paged_decode", S=3, L=40, H=8, K=1, D=64, items=3, dtype=torch.float16),
    Case("paged_decode", S=2, L=70, H=4, K=2, D=80, dtype=torch.bfloat16),
    Case("paged_decode", S=2, L=150, H=3, K=1, D=96, items=6),
    Case("paged_decode", S=3, L=300, P=2, H=8, K=2, D=128, B=32, items=12, dtype=torch.bfloat16),
    Case("paged_decode", S=2, L=70, H=2, K=1, D=256, items=4, dtype=torch.float16),
    Case("paged_decode", S=5, L=30, long=1500, P=1, H=4, K=2, D=16, B=4, items=22),
    Case("paged_decode", S=5, L=30, long=700, P=1, H=6, K=2, D=32, B=1, items=11),
    Case("paged_decode", S=4, L=90, H=9, K=3, D=64, B=16, items=9),
    Case("paged_decode", S=1, L=700, H=14, K=2, D=64, items=20),  # more items than are merged at once
    Case("paged_decode", S=4, L=200, W=75, H=4, K=2, D=32, B=16, items=8),
    Case("paged_decode", S=4, L=90, W=5, H=2, K=2, D=16, B=4, softcap=2),
    Case("paged_decode", S=3, L=200, H=4, K=1, D=8, B=16, softcap=30),
    Case("paged_decode", S=3, L=200, H=8, K=2, D=128, items=6, fp8=1, dtype=torch.bfloat16),
    Case("paged_decode", S=2, L=90, H=2, K=1, D=16, items=4, fp8=1),
]
