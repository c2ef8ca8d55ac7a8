"""Grouped products: any order and tile gives the same, ranks add up, and nothing leaks between tokens."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from pagedray.kernels.grouped_linear import (
    ALL_32BIT,
    GATED_16BIT,
    SUM_16BIT,
    ExpertPairs,
    Tile,
    grouped_gated_linear,
    grouped_gated_linear_triton,
    grouped_sum_linear,
    grouped_sum_linear_triton,
    pairs_of,
    pick_block_m,
)
from pagedray.kernels.sort_pairs import SortedPairs, sort_pairs

E, HIDDEN, INNER = 6, 48, 40


@pytest.fixture(params=["torch", "triton", pytest.param("gpu", marks=pytest.mark.gpu)])
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "triton":
        request.getfixturevalue("interpreter")
    chosen: str = request.param
    return chosen


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


GATE_UP, DOWN = randn(E, 2 * INNER, HIDDEN, seed=1) / 7, randn(E, HIDDEN, INNER, seed=2) / 6


def chosen(num_tokens: int, top_k: int = 3) -> tuple[Tensor, Tensor]:
    weights, experts = randn(num_tokens, E, seed=num_tokens).softmax(-1).topk(top_k)
    return weights.contiguous(), experts.int()


def pairs(experts: Tensor, first: int = 0, num_local: int = E, block_m: int = 16) -> ExpertPairs:
    if block_m == 0:
        return ExpertPairs(experts, first, num_local)
    return ExpertPairs(experts, first, num_local, sort_pairs(experts, E, first, num_local, block_m), block_m)


def expert_mlp(kind: str, x: Tensor, weights: Tensor, of: ExpertPairs, **how: Any) -> Tensor:
    """Both layers, with NaN in the rows of h that nobody writes. kind: torch, the interpreter, or a GPU."""
    mine, device = slice(of.first, of.first + of.num_local), "cuda" if kind == "gpu" else "cpu"
    gated, summed = grouped_gated_linear, grouped_sum_linear
    if kind != "torch":
        gated, summed = grouped_gated_linear_triton, grouped_sum_linear_triton
    in_tiles = None if of.in_tiles is None else SortedPairs(*(part.to(device) for part in of.in_tiles))
    of = dataclasses.replace(of, experts=of.experts.to(device), in_tiles=in_tiles)
    gate_up, down = GATE_UP[mine].contiguous().to(device), DOWN[mine].contiguous().to(device)
    new_empty = Tensor.new_empty

    def poisoned(x: Tensor, *size: int, **options: Any) -> Tensor:
        made = new_empty(x, *size, **options)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "new_empty", poisoned)
        h = gated(x.to(device), gate_up, of, **how)
        return summed(h, down, weights.to(device), of, **how).cpu()


def by_hand(x: Tensor, weights: Tensor, experts: Tensor, mine: range = range(E)) -> Tensor:
    y = torch.zeros(len(x), HIDDEN)
    for t, row in enumerate(experts.tolist()):
        for j, expert in enumerate(row):
            if expert in mine:
                gate, up = (GATE_UP[expert] @ x[t]).chunk(2)
                y[t] += weights[t, j] * (DOWN[expert] @ (torch.nn.functional.silu(gate) * up))
    return y


@pytest.mark.parametrize("block_m", [0, 16, 32])
@pytest.mark.parametrize("num_tokens", [1, 5, 23])
def test_both_layers_together(kind: str, block_m: int, num_tokens: int) -> None:
    x, (weights, experts) = randn(num_tokens, HIDDEN), chosen(num_tokens)
    got = expert_mlp(kind, x, weights, pairs(experts, block_m=block_m))
    torch.testing.assert_close(got, by_hand(x, weights, experts), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("block_m", [0, 16])
@pytest.mark.parametrize("cuts", [(0, 3, 6), (0, 1, 2, 6), (0, 0, 6)])
def test_ranks_with_some_of_the_experts_add_up(kind: str, block_m: int, cuts: tuple[int, ...]) -> None:
    x, (weights, experts) = randn(9, HIDDEN), chosen(9)
    total = torch.zeros(9, HIDDEN)
    for first, end in itertools.pairwise(cuts):
        part = expert_mlp(kind, x, weights, pairs(experts, first, end - first, block_m))
        torch.testing.assert_close(part, by_hand(x, weights, experts, range(first, end)), rtol=1e-4, atol=1e-5)
        total += part
    torch.testing.assert_close(total, by_hand(x, weights, experts), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("block_m", [0, 16])
def test_padding_has_no_experts_and_gets_zeros(kind: str, block_m: int) -> None:
    x, (weights, experts) = randn(7, HIDDEN), chosen(7)
    experts[2:5] = -1
    x[2:5] = torch.nan
    got = expert_mlp(kind, x, weights, pairs(experts, block_m=block_m))
    assert torch.equal(got[2:5], torch.zeros(3, HIDDEN))
    torch.testing.assert_close(got, by_hand(x, weights, experts).nan_to_num(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("block_m", [0, 16])
def test_a_broken_token_breaks_alone(kind: str, block_m: int) -> None:
    x, (weights, experts) = randn(7, HIDDEN), chosen(7)
    expected = expert_mlp(kind, x, weights, pairs(experts, block_m=block_m))
    x[3] = torch.nan
    got = expert_mlp(kind, x, weights, pairs(experts, block_m=block_m))
    assert got[3].isnan().all()
    others = [0, 1, 2, 4, 5, 6]
    assert torch.equal(got[others], expected[others])


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("tile", [Tile(16, 16, 1, 1), Tile(64, 32, 2, 2), Tile(32, 64, 4, 3)], ids=str)
def test_any_tile(tile: Tile) -> None:
    x, (weights, experts) = randn(20, HIDDEN), chosen(20)
    got = expert_mlp("triton", x, weights, pairs(experts), tile=tile)
    torch.testing.assert_close(got, by_hand(x, weights, experts), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_tokens", [1, 4, 30])
def test_the_cpu_takes_each_expert_once(num_tokens: int) -> None:
    _, experts = chosen(num_tokens)
    in_tiles = pairs_of(experts, E, 2, 3, torch.float32).in_tiles
    assert in_tiles is not None
    used = [expert for expert, _, size in in_tiles.tiles.tolist() if size]
    assert used == sorted({expert - 2 for expert in experts.flatten().tolist() if 2 <= expert < 5})


def test_tiles_grow_with_the_pairs_of_an_expert() -> None:
    assert [pick_block_m(n, 8, torch.bfloat16) for n in (0, 1, 4, 5)] == [0, 0, 0, 16]
    assert [pick_block_m(n * 8, 8, torch.bfloat16) for n in (1, 12, 13, 24, 25, 48, 49, 9999)] == [
        *(16, 16, 32, 32, 64, 64, 128, 128)
    ]
    assert {pick_block_m(n * 8, 8, torch.float32) for n in (1, 50, 9999)} == {16, 32}


@pytest.mark.parametrize("table, num_weights", [(GATED_16BIT, 2), (SUM_16BIT, 1)])
def test_tiles_fit_a_hopper(table: dict[int, Tile], num_weights: int) -> None:
    """227 KiB of shared memory a program, and sums in at most 128 registers a thread."""
    for block_m, tile in table.items():
        stage = 2 * tile.block_k * (block_m + num_weights * tile.block_n)
        assert stage * tile.num_stages <= 227 * 1024
        assert block_m * tile.block_n * num_weights <= 128 * 32 * tile.num_warps
    assert table.keys() == GATED_16BIT.keys() and ALL_32BIT.keys() <= GATED_16BIT.keys()
