import pytest
import torch

from pagedray.kernels.penalties import apply_penalties


def penalised(z, ids, counts, num_unique=None, repetition=1.0, presence=0.0, frequency=0.0):
    """One row's logits after penalties."""
    logits = torch.tensor([z])
    apply_penalties(
        logits,
        torch.tensor([0]),
        torch.tensor([ids]),
        torch.tensor([counts], dtype=torch.int32),
        torch.tensor([len(ids) if num_unique is None else num_unique]),
        *(torch.tensor([x]) for x in (repetition, presence, frequency)),
    )
    return logits[0].tolist()


@pytest.mark.parametrize(
    "penalties, expected",
    [  # token 0 was only in the prompt, token 1 three times and token 2 once in the output, token 3 nowhere
        ({"repetition": 2.0}, [2.0, 1.0, -2.0, 3.0]),
        ({"repetition": 0.5}, [8.0, 4.0, -0.5, 3.0]),
        ({"presence": 0.5}, [4.0, 1.5, -1.5, 3.0]),
        ({"presence": -0.5}, [4.0, 2.5, -0.5, 3.0]),
        ({"frequency": 0.5}, [4.0, 0.5, -1.5, 3.0]),
        ({"repetition": 2.0, "presence": 1.0, "frequency": 0.5}, [2.0, -1.5, -3.5, 3.0]),
    ],
)
def test_each_penalty(penalties, expected):
    assert penalised([4.0, 2.0, -1.0, 3.0], [0, 1, 2], [0, 3, 1], **penalties) == expected


def test_unused_columns_change_nothing():
    assert penalised([4.0, 2.0, 1.0], [1, 0, 2], [1, 9, 9], num_unique=1, presence=1.0) == [4.0, 1.0, 1.0]
    # no token yet: column 0 stands in, with the count it was given (0)
    assert penalised([4.0, 2.0, 1.0], [0, 9, 9], [0, 9, 9], num_unique=0, presence=1.0, frequency=1.0) == [
        4.0,
        2.0,
        1.0,
    ]


def test_only_the_given_rows_change():
    logits = torch.ones((4, 6))
    apply_penalties(
        logits,
        torch.tensor([2, 0]),
        torch.tensor([[5], [3]]),
        torch.tensor([[1], [2]], dtype=torch.int32),
        torch.tensor([1, 1]),
        torch.ones(2),
        torch.tensor([0.5, 0.0]),
        torch.tensor([0.0, 0.25]),
    )
    expected = torch.ones((4, 6))
    expected[2, 5] = expected[0, 3] = 0.5
    assert torch.equal(logits, expected)
