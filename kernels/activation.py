"""Gated activation of stacked projections:  y = act(x[:, :N]) * x[:, N:],  act silu or gelu (tanh form)

Shapes   x [T, 2N], y [T, N]. Last dim contiguous, row stride free.
Dtypes   float32, bf16 or fp16, in and out; act(gate) is rounded to the type before the product.
Writes   nothing but y, which is returned. Safe under CUDA graph capture.
Source   Shazeer 2020, arXiv:2002.05202
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from pagedray.kernels.case import Case
from pagedray.kernels.jit import launch, tl, triton

_BLOCK = 1024  # columns: 16 bytes of bf16 for each thread of four warps


def silu_and_mul_ref(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    wide = gate.float()
    return (wide / (1 + torch.exp(-wide))).to(x.dtype) * up


def gelu_tanh_and_mul_ref(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    wide = gate.float()
    inner = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)
    return (0.5 * wide * (1 + torch.tanh(inner))).to(x.dtype) * up


@triton.jit
def _act_and_mul(x_ptr, y_ptr, x_row, N, num_blocks, IS_GELU: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """BLOCK columns of a row a program. x_row: stride."""
    program = tl.program_id(0)
    row = (program // num_blocks).to(tl.int64)
    column = program % num_blocks * BLOCK + tl.arange(0, BLOCK)
    inside = column < N
    x = x_ptr + row * x_row + column
    gate = tl.load(x, inside, other=0.0).to(tl.float32)
    up = tl.load(x + N, inside, other=0.0).to(tl.float32)
    if IS_GELU:  # 0.5 * (1 + tanh(u)) is the logistic function of 2u
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 * sqrt(2 / pi)
    else:
        slope = gate
    act = (gate / (1.0 + tl.exp(-slope))).to(x_ptr.dtype.element_ty).to(tl.float32)
    tl.store(y_ptr + row * N + column, (act * up).to(y_ptr.dtype.element_ty), inside)


def silu_and_mul(x: Tensor) -> Tensor:
    if x.is_cuda:
        return silu_and_mul_triton(x)
    size = x.shape[-1] // 2
    return F.silu(x[:, :size]).mul_(x[:, size:])


def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    if x.is_cuda:
        return gelu_tanh_and_mul_triton(x)
    size = x.shape[-1] // 2
    return F.gelu(x[:, :size], approximate="tanh").mul_(x[:, size:])


def silu_and_mul_triton(x: Tensor) -> Tensor:
    return _launch(x, is_gelu=False)


def gelu_tanh_and_mul_triton(x: Tensor) -> Tensor:
    return _launch(x, is_gelu=True)


def _launch(x: Tensor, is_gelu: bool) -> Tensor:
    size = x.shape[-1] // 2
    assert x.dim() == 2 and x.stride(1) == 1
    num_tokens, num_blocks = x.shape[0], -(-size // _BLOCK)
    y = x.new_empty(num_tokens, size)
    if y.numel():
        args = x, y, x.stride(0), size, num_blocks
        launch(_act_and_mul, (num_tokens * num_blocks,), args, {"IS_GELU": is_gelu, "BLOCK": _BLOCK})
    return y


def make_inputs(case: Case) -> tuple[Tensor, ...]:
    """Rows lie `gap` apart."""
    return (3 * case.randn(case["T"], 2 * case["N"] + case.get("gap"), seed=1)[:, : 2 * case["N"]],)


CASES = [
    Case(op, T=tokens, N=width, dtype=dtype)
    for op in ("silu_and_mul", "gelu_tanh_and_mul")
    for tokens, width, dtype in [
        (1, 1536, torch.bfloat16),
        (64, 1536, torch.bfloat16),
        (7, 24, torch.float32),
        (129, 2048, torch.float16),
    ]
] + [
    Case("silu_and_mul", T=3, N=1025, gap=5, dtype=torch.bfloat16),
    Case("gelu_tanh_and_mul", T=3, N=40, gap=1),
]
