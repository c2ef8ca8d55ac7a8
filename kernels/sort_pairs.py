"""(token, expert) pairs by expert, in tiles: what a grouped product works through

    Pair p is token p // k with its expert number p % k. A place is a position in the sorted order: order[place] = pair.
    A tile is (expert of this rank, first place, number of places): up to block_m pairs of one expert. 0 places: unused.

Shapes   experts [T, k] int32, -1: none. E experts in all; this rank's are first … first + num_local - 1, and tiles name
         them from 0 on. order [T * k] int32, by expert, then by pair; places past the last pair that has an expert are
         left as they are. tiles [most_tiles, 3] int32, those in use first. T * k < 2^31, E <= 4096.
Writes   nothing else. Deterministic: no atomics. Safe under CUDA graph capture: the number of tiles is the most that
         so many pairs can need, known to the host.
Method   Counting sort over blocks of pairs, as small as the pairs are few. One kernel counts each block's pairs by
         expert, which few pairs don't need; in the other each program adds up what comes before its pairs, and one
         more program writes the tiles.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pagedray.kernels.case import Case
from pagedray.kernels.jit import launch, power_of_2, tl, triton

_CELLS = 4096  # of a table, that a program goes through at a time


class SortedPairs(NamedTuple):
    order: Tensor  # [T * k] int32
    tiles: Tensor  # [most_tiles, 3] int32


def most_tiles(num_pairs: int, num_experts: int, block_m: int) -> int:
    """Each expert with pairs may leave one tile that isn't full."""
    used = min(num_experts, num_pairs)
    return used + (num_pairs - used) // block_m


def sort_pairs_ref(experts: Tensor, num_experts: int, first: int, num_local: int, block_m: int) -> SortedPairs:
    keys = experts.flatten().tolist()
    order = sorted(range(len(keys)), key=lambda pair: (keys[pair] < 0, keys[pair], pair))
    tiles, place = [], 0
    for expert in range(num_experts):
        size = keys.count(expert)
        if first <= expert < first + num_local:
            cuts = range(0, size, block_m)
            tiles += [[expert - first, place + cut, min(block_m, size - cut)] for cut in cuts]
        place += size
    tiles += [[0, 0, 0]] * (most_tiles(len(keys), num_local, block_m) - len(tiles))
    made = torch.tensor(tiles, dtype=torch.int32).view(-1, 3)
    return SortedPairs(torch.tensor(order, dtype=torch.int32).to(experts.device), made.to(experts.device))


