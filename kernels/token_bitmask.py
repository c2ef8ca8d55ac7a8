"""Tokens that a grammar allows, as bits: the logits of all others become -inf.

    z[rows[e], v] = -inf     where bit v % 32 of words[e, v // 32] is 0

Shapes   logits [S, V] float32 without NaN, changed in place, row stride free; rows [E] int64: the rows of logits to
         change, each once; words [E, ceil(V / 32)] int32, contiguous. Bits past V mean nothing.
Method   A GPU reads the logits that it leaves as they are, so that it writes whole vectors. A CPU takes the minimum
         with inf or -inf, eight of which a table has for each byte: ten times as fast as a masked fill where bits are
         mixed, and never slower. It goes row by row, so that these limits stay in the cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagedray.kernels.case import Case
from pagedray.kernels.jit import launch, tl, triton

_BLOCK = 1024
_BITS_OF_BYTES = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_LIMITS_OF_BYTES = np.where(_BITS_OF_BYTES, inf, -inf).astype(np.float32)  # [256, 8]


def pack_ids(ids: Iterable[int], vocab: int) -> NDArray[np.int32]:
    """The words [ceil(vocab / 32)] that allow these ids alone."""
    flags = np.zeros(-(-vocab // 32) * 32, dtype=np.uint8)
    flags[np.fromiter(ids, dtype=np.int64)] = 1
    return np.packbits(flags, bitorder="little").view("<i4").astype(np.int32, copy=False)


def mask_tokens_ref(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    for e, row in enumerate(rows.tolist()):
        for v in range(logits.shape[1]):
            if not (int(words[e, v // 32]) >> (v % 32)) & 1:
                logits[row, v] = -inf


def mask_tokens(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    num_words = -(-logits.shape[1] // 32)
    assert words.shape == (len(rows), num_words), f"words {tuple(words.shape)}, not {(len(rows), num_words)}"
    if logits.device.type == "cuda":
        return mask_tokens_triton(logits, rows, words)
    vocab = logits.shape[1]
    for row, bits in zip(rows.tolist(), words.numpy().astype("<i4", copy=False).view(np.uint8), strict=True):
        z = logits[row].numpy()
        np.minimum(z, _LIMITS_OF_BYTES.take(bits, axis=0).reshape(-1)[:vocab], out=z)


@triton.jit
def _mask_tokens(  # type: ignore[no-untyped-def]
    logits_ptr, row_stride, rows_ptr, words_ptr, num_words, V, BLOCK: tl.constexpr
):
    """One block of a row a program; 32 neighbouring lanes load the same word."""
    e = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + e)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = v < V
    word = tl.load(words_ptr + e * num_words + v // 32, mask=inside, other=-1)
    is_forbidden = ((word >> (v % 32)) & 1) == 0
    z_ptrs = logits_ptr + row * row_stride + v
    z = tl.load(z_ptrs, mask=inside, other=0.0)
    tl.store(z_ptrs, tl.where(is_forbidden, float("-inf"), z), mask=inside)


def mask_tokens_triton(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    assert words.is_contiguous() and logits.stride(1) == 1
    vocab = logits.shape[1]
    launch(
        _mask_tokens,
        (len(rows), -(-vocab // _BLOCK)),
        (logits, logits.stride(0), rows, words, words.shape[1], vocab),
        {"BLOCK": _BLOCK},
        num_warps=4,
    )


def make_inputs(case: Case) -> tuple[Tensor, ...]:
    """Words have bits of both kinds, bit 31 included; logits hold what others may leave in them."""
    generator = torch.Generator().manual_seed(7)
    num_rows, vocab = case["E"], case["V"]
    rows = torch.randperm(case["S"], generator=generator)[:num_rows]
    words = torch.randint(-(2**31), 2**31, (num_rows, -(-vocab // 32)), generator=generator).int()
    logits = case.randn(case["S"], vocab)
    logits[:, :2] = torch.tensor([inf, -inf])
    return logits, rows, words


CASES = [
    Case("mask_tokens", S=1, V=3, E=1),
    Case("mask_tokens", S=5, V=64, E=5),
    Case("mask_tokens", S=9, V=1057, E=4),
    Case("mask_tokens", S=3, V=5003, E=2),
]
