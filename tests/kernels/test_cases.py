"""Every kernel equals its reference on every case of its file: output, and whatever it writes in place."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from pagedray.kernels import paged_attention
from pagedray.kernels.case import Case
from pagedray.kernels.paged_attention import PagedBatch, Workspace, plan_attention

FOLDER = Path(__file__).parents[2] / "kernels"
MODULES = [importlib.import_module(f"pagedray.kernels.{path.stem}") for path in sorted(FOLDER.glob("*.py"))]
ALL = [(module, case) for module in MODULES for case in getattr(module, "CASES", []) if isinstance(case, Case)]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Small work is slower when threads wait for each other, much slower on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_every_op_has_cases() -> None:
    ops = {case.op for _, case in ALL}
    assert ops >= {"rms_norm", "add_rms_norm", "rotate", "silu_and_mul", "gelu_tanh_and_mul", "paged_attention"}


def run_kernel(op: object, module: ModuleType, inputs: tuple[object, ...]) -> torch.Tensor | None:
    """What differs between a reference and a kernel: attention's kernel takes a plan made from the batch."""
    assert callable(op)
    if module is paged_attention and op is paged_attention.paged_attention:
        qkv, pages, batch, *rest = inputs
        assert isinstance(batch, PagedBatch)
        assert isinstance(pages, torch.Tensor)
        plan = plan_attention(batch, pages, Workspace(pages.dtype, pages.device))
        return op(qkv, pages, plan, *rest)
    return op(*inputs)


@pytest.mark.parametrize(("module", "case"), ALL, ids=lambda value: str(value) if isinstance(value, Case) else "")
def test_kernel_equals_reference(module: ModuleType, case: Case) -> None:
    expected_inputs, inputs = module.make_inputs(case), module.make_inputs(case)
    with torch.inference_mode():
        expected = run_kernel(getattr(module, case.op + "_ref"), module, expected_inputs)
        got = run_kernel(getattr(module, case.op), module, inputs)
    for a, b in [(expected, got), *zip(expected_inputs, inputs, strict=True)]:
        if isinstance(a, torch.Tensor):
            torch.testing.assert_close(b, a, rtol=case.rtol, atol=case.atol)
