"""Linear layers of few rows, which only read weights:  y = x w^T + b,  gated: y = act(x g^T) * (x u^T)

Shapes   x [T, K], y [T, N]; w [N, K], b [N]; gated: w [2N, K] stacks g and u, no bias. All contiguous.
         T <= MAX_ROWS and rows of whole 16 bytes; torch computes the rest. small_linear_triton itself takes any K.
Dtypes   float32, bf16 or fp16, all alike; sums in float32, rounded once. Gated: g's and u's outputs and act(…) are
         rounded to the type before the product, as if activation.py's op came after the linear layer.
Writes   returns y. Deterministic: each output is summed by one program in a fixed order. With the same block_k and
         num_warps a row's bits don't depend on T within one of the two kernels. Safe under CUDA graph capture.
Launch   on Hopper with programmatic dependent launch: a program asks for its first weights before it waits for the
         kernel that writes x, so the end of one kernel and the start of the next keep the memory busy together.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pagedray.kernels import activation as gates
from pagedray.kernels.case import Case
from pagedray.kernels.jit import launch, power_of_2, tl, triton

MAX_ROWS = 16
_PDL_BYTES = 64 * 2**20
Activation = Literal["silu", "gelu_tanh"]


class Tile(NamedTuple):
    """What one program does at a time.

    Without tensor_cores, num_warps warps ask for block_n rows of block_k weights at once; block_k is num_warps * 32
    lanes * 16 bytes, or a multiple. With them, each warp multiplies block_n rows by its own block_k of
    num_warps * block_k columns. num_stages - 1 such blocks are in shared memory or on their way to it; 1: in registers.
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int = 1
    tensor_cores: bool = False


# (rows of w, K) → padded T → the fastest tile on an H200 for 16-bit types, or None where torch is faster.
MEASURED: dict[tuple[int, int], dict[int, Tile | None]] = {
    (6144, 4096): {
        1: Tile(4, 1024, 4, 6),
        2: Tile(16, 128, 4, 4, True),
        4: Tile(16, 128, 4, 4, True),
        8: Tile(16, 128, 4, 4, True),
        16: Tile(16, 128, 2, 5, True),
    },
    (4096, 4096): {
        1: Tile(4, 1024, 4, 6),
        2: Tile(4, 1024, 4),
        4: Tile(32, 128, 4, 4, True),
        8: Tile(32, 128, 4, 4, True),
        16: Tile(32, 128, 4, 4, True),
    },
    (28672, 4096): {1: Tile(4, 1024, 4, 6), 2: Tile(8, 512, 2), 4: None, 8: None, 16: None},
    (4096, 14336): {
        1: Tile(2, 1024, 4),
        2: Tile(4, 1024, 4),
        4: Tile(32, 128, 4, 4, True),
        8: Tile(32, 128, 4, 4, True),
        16: Tile(32, 128, 4, 4, True),
    },
    (128256, 4096): {
        1: Tile(16, 512, 2, 4),
        2: Tile(8, 512, 2),
        4: Tile(64, 64, 4, 4, True),
        8: Tile(64, 64, 4, 4, True),
        16: Tile(32, 128, 1, 5, True),
    },
    (4096, 1024): {
        1: Tile(8, 1024, 4, 4),
        2: Tile(4, 1024, 4),
        4: Tile(32, 128, 2, 5, True),
        8: Tile(32, 128, 2, 5, True),
        16: Tile(16, 128, 4, 4, True),
    },
    (1024, 2048): {
        1: Tile(4, 2048, 4),
        2: Tile(4, 2048, 8),
        4: Tile(16, 128, 4, 6, True),
        8: Tile(16, 128, 4, 6, True),
        16: Tile(16, 128, 4, 6, True),
    },
    (6144, 1024): {
        1: Tile(4, 1024, 4),
        2: Tile(4, 1024, 4),
        4: Tile(16, 128, 4, 4, True),
        8: Tile(16, 128, 4, 4, True),
        16: Tile(16, 128, 2, 5, True),
    },
    (1024, 3072): {
        1: Tile(2, 4096, 8),
        2: Tile(4, 2048, 8),
        4: Tile(16, 128, 4, 6, True),
        8: Tile(16, 128, 4, 6, True),
        16: Tile(16, 128, 4, 6, True),
    },
    (151936, 1024): {1: Tile(8, 256, 1), 2: None, 4: None, 8: Tile(16, 128, 4, 3, True), 16: None},
}


