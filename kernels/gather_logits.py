"""Scores over the vocabulary from the shards that an all-gather put one after the other:  y[s] = parts[:, s], joined

Shapes   parts [W, S, P]: of W ranks, of which rank w has the ids w * P … w * P + P - 1; y [S, V], V <= W * P. Ids from
         V on are padding and fall away. Contiguous.
Dtypes   float32, bf16 or fp16.
Writes   nothing but y, which is returned. Safe under CUDA graph capture.
Source   Shoeybi et al. 2019, arXiv:1909.08053
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagedray.kernels.case import Case
from pagedray.kernels.jit import launch, tl, triton

_BLOCK = 2048  # columns


def gather_logits_ref(parts: Tensor, vocab: int) -> Tensor:
    return torch.stack([torch.cat(list(parts[:, seq]))[:vocab] for seq in range(parts.shape[1])])


@triton.jit(do_not_specialize=["S"])
def _gather_logits(parts_ptr, y_ptr, S, P, V, num_blocks, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """BLOCK columns of one part of a row a program."""
    program = tl.program_id(0)
    column = program % num_blocks * BLOCK + tl.arange(0, BLOCK)
    part_row = (program // num_blocks).to(tl.int64)
    part, seq = part_row // S, part_row % S
    token_id = part * P + column
    inside = (column < P) & (token_id < V)
    x = tl.load(parts_ptr + part_row * P + column, inside)
    tl.store(y_ptr + seq * V + token_id, x, inside)


def gather_logits(parts: Tensor, vocab: int) -> Tensor:
    if parts.is_cuda:
        return gather_logits_triton(parts, vocab)
    return parts.transpose(0, 1).flatten(1)[:, :vocab].contiguous()


def gather_logits_triton(parts: Tensor, vocab: int) -> Tensor:
    num_parts, num_seqs, size = parts.shape
    assert parts.is_contiguous() and vocab <= num_parts * size
    y = parts.new_empty(num_seqs, vocab)
    num_blocks = -(-size // _BLOCK)
    if y.numel():
        grid = (num_parts * num_seqs * num_blocks,)
        launch(_gather_logits, grid, (parts, y, num_seqs, size, vocab, num_blocks), {"BLOCK": _BLOCK}, num_warps=8)
    return y


def make_inputs(case: Case) -> tuple[Tensor, int]:
    return case.randn(case["W"], case["S"], case["P"], seed=1), case["V"]


CASES = [
    Case("gather_logits", W=1, S=3, P=50, V=49),
    Case("gather_logits", W=2, S=1, P=3000, V=6000, dtype=torch.bfloat16),
    Case("gather_logits", W=8, S=5, P=33, V=257, dtype=torch.float16),
    Case("gather_logits", W=4, S=2, P=10, V=21),  # the last rank has nothing but padding
]
