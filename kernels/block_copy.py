"""Copies of whole blocks inside the KV pool:  pages[target] = pages[source]  for every pair, in every slot

Shapes   pages: one tensor a slot, each [num_blocks, 2, K, B, D], contiguous; pairs [N, 2]: (source, target). No block
         is the target of two pairs, or the target of one and the source of another; (0, 0) pads.
Dtypes   pages of any type, all alike: bytes are copied; pairs int64.
Writes   pages in place. Safe under CUDA graph capture.
Source   copy on write: Kwon et al. 2023, arXiv:2309.06180
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pagedray.kernels.case import Case
from pagedray.kernels.jit import launch, tl, triton

_BLOCK = 2048  # words of 4 bytes


def copy_blocks_ref(pages: Sequence[Tensor], pairs: Tensor) -> None:
    for page in pages:
        for source, target in pairs.tolist():
            page[target].copy_(page[source])


@triton.jit(do_not_specialize_on_alignment=["pairs_ptr"])
def _copy_blocks(words_ptr, pairs_ptr, size, num_parts, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """BLOCK words of a pair a program. size: words of a block."""
    program = tl.program_id(0)
    pair = program // num_parts
    word = program % num_parts * BLOCK + tl.arange(0, BLOCK)
    source, target = tl.load(pairs_ptr + 2 * pair), tl.load(pairs_ptr + 2 * pair + 1)
    words = tl.load(words_ptr + source * size + word, word < size)
    tl.store(words_ptr + target * size + word, words, word < size)


def copy_blocks(pages: Sequence[Tensor], pairs: Tensor) -> None:
    if pairs.is_cuda:
        return copy_blocks_triton(pages, pairs)
    source, target = pairs.unbind(1)
    for page in pages:
        rows = page.view(torch.uint8).flatten(1)
        rows.index_copy_(0, target, rows.index_select(0, source))


def copy_blocks_triton(pages: Sequence[Tensor], pairs: Tensor) -> None:
    assert pairs.dtype == torch.int64 and pairs.is_contiguous()
    for page in pages if len(pairs) else ():
        assert page.is_contiguous()
        words = page.view(torch.int32)
        size = words[0].numel()
        num_parts = -(-size // _BLOCK)
        grid = (len(pairs) * num_parts,)
        launch(_copy_blocks, grid, (words, pairs, size, num_parts), {"BLOCK": _BLOCK}, num_warps=8)


def make_inputs(case: Case) -> tuple[tuple[Tensor, ...], Tensor]:
    num_blocks, num_pairs = case["blocks"], case["N"]
    dtype = torch.float8_e4m3fn if case.get("fp8") else case.dtype
    pages = tuple(
        case.randn(num_blocks, 2, case["K"], case["B"], case["D"], seed=slot).to(dtype) for slot in range(case["slots"])
    )
    shuffled = 1 + torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(9))
    pairs = shuffled[: 2 * num_pairs].view(num_pairs, 2)
    return pages, torch.cat((pairs, pairs.new_zeros(case.get("padding"), 2)))


CASES = [
    Case("copy_blocks", blocks=9, N=4, padding=2, slots=2, K=3, B=16, D=64, dtype=torch.bfloat16),
    Case("copy_blocks", blocks=5, N=1, slots=3, K=1, B=1, D=8),
    Case("copy_blocks", blocks=5, N=0, padding=1, slots=1, K=2, B=4, D=80, dtype=torch.float16),
    Case("copy_blocks", blocks=7, N=3, slots=1, K=2, B=4, D=8, fp8=1, dtype=torch.bfloat16),
]
