"""One token per row of a batch in two or three launches, whatever mixture of methods its rows use.

    temperature 0: the most likely token; otherwise kernels/sampling.py's definition, with u = uniform(seed, position)

Shapes   logits [L, V] any float dtype, last dim contiguous, V <= 2^18; fields [9, S] int64, see FIELDS: row i reads
         logits[source[i]] and writes tokens[target[i]] and, if there are results, results[result[i]]; both int64.
         The last num_filtered of the S rows are those with a filter: top_k, top_p or min_p, and a temperature.
Writes   tokens and results, which may be pinned memory of the host. Safe under CUDA graph capture.
Broken   see finite_logits.py for NaN and infinities.
Method   `_scan_blocks` reads each row once, by many programs, and leaves per block the best logit and the sum of
         exp((z - best) / temperature). For rows without a filter `_finish_row` picks the block, then the token in it.
         For the others `_finish_filtered` looks for the cut: it halves the range of logits again and again, counting
         what lies above (top_k) or adding it up (top_p). Mostly it need not look at the whole row: the tokens above
         the n-th highest maximum of the row's parts are at least n, few more, and often all that counts.
Sums     of filtered rows are integers, exp as a multiple of 2^-44: exact in any order, so the number of candidates, of
         chunks and of warps changes nothing. Those of other rows are float64 in an order that V alone decides.
Rows     don't influence each other: a token is the same alone and in any batch, bit for bit.
Source   see kernels/sampling.py; bisection: Alabi et al. 2012, "Fast k-selection algorithms for GPUs" (JEA 17).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagedray.kernels.case import Case
from pagedray.kernels.finite_logits import LOWEST, finite_logits, load_logits
from pagedray.kernels.jit import launch, power_of_2, tl, triton
from pagedray.kernels.philox import uniform
from pagedray.kernels.sampling import greedy_ref, sample_ref

# Rows of `fields`. The last three hold the bits of float64 numbers that float32 can hold.
FIELDS = SOURCE, TARGET, RESULT, SEED, POSITION, TOP_K, TEMPERATURE, TOP_P, MIN_P = range(9)
MAX_TEMPERATURE = 1e30  # every usable logit is as likely as any other then; more would make forbidden ones possible
MAX_VOCAB = 1 << 18
_KEY_SHIFT = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}  # low bits that say nothing in a float32


@dataclass(frozen=True)
class Tiles:
    """How much of a row a program takes at once, all powers of two. Only `block` shows in last bits of sums."""

    block: int = 2048
    part: int = 128  # of a block, which has a maximum of its own
    num_parts: int = 256  # that give candidates to rows without top_k
    capacity: int = 4096  # for candidates, and values at once when a row is searched


TILES = Tiles()


def sample_rows_ref(logits: Tensor, fields: Tensor, num_filtered: int | None) -> Tensor:
    """The definition, row by row."""
    host = fields.cpu().numpy()
    floats = torch.from_numpy(host[TEMPERATURE:].copy()).view(torch.float64).float()
    tokens = torch.empty(1 + host[TARGET].max(initial=-1), dtype=torch.int64)
    for i, u in enumerate(uniform(host[SEED], host[POSITION]).tolist()):
        z = logits[host[SOURCE, i]].float().cpu().unsqueeze(0)
        if not z.amax().isfinite():
            z = z.nan_to_num(nan=LOWEST, posinf=-LOWEST, neginf=LOWEST)
        temperature, top_p, min_p = floats[:, i : i + 1]
        tokens[host[TARGET, i]] = (
            sample_ref(z, torch.tensor([u]).double(), temperature, torch.tensor(host[TOP_K, i : i + 1]), top_p, min_p)
            if temperature > 0
            else greedy_ref(z)
        )
    return tokens.to(logits.device)


@triton.jit
def _fields(fields_ptr, num_rows, i):  # type: ignore[no-untyped-def]
    """Row i's fields in their order; what a caller doesn't use isn't loaded."""
    at = fields_ptr + i
    source, target = tl.load(at), tl.load(at + num_rows)
    seed, position = tl.load(at + 3 * num_rows), tl.load(at + 4 * num_rows)
    top_k = tl.load(at + 5 * num_rows)
    temperature = tl.load(at + 6 * num_rows).to(tl.float64, bitcast=True)
    top_p = tl.load(at + 7 * num_rows).to(tl.float64, bitcast=True)
    min_p = tl.load(at + 8 * num_rows).to(tl.float64, bitcast=True).to(tl.float32)
    return source, target, seed, position, top_k, temperature, top_p, min_p


