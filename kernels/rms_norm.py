"""RMS norm, alone and with the residual add before it:  r += x;  y = r * rsqrt(mean(r^2) + eps) * w

Shapes   x, r, y [..., N]; w [N], or [G, N] where x is [T, G, N]. Last dim contiguous, row strides free.
Dtypes   x, r, y float32, bf16 or fp16; mean and scale in float32. w of x's type: the normalized value is rounded to it
         before the product (Llama). w float32 with a narrower x: the product is in float32 too (Gemma).
Writes   add_rms_norm: r in place. Both return y.
Source   Zhang and Sennrich 2019, arXiv:1910.07467
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pagedray.kernels.case import Case


def rms_norm_ref(x: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
    wide = x.float()
    y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (y.to(w.dtype) * w).to(x.dtype)


def add_rms_norm_ref(x: Tensor, r: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
    r.add_(x)
    return rms_norm_ref(r, w, eps)


def rms_norm(x: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
    if w.dtype == x.dtype:
        return F.rms_norm(x, x.shape[-1:], None, eps).mul_(w)
    return F.rms_norm(x.float(), x.shape[-1:], None, eps).mul_(w).to(x.dtype)


def add_rms_norm(x: Tensor, r: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
    r.add_(x)
    return rms_norm(r, w, eps)


def make_inputs(case: Case) -> tuple[Tensor | float, ...]:
    """An eps as large as the mean square, or else it would hardly matter."""
    groups = (case["G"],) if case.get("G") else ()
    rows = case["T"], *groups, case["N"]
    w = case.randn(*groups, case["N"], seed=3)
    if case.get("wide_weight"):
        w = 1 + w.float()
    residual = [case.randn(*rows, seed=2)] if case.op == "add_rms_norm" else []
    return (case.randn(*rows, seed=1), *residual, w, 0.5)


CASES = [
    Case("rms_norm", T=1, N=576),
    Case("rms_norm", T=7, N=576, dtype=torch.bfloat16),
    Case("rms_norm", T=5, N=64, G=12, dtype=torch.bfloat16),
    Case("rms_norm", T=3, N=640, wide_weight=1, dtype=torch.bfloat16),
    Case("rms_norm", T=1, N=64, wide_weight=1, dtype=torch.bfloat16, rtol=1e-3, atol=1e-4),  # the same roundings
    Case("rms_norm", T=1, N=64, dtype=torch.bfloat16, rtol=1e-3, atol=1e-4),
    Case("rms_norm", T=33, N=256, G=5, wide_weight=1),
    Case("add_rms_norm", T=1, N=4096),
    Case("add_rms_norm", T=64, N=576, dtype=torch.bfloat16),
    Case("add_rms_norm", T=2, N=640, wide_weight=1, dtype=torch.bfloat16),
    Case("add_rms_norm", T=129, N=5120, dtype=torch.float16),
]
