"""Gated activation of stacked projections:  y = act(x[:, :N]) * x[:, N:],  act silu or gelu (tanh form)

Shapes   x [T, 2N], y [T, N]. Last dim contiguous, row stride free.
Dtypes   float32, bf16 or fp16, in and out; act(gate) is rounded to the type before the product.
Source   Shazeer 2020, arXiv:2002.05202
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from pagedray.kernels.case import Case


def silu_and_mul_ref(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    wide = gate.float()
    return (wide / (1 + torch.exp(-wide))).to(x.dtype) * up


def gelu_tanh_and_mul_ref(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    wide = gate.float()
    inner = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)
    return (0.5 * wide * (1 + torch.tanh(inner))).to(x.dtype) * up


def silu_and_mul(x: Tensor) -> Tensor:
    size = x.shape[-1] // 2
    return F.silu(x[:, :size]).mul_(x[:, size:])


def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    size = x.shape[-1] // 2
    return F.gelu(x[:, :size], approximate="tanh").mul_(x[:, size:])


def make_inputs(case: Case) -> tuple[Tensor, ...]:
    return (3 * case.randn(case["T"], 2 * case["N"], seed=1),)


CASES = [
    Case(op, T=tokens, N=width, dtype=dtype)
    for op in ("silu_and_mul", "gelu_tanh_and_mul")
    for tokens, width, dtype in [
        (1, 1536, torch.bfloat16),
        (64, 1536, torch.bfloat16),
        (7, 24, torch.float32),
        (129, 2048, torch.float16),
    ]
]
