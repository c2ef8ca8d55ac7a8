"""RMS norm, alone and with the residual add before it:  r += x;  y = r * rsqrt(mean(r^2) + eps) * w

Shapes   x, r, y [T, N] with w [N], or [T, G, N] with w [G, N]. Last dim contiguous, row strides free. N <= 16384.
Dtypes   x, r, y float32, bf16 or fp16; mean and scale in float32. w of x's type: the normalized value is rounded to it
         before the product (Llama). w float32 with a narrower x: the product is in float32 too (Gemma).
Writes   add_rms_norm: r in place. Both return y. Safe under CUDA graph capture.
Source   Zhang and Sennrich 2019, arXiv:1910.07467
"""

from __future__ import annotations

from ctypes import CDLL

import torch
import torch.nn.functional as F
from torch import Tensor

from pagedray.kernels.case import Case
from pagedray.kernels.cpu.library import TYPES, library_for
from pagedray.kernels.jit import launch, power_of_2, tl, triton


def rms_norm_ref(x: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
    wide = x.float()
    y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (y.to(w.dtype) * w).to(x.dtype)


def add_rms_norm_ref(x: Tensor, r: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
    r.add_(x)
    return rms_norm_ref(r, w, eps)


@triton.jit
def _rms_norm(  # type: ignore[no-untyped-def]
    x_ptr,
    r_ptr,
    w_ptr,
    y_ptr,
    x_token,
    x_group,
    r_token,
    r_group,
    G,
    N,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row a program. x_token, x_group, …: strides of the first dims. Without a residual, r is not looked at."""
    row = tl.program_id(0).to(tl.int64)
    token, group = row // G, row % G
    column = tl.arange(0, BLOCK)
    inside = column < N
    w = tl.load(w_ptr + group * N + column, inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + token * x_token + group * x_group + column, inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        r_row = r_ptr + token * r_token + group * r_group + column
        total = (x + tl.load(r_row, inside, other=0.0).to(tl.float32)).to(r_ptr.dtype.element_ty)
        tl.store(r_row, total, inside)
        x = total.to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / N + eps)
    y = y.to(w_ptr.dtype.element_ty).to(tl.float32) * w
    tl.store(y_ptr + row * N + column, y.to(y_ptr.dtype.element_ty), inside)


def rms_norm(x: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
    if x.is_cuda:
        return rms_norm_triton(x, w, eps)
    library = library_for(x, w)
    return rms_norm_torch(x, w, eps) if library is None else _call(library, x, None, w, eps)


def add_rms_norm(x: Tensor, r: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
    if x.is_cuda:
        return add_rms_norm_triton(x, r, w, eps)
    library = library_for(x, r, w)
    return add_rms_norm_torch(x, r, w, eps) if library is None else _call(library, x, r, w, eps)


def rms_norm_torch(x: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
    if x.dtype == torch.float32:
        return F.rms_norm(x, x.shape[-1:], None, eps).mul_(w)
    y = x.float()  # normalized in place: torch's own norm makes three such copies, more than the cache holds
    scale = torch.linalg.vector_norm(y, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return y.mul_(scale).to(w.dtype).mul_(w).to(x.dtype)


def add_rms_norm_torch(x: Tensor, r: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
    r.add_(x)
    return rms_norm_torch(r, w, eps)


def _call(library: CDLL, x: Tensor, r: Tensor | None, w: Tensor, eps: float) -> Tensor:
    shape = x.shape
    assert shape[1:] == w.shape and w.is_contiguous() and w.dtype in (x.dtype, torch.float32)
    y = torch.empty(shape, dtype=x.dtype)
    token, *groups, _ = x.stride()
    r_token, *r_groups, _ = x.stride() if r is None else r.stride()
    assert r is None or (r.shape == shape and r.dtype == x.dtype)
    library.pagedray_rms_norm(
        *(x.data_ptr(), None if r is None else r.data_ptr(), w.data_ptr(), y.data_ptr()),
        *(shape[0], shape[1] if groups else 1, shape[-1]),
        *(token, groups[0] if groups else 0, r_token, r_groups[0] if r_groups else 0),
        *(eps, TYPES[x.dtype], TYPES[w.dtype], torch.get_num_threads()),
    )
    return y


def rms_norm_triton(x: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
    return _launch(x, None, w, eps)


def add_rms_norm_triton(x: Tensor, r: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
    return _launch(x, r, w, eps)


def _launch(x: Tensor, r: Tensor | None, w: Tensor, eps: float) -> Tensor:
    shape, x_strides = x.shape, x.stride()
    size, num_groups = shape[-1], w.shape[0] if w.dim() == 2 else 1
    assert shape[1:] == w.shape and x_strides[-1] == 1 and size <= 16384
    residual, r_strides = x, x_strides
    if r is not None:
        residual, r_strides = r, r.stride()
        assert r.shape == shape and r_strides[-1] == 1
    y = residual.new_empty(shape)
    if not y.numel():
        return y
    block = power_of_2(size)
    launch(
        _rms_norm,
        (shape[0] * num_groups,),
        (x, residual, w, y, *x_strides[:2], *r_strides[:2], num_groups, size, eps),
        {"HAS_RESIDUAL": r is not None, "BLOCK": block},
        num_warps=min(max(block // 256, 1), 16),
    )
    return y


def make_inputs(case: Case) -> tuple[Tensor | float, ...]:
    """An eps as large as the mean square, or else it would hardly matter. Rows lie `gap` apart."""
    groups = (case["G"],) if case.get("G") else ()
    rows = case["T"], *groups, case["N"] + case.get("gap")
    w = case.randn(*groups, case["N"], seed=3)
    if case.get("wide_weight"):
        w = 1 + w.float()
    residual = [case.randn(*rows, seed=2)[..., : case["N"]]] if case.op == "add_rms_norm" else []
    return (case.randn(*rows, seed=1)[..., : case["N"]], *residual, w, 0.5)


CASES = [
    Case("rms_norm", T=1, N=576),
    Case("rms_norm", T=7, N=576, dtype=torch.bfloat16),
    Case("rms_norm", T=5, N=64, G=12, dtype=torch.bfloat16),
    Case("rms_norm", T=3, N=640, wide_weight=1, dtype=torch.bfloat16),
    Case("rms_norm", T=1, N=64, wide_weight=1, dtype=torch.bfloat16, rtol=1e-3, atol=1e-4),  # the same roundings
    Case("rms_norm", T=1, N=64, dtype=torch.bfloat16, rtol=1e-3, atol=1e-4),
    Case("rms_norm", T=33, N=256, G=5, wide_weight=1),
    Case("rms_norm", T=3, N=80, G=2, gap=16, dtype=torch.bfloat16),
    Case("rms_norm", T=2, N=16384, dtype=torch.float16),
    Case("add_rms_norm", T=1, N=4096),
    Case("add_rms_norm", T=5, N=96, gap=3, dtype=torch.bfloat16),
    Case("add_rms_norm", T=5, N=40, G=3, gap=1),
    Case("add_rms_norm", T=64, N=576, dtype=torch.bfloat16),
    Case("add_rms_norm", T=2, N=640, wide_weight=1, dtype=torch.bfloat16),
    Case("add_rms_norm", T=129, N=5120, dtype=torch.float16),
]
