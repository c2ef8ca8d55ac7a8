"""Allowed ids, forbidden ids and biases of a batch, as flat positions in the logits.

    z[r, v] = -inf     for every v outside a row's allowed ids, and for its forbidden ids
    z[r, v] += bias    afterwards: a bias never brings a forbidden token back

Shapes   logits [S, V] float32 contiguous, changed in place; keep_rows [A] int64: rows that have allowed ids;
         keep, forbid, biased [*] int64: row * V + id; bias like biased, float32. No position twice in `biased`.
Method   Work follows the number of ids, whatever row each belongs to; only rows with allowed ids cost a pass over V.
"""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from pagedray.kernels.case import Case


def edit_logits_ref(
    logits: Tensor, keep_rows: Tensor, keep: Tensor, forbid: Tensor, biased: Tensor, bias: Tensor
) -> None:
    vocab = logits.shape[1]
    kept, forbidden = set(keep.tolist()), set(forbid.tolist())
    for row in range(logits.shape[0]):
        for position in range(row * vocab, (row + 1) * vocab):
            if (row in keep_rows.tolist() and position not in kept) or position in forbidden:
                logits[row, position - row * vocab] = -inf
    for position, value in zip(biased.tolist(), bias.tolist(), strict=True):
        logits[position // vocab, position % vocab] += value


def edit_logits(logits: Tensor, keep_rows: Tensor, keep: Tensor, forbid: Tensor, biased: Tensor, bias: Tensor) -> None:
    flat = logits.view(-1)
    if keep_rows.numel():
        kept = flat[keep]
        logits.index_fill_(0, keep_rows, -inf)
        flat[keep] = kept
    if forbid.numel():
        flat.index_fill_(0, forbid, -inf)
    if biased.numel():
        flat[biased] = flat[biased] + bias


def make_inputs(case: Case) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(7)

    def positions(rows: Tensor, number: int) -> Tensor:
        ids = [torch.randperm(case["V"], generator=generator)[:number] for _ in rows]
        return torch.cat([row * case["V"] + ids[i] for i, row in enumerate(rows)]) if len(rows) else rows

    every = torch.arange(case["S"])
    keep_rows, biased = every[:: case.get("every", 2)], positions(every[1:], 3)
    keep, forbid = positions(keep_rows, 5), positions(every, case["V"] // 2)
    return case.randn(case["S"], case["V"]), keep_rows, keep, forbid, biased, torch.ones(len(biased))


CASES = [
    Case("edit_logits", S=1, V=7),
    Case("edit_logits", S=9, V=100, every=3),
]
