"""Which device, type and attention kernel a worker uses. Pure functions: what they choose, they explain."""

from __future__ import annotations

import dataclasses

from pagedray.engine.errors import ConfigError

BACKENDS = ("cpu", "torch", "triton", "flashinfer")


@dataclasses.dataclass(frozen=True)
class Machine:
    """What this process finds."""

    num_gpus: int
    gpu_name: str = ""
    capability: tuple[int, int] = (0, 0)
    has_triton: bool = False
    flashinfer_trouble: str | None = "not installed"  # None: it can be used
    compiled_trouble: str | None = "they are not compiled"  # why compiled kernels can't run on the CPU; None: they can
    compiled_by: str = ""


def choose_device(requested: str, machine: Machine) -> str:
    """Raises: ConfigError when the requested device can't be used."""
    if requested == "cuda" and machine.num_gpus == 0:
        raise ConfigError("device is cuda, and this process sees no NVIDIA GPU; use device=auto or device=cpu")
    if requested == "auto":
        return "cuda" if machine.num_gpus else "cpu"
    return requested


def choose_dtype(requested: str, checkpoint_dtype: str, device: str) -> str:
    """`checkpoint_dtype`: what the weights are stored in; float32 for GGUF, whose numbers are dequantized.

    Raises: ConfigError for a type that the device can't compute in.
    """
    dtype = checkpoint_dtype if requested == "auto" else requested
    if device == "cpu" and dtype == "float16":
        origin = "the checkpoint's dtype" if requested == "auto" else "dtype"
        raise ConfigError(f"{origin} is float16, which a CPU can't compute in; set dtype to bfloat16 or float32")
    return dtype


def choose_backend(machine: Machine, device: str, dtype: str, head_dim: int, forced: str) -> tuple[str, str]:
    """Attention backend and the reason for it.

    Args:
        dtype: of keys and values as they are stored.
        forced: the configured backend, or "auto".

    Raises:
        ConfigError: the forced one can't run.
    """
    trouble = {name: _trouble(name, machine, device, dtype, head_dim) for name in BACKENDS}
    what = f"{machine.gpu_name or device}, {dtype}, head size {head_dim}"
    if forced != "auto":
        if (reason := trouble[forced]) is not None:
            usable = ", ".join(name for name in BACKENDS if trouble[name] is None)
            raise ConfigError(f"attention_backend is {forced}, which {reason}; use auto or one of: {usable}")
        return forced, f"forced by attention_backend ({what})"
    if device == "cpu":
        if trouble["cpu"] is None:
            return "cpu", f"kernels of our own, {machine.compiled_by} ({what})"
        return "torch", f"cpu {trouble['cpu']} ({what})"
    if trouble["triton"] is None:
        return "triton", f"kernels of our own ({what})"
    return "torch", f"triton {trouble['triton']} ({what})"


def _trouble(name: str, machine: Machine, device: str, dtype: str, head_dim: int) -> str | None:
    """Why a backend can't run here; None if it can."""
    if name == "torch":
        return "can't read fp8 keys and values" if dtype.startswith("float8") else None
    if name == "cpu":
        return _cpu_trouble(machine, device, dtype, head_dim)
    if device == "cpu":
        return "needs a GPU, and the device is cpu"
    if machine.capability < (8, 0):
        return f"needs compute capability 8.0, and {machine.gpu_name} has {'.'.join(map(str, machine.capability))}"
    if name == "triton":
        if not machine.has_triton:
            return "needs the package triton, which is not installed"
        return None if head_dim <= 256 else f"has no kernel for head size {head_dim}, only up to 256"
    if machine.flashinfer_trouble is not None:
        return f"needs the package flashinfer-python: {machine.flashinfer_trouble}"
    if dtype == "float32":
        return "has no kernels for float32"
    if head_dim not in (64, 128, 256):
        return f"has no kernel for head size {head_dim}, only for 64, 128 and 256"
    return None


def _cpu_trouble(machine: Machine, device: str, dtype: str, head_dim: int) -> str | None:
    if device != "cpu":
        return f"runs on a CPU, and the device is {device}"
    if dtype not in ("float32", "bfloat16"):
        return f"has no kernel for {dtype}"
    if head_dim > 256:
        return f"has no kernel for head size {head_dim}, only up to 256"
    if machine.compiled_trouble is not None:
        return f"needs compiled kernels: {machine.compiled_trouble}"
    return None
