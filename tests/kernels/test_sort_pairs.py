"""Sorted pairs at sizes around a block, with pairs that have no expert."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagedray.kernels.sort_pairs import SortedPairs, most_tiles, sort_pairs, sort_pairs_ref, sort_pairs_triton

Sort = Callable[..., SortedPairs]


def on_gpu(experts: torch.Tensor, *numbers: int) -> SortedPairs:
    return SortedPairs(*(part.cpu() for part in sort_pairs(experts.cuda(), *numbers)))


@pytest.fixture(params=[sort_pairs, sort_pairs_triton, pytest.param(on_gpu, marks=pytest.mark.gpu)])
def sort(request: pytest.FixtureRequest) -> Sort:
    if request.param is sort_pairs_triton:
        request.getfixturevalue("interpreter")
    chosen: Sort = request.param
    return chosen


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 32, 33, 600, 1025])
@pytest.mark.parametrize("share", [(0, 9), (4, 3), (8, 1), (2, 0)])
def test_pairs_without_an_expert_are_in_no_tile(sort: Sort, num_tokens: int, share: tuple[int, int]) -> None:
    experts = torch.randint(-1, 9, (num_tokens, 2), generator=torch.Generator().manual_seed(num_tokens)).int()
    got, expected = sort(experts, 9, *share, 16), sort_pairs_ref(experts, 9, *share, 16)
    num_routed = int((experts >= 0).sum())
    assert torch.equal(got.order[:num_routed], expected.order[:num_routed])
    assert torch.equal(got.tiles, expected.tiles)
    covered = [p for _, first, size in got.tiles.tolist() for p in got.order[first : first + size].tolist()]
    flat = experts.flatten()
    assert sorted(covered) == [p for p in range(len(flat)) if share[0] <= flat[p] < sum(share)]


@given(st.lists(st.integers(0, 5), max_size=60), st.integers(1, 9))
def test_no_more_tiles_than_the_host_made_room_for(experts: list[int], block_m: int) -> None:
    pairs = sort_pairs_ref(torch.tensor(experts, dtype=torch.int32).view(-1, 1), 6, 0, 6, block_m)
    assert len(pairs.tiles) == most_tiles(len(experts), 6, block_m)  # made longer only where it was too short


@pytest.mark.parametrize("num_pairs, num_experts, block_m", [(1, 8, 16), (7, 8, 4), (8, 8, 16), (100, 3, 16)])
def test_the_room_is_not_larger_than_the_worst_case_needs(num_pairs: int, num_experts: int, block_m: int) -> None:
    """One pair for each expert, and the rest for one of them."""
    experts = torch.arange(num_pairs).clamp(max=num_experts - 1).int().view(-1, 1)
    pairs = sort_pairs_ref(experts, num_experts, 0, num_experts, block_m)
    assert (pairs.tiles[:, 2] > 0).all()


def test_no_tokens(sort: Sort) -> None:
    pairs = sort(torch.empty(0, 2, dtype=torch.int32), 8, 0, 8, 16)
    assert pairs.order.shape == (0,) and pairs.tiles.shape == (0, 3)
