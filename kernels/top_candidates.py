"""The k most likely tokens of each row, in one total order: higher logit first, then lower id.

    top_candidates(z, k) → values, ids   with (values desc, ids asc) sorted, exactly min(k, V) of them

Shapes   z [R, V] float32; values [R, k] float32, ids [R, k] int64.
Ties     are common (bfloat16 logits have 8 bits), and `torch.topk` breaks them as it likes. One order for all makes
         top_k = 1 equal greedy, and a token independent of which algorithm ran.
NaN      sorts first.
Method   The top k lie in the k blocks whose maxima are highest (lower block first among equals), so only those are
         searched: one vectorised pass over V, then k * 64 candidates instead of V.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 64
_ID_BITS = 32
_ID_MASK = (1 << _ID_BITS) - 1


def top_candidates_ref(z: Tensor, k: int) -> tuple[Tensor, Tensor]:
    values, ids = (z + 0.0).sort(dim=-1, descending=True, stable=True)
    return values[:, :k], ids[:, :k]


def order_keys(values: Tensor, ids: Tensor) -> Tensor:
    """int64 keys that are all different and descend in the total order; the low half gives the id back."""
    bits = (values + 0.0).view(torch.int32)  # + 0.0 makes -0.0 and 0.0 the same bits
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # as an integer, negative floats would ascend the wrong way
    ordered = torch.where(values.isnan(), 0x7FFFFFFF, ordered)
    return (ordered.to(torch.int64) << _ID_BITS) | (_ID_MASK - ids)


def key_ids(keys: Tensor) -> Tensor:
    return _ID_MASK - (keys & _ID_MASK)


def top_candidates(z: Tensor, k: int) -> tuple[Tensor, Tensor]:
    num_rows, vocab = z.shape
    k = min(k, vocab)
    num_blocks = vocab // BLOCK
    if k * BLOCK * 2 > vocab:
        keys = order_keys(z, torch.arange(vocab, device=z.device))
    else:
        maxima = z[:, : num_blocks * BLOCK].unflatten(1, (num_blocks, BLOCK)).amax(-1)
        block_keys = order_keys(maxima, torch.arange(num_blocks, device=z.device))
        blocks = key_ids(block_keys.topk(k, dim=-1, sorted=False).values)
        ids = (blocks.unsqueeze(-1) * BLOCK + torch.arange(BLOCK, device=z.device)).flatten(1)
        rest = torch.arange(num_blocks * BLOCK, vocab, device=z.device).expand(num_rows, -1)
        ids = torch.cat((ids, rest), dim=1)
        keys = order_keys(z.gather(1, ids), ids)
    ids = key_ids(keys.topk(k, dim=-1).values)
    return z.gather(1, ids), ids