@triton.jit
def _has_filter(top_k, temperature, top_p, min_p):  # type: ignore[no-untyped-def]
    return ((temperature > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0))).to(tl.int32)


@triton.jit
def _store(tokens_ptr, target, results_ptr, result_field, fields_ptr, num_rows, i, token):  # type: ignore[no-untyped-def]
    """result_field: RESULT; or TARGET where results are the tokens, which then are written twice."""
    result = tl.load(fields_ptr + result_field * num_rows + i)
    tl.store(tokens_ptr + target, token.to(tl.int64))
    tl.store(results_ptr + result, token.to(tl.int64))


@triton.jit
def _uniform(seed, position):  # type: ignore[no-untyped-def]
    """`uniform_ref` of kernels/philox.py."""
    zero = (position & 0).to(tl.uint32)
    low, high = (position & 0xFFFFFFFF).to(tl.uint32), (position >> 32).to(tl.uint32)
    w0, w1, _, _ = tl.philox(seed, low, high, zero, zero)
    bits = (w0.to(tl.uint64) << 32) | w1.to(tl.uint64)
    return (bits >> 11).to(tl.int64).to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def _scale(temperature):  # type: ignore[no-untyped-def]
    """exp2(scale * z) is exp(z / temperature)."""
    return (1.4426950408889634 / temperature).to(tl.float32)


