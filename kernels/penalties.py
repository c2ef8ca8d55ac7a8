"""Repetition, presence and frequency penalties, from a row's distinct tokens and their output counts.

    z > 0: z / repetition, else z * repetition      for tokens of prompt or output
    z - frequency * count - presence * (count > 0)  count: times in the output

Shapes   logits [S, V] float32, changed in place; rows [E] int64: the rows of logits to change, each once;
         ids [E, L] int64, counts [E, L] int32, num_unique [E] int64: row e's distinct tokens are its first
         num_unique[e] ids, a count of 0 means only in the prompt; repetition, presence, frequency [E] float32.
Method   Work and memory follow the history's length L, not V: 64 rows of 2,000 tokens take 1.5 MB where dense
         counts over 262,144 tokens would take 67 MB. Unused columns repeat column 0, so their writes agree with it.
Source   Keskar et al. 2019, arXiv:1909.05858 (repetition); OpenAI's API reference (presence, frequency).
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagedray.kernels.case import Case


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
    unused = torch.arange(ids.shape[1], device=ids.device) >= num_unique.unsqueeze(1)
    ids = torch.where(unused, ids[:, :1], ids)
    counts = torch.where(unused, counts[:, :1], counts)
    at = rows.unsqueeze(1) * logits.shape[1] + ids
    z = logits.view(-1)[at]
    repetition, presence, frequency = (x.unsqueeze(1) for x in (repetition, presence, frequency))
    z = torch.where(z > 0, z / repetition, z * repetition)
    z = z - frequency * counts - presence * (counts > 0)
    logits.view(-1)[at] = z


def make_inputs(case: Case) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(7)
    num_rows, length = case["E"], case["L"]
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
]
