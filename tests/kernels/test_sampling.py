from collections.abc import Callable
from math import inf, nan

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pagedray.kernels.sampling import greedy, sample_all, sample_min_p, sample_ref, sample_top_k, sample_top_p

GRID = 200  # numbers u = (i + 0.5) / GRID read the whole distribution off, without chance


def sample(z: Tensor, u: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> list[Tensor]:
    """Tokens of the reference and of every op that can serve these parameters."""
    rows = z.shape[0]
    if not rows:
        return [torch.empty(0, dtype=torch.int64)]
    t, p, m = (torch.full((rows,), x) for x in (temperature, top_p, min_p))
    k = torch.full((rows,), top_k)
    results = [sample_ref(z, u, t, k, p, m)]
    if top_k:
        results += [sample_top_k(z, u, t, k, p, m, width) for width in (max(64, top_k), max(2000, top_k))]
    elif top_p < 1:
        results.append(sample_top_p(z, u, t, p, m))
    elif min_p:
        results.append(sample_min_p(z, u, t, m))
    else:
        results += [sample_all(z, u, t), sample_min_p(z, u, t, m)]
    return results


def check(z: Tensor, u: Tensor, *params: float) -> None:
    """All ops agree with the definition, but for numbers within 1e-6 of a step: p is float32 over the vocabulary."""
    expected, *others = sample(z, u, *params)
    for tokens in others:
        at = (tokens != expected).nonzero().squeeze(1)
        low, high = (sample(z[at], u[at] + shift, *params)[0] for shift in (-1e-6, 1e-6))
        assert (low <= tokens[at]).all() and (tokens[at] <= high).all()


def shares(tokens: Tensor, vocab: int) -> list[float]:
    return (torch.bincount(tokens, minlength=vocab) / len(tokens)).tolist()


# probabilities by id: the order of ids is not the order of likelihood
P = [0.15, 0.5, 0.05, 0.2, 0.1]


@pytest.mark.parametrize("filler", [0, 300])  # impossible tokens around: the same by blocks as all at once
@pytest.mark.parametrize(
    "temperature, top_k, top_p, min_p, weights",
    [
        (1.0, 0, 1.0, 0.0, [0.15, 0.5, 0.05, 0.2, 0.1]),
        (0.5, 0, 1.0, 0.0, [0.0225, 0.25, 0.0025, 0.04, 0.01]),
        (1.0, 1, 1.0, 0.0, [0, 1, 0, 0, 0]),
        (1.0, 3, 1.0, 0.0, [0.15, 0.5, 0, 0.2, 0]),
        (1.0, 0, 0.49, 0.0, [0, 1, 0, 0, 0]),
        (1.0, 0, 1e-30, 0.0, [0, 1, 0, 0, 0]),  # the best one always stays
        (1.0, 0, 0.51, 0.0, [0, 0.5, 0, 0.2, 0]),
        (1.0, 0, 0.84, 0.0, [0.15, 0.5, 0, 0.2, 0]),
        (1.0, 0, 0.96, 0.0, P),
        (1.0, 0, 1.0, 0.29, [0.15, 0.5, 0, 0.2, 0]),
        (1.0, 0, 1.0, 0.31, [0, 0.5, 0, 0.2, 0]),
        (1.0, 0, 1.0, 1.0, [0, 1, 0, 0, 0]),
        (1.0, 3, 0.8, 0.0, [0, 0.5, 0, 0.2, 0]),  # 0.7 of 0.85 is enough: top_p counts what top_k left
        (1.0, 4, 0.8, 0.0, [0.15, 0.5, 0, 0.2, 0]),  # 0.7 of 0.95 is not
        (1.0, 0, 0.8, 0.25, [0, 0.5, 0, 0.2, 0]),  # and what min_p left
        (1.0, 5, 0.95, 0.35, [0, 0.5, 0, 0.2, 0]),
        (0.5, 0, 0.85, 0.0, [0, 0.25, 0, 0.04, 0]),  # temperature comes first: 0.25 of 0.325 is 0.77
        (1.0, 4, 0.999, 0.05, [0.15, 0.5, 0, 0.2, 0.1]),
    ],
)
def test_filters_by_hand(temperature, top_k, top_p, min_p, weights, filler):
    z = torch.tensor(P).log()
    z = torch.cat((z[:2], torch.full((filler,), -inf), z[2:]))
    u = (torch.arange(GRID, dtype=torch.float64) + 0.5) / GRID
    expected = [*weights[:2], *[0.0] * filler, *weights[2:]]
    for tokens in sample(z.expand(GRID, -1), u, temperature, top_k, top_p, min_p):
        assert (tokens.diff() >= 0).all()  # inverse of a cumulative distribution in id order
        assert shares(tokens, len(expected)) == pytest.approx([w / sum(weights) for w in expected], abs=1.01 / GRID)


@pytest.mark.parametrize("vocab", [8, 2000])
@pytest.mark.parametrize("top_k, top_p", [(2, 1.0), (0, 2 / 8 - 1e-3), (4, 0.5)])
def test_equal_tokens_are_kept_by_lowest_id(vocab, top_k, top_p):
    """Two of eight equal tokens: cut inside a tie, in the candidates' order and in the histogram's bucket."""
    top_k, kept = top_k * vocab // 8, vocab // 4
    z = torch.zeros((GRID, vocab))
    z[torch.rand(z.shape, generator=torch.Generator().manual_seed(0)) < 0.5] = -0.0
    u = (torch.arange(GRID, dtype=torch.float64) + 0.5) / GRID
    for tokens in sample(z, u, 1.0, top_k, top_p, 0.0):
        assert tokens.max() < kept
        assert (tokens - (u * kept).long()).abs().max() <= kept * 0.02


def random_logits(seed: int, rows: int, vocab: int, scale: float, dtype: torch.dtype, masked: float) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    z = (torch.randn((rows, vocab), generator=generator) * scale).to(dtype).float()
    z[(torch.rand(z.shape, generator=generator) < masked).logical_and(z < z.amax(-1, keepdim=True))] = -inf
    return z


@given(
    seed=st.integers(0, 2**32),
    vocab=st.sampled_from([1, 2, 63, 64, 65, 200, 1000, 3001]),
    scale=st.sampled_from([0.0, 0.01, 1.0, 4.0, 20.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    masked=st.sampled_from([0.0, 0.5, 0.999]),
    temperature=st.floats(0.05, 5.0),
    top_k=st.sampled_from([0, 1, 5, 64, 300]),
    top_p=st.floats(1e-3, 1.0),
    min_p=st.sampled_from([0.0, 0.01, 0.3]),
)
def test_fast_ways_equal_the_definition(seed, vocab, scale, dtype, masked, temperature, top_k, top_p, min_p):
    z = random_logits(seed, 8, vocab, scale, dtype, masked)
    u = torch.rand(8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    # the factor keeps top_p off the sums of equal tokens, where rounding decides which side it is on
    check(z, u, temperature, min(top_k, vocab - 1), top_p * 0.98765 if top_p < 1 else 1.0, min_p)


@pytest.mark.parametrize(
    "scale, temperature, dtype", [(6.0, 0.5, torch.float32), (1.0, 1.0, torch.bfloat16), (0.1, 3.0, torch.float32)]
)
def test_peaked_and_flat_distributions_over_a_large_vocabulary(scale, temperature, dtype):
    z = random_logits(3, 2, 262_144, scale, dtype, 0.0)
    u = torch.tensor([0.3, 0.99], dtype=torch.float64)
    for top_k, top_p, min_p in [(0, 1.0, 0.0), (0, 0.9, 0.0), (0, 0.5, 0.01), (0, 1.0, 0.05), (1000, 0.95, 0.0)]:
        check(z, u, temperature, top_k, top_p, min_p)


@pytest.mark.parametrize("top_k, top_p, min_p", [(0, 1.0, 0.0), (3, 1.0, 0.0), (0, 0.99, 0.0), (0, 1.0, 0.1)])
@pytest.mark.parametrize("vocab", [5, 1000])
def test_the_ends_of_the_interval_give_the_first_and_last_possible_token(top_k, top_p, min_p, vocab):
    z = torch.full((3, vocab), -inf)
    z[:, 1] = z[:, -2] = 1.0
    z[:, 2] = 1.1
    u = torch.tensor([0.0, 1 - 2**-53, 1.0], dtype=torch.float64)  # 1.0: where u * sum is rounded up to the sum
    for tokens in sample(z, u, 1.0, top_k, top_p, min_p):
        assert tokens.tolist() == [1, vocab - 2, vocab - 2]


@pytest.mark.parametrize("vocab", [1, 3, 64, 129, 5003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_takes_the_lowest_of_the_best(vocab, dtype):
    z = torch.randint(-3, 2, (50, vocab), generator=torch.Generator().manual_seed(vocab)).to(dtype)
    assert greedy(z).tolist() == [row.index(max(row)) for row in z.tolist()]


@pytest.mark.parametrize("vocab", [5, 500])
def test_greedy_shows_a_row_that_holds_nan(vocab):
    z = torch.zeros((3, vocab))
    z[0, 3] = z[2, vocab - 1] = nan
    z[0, 1] = inf
    assert greedy(z).tolist() == [3, 0, vocab - 1]


def test_last_bits_do_not_depend_on_the_other_rows():
    """Numbers u that sit on the cumulative distribution's steps: a last bit that differs takes another token."""
    rows, vocab = 24, 5003
    z = random_logits(9, rows, vocab, 2.0, torch.float32, 0.0)
    steps = torch.softmax(z, -1).double().cumsum(1)
    u = (steps / steps[:, -1:])[torch.arange(rows), torch.arange(rows) * 200]
    ones, k = torch.ones(rows), torch.full((rows,), 50)
    p, m = torch.full((rows,), 0.9), torch.full((rows,), 0.01)
    ways: list[Callable[[slice | Tensor], Tensor]] = [
        lambda at: greedy(z[at]),
        lambda at: sample_all(z[at], u[at], ones[at]),
        lambda at: sample_min_p(z[at], u[at], ones[at], m[at]),
        lambda at: sample_top_p(z[at], u[at], ones[at], p[at], m[at]),
        lambda at: sample_top_k(z[at], u[at], ones[at], k[at], p[at], m[at], 64),
    ]
    shuffled = torch.randperm(rows, generator=torch.Generator().manual_seed(0))
    threads = torch.get_num_threads()
    for way in ways:
        together = way(slice(None))
        assert torch.equal(way(shuffled), together[shuffled])
        try:
            torch.set_num_threads(1)
            alone = torch.cat([way(slice(row, row + 1)) for row in range(rows)])
        finally:
            torch.set_num_threads(threads)
        assert torch.equal(alone, together)
