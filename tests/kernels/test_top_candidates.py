from math import inf

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagedray.kernels.top_candidates import CASES, make_inputs, top_candidates, top_candidates_ref


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_ids_equal_the_reference(case):
    for got, expected in zip(top_candidates(*make_inputs(case)), top_candidates_ref(*make_inputs(case)), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


@given(
    vocab=st.integers(1, 700),
    k=st.integers(1, 12),
    levels=st.sampled_from([1, 2, 7, 1000]),
    masked=st.sampled_from([0.0, 0.5, 0.99]),
    seed=st.integers(0, 2**32),
)
def test_ties_go_to_the_lowest_id(vocab, k, levels, masked, seed):
    generator = torch.Generator().manual_seed(seed)
    z = torch.randint(-levels, levels + 1, (3, vocab), generator=generator) / 4
    z[torch.rand(z.shape, generator=generator) < masked] = -inf
    values, ids = top_candidates(z, k)
    for row in range(3):
        order = sorted(range(vocab), key=lambda i: (-z[row, i].item(), i))[:k]
        assert ids[row].tolist() == order
        assert values[row].tolist() == z[row, order].tolist()


def test_both_zeros_are_equal():
    z = torch.tensor([[-1.0, -0.0, 0.0, -0.0] * 100])
    assert top_candidates(z, 3)[1].tolist() == [[1, 2, 3]]  # searched by blocks
    assert top_candidates(z[:, :4], 3)[1].tolist() == [[1, 2, 3]]  # all at once


def test_a_row_of_nan_has_candidates_beside_rows_that_have_theirs() -> None:
    z = torch.randn(3, 1024, generator=torch.Generator().manual_seed(0))
    z[1] = float("nan")
    values, ids = top_candidates(z, 8)
    assert ((ids >= 0) & (ids < 1024)).all() and values[1].isnan().all()
    for row in (0, 2):
        assert torch.equal(values[row], z[row].topk(8).values)
