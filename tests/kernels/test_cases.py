"""Every kernel equals its reference on every case of its file: output, and whatever it writes in place.

An op is tested as it is called, which on a CPU means compiled kernels where there is a compiler; where its file has
`<op>_torch`, what runs without one; where its file has `<op>_triton`, that in Triton's interpreter (where
there is no GPU); and that on a GPU. A file whose kernels take something made from the reference's inputs says what:
`kernel_inputs("<op>" or "<op>_triton", inputs)` returns their arguments.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from pagedray.kernels import paged_attention
from pagedray.kernels.case import Case
from pagedray.kernels.cpu.library import compiled_kernels
from pagedray.kernels.paged_attention import PagedBatch, Workspace, plan_attention

FOLDER = Path(__file__).parents[2] / "kernels"
MODULES = [importlib.import_module(f"pagedray.kernels.{path.stem}") for path in sorted(FOLDER.glob("*.py"))]
ALL = [(module, case) for module in MODULES for case in getattr(module, "CASES", []) if isinstance(case, Case)]
TORCH = [(module, case) for module, case in ALL if hasattr(module, case.op + "_torch")]
TRITON = [(module, case) for module, case in ALL if hasattr(module, case.op + "_triton")]


def case_name(value: object) -> str:
    return str(value) if isinstance(value, Case) else ""


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
    assert {case.op for _, case in TRITON} >= {
        *("rms_norm", "add_rms_norm", "silu_and_mul", "gelu_tanh_and_mul"),
        *("write_qkv", "embedding", "gather_logits", "copy_blocks"),
    }


def run_kernel(name: str, module: ModuleType, inputs: tuple[object, ...]) -> object:
    """What differs between a reference and a kernel: attention's kernel takes a plan made from the batch."""
    op = getattr(module, name)
    if hasattr(module, "kernel_inputs") and not name.endswith("_ref"):
        inputs = module.kernel_inputs(name, inputs)
    elif module is paged_attention and op is paged_attention.paged_attention:
        qkv, pages, batch, *rest = inputs
        assert isinstance(batch, PagedBatch)
        assert isinstance(pages, torch.Tensor)
        inputs = qkv, pages, plan_attention(batch, pages, Workspace(pages.dtype, pages.device)), *rest
    return op(*inputs)


def moved(value: object, device: str) -> object:
    """A copy of `value` whose tensors lie on `device`, with their strides."""
    if isinstance(value, torch.Tensor):
        if 0 in value.stride():
            return value.to(device)
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device).copy_(value)
    if isinstance(value, (list, tuple)):
        items = [moved(item, device) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(value, **{field: moved(getattr(value, field), device) for field in fields})
    return value


def tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors(getattr(value, field.name))


def check(module: ModuleType, case: Case, kernel: str, device: str = "cpu") -> None:
    expected_inputs, inputs = module.make_inputs(case), module.make_inputs(case)
    with torch.inference_mode():
        expected = run_kernel(case.op + "_ref", module, expected_inputs)
        inputs = moved(inputs, device) if device != "cpu" else inputs
        got = run_kernel(kernel, module, inputs)
    for a, b in zip(tensors([expected, *expected_inputs]), tensors([got, *inputs]), strict=True):
        rtol, atol = case.rtol, case.atol
        if a.dtype == torch.float8_e4m3fn:  # neighbours in it, normal or not, are 2**-3 of their value or 2**-9 apart
            assert b.dtype == a.dtype
            a, b, rtol, atol = a.float(), b.float(), max(rtol, 2**-3), max(atol, 2**-9)
        torch.testing.assert_close(b.cpu(), a, rtol=rtol, atol=atol, equal_nan=True)


@pytest.mark.parametrize(("module", "case"), ALL, ids=case_name)
def test_kernel_equals_reference(module: ModuleType, case: Case) -> None:
    if case.op == "compiled_attention" and compiled_kernels().library is None:
        pytest.skip(compiled_kernels().reason)
    check(module, case, case.op)


@pytest.mark.parametrize(("module", "case"), TORCH, ids=case_name)
def test_without_a_compiler_torch_equals_the_reference(module: ModuleType, case: Case) -> None:
    check(module, case, case.op + "_torch")


# A GPU says nothing of an infinity in a lane that is masked later, which numpy warns of.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(("module", "case"), TRITON, ids=case_name)
def test_interpreted_triton_kernel_equals_reference(module: ModuleType, case: Case) -> None:
    check(module, case, case.op + "_triton")


@pytest.mark.gpu
@pytest.mark.parametrize(("module", "case"), TRITON, ids=case_name)
def test_triton_kernel_equals_reference_on_the_gpu(module: ModuleType, case: Case) -> None:
    check(module, case, case.op + "_triton", "cuda")
