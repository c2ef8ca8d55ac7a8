"""Rotary position embedding, in place, on heads that lie side by side:  x = x * cos + swap(x) * sin

swap exchanges the two halves of the rotated dims; sin comes with its first half negated, so that this is the usual
rotate_half. Dims beyond R stay as they are.

Shapes   x [T, N, D]; cos, sin [T, 1, R], R even and <= D. Last dim contiguous, other strides free.
Dtypes   x, cos and sin alike: float32, bf16 or fp16.
Writes   x in place.
Source   Su et al. 2021, arXiv:2104.09864
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagedray.kernels.case import Case


def rotate_ref(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    size = cos.shape[-1] // 2
    first, second = x[..., :size].clone(), x[..., size : 2 * size].clone()
    x[..., :size] = first * cos[..., :size] + second * sin[..., :size]
    x[..., size : 2 * size] = second * cos[..., size:] + first * sin[..., size:]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    size = cos.shape[-1]
    if size < x.shape[-1]:
        x = x[..., :size]
    swapped = x.roll(size // 2, -1)
    x.mul_(cos).addcmul_(swapped, sin)


def make_inputs(case: Case) -> tuple[Tensor, ...]:
    size = case.get("R", case["D"])
    angles = 6 * case.randn(case["T"], 1, size // 2, seed=1).float()
    cos, sin = angles.cos(), angles.sin()
    x = case.randn(case["T"], case["N"] + 3, case["D"], seed=2)[:, : case["N"]]
    return x, torch.cat((cos, cos), -1).to(case.dtype), torch.cat((-sin, sin), -1).to(case.dtype)


CASES = [
    Case("rotate", T=1, N=12, D=64, dtype=torch.bfloat16),
    Case("rotate", T=64, N=12, D=64, dtype=torch.bfloat16),
    Case("rotate", T=5, N=5, D=256),
    Case("rotate", T=7, N=6, D=16, R=8),
    Case("rotate", T=130, N=40, D=128, dtype=torch.float16),
]
