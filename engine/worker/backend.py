"""Which device and which attention kernel a worker uses. Pure functions: what they choose, they explain."""

from __future__ import annotations

from pagedray.engine.errors import ConfigError


def choose_device(requested: str) -> str:
    """Raises: ConfigError when the requested device can't be used."""
    if requested == "cuda":
        raise ConfigError("device is cuda, which this version doesn't implement; use device=auto or device=cpu")
    return "cpu"


def choose_dtype(requested: str, checkpoint_dtype: str, device: str) -> str:
    """`checkpoint_dtype`: what the weights are stored in; float32 for GGUF, whose numbers are dequantized.

    Raises: ConfigError for a type that the device can't compute in.
    """
    dtype = checkpoint_dtype if requested == "auto" else requested
    if device == "cpu" and dtype == "float16":
        origin = "the checkpoint's dtype" if requested == "auto" else "dtype"
        raise ConfigError(f"{origin} is float16, which a CPU can't compute in; set dtype to bfloat16 or float32")
    return dtype


def choose_backend(device: str, dtype: str, head_dim: int, forced: str) -> tuple[str, str]:
    """Attention backend and the reason for it.

    Args:
        forced: the configured backend, or "auto".

    Raises:
        ConfigError: the forced one can't run.
    """
    if device != "cpu":
        raise ConfigError(f"no attention backend for device {device}; this version has one for cpu")
    if forced not in ("auto", "torch"):
        raise ConfigError(f"attention_backend is {forced}, which needs a GPU, and the device is {device}; use auto")
    reason = f"the only one for {device} ({dtype}, head size {head_dim})"
    return "torch", reason if forced == "auto" else "forced by attention_backend"
