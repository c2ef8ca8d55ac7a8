"""What tests of Triton kernels need where there is no GPU."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

TORCH_TYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
}


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips a test where Triton would compile; its interpreter cuts bits off bf16 and float8, here it rounds them."""
    pytest.importorskip("triton", reason="triton is not installed")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton compiles here; a test marked gpu runs this kernel")
    from triton.runtime import interpreter

    def convert(values: NDArray[Any], before: Any, after: Any, rounding_mode: Any) -> NDArray[Any]:
        bits = torch.from_numpy(values.copy().view(f"int{before.primitive_bitwidth}"))
        rounded = bits.view(TORCH_TYPES[before.name]).to(TORCH_TYPES[after.name])
        numbers: NDArray[Any] = rounded.view(getattr(torch, f"int{after.primitive_bitwidth}")).numpy()
        return numbers.view(f"uint{after.primitive_bitwidth}")

    monkeypatch.setattr(interpreter, "_convert_float", convert)
