"""What the cases of paged_attention.py don't show: pages hold what other sequences left there."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagedray.kernels.paged_attention import PagedBatch, Workspace, paged_attention, plan_attention

H, K, D, B = 4, 2, 16, 4


@pytest.mark.parametrize(("dtype", "softcap"), [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, 5.0)])
@pytest.mark.parametrize("window", [None, 6])
def test_what_others_left_in_a_page_is_not_seen(dtype: torch.dtype, softcap: float | None, window: int | None) -> None:
    lengths = np.array([3, 9, 10, 18])
    width = -(-int(lengths.max()) // B)
    tables = 1 + np.arange(len(lengths) * width, dtype=np.int32).reshape(len(lengths), width)
    batch = PagedBatch(tables, np.arange(len(lengths) + 1), lengths, window)
    generator = torch.Generator().manual_seed(0)
    clean = torch.randn(tables.size + 1, 2, K, B, D, generator=generator).to(dtype)
    qkv = torch.randn(len(lengths), H + 2 * K, D, generator=generator).to(dtype)
    left = clean.clone()
    for table, length in zip(tables, lengths, strict=True):
        for position in range(width * B):
            if position >= length or (window is not None and position < length - window):
                left[table[position // B], :, :, position % B] = torch.nan
    ours, theirs = (
        paged_attention(qkv.clone(), pages, plan_attention(batch, pages, Workspace(dtype, pages.device)), 0.25, softcap)
        for pages in (clean, left)
    )
    assert torch.equal(ours, theirs)
