"""Vocabulary-parallel ranks give together what one rank with the whole table gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pagedray.kernels.embedding import embedding, embedding_triton
from pagedray.kernels.gather_logits import gather_logits


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("op", [embedding, embedding_triton])
@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_sum_over_ranks_is_the_whole_row(op: Callable[..., torch.Tensor], num_ranks: int) -> None:
    table = torch.randn(30, 24).bfloat16()
    ids = torch.randperm(30)
    parts = [
        op(ids, shard.contiguous(), 3.5, first=rank * len(shard)) for rank, shard in enumerate(table.chunk(num_ranks))
    ]
    assert torch.equal(torch.stack(parts).sum(0), op(ids, table, 3.5))
    assert torch.equal(op(ids, table), table[ids])


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("op", [embedding, embedding_triton])
def test_a_rank_without_any_id_gives_zeros(op: Callable[..., torch.Tensor]) -> None:
    table = torch.full((10, 8), torch.nan)
    assert torch.equal(op(torch.tensor([0, 9, 20]), table, 2.0, first=10), torch.zeros(3, 8))
    assert op(torch.empty(0, dtype=torch.int64), table).shape == (0, 8)


def test_gathered_scores_are_those_of_the_whole_head() -> None:
    x, head = torch.randn(3, 16), torch.randn(10, 16)
    padded = torch.cat((head, head.new_zeros(2, 16)))
    parts = torch.stack([x @ shard.T for shard in padded.chunk(4)])
    torch.testing.assert_close(gather_logits(parts, 10), x @ head.T)
