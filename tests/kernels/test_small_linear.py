"""Both kernels at tiles of every kind; test_cases.py compares the tiles that are chosen by default."""

from __future__ import annotations

import itertools

import pytest
import torch

from pagedray.kernels.small_linear import (
    MAX_ROWS,
    MEASURED,
    Tile,
    default_tile,
    small_gated_linear,
    small_gated_linear_ref,
    small_gated_linear_triton,
    small_linear,
    small_linear_ref,
    small_linear_triton,
    tile_of,
)

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}

VECTOR_TILES = [Tile(2, 256, 1), Tile(8, 512, 2), Tile(4, 1024, 4, num_stages=3)]
MATRIX_TILES = [
    Tile(16, 64, 4, num_stages=3, tensor_cores=True),
    Tile(32, 32, 1, num_stages=2, tensor_cores=True),
    Tile(16, 128, 2, num_stages=4, tensor_cores=True),
]
SHAPES = [(64, 1024), (50, 560), (37, 67)]  # all loads whole; rows left over; columns left over


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where the kernels run: the interpreter's CPU, or a GPU."""
    if request.param == "cpu":
        request.getfixturevalue("interpreter")
    device: str = request.param
    return device


def randn(*shape: int, device: str = "cpu", dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(device)


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=TOLERANCE[got.dtype], atol=TOLERANCE[got.dtype])


@pytest.mark.parametrize("tile", [*VECTOR_TILES, *MATRIX_TILES], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_any_tile_gives_the_reference(device, tile, shape, num_tokens):
    n, k = shape
    x, w, bias = randn(num_tokens, k), randn(n, k, seed=1) * k**-0.5, randn(n, seed=2)
    got = small_linear_triton(x.to(device), w.to(device), bias.to(device), tile=tile)
    assert_close(got.cpu(), small_linear_ref(x, w, bias))


@pytest.mark.parametrize("tile", [VECTOR_TILES[1], MATRIX_TILES[0]], ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_a_gated_layer_pairs_rows_of_both_halves(device, tile, activation):
    x, w = randn(2, 192), randn(2 * 37, 192, seed=1) * 192**-0.5
    got = small_gated_linear_triton(x.to(device), w.to(device), activation, tile=tile)
    assert got.shape == (2, 37)
    assert_close(got.cpu(), small_gated_linear_ref(x, w, activation))


@pytest.mark.parametrize("num_tokens", [1, 5, 16])
def test_float32_is_not_rounded_to_a_narrower_type(device, num_tokens):
    x, w = (randn(size, 200, device=device, dtype=torch.float32, seed=size) for size in (num_tokens, 33))
    torch.testing.assert_close(small_linear_triton(x, w), (x.double() @ w.double().T).float(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("tile", [VECTOR_TILES[0], MATRIX_TILES[1]], ids=str)
def test_what_lies_behind_the_last_row_and_column_does_not_matter(device, tile):
    x, w = randn(3, 67), randn(37, 67, seed=1)
    behind = torch.full((64 * 67,), torch.nan, dtype=w.dtype)
    x_inside, w_inside = (
        torch.cat([a.flatten(), behind]).to(device)[: a.numel()].view(a.shape) for a in (x, w)
    )  # NaN times a masked zero would show
    assert_close(small_linear_triton(x_inside, w_inside, tile=tile).cpu(), small_linear_ref(x, w))


@pytest.mark.parametrize("tile", [Tile(2, 256, 1), Tile(16, 32, 2, num_stages=2, tensor_cores=True)], ids=str)
def test_a_row_does_not_depend_on_the_rows_beside_it(device, tile):
    x, w = randn(16, 320, device=device), randn(48, 320, device=device, seed=1)
    whole = small_linear_triton(x, w, tile=tile)
    for num_tokens in (9, 12) if device == "cpu" else range(1, 16):  # numpy sums in another order where shapes differ
        assert torch.equal(small_linear_triton(x[:num_tokens], w, tile=tile), whole[:num_tokens])


def test_many_rows_and_rows_of_odd_size_go_to_torch():
    assert tile_of(MAX_ROWS + 1, 40, 64, torch.bfloat16) is None
    assert tile_of(1, 40, 67, torch.bfloat16) is None
    x, w = randn(MAX_ROWS + 1, 64), randn(40, 64, seed=1)
    assert_close(small_linear(x, w), small_linear_ref(x, w))
    assert_close(small_gated_linear(x, w, "gelu_tanh"), small_gated_linear_ref(x, w, "gelu_tanh"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 2, 4, 8, 16])
def test_default_tiles_fit_the_registers_and_the_loads(dtype, tokens):
    for n, k in itertools.product([2, 576, 4096, 28672, 151936], [33, 576, 1024, 4096, 14336]):
        tile = default_tile(tokens, n, k, dtype)
        assert all(size & (size - 1) == 0 for size in (tile.block_n, tile.block_k, tile.num_warps))
        if tile.tensor_cores:
            assert dtype.itemsize == 2
            assert tile.block_n >= 16
            assert tile.block_k >= 16
        else:
            per_row = tile.block_k // (32 * tile.num_warps)
            assert per_row % (16 // dtype.itemsize) == 0  # whole 16-byte loads
            assert tile.block_n * tokens <= 64  # sums of a thread, with as many loaded values as these take registers
            assert tile.block_n % 2 == 0  # a gated layer halves it


def test_measured_shapes_use_what_was_measured():
    for (n, k), tiles in MEASURED.items():
        for tokens, tile in tiles.items():
            assert tile_of(tokens, n, k, torch.bfloat16) == tile
            assert tile_of(tokens, n, k, torch.float32) != tile


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 2, 8, 16])
def test_a_captured_chain_equals_the_layers_one_by_one(pdl, num_tokens):
    """Each layer reads what the one before it wrote, so a launch that ran ahead of its input would show."""
    weights = [randn(n, k, device="cuda", seed=n) * k**-0.5 for n, k in [(4096, 2048), (2048, 4096)]] * 8
    x = randn(num_tokens, 2048, device="cuda")

    def chain(linear):
        y = x
        for w in weights:
            y = linear(y, w)
        return y

    chain(lambda y, w: small_linear_triton(y, w, pdl=pdl))  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(lambda y, w: small_linear_triton(y, w, pdl=pdl))
    for seed in range(20):
        x.copy_(randn(num_tokens, 2048, seed=seed))
        expected = chain(lambda y, w: small_linear_triton(y, w, pdl=False))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(got, expected)