def tile_of(num_tokens: int, num_rows: int, width: int, dtype: torch.dtype) -> Tile | None:
    """The tile for x [num_tokens, width] and w [num_rows, width]; None: leave it to torch."""
    if num_tokens > MAX_ROWS or width * dtype.itemsize % 16 != 0:
        return None
    tokens = power_of_2(num_tokens)
    if dtype.itemsize == 2:
        measured = MEASURED.get((num_rows, width), {})
        if tokens in measured:
            return measured[tokens]
    return default_tile(tokens, num_rows, width, dtype)


def default_tile(tokens: int, num_rows: int, width: int, dtype: torch.dtype) -> Tile:
    """A good guess for shapes that nobody measured; tokens is a power of two."""
    lanes = 32 * 16 // dtype.itemsize
    if dtype.itemsize == 2 and tokens > 2:
        num_warps = min(4, power_of_2(-(-width // 128)))
        return Tile(16, 128, num_warps, num_stages=4 if tokens <= 8 else 3, tensor_cores=True)
    num_warps = min(4, power_of_2(-(-width // lanes)))
    block_n = 8 if tokens <= 2 else 4 if tokens <= 8 else 2  # of x, too, each thread has 16 bytes a row in registers
    while block_n > 2 and num_rows < 4 * 132 * block_n:
        block_n //= 2
    return Tile(block_n, num_warps * lanes, num_warps)


def small_linear_ref(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    y = x.float() @ w.float().T
    return (y if bias is None else y + bias.float()).to(x.dtype)


def small_gated_linear_ref(x: Tensor, w: Tensor, activation: Activation = "silu") -> Tensor:
    act = gates.silu_and_mul_ref if activation == "silu" else gates.gelu_tanh_and_mul_ref
    return act(small_linear_ref(x, w))


@triton.jit
def _rows(N, BLOCK_N: tl.constexpr, OUT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows of w for outputs OUT * program … : those of g, then for a gated layer (OUT = BLOCK_N / 2) those of u.

    Past the end the last row stands in, so that loads need no mask.
    """
    i = tl.arange(0, BLOCK_N)
    row = tl.minimum(tl.program_id(0) * OUT + i % OUT, N - 1) + i // OUT * N
    return row.to(tl.int64)


@triton.jit
def _weights(ptrs, columns_left, k, EVEN_K: tl.constexpr):  # type: ignore[no-untyped-def]
    if EVEN_K:
        w = tl.load(ptrs, eviction_policy="evict_first")
    else:
        w = tl.load(ptrs, mask=k < columns_left, other=0, eviction_policy="evict_first")
    return w


@triton.jit
def _prefetch(w_ptr, row, K, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Bring the first columns of some rows into the L2 cache, a line of 128 bytes at a time."""
    LINE: tl.constexpr = 1024 // w_ptr.dtype.element_ty.primitive_bitwidth
    NUM_LINES: tl.constexpr = triton.next_power_of_2(COLUMNS // LINE)
    k = tl.minimum(tl.arange(0, NUM_LINES) * LINE, K - 1)
    ptrs = w_ptr + row[:, None] * K + k[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [ptrs.to(tl.uint64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _store(  # type: ignore[no-untyped-def]
    y, bias_ptr, y_ptr, T, N, BLOCK_N: tl.constexpr, TOKENS: tl.constexpr, ACTIVATION: tl.constexpr
):
    """Bias or activation, and rounding, of y [BLOCK_N, TOKENS] float32."""
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    OUT: tl.constexpr = BLOCK_N if ACTIVATION is None else BLOCK_N // 2
    n = tl.program_id(0) * OUT + tl.arange(0, OUT)[:, None]
    t = tl.arange(0, TOKENS)[None, :]
    if ACTIVATION is not None:
        pairs = tl.permute(tl.reshape(y.to(dtype).to(tl.float32), [2, OUT, TOKENS]), [1, 2, 0])
        gate, up = tl.split(pairs)
        if ACTIVATION == "silu":
            z = gate
        else:  # gelu by tanh:  (1 + tanh z) / 2 = sigmoid(2z)
            z = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        out = (gate / (1 + tl.exp(-z))).to(dtype).to(tl.float32) * up
    elif bias_ptr is not None:
        out = y + tl.load(bias_ptr + n, mask=n < N, other=0).to(tl.float32)
    else:
        out = y
    tl.store(y_ptr + t * N + n, out.to(dtype), mask=(t < T) & (n < N))


@triton.jit(do_not_specialize=["T"])
def _vector_linear(  # type: ignore[no-untyped-def]
    x_ptr,
    w_ptr,
    bias_ptr,
    y_ptr,
    T,
    N,
    K,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TOKENS: tl.constexpr,
    EVEN_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Products in float32. A thread adds up its own columns; the threads of a row meet only at the very end."""
    VECTOR: tl.constexpr = 128 // w_ptr.dtype.element_ty.primitive_bitwidth  # elements of a 16-byte load
    row = _rows(N, BLOCK_N, BLOCK_N if ACTIVATION is None else BLOCK_N // 2)
    t = tl.minimum(tl.arange(0, TOKENS), T - 1)[None, :, None]
    k = tl.arange(0, BLOCK_K)[None, None, :]
    w_ptrs = w_ptr + row[:, None, None] * K + k
    x_ptrs = x_ptr + t * K + k
    if PDL:
        _prefetch(w_ptr, row, K, 2 * BLOCK_K)
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()  # x is read, and y written, after it
    sums = tl.zeros([BLOCK_N, TOKENS, BLOCK_K // VECTOR], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        w = _weights(w_ptrs + start, K - start, k, EVEN_K)
        if EVEN_K:
            x = tl.load(x_ptrs + start)
        else:
            x = tl.load(x_ptrs + start, mask=k < K - start, other=0)
        products = w.to(tl.float32) * x.to(tl.float32)
        sums += tl.sum(tl.reshape(products, [BLOCK_N, TOKENS, BLOCK_K // VECTOR, VECTOR]), 3)
    _store(tl.sum(sums, 2), bias_ptr, y_ptr, T, N, BLOCK_N, TOKENS, ACTIVATION)


@triton.jit(do_not_specialize=["T"])
def _matrix_linear(  # type: ignore[no-untyped-def]
    x_ptr,
    w_ptr,
    bias_ptr,
    y_ptr,
    T,
    N,
    K,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TOKENS: tl.constexpr,
    EVEN_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
    STAGES: tl.constexpr,
    WARPS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One product per warp over columns of its own, a batch of WARPS; the warps' sums are added at the end."""
    row = _rows(N, BLOCK_N, BLOCK_N if ACTIVATION is None else BLOCK_N // 2)
    t = tl.arange(0, TOKENS)[None, None, :]
    k = tl.arange(0, WARPS)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    w_ptrs = w_ptr + row[None, :, None] * K + k[:, None, :]
    x_ptrs = x_ptr + t * K + k[:, :, None]
    if PDL:
        _prefetch(w_ptr, row, K, STAGES * WARPS * BLOCK_K)
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()  # x is read, and y written, after it
    sums = tl.zeros([WARPS, BLOCK_N, TOKENS], tl.float32)
    for start in tl.range(0, K, WARPS * BLOCK_K, num_stages=STAGES):
        w = _weights(w_ptrs + start, K - start, k[:, None, :], EVEN_K)
        if EVEN_K:
            x = tl.load(x_ptrs + start, mask=t < T, other=0)
        else:
            x = tl.load(x_ptrs + start, mask=(t < T) & (k[:, :, None] < K - start), other=0)
        if INTERPRETED:  # where tl.dot takes the bits of bf16 for integers
            w, x = w.to(tl.float32), x.to(tl.float32)
        sums = tl.dot(w, x, sums, input_precision="ieee")
    _store(tl.sum(sums, 0), bias_ptr, y_ptr, T, N, BLOCK_N, TOKENS, ACTIVATION)


def small_linear(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    tile = tile_of(x.shape[0], w.shape[0], w.shape[1], x.dtype) if x.is_cuda else None
    return F.linear(x, w, bias) if tile is None else small_linear_triton(x, w, bias, tile=tile)


def small_gated_linear(x: Tensor, w: Tensor, activation: Activation = "silu") -> Tensor:
    tile = tile_of(x.shape[0], w.shape[0], w.shape[1], x.dtype) if x.is_cuda else None
    if tile is None:
        act = gates.silu_and_mul if activation == "silu" else gates.gelu_tanh_and_mul
        return act(F.linear(x, w))
    return small_gated_linear_triton(x, w, activation, tile=tile)


def small_linear_triton(
    x: Tensor, w: Tensor, bias: Tensor | None = None, *, tile: Tile | None = None, pdl: bool | None = None
) -> Tensor:
    return _launch(x, w, bias, None, tile, pdl)


def small_gated_linear_triton(
    x: Tensor, w: Tensor, activation: Activation = "silu", *, tile: Tile | None = None, pdl: bool | None = None
) -> Tensor:
    return _launch(x, w, None, activation, tile, pdl)


def _launch(
    x: Tensor, w: Tensor, bias: Tensor | None, activation: Activation | None, tile: Tile | None, pdl: bool | None
) -> Tensor:
    """The default tile where none is given; pdl None: if the device can and it pays."""
    num_tokens, width = x.shape
    num_rows = w.shape[0]
    assert 1 <= num_tokens <= MAX_ROWS and w.shape[1] == width and x.dtype == w.dtype
    assert x.is_contiguous() and w.is_contiguous()
    tokens = power_of_2(num_tokens)
    if tile is None:
        tile = tile_of(num_tokens, num_rows, width, x.dtype) or default_tile(tokens, num_rows, width, x.dtype)
    if pdl is None:  # long reads gain nothing from a start that overlaps, and lose a little
        pdl = x.is_cuda and w.nbytes <= _PDL_BYTES and has_dependent_launch(x.device)
    num_out, block_out = num_rows, tile.block_n
    if activation is not None:
        num_out, block_out = num_out // 2, block_out // 2
    y = x.new_empty(num_tokens, num_out)
    columns = tile.block_k
    if tile.tensor_cores:
        columns *= tile.num_warps
        tokens = max(tokens, 8)  # what a tensor core takes at least
    constants: dict[str, Any] = {
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "TOKENS": tokens,
        "EVEN_K": width % columns == 0,
        "ACTIVATION": activation,
        "PDL": pdl,
        "STAGES": tile.num_stages,
    }
    kernel = _vector_linear
    if tile.tensor_cores:
        kernel = _matrix_linear
        constants["WARPS"] = tile.num_warps
        constants["INTERPRETED"] = not x.is_cuda
    args = x, w, bias, y, num_tokens, num_out, width
    options = {"launch_pdl": True} if pdl else {}  # unknown to the interpreter
    launch(kernel, (-(-num_out // block_out),), args, constants, num_warps=tile.num_warps, **options)
    return y


@functools.cache
def has_dependent_launch(device: torch.device) -> bool:
    """Hopper and later."""
    return torch.cuda.get_device_capability(device) >= (9, 0)


def make_inputs(case: Case) -> tuple[Tensor | str | None, ...]:
    x, w = case.randn(case["T"], case["K"], seed=1), case.randn(case["N"], case["K"], seed=2)
    if case.op == "small_linear":
        return x, w, case.randn(case["N"], seed=3) if case.get("bias") else None
    return x, w * case["K"] ** -0.5, "gelu_tanh" if case.get("gelu") else "silu"


CASES = [
    Case("small_linear", T=1, N=256, K=256, dtype=torch.bfloat16),
    Case("small_linear", T=1, N=300, K=264, bias=1, dtype=torch.bfloat16),
    Case("small_linear", T=1, N=7, K=33, bias=1),
    Case("small_linear", T=2, N=192, K=288, dtype=torch.bfloat16),
    Case("small_linear", T=3, N=130, K=256, bias=1, dtype=torch.float16),
    Case("small_linear", T=3, N=50, K=130),
    Case("small_linear", T=8, N=100, K=300, bias=1, dtype=torch.bfloat16),
    Case("small_linear", T=16, N=64, K=128, dtype=torch.float16),
    Case("small_linear", T=16, N=33, K=65, bias=1),
    Case("small_gated_linear", T=1, N=192, K=256, dtype=torch.bfloat16),
    Case("small_gated_linear", T=2, N=60, K=100, gelu=1),
    Case("small_gated_linear", T=8, N=130, K=288, dtype=torch.bfloat16),
    Case("small_gated_linear", T=16, N=90, K=64, gelu=1, dtype=torch.float16),
]
