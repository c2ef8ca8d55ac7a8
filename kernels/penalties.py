"""Repetition, presence and frequency penalties, from a row's distinct tokens and their output counts; and counting.

    z > 0: z / repetition, else z * repetition      for tokens of prompt or output
    z - frequency * count - presence * (count > 0)  count: times in the output

Shapes   logits [S, V] float32, changed in place; rows [E] int64: the rows of logits to change, each once;
         ids [E, L] int64, counts [E, L] int32, num_unique [E] int64: row e's distinct tokens are its first
         num_unique[e] ids, a count of 0 means only in the prompt; repetition, presence, frequency [E] float32.
         count_tokens: ids, counts [N, L] and num_unique [N] of all slots, changed in place; each of slots [E] gets its
         one of tokens [E], both int64. No slot twice; each has room for a token more.
Method   Work and memory follow the history's length L, not V: 64 rows of 2,000 tokens take 1.5 MB where dense
         counts over 262,144 tokens would take 67 MB. On a CPU unused columns repeat column 0, so their writes agree.
Source   Keskar et al. 2019, arXiv:1909.05858 (repetition); OpenAI's API reference (presence, frequency).
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagedray.kernels.case import Case
from pagedray.kernels.jit import launch, tl, triton

_BLOCK = 512


def apply_penalties_ref(
    logits: Tensor,
    rows: Tensor,
    ids: Tensor,
    counts: Tensor,
    num_unique: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    for e, row in enumerate(rows.tolist()):
        for token_id, count in zip(ids[e, : num_unique[e]].tolist(), counts[e].tolist(), strict=False):
            z = logits[row, token_id]
            z = z / repetition[e] if z > 0 else z * repetition[e]
            logits[row, token_id] = z - frequency[e] * count - presence[e] * (count > 0)


def apply_penalties(
    logits: Tensor,
    rows: Tensor,
    ids: Tensor,
    counts: Tensor,
    num_unique: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    if logits.device.type == "cuda":
        return apply_penalties_triton(logits, rows, ids, counts, num_unique, repetition, presence, frequency)
    unused = torch.arange(ids.shape[1], device=ids.device) >= num_unique.unsqueeze(1)
    ids = torch.where(unused, ids[:, :1], ids)
    counts = torch.where(unused, counts[:, :1], counts)
    at = rows.unsqueeze(1) * logits.shape[1] + ids
    z = logits.view(-1)[at]
    repetition, presence, frequency = (x.unsqueeze(1) for x in (repetition, presence, frequency))
    z = torch.where(z > 0, z / repetition, z * repetition)
    z = z - frequency * counts - presence * (counts > 0)
    logits.view(-1)[at] = z


@triton.jit
def _apply_penalties(  # type: ignore[no-untyped-def]
    logits_ptr,
    row_stride,
    rows_ptr,
    ids_ptr,
    ids_stride,
    counts_ptr,
    counts_stride,
    num_unique_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    penalty_stride,
    BLOCK: tl.constexpr,
):
    """One row a program; its ids are distinct, so no two lanes touch one logit."""
    e = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + tl.load(rows_ptr + e) * row_stride
    repetition = tl.load(repetition_ptr + e * penalty_stride)
    presence = tl.load(presence_ptr + e * penalty_stride)
    frequency = tl.load(frequency_ptr + e * penalty_stride)
    num_unique = tl.load(num_unique_ptr + e).to(tl.int32)
    for start in range(0, num_unique, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < num_unique
        ids = tl.load(ids_ptr + e * ids_stride + column, mask=inside, other=0)
        count = tl.load(counts_ptr + e * counts_stride + column, mask=inside, other=0)
        z = tl.load(row_ptr + ids, mask=inside, other=0.0)
        z = tl.where(z > 0, z / repetition, z * repetition)
        z = z - frequency * count.to(tl.float32) - tl.where(count > 0, presence, 0.0)
        tl.store(row_ptr + ids, z, mask=inside)


def apply_penalties_triton(
    logits: Tensor,
    rows: Tensor,
    ids: Tensor,
    counts: Tensor,
    num_unique: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    penalty_stride = repetition.stride(0)
    assert penalty_stride == presence.stride(0) == frequency.stride(0)
    launch(
        _apply_penalties,
        (len(rows),),
        (
            *(logits, logits.stride(0), rows, ids, ids.stride(0), counts, counts.stride(0), num_unique),
            *(repetition, presence, frequency, penalty_stride),
        ),
        {"BLOCK": _BLOCK},
        num_warps=4,
    )


def count_tokens_ref(ids: Tensor, counts: Tensor, num_unique: Tensor, slots: Tensor, tokens: Tensor) -> None:
    for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
        known = ids[slot, : num_unique[slot]].tolist()
        if token in known:
            counts[slot, known.index(token)] += 1
        else:
            ids[slot, len(known)], counts[slot, len(known)] = token, 1
            num_unique[slot] += 1


def count_tokens(ids: Tensor, counts: Tensor, num_unique: Tensor, slots: Tensor, tokens: Tensor) -> None:
    if ids.device.type == "cuda":
        return count_tokens_triton(ids, counts, num_unique, slots, tokens)
    length = num_unique[slots].unsqueeze(1)
    column = torch.arange(ids.shape[1])
    token = tokens.unsqueeze(1)
    is_same = (ids[slots] == token) & (column < length)
    is_new = ~is_same.any(1, keepdim=True)
    is_next = is_new & (column == length)
    new_ids = torch.where(is_next, token, ids[slots])
    new_counts = torch.where(is_next, 1, counts[slots] + is_same)
    ids[slots] = new_ids
    counts[slots] = new_counts.to(torch.int32)
    num_unique[slots] += is_new.squeeze(1)


@triton.jit
def _count_tokens(  # type: ignore[no-untyped-def]
    ids_ptr, ids_stride, counts_ptr, counts_stride, num_unique_ptr, slots_ptr, tokens_ptr, BLOCK: tl.constexpr
):
    """One slot a program of one warp, whose loads come before its stores."""
    e = tl.program_id(0)
    slot, token = tl.load(slots_ptr + e), tl.load(tokens_ptr + e)
    num_unique = tl.load(num_unique_ptr + slot).to(tl.int32)
    found = tl.full((), -1, tl.int32)
    for start in range(0, num_unique, BLOCK):
        column = start + tl.arange(0, BLOCK)
        is_same = tl.load(ids_ptr + slot * ids_stride + column, mask=column < num_unique, other=-1) == token
        found = tl.maximum(found, tl.max(tl.where(is_same, column, -1), 0))
    is_new = found < 0
    column = tl.where(is_new, num_unique, found)
    count = tl.where(is_new, 0, tl.load(counts_ptr + slot * counts_stride + column))
    tl.store(ids_ptr + slot * ids_stride + column, token)
    tl.store(counts_ptr + slot * counts_stride + column, count + 1)
    tl.store(num_unique_ptr + slot, (num_unique + is_new.to(tl.int32)).to(tl.int64))


def count_tokens_triton(ids: Tensor, counts: Tensor, num_unique: Tensor, slots: Tensor, tokens: Tensor) -> None:
    args = ids, ids.stride(0), counts, counts.stride(0), num_unique, slots, tokens
    launch(_count_tokens, (len(slots),), args, {"BLOCK": _BLOCK}, num_warps=1)


def make_inputs(case: Case) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(7)
    num_rows, length = case["E"], case["L"]
    if case.op == "count_tokens":
        ids = torch.stack([torch.randperm(case["V"], generator=generator)[:length] for _ in range(case["N"])])
        counts = torch.randint(0, 4, ids.shape, generator=generator, dtype=torch.int32)
        num_unique = torch.randint(0, length, (case["N"],), generator=generator)
        slots = torch.randperm(case["N"], generator=generator)[:num_rows]
        tokens = torch.where(torch.arange(num_rows) % 2 > 0, ids[slots, num_unique[slots] // 2], case["V"])
        return ids, counts, num_unique, slots, tokens
    rows = torch.randperm(case["S"], generator=generator)[:num_rows]
    ids = torch.stack([torch.randperm(case["V"], generator=generator)[:length] for _ in range(num_rows)])
    counts = torch.randint(0, 4, (num_rows, length), generator=generator, dtype=torch.int32)
    num_unique = torch.randint(1, length + 1, (num_rows,), generator=generator)
    repetition, presence, frequency = torch.rand((3, num_rows), generator=generator)
    return case.randn(case["S"], case["V"]), rows, ids, counts, num_unique, repetition + 0.5, presence, frequency


CASES = [
    Case("apply_penalties", S=1, V=7, E=1, L=3),
    Case("apply_penalties", S=9, V=100, E=4, L=60),
    Case("apply_penalties", S=16, V=49152, E=16, L=400),
    Case("apply_penalties", S=3, V=5003, E=2, L=2000),
    Case("count_tokens", V=7, N=1, E=1, L=3),
    Case("count_tokens", V=5003, N=9, E=8, L=1500),
]
