"""What the cases don't say of routing: ties, broken rows, and counters that go on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pagedray.kernels.route_experts import route_experts, route_experts_ref, route_experts_triton

Route = Callable[..., tuple[Tensor, Tensor]]


def on_gpu(
    logits: Tensor,
    top_k: int,
    renormalise: bool,
    loads: Tensor | None = None,
    slots: Tensor | None = None,
    num_null: int = 0,
) -> tuple[Tensor, Tensor]:
    counted, at = (None if given is None else given.cuda() for given in (loads, slots))
    weights, experts = route_experts(logits.cuda(), top_k, renormalise, counted, at, num_null)
    if loads is not None and counted is not None:
        loads.copy_(counted)
    return weights.cpu(), experts.cpu()


GPU = pytest.param(on_gpu, marks=pytest.mark.gpu)


@pytest.fixture(params=[route_experts, route_experts_ref, route_experts_triton, GPU])
def route(request: pytest.FixtureRequest) -> Route:
    if request.param is route_experts_triton:
        request.getfixturevalue("interpreter")
    chosen: Route = request.param
    return chosen


def test_among_equal_logits_the_lower_expert_wins(route: Route) -> None:
    logits = torch.zeros(3, 40)
    logits[1, 7] = logits[1, 30] = 1.0
    logits[2, 5:] = -0.0
    weights, experts = route(logits, 4, True)
    assert experts.tolist() == [[0, 1, 2, 3], [7, 30, 0, 1], [0, 1, 2, 3]]
    torch.testing.assert_close(weights[0], torch.full((4,), 0.25))


def test_weights_are_of_all_experts_or_of_the_chosen(route: Route) -> None:
    logits = torch.tensor([[3.0, 1.0, 2.0, 0.0]]).log()
    torch.testing.assert_close(route(logits, 2, False)[0], torch.tensor([[3 / 6, 2 / 6]]))
    torch.testing.assert_close(route(logits, 2, True)[0], torch.tensor([[3 / 5, 2 / 5]]))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_broken_row_breaks_alone_and_names_experts_that_exist(route: Route) -> None:
    logits = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    expected = route(logits, 2, True)
    logits[1, 3], logits[2] = torch.nan, torch.nan
    loads = torch.zeros(8, dtype=torch.int64)
    weights, experts = route(logits, 2, True, loads)
    assert weights[1:3].isnan().all()
    assert ((experts >= 0) & (experts < 8)).all()
    for row in (0, 3):
        assert torch.equal(weights[row], expected[0][row]) and torch.equal(experts[row], expected[1][row])
    assert loads.sum() == 8


def test_counters_go_on_and_leave_padding_out(route: Route) -> None:
    logits = torch.eye(6)
    loads = torch.full((6,), 10)
    for _ in range(2):
        _, experts = route(logits, 1, False, loads, torch.tensor([4, 5, 3, 0, 400, 4]), 4)
    assert experts[:, 0].tolist() == [0, 1, -1, -1, 4, 5]
    assert loads.tolist() == [12, 12, 10, 10, 12, 12]


def test_a_token_does_not_depend_on_the_tokens_beside_it(route: Route) -> None:
    logits = torch.randn(70, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    weights, experts = route(logits, 4, True)
    for part in (slice(0, 1), slice(5, 50)):
        alone = route(logits[part], 4, True)
        assert torch.equal(alone[0], weights[part]) and torch.equal(alone[1], experts[part])


def test_no_tokens(route: Route) -> None:
    weights, experts = route(torch.empty(0, 8), 2, True, torch.zeros(8, dtype=torch.int64))
    assert weights.shape == experts.shape == (0, 2)
