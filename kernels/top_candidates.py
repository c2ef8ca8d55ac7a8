"""The k most likely tokens of each row, in one total order: higher logit first, then lower id.

    top_candidates(z, k) → values, ids   with (values desc, ids asc) sorted, exactly min(k, V) of them

Shapes   z [R, V] float32 without NaN; values [R, k] float32, ids [R, k] int64.
Ties     are common (bfloat16 logits have 8 bits), and `torch.topk` breaks them as it likes. One order for all makes
         top_k = 1 equal greedy, and a token independent of which algorithm ran.
Method   The top k lie in the k blocks whose maxima are highest (lower block first among equals), and are at least as
         high as the lowest of these maxima. That leaves few more than k tokens to sort, after one vectorised pass.
"""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from pagedray.kernels.case import Case

BLOCK = 64
_ID_BITS = 32
_ID_MASK = (1 << _ID_BITS) - 1
_NO_KEY = -(1 << 63)


def top_candidates_ref(z: Tensor, k: int) -> tuple[Tensor, Tensor]:
    values, ids = (z + 0.0).sort(dim=-1, descending=True, stable=True)
    return values[:, :k], ids[:, :k]


def top_candidates(z: Tensor, k: int) -> tuple[Tensor, Tensor]:
    vocab = z.shape[1]
    k = min(k, vocab)
    if k * BLOCK * 2 > vocab:
        keys = _order_keys(z, torch.arange(vocab, device=z.device))
    else:
        keys = _search_blocks(z, k)
    ids = _key_ids(keys.topk(k, dim=-1).values)
    return z.gather(1, ids), ids


def _search_blocks(z: Tensor, k: int) -> Tensor:
    """Keys of at least the top k tokens, [R, n]."""
    num_rows, vocab = z.shape
    num_blocks = vocab // BLOCK
    in_blocks = z[:, : num_blocks * BLOCK].unflatten(1, (num_blocks, BLOCK))
    maxima = in_blocks.amax(-1)
    blocks = _key_ids(_order_keys(maxima, torch.arange(num_blocks, device=z.device)).topk(k, dim=-1).values)
    least = maxima.gather(1, blocks[:, -1:])
    values = in_blocks[torch.arange(num_rows, device=z.device).unsqueeze(1), blocks].flatten(1)
    if vocab % BLOCK:  # what the blocks don't cover competes too, as one more block
        past_blocks = torch.nn.functional.pad(z[:, num_blocks * BLOCK :], (0, BLOCK - vocab % BLOCK), value=-inf)
        values = torch.cat((values, past_blocks), dim=1)
        blocks = torch.nn.functional.pad(blocks, (0, 1), value=num_blocks)
    rows, columns = (~(values < least)).nonzero(as_tuple=True)  # NaN, which nothing is above, is a candidate too
    ids = blocks[rows, columns // BLOCK] * BLOCK + columns % BLOCK
    ends = torch.bincount(rows, minlength=num_rows).cumsum(0)
    starts = torch.nn.functional.pad(ends[:-1], (1, 0))
    keys = torch.full((num_rows, int((ends - starts).max())), _NO_KEY, dtype=torch.int64, device=z.device)
    keys[rows, torch.arange(len(rows), device=z.device) - starts[rows]] = _order_keys(values[rows, columns], ids)
    return keys


def _order_keys(values: Tensor, ids: Tensor) -> Tensor:
    """int64 keys that are all different and descend in the total order; the low half gives the id back."""
    bits = (values + 0.0).view(torch.int32)  # + 0.0 makes -0.0 and 0.0 the same bits
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # as an integer, negative floats would ascend the wrong way
    return (ordered.to(torch.int64) << _ID_BITS) | (_ID_MASK - ids)


def _key_ids(keys: Tensor) -> Tensor:
    return _ID_MASK - (keys & _ID_MASK)


def make_inputs(case: Case) -> tuple[Tensor, int]:
    return case.randn(case["R"], case["V"]).float(), case["k"]


CASES = [
    Case("top_candidates", R=1, V=7, k=20),
    Case("top_candidates", R=3, V=1000, k=5, dtype=torch.bfloat16),
    Case("top_candidates", R=5, V=50257, k=50),
    Case("top_candidates", R=64, V=49152, k=128, dtype=torch.bfloat16),
]
