"""Allowed ids, forbidden ids and biases of a batch, as flat positions in the logits.

    z[r, v] = -inf     for every v outside a row's allowed ids, and for its forbidden ids
    z[r, v] += bias    afterwards: a bias never brings a forbidden token back

Shapes   logits [S, V] float32 contiguous, changed in place; keep_rows [A] int64: rows that have allowed ids;
         keep, forbid, biased [*] int64: row * V + id; bias like biased, float32. No position twice in `biased`.
Method   Work follows the number of ids, whatever row each belongs to; only rows with allowed ids cost a pass over V.
"""

from __future__ import annotations

from math import inf

from torch import Tensor


def edit_logits_ref(
    logits: Tensor,
    allowed: list[list[int] | None],
    forbidden: list[list[int]],
    biases: list[dict[int, float]],
) -> Tensor:
    """The definition, one token at a time; returns new logits."""
    edited = logits.clone()
    for row in range(logits.shape[0]):
        keep = allowed[row]
        for token_id in range(logits.shape[1]):
            if (keep is not None and token_id not in keep) or token_id in forbidden[row]:
                edited[row, token_id] = -inf
            edited[row, token_id] += biases[row].get(token_id, 0.0)
    return edited


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
