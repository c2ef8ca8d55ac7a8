from math import inf

import torch

from pagedray.kernels.logit_edits import edit_logits

NONE = torch.tensor([], dtype=torch.int64)


def test_allowed_forbidden_and_biased_ids_of_three_rows():
    logits = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]])
    edit_logits(
        logits,
        keep_rows=torch.tensor([1]),
        keep=torch.tensor([3, 4]),
        forbid=torch.tensor([2, 6]),
        biased=torch.tensor([2, 4, 7]),
        bias=torch.tensor([100.0, -0.5, 0.25]),
    )
    # the bias of position 2 doesn't bring its token back
    assert logits.tolist() == [[1.0, 2.0, -inf], [4.0, 4.5, -inf], [-inf, 8.25, 9.0]]


def test_a_forbidden_id_stays_forbidden_when_it_is_allowed_too():
    logits = torch.zeros((1, 3))
    edit_logits(logits, torch.tensor([0]), torch.tensor([0, 1]), torch.tensor([1]), NONE, NONE.float())
    assert logits.tolist() == [[0.0, -inf, -inf]]


def test_nothing_to_do():
    logits = torch.zeros((2, 3))
    edit_logits(logits, NONE, NONE, NONE, NONE, NONE.float())
    assert torch.equal(logits, torch.zeros((2, 3)))
