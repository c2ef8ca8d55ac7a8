"""Rows of a vocabulary table, which may be one rank's share of it:  y = table[id - first] * scale,  0 for absent ids

The rank that has an id's row gives it, all others give zeros, so that the sum over ranks is the whole table's row.

Shapes   token_ids [T]; table [rows, N], the rows of ids first … first + rows - 1; y [T, N]. Contiguous.
Dtypes   token_ids int64; table and y float32, bf16 or fp16, the product is rounded once.
Writes   nothing but y, which is returned. Safe under CUDA graph capture.
Source   the split by vocabulary: Shoeybi et al. 2019, arXiv:1909.08053
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pagedray.kernels.case import Case
from pagedray.kernels.jit import launch, tl, triton

_BLOCK = 1024  # columns: 16 bytes of bf16 for each thread of four warps


def embedding_ref(token_ids: Tensor, table: Tensor, scale: float = 1.0, first: int = 0) -> Tensor:
    y = torch.zeros((len(token_ids), table.shape[1]), dtype=table.dtype, device=table.device)
    for token, token_id in enumerate(token_ids.tolist()):
        if first <= token_id < first + len(table):
            y[token] = table[token_id - first] * scale
    return y


@triton.jit(do_not_specialize_on_alignment=["ids_ptr"])
def _embedding(  # type: ignore[no-untyped-def]
    ids_ptr, table_ptr, y_ptr, num_rows, N, scale, first, num_blocks, BLOCK: tl.constexpr
):
    """BLOCK columns of a token a program."""
    program = tl.program_id(0)
    token = (program // num_blocks).to(tl.int64)
    column = program % num_blocks * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids_ptr + token) - first
    size_here = tl.where((row >= 0) & (row < num_rows), N, 0)
    x = tl.load(table_ptr + row * N + column, column < size_here, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * N + column, (x * scale).to(y_ptr.dtype.element_ty), column < N)


def embedding(token_ids: Tensor, table: Tensor, scale: float = 1.0, first: int = 0) -> Tensor:
    if table.is_cuda:
        return embedding_triton(token_ids, table, scale, first)
    rows = token_ids - first if first else token_ids
    if first == 0 and (not len(rows) or int(rows.max()) < len(table)):
        y = F.embedding(rows, table)
    else:
        absent = (rows < 0) | (rows >= len(table))
        y = F.embedding(rows.masked_fill(absent, 0), table).masked_fill_(absent[:, None], 0)
    return y if scale == 1.0 else y.mul_(scale)


def embedding_triton(token_ids: Tensor, table: Tensor, scale: float = 1.0, first: int = 0) -> Tensor:
    num_rows, size = table.shape
    assert token_ids.dtype == torch.int64 and token_ids.is_contiguous() and table.is_contiguous()
    num_tokens, num_blocks = token_ids.shape[0], -(-size // _BLOCK)
    y = table.new_empty(num_tokens, size)
    if y.numel():
        args = token_ids, table, y, num_rows, size, scale, first, num_blocks
        launch(_embedding, (num_tokens * num_blocks,), args, {"BLOCK": _BLOCK})
    return y


def make_inputs(case: Case) -> tuple[Tensor, Tensor, float, int]:
    """The table of a rank whose first id is `first`, of a vocabulary of `V`; both its ends are asked for."""
    first, rows = case.get("first"), case["rows"]
    ids = torch.randint(0, case["V"], (case["T"],), generator=torch.Generator().manual_seed(1))
    ends = torch.tensor([first, first + rows - 1, 0, case["V"] - 1])[: case["T"]]
    ids[: len(ends)] = ends
    scale = case.get("scale_percent", 100) / 100
    return ids, case.randn(rows, case["N"], seed=2), float(torch.tensor(scale, dtype=case.dtype)), first


CASES = [
    Case("embedding", T=1, rows=64, V=64, N=576, dtype=torch.bfloat16),
    Case("embedding", T=33, rows=64, V=64, N=64),
    Case("embedding", T=9, rows=50, V=50, N=1152, scale_percent=3395, dtype=torch.bfloat16),
    Case("embedding", T=12, rows=20, V=60, N=40),
    Case("embedding", T=12, rows=20, first=20, V=60, N=96, scale_percent=700, dtype=torch.float16),
    Case("embedding", T=12, rows=20, first=40, V=60, N=2049, dtype=torch.bfloat16),
]