@triton.jit
def _key(y, SHIFT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Unsigned integers in the order of the floats, without the SHIFT low bits; never 0."""
    bits = tl.where(y == 0.0, 0.0, y).to(tl.uint32, bitcast=True)  # -0.0 equals 0.0
    ordered = tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    return ordered >> SHIFT


@triton.jit
def _logit(key, SHIFT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The number that has this key."""
    ordered = key << SHIFT
    bits = tl.where((ordered >> 31) != 0, ordered ^ 0x80000000, (ordered | ((1 << SHIFT) - 1)) ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _mass(y, best, scale, min_p):  # type: ignore[no-untyped-def]
    """Probabilities as integers, relative to the best token's; 0 where min_p cuts."""
    p = tl.exp2((y - best) * scale)
    return (tl.where(p >= min_p, p, 0.0) * 17592186044416.0).to(tl.int64)  # 2^44: 2^18 of these fit in 62 bits


@triton.jit(do_not_specialize=["num_rows", "first_filtered"])
def _scan_blocks(  # type: ignore[no-untyped-def]
    logits_ptr,
    row_stride,
    fields_ptr,
    num_rows,
    first_filtered,
    vocab,
    best_ptr,  # [S, num_blocks] float64
    sum_ptr,  # [S, num_blocks] float64
    parts_ptr,  # [num_filtered, num_parts] float32 maxima
    num_parts,
    IS_GREEDY: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
):
    """IS_GREEDY: no row needs sums, and more programs fit onto a multiprocessor. Maxima are the same either way."""
    block, i = tl.program_id(0), tl.program_id(1)
    source, _, _, _, _, temperature, _, _ = _fields(fields_ptr, num_rows, i)
    part = block * (BLOCK // PART) + tl.arange(0, BLOCK // PART)
    ids = part[:, None] * PART + tl.arange(0, PART)[None, :]
    y = load_logits(logits_ptr + source * row_stride, ids, vocab)
    part_best = tl.max(y, 1)
    best = tl.max(part_best, 0)
    at = i.to(tl.int64) * tl.num_programs(0) + block
    tl.store(best_ptr + at, best.to(tl.float64))
    if not IS_GREEDY:
        if temperature > 0:
            p = tl.exp2((y - best) * _scale(temperature))
            tl.store(sum_ptr + at, tl.sum(tl.sum(p, 1).to(tl.float64), 0))
        if i >= first_filtered:
            row_parts_ptr = parts_ptr + (i - first_filtered).to(tl.int64) * num_parts
            tl.store(row_parts_ptr + part, part_best, mask=part < num_parts)


@triton.jit
def _weigh_blocks(best_ptr, sum_ptr, num_blocks, scale, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The row's best logit; and by block: its best probability relative to the row's, and its sum."""
    block = tl.arange(0, BLOCKS)
    inside = block < num_blocks
    bests = tl.load(best_ptr + block, mask=inside, other=float("-inf")).to(tl.float32)
    best = tl.max(bests, 0)
    heights = tl.exp2((bests - best) * scale).to(tl.float64)
    return best, heights, heights * tl.load(sum_ptr + block, mask=inside, other=0.0)


@triton.jit
def _first_beyond(cumulative, weights, target, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """First position with a weight whose sum exceeds the target, or else the last with a weight."""
    position = tl.arange(0, SIZE)
    found = tl.min(tl.where((cumulative > target) & (weights > 0), position, SIZE), 0)
    last = tl.max(tl.where(weights > 0, position, 0), 0)
    return tl.minimum(found, last)


@triton.jit(do_not_specialize=["num_rows", "result_field"])
def _finish_row(  # type: ignore[no-untyped-def]
    logits_ptr,
    row_stride,
    fields_ptr,
    num_rows,
    vocab,
    best_ptr,
    sum_ptr,
    tokens_ptr,
    results_ptr,
    result_field,
    num_blocks,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,  # num_blocks, as a power of two
):
    """The token of a row without a filter; others are left alone."""
    i = tl.program_id(0)
    source, target, seed, position, top_k, temperature, top_p, min_p = _fields(fields_ptr, num_rows, i)
    if _has_filter(top_k, temperature, top_p, min_p) != 0:
        return
    row_ptr = logits_ptr + source * row_stride
    best_ptr += i.to(tl.int64) * num_blocks
    sum_ptr += i.to(tl.int64) * num_blocks
    block, at = tl.arange(0, BLOCKS), tl.arange(0, BLOCK)
    if temperature > 0:
        scale = _scale(temperature)
        _, heights, weights = _weigh_blocks(best_ptr, sum_ptr, num_blocks, scale, BLOCKS)
        reached = tl.cumsum(weights, 0)
        aim = _uniform(seed, position) * tl.max(reached, 0)
        chosen = _first_beyond(reached, weights, aim, BLOCKS)
        before = tl.sum(tl.where(block == chosen - 1, reached, 0.0), 0)
        height = tl.sum(tl.where(block == chosen, heights, 0.0), 0)
        best = tl.load(best_ptr + chosen).to(tl.float32)
        p = tl.exp2((load_logits(row_ptr, chosen * BLOCK + at, vocab) - best) * scale).to(tl.float64)
        aim = tl.maximum((aim - before) / height, 0.0)
        token = chosen * BLOCK + _first_beyond(tl.cumsum(p, 0), p, aim, BLOCK)
        _store(tokens_ptr, target, results_ptr, result_field, fields_ptr, num_rows, i, token)
    else:
        bests = tl.load(best_ptr + block, mask=block < num_blocks, other=float("-inf")).to(tl.float32)
        best = tl.max(bests, 0)
        chosen = tl.min(tl.where(bests == best, block, BLOCKS), 0)
        y = load_logits(row_ptr, chosen * BLOCK + at, vocab)
        token = chosen * BLOCK + tl.min(tl.where(y == best, at, BLOCK), 0)
        _store(tokens_ptr, target, results_ptr, result_field, fields_ptr, num_rows, i, token)


@triton.jit
def _count_from(values_ptr, count, key, SHIFT: tl.constexpr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Number of values with at least this key."""
    found = tl.zeros((SIZE,), tl.int32)
    for start in range(0, count, SIZE):
        y = load_logits(values_ptr, start + tl.arange(0, SIZE), count)
        found += (_key(y, SHIFT) >= key).to(tl.int32)
    return tl.sum(found, 0)


@triton.jit
def _mass_from(  # type: ignore[no-untyped-def]
    values_ptr, count, key, best, scale, min_p, SHIFT: tl.constexpr, SIZE: tl.constexpr
):
    """Mass of the values with at least this key."""
    found = tl.zeros((SIZE,), tl.int64)
    for start in range(0, count, SIZE):
        y = load_logits(values_ptr, start + tl.arange(0, SIZE), count)
        found += tl.where(_key(y, SHIFT) >= key, _mass(y, best, scale, min_p), 0)
    return tl.sum(found, 0)


@triton.jit
def _find_count(  # type: ignore[no-untyped-def]
    values_ptr, count, low, high, number, SHIFT: tl.constexpr, SIZE: tl.constexpr
):
    """The highest key that at least `number` values reach; they reach `low` and not `high`."""
    while high - low > 1:
        middle = low + ((high - low) >> 1)
        is_reached = _count_from(values_ptr, count, middle, SHIFT, SIZE) >= number
        low, high = tl.where(is_reached, middle, low), tl.where(is_reached, high, middle)
    return low


@triton.jit
def _find_mass(  # type: ignore[no-untyped-def]
    values_ptr, count, low, high, limit, best, scale, min_p, SHIFT: tl.constexpr, SIZE: tl.constexpr
):
    """The highest key from which on values weigh at least `limit`; they do from `low` and don't from `high` on."""
    num_halved = 0
    while high - low > 1:
        middle = low + ((high - low) >> 1)
        if num_halved < 6:  # halves of the logits' range leave fewer keys than halves of the keys', around 0 above all
            half = _key(0.5 * _logit(low, SHIFT) + 0.5 * _logit(high, SHIFT), SHIFT)
            middle = tl.minimum(tl.maximum(half, low + 1), high - 1)
        is_reached = _mass_from(values_ptr, count, middle, best, scale, min_p, SHIFT, SIZE) >= limit
        low, high = tl.where(is_reached, middle, low), tl.where(is_reached, high, middle)
        num_halved += 1
    return low


@triton.jit
def _gather_candidates(  # type: ignore[no-untyped-def]
    row_ptr,
    vocab,
    parts_ptr,
    num_parts,
    least,  # key
    list_ptr,  # [CAPACITY] int32: parts that hold a candidate
    values_ptr,  # [CAPACITY]
    ids_ptr,  # [CAPACITY] int32
    SHIFT: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,  # maxima at once
    CAPACITY: tl.constexpr,
    GROUP: tl.constexpr,  # parts at once
):
    """Write the tokens with at least this key by ascending id; returns their number, of which CAPACITY are written."""
    num_listed = tl.full((), 0, tl.int32)
    for start in range(0, num_parts, PARTS):
        part = start + tl.arange(0, PARTS)
        is_listed = (_key(load_logits(parts_ptr, part, num_parts), SHIFT) >= least) & (part < num_parts)
        flags = is_listed.to(tl.int32)
        at = num_listed + tl.cumsum(flags, 0) - 1
        tl.store(list_ptr + at, part, mask=is_listed & (at < CAPACITY))
        num_listed += tl.sum(flags, 0)
    tl.debug_barrier()
    num_found = tl.full((), 0, tl.int32)
    for start in range(0, tl.minimum(num_listed, CAPACITY), GROUP):
        at = start + tl.arange(0, GROUP)
        part = tl.load(list_ptr + at, mask=at < tl.minimum(num_listed, CAPACITY), other=num_parts)
        ids = part[:, None] * PART + tl.arange(0, PART)[None, :]
        inside = ids < vocab
        z = tl.load(row_ptr + ids, mask=inside, other=0.0)
        is_found = _key(finite_logits(z, inside), SHIFT) >= least
        flags = is_found.to(tl.int32)
        by_part = tl.sum(flags, 1)
        at = num_found + (tl.cumsum(by_part, 0) - by_part)[:, None] + tl.cumsum(flags, 1) - 1
        tl.store(values_ptr + at, z, mask=is_found & (at < CAPACITY))
        tl.store(ids_ptr + at, ids, mask=is_found & (at < CAPACITY))
        num_found += tl.sum(by_part, 0)
    tl.debug_barrier()
    return tl.where(num_listed > CAPACITY, CAPACITY + 1, num_found)


@triton.jit
def _ceil(x):  # type: ignore[no-untyped-def]
    down = x.to(tl.int64)
    return down + (down.to(tl.float64) < x).to(tl.int64)


@triton.jit
def _cut(  # type: ignore[no-untyped-def]
    values_ptr, count, low, top_k, top_p, limit, best, scale, min_p, SHIFT: tl.constexpr, SIZE: tl.constexpr
):
    """What is kept: all above `key`, and the first num_ties with that key, each of mass `tie`; `total` is their mass.

    low: a key that all values reach; limit: the mass that top_p wants, of a row without top_k and min_p.
    """
    key = tl.full((), 0, tl.uint32)
    num_ties = tl.full((), 0, tl.int64)
    high = _key(best, SHIFT) + 1
    if top_k > 0:
        key = _find_count(values_ptr, count, low, high, top_k, SHIFT, SIZE)
        num_ties = top_k - _count_from(values_ptr, count, key + 1, SHIFT, SIZE)
    tie = _mass(_logit(key, SHIFT), best, scale, min_p)
    above = _mass_from(values_ptr, count, key + 1, best, scale, min_p, SHIFT, SIZE)
    if top_p < 1:
        if (top_k > 0) | (min_p > 0):
            limit = tl.maximum(_ceil(top_p * (above + num_ties * tie).to(tl.float64)), 1)
        if above >= limit:
            # What lies 46 binary digits below the best has no mass.
            low = tl.maximum(low, _key(tl.maximum(best - 46.0 / scale, _logit(low, SHIFT)), SHIFT))
            key = _find_mass(values_ptr, count, low, high, limit, best, scale, min_p, SHIFT, SIZE)
            tie = _mass(_logit(key, SHIFT), best, scale, min_p)
            above = _mass_from(values_ptr, count, key + 1, best, scale, min_p, SHIFT, SIZE)
            num_ties = (limit - above + tie - 1) // tl.maximum(tie, 1)
        else:
            num_ties = tl.minimum(num_ties, (limit - above + tie - 1) // tl.maximum(tie, 1))
    return key, num_ties, tie, above + num_ties * tie


@triton.jit
def _weigh_chunk(  # type: ignore[no-untyped-def]
    values_ptr, start, count, key, num_ties, tie, best, scale, min_p, SHIFT: tl.constexpr, SIZE: tl.constexpr
):
    """Kept mass of one chunk, and its number of ties, of which the first num_ties are kept."""
    y = load_logits(values_ptr, start + tl.arange(0, SIZE), count)
    keys = _key(y, SHIFT)
    ties = tl.sum((keys == key).to(tl.int64), 0)
    above = tl.sum(tl.where(keys > key, _mass(y, best, scale, min_p), 0), 0)
    return above + tl.minimum(ties, num_ties) * tie, ties


@triton.jit
def _choose(  # type: ignore[no-untyped-def]
    values_ptr, count, key, num_ties, tie, aim, best, scale, min_p, SHIFT: tl.constexpr, SIZE: tl.constexpr
):
    """Position of the first kept value at which the sum of masses exceeds `aim`, which is less than their total."""
    start = tl.full((), 0, tl.int32)
    weight, ties = _weigh_chunk(values_ptr, start, count, key, num_ties, tie, best, scale, min_p, SHIFT, SIZE)
    while (weight <= aim) & (start + SIZE < count):
        aim -= weight
        num_ties -= tl.minimum(ties, num_ties)
        start += SIZE
        weight, ties = _weigh_chunk(values_ptr, start, count, key, num_ties, tie, best, scale, min_p, SHIFT, SIZE)
    y = load_logits(values_ptr, start + tl.arange(0, SIZE), count)
    keys = _key(y, SHIFT)
    is_tie = keys == key
    is_kept_tie = is_tie & (tl.cumsum(is_tie.to(tl.int32), 0) <= num_ties)
    mass = tl.where(keys > key, _mass(y, best, scale, min_p), tl.where(is_kept_tie, tie, 0))
    position = start + tl.sum((tl.cumsum(mass, 0) <= aim).to(tl.int32), 0)
    return tl.minimum(position, count - 1)


@triton.jit(do_not_specialize=["num_rows", "first_filtered", "result_field"])
def _finish_filtered(  # type: ignore[no-untyped-def]
    logits_ptr,
    row_stride,
    fields_ptr,
    num_rows,
    first_filtered,
    vocab,
    best_ptr,
    sum_ptr,
    tokens_ptr,
    results_ptr,
    result_field,
    num_blocks,
    parts_ptr,
    num_parts,
    scratch_ptr,  # [num_filtered, 2, CAPACITY] int32
    values_ptr,  # [num_filtered, CAPACITY] of the logits' type
    LOWEST: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCKS: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    CAPACITY: tl.constexpr,
    GROUP: tl.constexpr,
):
    """The token of a row with a filter; others are left alone."""
    j = tl.program_id(0).to(tl.int64)
    i = j + first_filtered
    source, target, seed, position, top_k, temperature, top_p, min_p = _fields(fields_ptr, num_rows, i)
    if _has_filter(top_k, temperature, top_p, min_p) == 0:
        return
    row_ptr = logits_ptr + source * row_stride
    parts_ptr += j * num_parts
    list_ptr = scratch_ptr + j * 2 * CAPACITY
    ids_ptr = list_ptr + CAPACITY
    values_ptr += j * CAPACITY
    scale = _scale(temperature)
    best, _, weights = _weigh_blocks(best_ptr + i * num_blocks, sum_ptr + i * num_blocks, num_blocks, scale, BLOCKS)
    limit = tl.maximum(_ceil(top_p * tl.sum(weights, 0) * 17592186044416.0), 1)

    candidates_ptr, count, has_candidates = row_ptr, vocab, 0
    low = _key(tl.full((), LOWEST, tl.float32), SHIFT)
    wanted = tl.where(top_k > 0, top_k, NUM_PARTS).to(tl.int32)
    if (wanted <= num_parts) & (wanted <= CAPACITY):
        least = _find_count(parts_ptr, num_parts, low, _key(best, SHIFT) + 1, wanted, SHIFT, PARTS)
        num_found = _gather_candidates(
            row_ptr,
            vocab,
            parts_ptr,
            num_parts,
            least,
            list_ptr,
            values_ptr,
            ids_ptr,
            SHIFT,
            PART,
            PARTS,
            CAPACITY,
            GROUP,
        )
        if num_found <= CAPACITY:
            # Are these all that can be kept? With top_k they are: each of the top_k parts has one.
            covers_min_p = tl.exp2((_logit(least, SHIFT) - best) * scale) < min_p
            found = _mass_from(values_ptr, num_found, least, best, scale, 0.0, SHIFT, CAPACITY)
            covers_top_p = (min_p == 0) & (top_p < 1) & (found >= limit)
            if (top_k > 0) | covers_min_p | covers_top_p:
                candidates_ptr, count, has_candidates, low = values_ptr, num_found, 1, least

    key, num_ties, tie, total = _cut(
        candidates_ptr, count, low, top_k, top_p, limit, best, scale, min_p, SHIFT, CAPACITY
    )
    aim = tl.minimum((_uniform(seed, position) * total.to(tl.float64)).to(tl.int64), total - 1)
    token = _choose(candidates_ptr, count, key, num_ties, tie, aim, best, scale, min_p, SHIFT, CAPACITY)
    if has_candidates != 0:
        token = tl.load(ids_ptr + token)
    _store(tokens_ptr, target, results_ptr, result_field, fields_ptr, num_rows, i, token)


def sample_rows(
    logits: Tensor,
    fields: Tensor,
    num_filtered: int | None,
    tokens: Tensor | None = None,
    is_greedy: bool = False,
    results: Tensor | None = None,
) -> Tensor:
    """Tokens of all rows.

    Args:
        num_filtered: None where only the device knows; rows with filters may be anywhere then.
        tokens: where to write them; targets that no row has stay as they are. None: a new tensor [S].
        is_greedy: all rows have temperature 0, which is faster when known.
        results: where to write them once more.
    """
    if logits.device.type == "cuda":
        return sample_rows_triton(logits, fields, num_filtered, tokens, is_greedy, results)
    found = sample_rows_ref(logits, fields, num_filtered)
    target = fields[TARGET]
    if results is not None:
        results[fields[RESULT]] = found[target]
    if tokens is None:
        return found
    tokens[target] = found[target]
    return tokens


def sample_rows_triton(
    logits: Tensor,
    fields: Tensor,
    num_filtered: int | None,
    tokens: Tensor | None = None,
    is_greedy: bool = False,
    results: Tensor | None = None,
    tiles: Tiles = TILES,
) -> Tensor:
    num_rows, vocab = fields.shape[1], logits.shape[1]
    assert vocab <= MAX_VOCAB, f"{vocab} logits, at most {MAX_VOCAB}"
    assert logits.stride(1) == 1 and fields.is_contiguous(), f"strides {logits.stride()} and {fields.stride()}"
    if tokens is None:
        tokens = fields.new_empty(num_rows)
    if not num_rows:
        return tokens
    num_plain = num_rows - (num_filtered or 0)  # rows that may have no filter
    if num_filtered is None:
        num_filtered = 0 if is_greedy else num_rows
    first_filtered, row_stride = num_rows - num_filtered, logits.stride(0)
    written = (tokens, tokens, TARGET) if results is None else (tokens, results, RESULT)
    num_blocks = -(-vocab // tiles.block)
    blocks = power_of_2(num_blocks)
    best, sums = logits.new_empty((2, num_rows, num_blocks), dtype=torch.float64)
    num_parts = -(-vocab // tiles.part)
    parts = logits.new_empty((num_filtered, num_parts), dtype=torch.float32)
    launch(
        _scan_blocks,
        (num_blocks, num_rows),
        (logits, row_stride, fields, num_rows, first_filtered, vocab, best, sums, parts, num_parts),
        {"IS_GREEDY": is_greedy, "BLOCK": tiles.block, "PART": tiles.part},
        num_warps=4,
    )
    if num_plain:
        launch(
            _finish_row,
            (num_plain,),
            (logits, row_stride, fields, num_rows, vocab, best, sums, *written, num_blocks),
            {"BLOCK": tiles.block, "BLOCKS": blocks},
            num_warps=4,
        )
    if num_filtered:
        scratch = fields.new_empty((num_filtered, 2, tiles.capacity), dtype=torch.int32)
        values = logits.new_empty((num_filtered, tiles.capacity))
        launch(
            _finish_filtered,
            (num_filtered,),
            (
                *(logits, row_stride, fields, num_rows, first_filtered, vocab, best, sums, *written, num_blocks),
                *(parts, num_parts, scratch, values),
            ),
            {
                "LOWEST": LOWEST,
                "SHIFT": _KEY_SHIFT[logits.dtype],
                "BLOCKS": blocks,
                "PART": tiles.part,
                "PARTS": min(power_of_2(num_parts), 2048),
                "NUM_PARTS": tiles.num_parts,
                "CAPACITY": tiles.capacity,
                "GROUP": max(1, min(tiles.capacity, 4096) // tiles.part),
            },
            num_warps=16,
        )
    return tokens


def pack_fields(
    seeds: NDArray[np.int64],
    positions: NDArray[np.int64],
    temperature: NDArray[np.float32],
    top_k: NDArray[np.int64],
    top_p: NDArray[np.float32],
    min_p: NDArray[np.float32],
) -> NDArray[np.int64]:
    """Fields of rows that stand in the order of their logits, in which filtered ones are last."""
    order = np.arange(len(seeds))
    floats = np.stack((temperature, top_p, min_p)).astype(np.float64).view(np.int64)
    return np.concatenate((np.stack((order, order, order, seeds, positions, top_k)), floats))


def make_inputs(case: Case) -> tuple[Tensor | int, ...]:
    """Rows of all kinds: greedy and plain ones first, then top_k, top_p, min_p and all three."""
    generator = np.random.default_rng(7)
    num_rows, num_filtered = case["S"], case["S"] // 2
    z = case.randn(num_rows, case["V"]) * case.get("scale", 3)
    kind = np.where(np.arange(num_rows) < num_rows - num_filtered, 0, 1 + np.arange(num_rows) % 4)
    temperature, top_p, min_p = generator.random((3, num_rows)).astype(np.float32)
    temperature = np.where((kind == 0) & (np.arange(num_rows) % 3 == 0), 0, 0.5 + temperature / 2).astype(np.float32)
    top_k = np.where((kind == 1) | (kind == 4), generator.integers(1, min(case["V"], 400), num_rows), 0)
    top_p = np.where((kind == 2) | (kind == 4), 0.5 + top_p / 2, 1).astype(np.float32)
    min_p = np.where((kind == 3) | (kind == 4), min_p / 20, 0).astype(np.float32)
    seeds, positions = generator.integers(0, 1 << 62, num_rows), generator.integers(0, 4096, num_rows)
    fields = pack_fields(seeds, positions, temperature, top_k, top_p, min_p)
    return z, torch.from_numpy(fields), num_filtered


CASES = [
    Case("sample_rows", S=1, V=7),
    Case("sample_rows", S=12, V=2500, dtype=torch.bfloat16),
    Case("sample_rows", S=8, V=50257, scale=6, dtype=torch.bfloat16),
    Case("sample_rows", S=8, V=49152, dtype=torch.float16),
    Case("sample_rows", S=8, V=5003, scale=1),
]
