"""Beyond its CASES: every way through the kernels, ties, forbidden tokens and the ends of the distribution."""

import os
from math import inf, nan

import numpy as np
import pytest
import torch
from torch import Tensor

from pagedray.kernels.philox import uniform
from pagedray.kernels.sample_rows import (
    TILES,
    Tiles,
    pack_fields,
    sample_rows,
    sample_rows_ref,
    sample_rows_triton,
)
from pagedray.kernels.sampling import greedy_ref, sample_ref

# A GPU says nothing of an infinity in a lane that is masked later, which numpy warns of.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SMALL = Tiles(block=256, part=16, num_parts=8, capacity=512)  # candidates are looked for, and mostly suffice
TINY = Tiles(block=256, part=16, num_parts=8, capacity=16)  # they often don't fit


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cpu":
        pytest.importorskip("triton", reason="triton is not installed")
        if os.environ.get("TRITON_INTERPRET") != "1":
            pytest.skip("Triton compiles here; the same test marked gpu runs on the GPU")
    return str(request.param)


class Rows:
    """Rows with the same settings, and different seeds."""

    def __init__(self, num_rows: int, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0):
        self.seeds, self.positions = np.arange(num_rows) + (5 << 33), np.full(num_rows, 3)
        self.settings = [np.full(num_rows, x, dtype=np.float32) for x in (temperature, top_p, min_p)]
        self.top_k = np.full(num_rows, top_k, dtype=np.int64)
        self.num_filtered = num_rows if top_k or top_p < 1 or min_p else 0

    def sample(self, z: Tensor, device: str, tiles: Tiles) -> Tensor:
        temperature, top_p, min_p = self.settings
        fields = pack_fields(self.seeds, self.positions, temperature, self.top_k, top_p, min_p)
        z, sent = z.to(device), torch.from_numpy(fields).to(device)
        tokens = sample_rows_triton(z, sent, self.num_filtered, tiles=tiles)
        if not temperature.any():
            assert torch.equal(tokens, sample_rows_triton(z, sent, 0, is_greedy=True, tiles=tiles))
        return tokens.cpu()

    def reference(self, z: Tensor, at: Tensor, shift: float) -> Tensor:
        """Tokens of rows `at` for numbers u that lie a little beside theirs."""
        temperature, top_p, min_p = (torch.from_numpy(x)[at] for x in self.settings)
        u = torch.from_numpy(uniform(self.seeds, self.positions))[at] + shift
        if temperature.numel() and temperature[0] == 0:
            return greedy_ref(z[at].float())
        return sample_ref(z[at].float(), u, temperature, torch.from_numpy(self.top_k)[at], top_p, min_p)

    def check(self, z: Tensor, device: str, tiles: Tiles) -> Tensor:
        """Equal to the definition, but for numbers within 1e-6 of a step: exp is float32."""
        tokens, expected = self.sample(z, device, tiles), self.reference(z, torch.arange(len(z)), 0.0)
        at = (tokens != expected).nonzero().squeeze(1)
        if len(at):
            assert (self.reference(z, at, -1e-6) <= tokens[at]).all()
            assert (tokens[at] <= self.reference(z, at, 1e-6)).all()
        return tokens


