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

from collections.abc import Sequence

import torch
from torch import Tensor


def apply_penalties_ref(
    logits: Tensor,
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """The definition, from whole histories; returns new logits."""
    counts = torch.zeros_like(logits)
    seen = torch.zeros_like(logits, dtype=torch.bool)
    for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        counts[row] = torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=logits.shape[1])
        seen[row, list({*prompt, *output})] = True
    repetition, presence, frequency = (x.unsqueeze(1) for x in (repetition, presence, frequency))
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    return torch.where(seen, repeated, logits) - frequency * counts - presence * (counts > 0)


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
    unused = torch.arange(ids.shape[1], device=ids.device) >= num_unique.clamp(min=1).unsqueeze(1)
    ids = torch.where(unused, ids[:, :1], ids)
    counts = torch.where(unused, counts[:, :1], counts)
    at = rows.unsqueeze(1) * logits.shape[1] + ids
    z = logits.view(-1)[at]
    repetition, presence, frequency = (x.unsqueeze(1) for x in (repetition, presence, frequency))
    z = torch.where(z > 0, z / repetition, z * repetition)
    z = z - frequency * counts - presence * (counts > 0)
    logits.view(-1)[at] = z
