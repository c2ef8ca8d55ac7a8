import dataclasses

import pytest

from pagedray.engine.errors import ConfigError
from pagedray.engine.worker.backend import Machine, choose_backend, choose_device, choose_dtype

NO_GPU = Machine(0)
HOPPER = Machine(1, "NVIDIA H200", (9, 0), has_triton=True, flashinfer_trouble=None)


COMPILED = Machine(0, compiled_trouble=None, compiled_by="compiled by /usr/bin/cc")
NO_COMPILER = Machine(0, compiled_trouble="no C compiler was found; install gcc or clang")


@pytest.mark.parametrize("forced", ["auto", "cpu"])
def test_a_cpu_runs_compiled_kernels(forced: str) -> None:
    name, reason = choose_backend(COMPILED, "cpu", "bfloat16", 64, forced)
    assert name == "cpu"
    assert ("forced" in reason) == (forced == "cpu")
    assert ("compiled by /usr/bin/cc" in reason) == (forced == "auto")


@pytest.mark.parametrize("machine", [COMPILED, NO_COMPILER])
def test_torch_can_be_forced_on_a_cpu(machine: Machine) -> None:
    name, reason = choose_backend(machine, "cpu", "bfloat16", 64, "torch")
    assert name == "torch"
    assert "forced" in reason


def test_without_a_compiler_a_cpu_runs_torch_and_says_what_helps() -> None:
    name, reason = choose_backend(NO_COMPILER, "cpu", "bfloat16", 64, "auto")
    assert name == "torch"
    assert "no C compiler was found; install gcc or clang" in reason


@pytest.mark.parametrize(
    ("machine", "device", "dtype", "head_dim", "message"),
    [
        (NO_COMPILER, "cpu", "bfloat16", 64, "needs compiled kernels: no C compiler was found.*one of: torch"),
        (COMPILED, "cpu", "bfloat16", 512, "no kernel for head size 512"),
        (COMPILED, "cpu", "float8_e4m3fn", 64, "no kernel for float8_e4m3fn"),
        (HOPPER, "cuda", "bfloat16", 64, "runs on a CPU, and the device is cuda"),
    ],
)
def test_compiled_kernels_that_cannot_run_are_refused(
    machine: Machine, device: str, dtype: str, head_dim: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_backend(machine, device, dtype, head_dim, "cpu")


@pytest.mark.parametrize("forced", ["triton", "flashinfer"])
@pytest.mark.parametrize("machine", [NO_GPU, HOPPER])
def test_a_cpu_runs_no_gpu_backend(machine: Machine, forced: str) -> None:
    with pytest.raises(ConfigError, match=f"attention_backend is {forced}, which needs a GPU.*one of: torch"):
        choose_backend(machine, "cpu", "bfloat16", 64, forced)


def test_a_gpu_runs_our_kernels_and_says_where() -> None:
    name, reason = choose_backend(HOPPER, "cuda", "bfloat16", 128, "auto")
    assert name == "triton"
    assert "NVIDIA H200" in reason
    assert choose_backend(HOPPER, "cuda", "bfloat16", 128, "flashinfer")[0] == "flashinfer"


@pytest.mark.parametrize(
    ("changed", "dtype", "head_dim", "forced", "message"),
    [
        ({"has_triton": False}, "bfloat16", 128, "triton", "needs the package triton.*torch, flashinfer"),
        ({"capability": (7, 5)}, "bfloat16", 128, "triton", r"compute capability 8.0, and NVIDIA H200 has 7.5"),
        ({}, "bfloat16", 512, "triton", "no kernel for head size 512"),
        ({"flashinfer_trouble": "it is not installed"}, "bfloat16", 128, "flashinfer", "it is not installed"),
        ({}, "float32", 128, "flashinfer", "no kernels for float32"),
        ({}, "bfloat16", 80, "flashinfer", "no kernel for head size 80"),
        ({}, "float8_e4m3fn", 128, "torch", "can't read fp8"),
    ],
)
def test_a_forced_backend_that_cannot_run_is_refused(
    changed: dict[str, object], dtype: str, head_dim: int, forced: str, message: str
) -> None:
    machine = dataclasses.replace(HOPPER, **changed)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        choose_backend(machine, "cuda", dtype, head_dim, forced)


def test_where_our_kernels_cannot_run_torch_does_and_the_reason_is_told() -> None:
    name, reason = choose_backend(dataclasses.replace(HOPPER, has_triton=False), "cuda", "bfloat16", 128, "auto")
    assert name == "torch"
    assert "needs the package triton" in reason


def test_devices() -> None:
    with pytest.raises(ConfigError, match=r"device is cuda.*no NVIDIA GPU.*device=cpu"):
        choose_device("cuda", NO_GPU)
    assert choose_device("auto", NO_GPU) == choose_device("cpu", HOPPER) == "cpu"
    assert choose_device("auto", HOPPER) == choose_device("cuda", HOPPER) == "cuda"


def test_dtype() -> None:
    assert choose_dtype("auto", "bfloat16", "cpu") == "bfloat16"
    assert choose_dtype("float32", "float16", "cpu") == "float32"
    assert choose_dtype("auto", "float16", "cuda") == "float16"
    with pytest.raises(ConfigError, match=r"^dtype is float16.*bfloat16 or float32"):
        choose_dtype("float16", "bfloat16", "cpu")
    with pytest.raises(ConfigError, match="checkpoint's dtype is float16"):
        choose_dtype("auto", "float16", "cpu")