@triton.jit
def _count_block(experts_ptr, block, P, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Pairs of each expert among those of a block, [BLOCK_E] int32."""
    expert = tl.arange(0, BLOCK_E)[None, :]
    counts = tl.zeros([ROWS, BLOCK_E], tl.int32)
    for start in range(0, BLOCK, ROWS):
        pair = block * BLOCK + start + tl.arange(0, ROWS)[:, None]
        key = tl.load(experts_ptr + pair, mask=pair < P, other=-1)
        counts += (key == expert).to(tl.int32)
    return tl.sum(counts, 0)


@triton.jit(do_not_specialize=["P"])
def _count_pairs(  # type: ignore[no-untyped-def]
    experts_ptr, counts_ptr, P, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr, ROWS: tl.constexpr
):
    block = tl.program_id(0)
    counts = _count_block(experts_ptr, block, P, BLOCK, BLOCK_E, ROWS)
    tl.store(counts_ptr + block * BLOCK_E + tl.arange(0, BLOCK_E), counts)


@triton.jit
def _write_order(  # type: ignore[no-untyped-def]
    experts_ptr, order_ptr, begins, block, P, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr, ROWS: tl.constexpr
):
    """Of the pairs of a block. begins [BLOCK_E]: the place of its first pair of each expert."""
    expert = tl.arange(0, BLOCK_E)[None, :]
    other = block * BLOCK + tl.arange(0, BLOCK)[None, :]
    other_key = tl.load(experts_ptr + other, mask=other < P, other=-1)
    for start in range(0, BLOCK, ROWS):
        pair = block * BLOCK + start + tl.arange(0, ROWS)
        key = tl.load(experts_ptr + pair, mask=pair < P, other=-1)
        is_before = (other_key == key[:, None]) & (other < pair[:, None])
        rank = tl.sum(is_before.to(tl.int32), 1)
        begin = tl.sum(tl.where(expert == key[:, None], begins[None, :], 0), 1)
        tl.store(order_ptr + begin + rank, pair, mask=key >= 0)


@triton.jit
def _write_tiles(  # type: ignore[no-untyped-def]
    tiles_ptr, begins, totals, first, num_local, num_tiles, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr
):
    """begins, totals [BLOCK_E]: first place and number of pairs of each expert."""
    expert = tl.arange(0, BLOCK_E) - first
    sizes = tl.where((expert >= 0) & (expert < num_local), totals, 0)
    counts = (sizes + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(counts, 0)
    for i in range(tl.max(counts, 0)):
        tile_ptr = tiles_ptr + (ends - counts + i) * 3
        is_used = i < counts
        tl.store(tile_ptr, expert, mask=is_used)
        tl.store(tile_ptr + 1, begins + i * BLOCK_M, mask=is_used)
        tl.store(tile_ptr + 2, tl.minimum(sizes - i * BLOCK_M, BLOCK_M), mask=is_used)
    num_used = tl.sum(counts, 0)
    for start in range(num_used * 3, num_tiles * 3, BLOCK_E):
        at = start + tl.arange(0, BLOCK_E)
        tl.store(tiles_ptr + at, tl.zeros([BLOCK_E], tl.int32), mask=at < num_tiles * 3)


@triton.jit(do_not_specialize=["P", "first", "num_blocks", "num_tiles"])
def _place_pairs(  # type: ignore[no-untyped-def]
    experts_ptr,
    counts_ptr,  # [num_blocks, BLOCK_E] of the blocks' pairs; None: there is one block
    order_ptr,
    tiles_ptr,
    P,
    first,
    num_local,
    num_blocks,
    num_tiles,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A block of pairs a program; the last program writes the tiles."""
    block = tl.program_id(0)
    if counts_ptr is None:
        totals = _count_block(experts_ptr, 0, P, BLOCK, BLOCK_E, ROWS)
        earlier = tl.zeros([BLOCK_E], tl.int32)
    else:
        sums = tl.zeros([ROWS, BLOCK_E], tl.int32)
        earlier_sums = tl.zeros([ROWS, BLOCK_E], tl.int32)
        for start in range(0, num_blocks, ROWS):
            row = start + tl.arange(0, ROWS)[:, None]
            ptrs = counts_ptr + row * BLOCK_E + tl.arange(0, BLOCK_E)[None, :]
            counts = tl.load(ptrs, mask=row < num_blocks, other=0)
            sums += counts
            earlier_sums += tl.where(row < block, counts, 0)
        totals = tl.sum(sums, 0)
        earlier = tl.sum(earlier_sums, 0)
    begins = tl.cumsum(totals, 0) - totals
    if block < num_blocks:
        _write_order(experts_ptr, order_ptr, begins + earlier, block, P, BLOCK, BLOCK_E, ROWS)
    else:
        _write_tiles(tiles_ptr, begins, totals, first, num_local, num_tiles, BLOCK_M, BLOCK_E)


def sort_pairs(experts: Tensor, num_experts: int, first: int, num_local: int, block_m: int) -> SortedPairs:
    """
    Args:
        experts: of each token, as `route_experts` gives them.
        first, num_local: the experts whose tiles are wanted.
        block_m: most pairs of a tile.
    """
    if experts.is_cuda:
        return sort_pairs_triton(experts, num_experts, first, num_local, block_m)
    keys = experts.flatten()
    keys = keys.where(keys >= 0, num_experts)
    order = keys.argsort(stable=True).int()
    sizes = torch.bincount(keys, minlength=num_experts).tolist()
    tiles, place = [], 0
    for expert, size in enumerate(sizes[:num_experts]):
        if first <= expert < first + num_local:
            tiles += [(expert - first, place + cut, min(block_m, size - cut)) for cut in range(0, size, block_m)]
        place += size
    made = torch.zeros(most_tiles(len(keys), num_local, block_m), 3, dtype=torch.int32)
    if tiles:
        made[: len(tiles)] = torch.tensor(tiles, dtype=torch.int32)
    return SortedPairs(order, made)


# Pairs up to which a program takes so many, measured on an H200. One program alone needs no count beforehand.
_BLOCKS = ((2048, 32), (16384, 64), (65536, 128))


def pick_block(num_pairs: int) -> int:
    """Pairs of one program: it compares each with all of them, and adds up what all programs counted."""
    if num_pairs <= 64:
        return max(power_of_2(num_pairs), 16)
    return next((block for most, block in _BLOCKS if num_pairs <= most), 256)


def sort_pairs_triton(
    experts: Tensor, num_experts: int, first: int, num_local: int, block_m: int, block: int | None = None
) -> SortedPairs:
    """Args: `block` replaces `pick_block`'s; a power of 2, from 16."""
    num_pairs = experts.numel()
    block = block or pick_block(num_pairs)
    assert experts.is_contiguous() and experts.dtype == torch.int32
    assert num_pairs < 2**31 and first >= 0 and first + num_local <= num_experts <= 4096
    num_blocks, num_tiles = -(-num_pairs // block), most_tiles(num_pairs, num_local, block_m)
    order = experts.new_empty(num_pairs)
    tiles = experts.new_empty(num_tiles, 3)
    block_e = max(power_of_2(num_experts), 16)
    table = {"BLOCK": block, "BLOCK_E": block_e, "ROWS": min(max(_CELLS // block_e, 1), 32, block)}
    if num_pairs == 0:
        return SortedPairs(order, tiles)
    counts = None
    if num_blocks > 1:
        counts = experts.new_empty(num_blocks, block_e)
        launch(_count_pairs, (num_blocks,), (experts, counts, num_pairs), table)
    args = experts, counts, order, tiles, num_pairs, first, num_local, num_blocks, num_tiles
    launch(_place_pairs, (num_blocks + 1,), args, {"BLOCK_M": block_m, **table}, num_warps=8)
    return SortedPairs(order, tiles)


def make_inputs(case: Case) -> tuple[Tensor | int, ...]:
    """Where `skew` is set half of the pairs belong to one expert; the last experts get none where `unused` is."""
    generator = torch.Generator().manual_seed(1)
    experts = torch.randint(0, case["E"] - case.get("unused"), (case["T"], case["k"]), generator=generator)
    if case.get("skew"):
        experts[: case["T"] // 2] = case["first"]
    return experts.int(), case["E"], case.get("first"), case.get("local", case["E"]), case["M"]


CASES = [
    Case("sort_pairs", T=1, k=2, E=8, M=16),
    Case("sort_pairs", T=40, k=2, E=8, M=16, unused=3),
    Case("sort_pairs", T=60, k=8, E=128, M=16),
    Case("sort_pairs", T=33, k=3, E=10, first=3, local=4, M=2),
    Case("sort_pairs", T=150, k=8, E=60, first=45, local=15, M=32),
    Case("sort_pairs", T=700, k=2, E=8, first=0, M=128, skew=1),
    Case("sort_pairs", T=64, k=4, E=8, first=6, local=2, M=16, unused=2),  # the rank has nothing to do
]
