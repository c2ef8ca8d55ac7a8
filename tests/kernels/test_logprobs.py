from math import log

import pytest
import torch

from pagedray.kernels.logprobs import CASES, make_inputs, token_logprobs, token_logprobs_ref


@pytest.mark.parametrize("case", CASES, ids=str)
def test_all_fields_equal_the_reference(case):
    got, expected = token_logprobs(*make_inputs(case)), token_logprobs_ref(*make_inputs(case))
    torch.testing.assert_close(tuple(got), tuple(expected), rtol=case.rtol, atol=case.atol)


def test_a_distribution_done_by_hand():
    p = [0.125, 0.5, 0.125, 0.25]
    found = token_logprobs(torch.tensor([p, p]).log() + 3.0, torch.tensor([2, 1]), 3)
    assert found.logprob.tolist() == pytest.approx([log(0.125), log(0.5)], abs=1e-6)
    assert found.rank.tolist() == [3, 1]  # two are more likely than token 2; its equal doesn't count
    assert found.top_ids.tolist() == [[1, 3, 0]] * 2  # of the equal tokens 0 and 2 the lower id
    assert found.top_logprobs[0].tolist() == pytest.approx([log(0.5), log(0.25), log(0.125)], abs=1e-6)


def test_k_may_exceed_the_vocabulary_or_be_zero():
    assert token_logprobs(torch.zeros((2, 3)), torch.tensor([0, 1]), 20).top_ids.tolist() == [[0, 1, 2]] * 2
    assert token_logprobs(torch.zeros((2, 3)), torch.tensor([0, 1]), 0).top_ids.shape == (2, 0)


def test_a_row_gives_the_same_bits_alone():
    logits = torch.randn((16, 5003), generator=torch.Generator().manual_seed(1)) * 4
    targets = torch.arange(16)
    together = token_logprobs(logits, targets, 20)
    for row in (0, 7, 15):
        alone = token_logprobs(logits[row : row + 1], targets[row : row + 1], 20)
        for one, all_rows in zip(alone, together, strict=True):
            assert torch.equal(one[0], all_rows[row])
