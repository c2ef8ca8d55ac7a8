"""CPUs need no Triton; and a remembered launch is the one that Triton would have chosen."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pagedray.kernels import jit
from pagedray.kernels.jit import launch, power_of_2, tl, triton

SCRIPT = """
import sys
sys.modules["triton"] = None
import torch
from pagedray.kernels.jit import triton
from pagedray.kernels.rms_norm import rms_norm
from pagedray.kernels import activation, block_copy, embedding, gather_logits, write_qkv

@triton.jit(do_not_specialize=["n"])
def kernel(n): ...

assert rms_norm(torch.ones(2, 8), torch.ones(8)).shape == (2, 8)
"""


def test_without_triton_kernels_can_be_declared() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_power_of_2() -> None:
    assert [power_of_2(n) for n in (1, 2, 3, 4, 5, 1024, 1025)] == [1, 2, 4, 4, 8, 1024, 2048]


class FakeKernel:
    """Counts ordinary launches, each of which makes something new that can be launched again."""

    def __init__(self, fn: Any, can_relaunch: bool = True):
        self.fn = fn
        self.can_relaunch = can_relaunch
        self.ordinary: list[tuple[object, ...]] = []  # grid, arguments and keywords
        self.again: list[tuple[int, tuple[object, ...]]] = []  # number of the ordinary launch, what `run` got

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def first(*args: object, **keywords: object) -> object:
            self.ordinary.append((grid, args, keywords))
            return FakeCompiled(self, len(self.ordinary) - 1) if self.can_relaunch else object()

        return first


class FakeCompiled:
    function = "function"
    packed_metadata = "metadata"

    def __init__(self, kernel: FakeKernel, number: int):
        self.kernel = kernel
        self.number = number

    def run(self, *args: object) -> None:
        self.kernel.again.append((self.number, args))


def signature(x_ptr: Any, n: Any, SIZE: tl.constexpr, IS_EVEN: tl.constexpr) -> None: ...


X = torch.zeros(64)
CONSTANTS = {"SIZE": 1, "IS_EVEN": True}


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(jit.triton, "JITFunction", FakeKernel, raising=False)
    monkeypatch.setattr(jit, "_is_known_version", lambda: True)
    active = SimpleNamespace(get_current_stream=lambda device: f"stream of {device}")
    runtime = SimpleNamespace(driver=SimpleNamespace(active=active))
    monkeypatch.setattr(jit.triton, "runtime", runtime, raising=False)
    return FakeKernel(signature)


def test_the_second_launch_reuses_what_the_first_compiled(kernel: Any) -> None:
    y = torch.ones(64)
    launch(kernel, (3,), (X, 5), CONSTANTS, num_warps=2)
    launch(kernel, (4, 2), (y, 7), CONSTANTS, num_warps=2)
    assert kernel.ordinary == [((3,), (X, 5), {**CONSTANTS, "num_warps": 2})]
    [(number, args)] = kernel.again
    assert number == 0
    assert args[:9] == (4, 2, 1, "stream of -1", "function", "metadata", None, None, None)
    assert args[9] is y
    assert args[10:] == (7, 1, True)


# What Triton compiles alike stands in one list.
KINDS: list[list[object]] = [
    [X, torch.zeros(8, 8), torch.nn.Parameter(torch.zeros(3)), X[4:]],
    [X[1:], X[2:5]],
    [X.half()],
    [X.bfloat16()],
    [X.long()],
    [X.to(torch.float8_e4m3fn)],
    [X.to(torch.float8_e5m2)],
    [None],
    [1],
    [2, 3, 17, -1, 2**31 - 1],
    [0, 16, 4096, -16, -(2**31)],
    [2**31 + 1, -(2**31) - 1, 2**63 - 1],
    [2**31, -(2**63)],
    [2**63 + 1],
    [2**63],
    [1.0, 0.0, 16.0, float("nan"), float("inf")],
]


def test_launches_that_triton_compiles_differently_are_told_apart(kernel: Any) -> None:
    for kind in KINDS:
        for value in kind:
            launch(kernel, (1,), (X, value), CONSTANTS)
    assert len(kernel.ordinary) == len(KINDS)
    assert [number for number, _ in kernel.again] == [i for i, kind in enumerate(KINDS) for _ in kind[1:]]


def test_the_kinds_of_arguments_are_those_of_triton() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    from triton.backends.compiler import BaseBackend  # type: ignore[import-untyped]
    from triton.runtime.jit import native_specialize_impl  # type: ignore[import-untyped]

    found = [{native_specialize_impl(BaseBackend, value, False, True, True) for value in kind} for kind in KINDS]
    assert all(len(kinds) == 1 for kinds in found), found
    assert len(set.union(*found)) == len(KINDS), found


def test_constants_and_options_are_told_apart(kernel: Any) -> None:
    launches: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (CONSTANTS, {}),
        (CONSTANTS, {"num_warps": 4}),
        (CONSTANTS, {"num_stages": 4}),
        (CONSTANTS, {"num_warps": 4, "launch_pdl": True}),
        ({"SIZE": 2, "IS_EVEN": True}, {}),
        ({"SIZE": 1, "IS_EVEN": False}, {}),
        ({"SIZE": 1, "IS_EVEN": None}, {}),
        ({"SIZE": "silu", "IS_EVEN": True}, {}),
    ]
    for _ in range(2):
        for constants, options in launches:
            launch(kernel, (1,), (X, 5), constants, **options)
    assert len(kernel.ordinary) == len(launches)
    assert [number for number, _ in kernel.again] == list(range(len(launches)))


@pytest.mark.parametrize("value", [True, object(), "a descriptor", (X, 1)], ids=str)
def test_other_arguments_take_the_ordinary_way(kernel: Any, value: object) -> None:
    for _ in range(3):
        launch(kernel, (1,), (X, value), CONSTANTS)
    assert len(kernel.ordinary) == 3


@pytest.mark.parametrize("is_known", [False, True])
def test_so_do_versions_that_launch_otherwise(kernel: Any, monkeypatch: pytest.MonkeyPatch, is_known: bool) -> None:
    if is_known:
        kernel.can_relaunch = False
    else:
        monkeypatch.setattr(jit, "_is_known_version", lambda: False)
    for _ in range(3):
        launch(kernel, (1,), (X, 5), CONSTANTS)
    assert len(kernel.ordinary) == 3


def test_kernels_do_not_share_what_was_compiled(kernel: Any) -> None:
    other: Any = FakeKernel(signature)
    for each in (kernel, other, kernel, other):
        launch(each, (1,), (X, 5), CONSTANTS)
    assert len(kernel.ordinary) == len(other.ordinary) == 1


def test_constants_that_differ_from_the_signature_are_refused(kernel: Any) -> None:
    launch(kernel, (1,), (X, 5), CONSTANTS)
    for constants in ({"IS_EVEN": False, "SIZE": 1}, {"SIZE": 1}, {**CONSTANTS, "x": 1}):
        with pytest.raises(
            AssertionError, match=r"signature: constants \[.*\], its signature has \['SIZE', 'IS_EVEN'\]"
        ):
            launch(kernel, (1,), (X, 5), constants)

    def mixed(x_ptr: Any, SIZE: tl.constexpr, n: Any) -> None: ...

    misplaced: Any = FakeKernel(mixed)
    with pytest.raises(AssertionError, match="must come last"):
        launch(misplaced, (1,), (X, 5), {"SIZE": 1})


@triton.jit
def _add(x_ptr, bias_ptr, y_ptr, n, delta, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, at < n, other=0)
    if HAS_BIAS:
        x += tl.load(bias_ptr + at, at < n, other=0)
    tl.store(y_ptr + at, (x + delta).to(y_ptr.dtype.element_ty), at < n)


def add(x: Tensor, bias: Tensor | None, delta: float, n: int, again: bool) -> Tensor:
    y = x.new_zeros(len(x) + 1)[len(x) % 2 :]
    constants = {"HAS_BIAS": bias is not None, "BLOCK": 64}
    grid, args = (-(-n // 64),), (x, bias, y, n, delta)
    if again:
        launch(_add, grid, args, constants, num_warps=2)
    else:
        _add[grid](*args, **constants, num_warps=2)
    return y


def various(device: str) -> list[tuple[Tensor, Tensor | None, float, int]]:
    """Arguments of all kinds, the same kind more than once."""
    found: list[tuple[Tensor, Tensor | None, float, int]] = []
    for dtype in (torch.float16, torch.int64):
        x = torch.arange(1, 201, device=device).to(dtype)
        for start in (0, 1, 16):
            for n in (1, 16, 47, 160):
                delta: float
                for delta in (1, 3, 2**33 if dtype == torch.int64 else 32, 0.5):
                    found.append((x[start:], x if n % 2 else None, delta, n))
    return found


@pytest.mark.usefixtures("interpreter")
def test_the_interpreter_launches_as_ever() -> None:
    for inputs in various("cpu")[::5]:
        assert torch.equal(add(*inputs, again=True), add(*inputs, again=False))


@pytest.mark.gpu
def test_remembered_launches_equal_ordinary_ones() -> None:
    for _ in range(2):
        for inputs in various("cuda"):
            assert torch.equal(add(*inputs, again=True), add(*inputs, again=False)), inputs[2:]
    found = jit._launches[id(_add)].found
    assert 0 < len(found) < len(various("cuda"))  # that they were remembered


@pytest.mark.gpu
def test_remembered_launches_are_captured() -> None:
    inputs = various("cuda")[::7]
    expected = [add(*each, again=False) for each in inputs]
    for each in inputs:
        add(*each, again=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = [add(*each, again=True) for each in inputs]
    for y in got:
        y.fill_(77)
    graph.replay()
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)
