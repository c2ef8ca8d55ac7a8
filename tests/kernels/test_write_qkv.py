"""What write_qkv promises beyond equality with its reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pagedray.kernels.case import Case
from pagedray.kernels.write_qkv import make_inputs, write_qkv, write_qkv_torch, write_qkv_triton


@pytest.mark.parametrize("norm", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("interpreter")
def test_both_paths_round_alike(dtype: torch.dtype, norm: int) -> None:
    """A rotated head is the same to the last bit; the mean of a norm is a sum in another order."""
    case = Case("write_qkv", T=5, H=4, K=2, D=64, B=4, norm=norm, dtype=dtype)
    by_torch, by_triton = make_inputs(case), make_inputs(case)
    write_qkv(*by_torch)
    write_qkv_triton(*by_triton)
    for a, b in zip(by_torch[:2], by_triton[:2], strict=True):
        if norm or dtype == torch.float32:
            torch.testing.assert_close(b, a)
        else:  # products of these fit into float32, so that it does not matter whether a sum takes them rounded
            assert torch.equal(b, a)


def test_nothing_else_is_written() -> None:
    case = Case("write_qkv", T=6, H=4, K=2, D=16, B=4)
    qkv, pages, slots, *rest = make_inputs(case)
    values, before = qkv[:, 6:].clone(), pages.clone()
    write_qkv(qkv, pages, slots, *rest)
    assert torch.equal(qkv[:, 6:], values)
    written = torch.zeros(len(pages), 4, dtype=torch.bool)
    written[slots // 4, slots % 4] = True
    is_same = (pages == before).all(-1).all(2).all(1)
    assert torch.equal(is_same, ~written)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("op", [write_qkv, write_qkv_triton])
def test_float8_pages_stay_within_their_bound(op: Callable[..., None]) -> None:
    """Half a step of three bits of mantissa, or half of the smallest step; beyond the largest number, that number."""
    case = Case("write_qkv", T=8, H=2, K=2, D=32, B=4, fp8=1)
    qkv, pages, slots, *rest, _, _ = make_inputs(case)
    k_scale, v_scale = 0.05, 0.001
    op(qkv, pages, slots, *rest, k_scale, v_scale)
    stored = pages[slots // 4, :, :, slots % 4].float()
    for kind, scale in enumerate([k_scale, v_scale]):
        wanted = qkv[:, 2 + 2 * kind : 4 + 2 * kind]
        limit = wanted.clamp(-448 * scale, 448 * scale)
        torch.testing.assert_close(stored[:, kind] * scale, limit, rtol=2**-4, atol=2**-10 * scale)
    assert (stored[:, 1].abs() == 448).any()


def test_an_empty_step_is_no_work() -> None:
    qkv, pages, slots, cos, sin, *rest = make_inputs(Case("write_qkv", T=2, H=2, K=2, D=16, B=4, norm=1))
    for op in (write_qkv, write_qkv_triton):
        op(qkv[:0], pages, slots[:0], cos[:0], sin[:0], *rest)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", [write_qkv, write_qkv_torch, write_qkv_triton])
def test_pages_hold_numbers_alone(op: Callable[..., None], dtype: torch.dtype) -> None:
    if op is write_qkv and dtype == torch.float16:
        pytest.skip("no CPU computes it")
    case = Case("write_qkv", T=3, H=4, K=2, D=16, B=4, broken=1, dtype=dtype)
    qkv, pages, *rest = make_inputs(case)
    op(qkv, pages, *rest)
    assert pages.isfinite().all() and qkv[:, 4:].isfinite().all() and qkv[0, 0].isnan().any()
    assert qkv[0, -1, 8] == 0 and qkv[0, -1, 9] == torch.finfo(dtype).max and qkv[-1, -1, 0] == torch.finfo(dtype).min