def logits(num_rows: int, vocab: int, scale: float, dtype: torch.dtype, masked: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(int(vocab + 10 * scale))
    z = torch.randn((num_rows, vocab), generator=generator) * scale
    z[(torch.rand(z.shape, generator=generator) < masked).logical_and(z < z.amax(-1, keepdim=True))] = -inf
    return z.to(dtype)


SETTINGS = [
    (0.0,),
    (0.7,),
    (1.0, 1),
    (0.9, 12),
    (1.5, 9, 0.8, 0.003),
    (0.9, 40),
    (1.3, 290),
    (1.0, 0, 0.3),
    (0.8, 0, 0.93),
    (2.0, 0, 0.9999),
    (1.0, 0, 1.0, 0.02),
    (1.0, 0, 1.0, 1.0),
    (1.2, 0, 0.8, 0.001),
    (1.0, 60, 0.9, 0.003),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize(
    "dtype, vocab, scale, masked",
    [(torch.bfloat16, 300, 3.0, 0.0), (torch.float16, 500, 6.0, 0.9), (torch.float32, 600, 0.5, 0.3)],
    ids=str,
)
def test_all_ways_equal_the_definition_and_each_other(settings, dtype, vocab, scale, masked, device):
    rows, z = Rows(2, *settings), logits(2, vocab, scale, dtype, masked)
    tokens = rows.check(z, device, SMALL)
    if rows.num_filtered:  # exact, whatever the tiles
        assert torch.equal(tokens, rows.sample(z, device, TILES))
    else:
        rows.check(z, device, TILES)


@pytest.mark.parametrize("settings", [(1.0, 20), (1.0, 7), (1.0, 0, 0.9), (1.0, 0, 0.1), (1.0, 5, 0.5, 0.01)], ids=str)
@pytest.mark.parametrize("scale", [0.5, 5.0])
def test_too_many_candidates_are_left_alone(settings, scale, device):
    rows, z = Rows(2, *settings), logits(2, 150, scale, torch.bfloat16)
    assert torch.equal(rows.check(z, device, TINY), rows.sample(z, device, TILES))


@pytest.mark.parametrize("tiles", [SMALL, TILES], ids=str)
@pytest.mark.parametrize("settings, kept", [((1.0, 75), 75), ((1.0, 0, 0.2499), 75), ((1.0, 150, 0.4999), 75)])
def test_equal_tokens_are_kept_by_lowest_id(settings, kept, tiles, device):
    num = 12
    z = torch.zeros((num, 300))
    z[torch.rand(z.shape, generator=torch.Generator().manual_seed(0)) < 0.5] = -0.0
    rows = Rows(num, *settings)
    tokens = rows.check(z, device, tiles)
    u = torch.from_numpy(uniform(rows.seeds, rows.positions))
    assert torch.equal(tokens, (u * kept).long())


@pytest.mark.parametrize("settings", [(0.0,), (1.0,), (1.0, 5), (1.0, 0, 0.5), (1.0, 0, 1.0, 0.1)], ids=str)
def test_broken_rows(settings, device):
    num, vocab = 8, 300
    sound = logits(num, vocab, 2.0, torch.bfloat16)
    broken = sound.clone()
    broken[0] = nan
    broken[2] = -inf
    broken[4, 7] = nan
    broken[6, [9, 200]] = inf
    rows = Rows(num, *settings)
    tokens, expected = rows.sample(broken, device, SMALL), rows.sample(sound, device, SMALL)
    assert torch.equal(tokens[1::2], expected[1::2])
    assert ((tokens >= 0) & (tokens < vocab)).all()
    assert tokens[4] != 7 and tokens[6] in (9, 200)
    if settings == (0.0,):
        assert tokens[[0, 2, 6]].tolist() == [0, 0, 9]


@pytest.mark.parametrize("settings", [(1.0,), (1.0, 3), (1.0, 0, 0.999), (1.0, 0, 1.0, 0.1)], ids=str)
def test_only_possible_tokens_between_impossible_ones(settings, device):
    z = torch.full((16, 700), -inf)
    z[:, 1] = z[:, -2] = 1.0
    z[:, 300] = 1.1
    assert set(Rows(16, *settings).check(z, device, SMALL).tolist()) == {1, 300, 698}


def test_a_row_gives_the_same_token_alone_and_anywhere(device):
    vocab, num = 900, 9
    z = logits(num, vocab, 2.0, torch.float32)
    for settings in ((0.8,), (1.0, 0, 0.9)):
        rows = Rows(num, *settings)
        together = rows.sample(z, device, SMALL)
        alone = Rows(1, *settings)
        for row in (0, 4, 8):
            alone.seeds = rows.seeds[row : row + 1]
            assert alone.sample(z[row : row + 1], device, SMALL).tolist() == [together[row].item()]


def test_sources_targets_and_strides(device):
    """Rows may read any logits, in a wider tensor, and write anywhere; other tokens stay."""
    z = torch.zeros((4, 64), device=device)
    z[2, 5] = z[0, 6] = z[2, 40] = 9.0
    zero, off = np.zeros(2, dtype=np.int64), np.zeros(2, dtype=np.float32)
    fields = pack_fields(zero, zero, off, zero, off + 1, off)
    fields[0], fields[1] = [2, 0], [1, 4]
    tokens = torch.full((5,), -7, device=device)
    sample_rows_triton(z[:, :30], torch.from_numpy(fields).to(device), 0, tokens)
    assert tokens.tolist() == [-7, 5, -7, -7, 6]


def test_rows_of_all_kinds_in_any_order(device):
    """Tokens are those of rows that were sorted first, and a copy of each arrives in the host's memory."""
    vocab, settings = 300, SETTINGS[:11]
    z = logits(len(settings), vocab, 2.0, torch.bfloat16).to(device)
    seeds, positions = np.arange(len(settings)) + (5 << 33), np.arange(len(settings))
    temperature, top_k, top_p, min_p = np.array([(*s, *(1.0, 0, 1.0, 0.0)[len(s) :]) for s in settings]).T
    temperature, top_p, min_p = (x.astype(np.float32) for x in (temperature, top_p, min_p))
    temperature[4] = 0  # whose filters mean nothing then
    fields = pack_fields(seeds, positions, temperature, top_k.astype(np.int64), top_p, min_p)
    has_filter = (temperature > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0))
    assert 0 < has_filter.sum() < len(settings)
    order = np.argsort(has_filter, kind="stable")
    by_kind = np.ascontiguousarray(fields[:, order])
    expected = sample_rows_triton(z, torch.from_numpy(by_kind).to(device), int(has_filter.sum()), tiles=SMALL)

    fields[1], fields[2] = 20 - np.arange(len(settings)), 3 + np.arange(len(settings))
    tokens = torch.full((25,), -7, device=device)
    results = torch.full((20,), -7, pin_memory=device == "cuda")
    sample_rows_triton(z, torch.from_numpy(fields).to(device), None, tokens, results=results, tiles=SMALL)
    if device == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(results[3 : 3 + len(settings)], expected.cpu())
    assert torch.equal(tokens[fields[1]], expected)
    assert (results == -7).sum() == 20 - len(settings) and (tokens == -7).sum() == 25 - len(settings)


def test_the_reference_writes_results_too():
    z = torch.tensor([[0.0, 5.0, 1.0], [9.0, 0.0, 0.0]])
    off = np.zeros(2, dtype=np.float32)
    fields = pack_fields(np.arange(2), np.arange(2), off, np.array([0, 0]), off + 1, off)
    fields[1], fields[2] = [3, 1], [0, 2]
    tokens, results = torch.full((4,), -7), torch.full((3,), -7)
    sample_rows(z, torch.from_numpy(fields), None, tokens, results=results)
    assert (tokens.tolist(), results.tolist()) == ([-7, 0, -7, 1], [1, -7, 0])


def test_the_reference_takes_rows_of_all_kinds():
    z = torch.tensor([[0.0, 5.0, 1.0], [nan, nan, nan], [0.0, 1.0, 40.0]])
    one = np.ones(3, dtype=np.float32)
    fields = pack_fields(
        np.arange(3), np.arange(3), np.array([0, 0, 1], dtype=np.float32), np.array([0, 0, 2]), one, 0 * one
    )
    assert sample_rows_ref(z, torch.from_numpy(fields), 1).tolist() == [1, 0, 2]
