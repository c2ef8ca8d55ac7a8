"""One shape to test and to time a kernel at. Tests and benchmarks find the CASES of every file in this folder."""

from __future__ import annotations

import torch

_TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


class Case:
    """Axes by their letter (T tokens, N width, …), type, and how far a kernel may be from its reference.

    Args:
        op: the function in the case's file; its definition is `<op>_ref`.
        rtol, atol: default to a few units in the last place of `dtype`.
    """

    def __init__(
        self,
        op: str,
        *,
        dtype: torch.dtype = torch.float32,
        rtol: float | None = None,
        atol: float | None = None,
        **axes: int,
    ):
        self.op, self.dtype, self.axes = op, dtype, axes
        self.rtol = _TOLERANCE[dtype] if rtol is None else rtol
        self.atol = _TOLERANCE[dtype] if atol is None else atol

    def __getitem__(self, axis: str) -> int:
        return self.axes[axis]

    def get(self, axis: str, default: int = 0) -> int:
        return self.axes.get(axis, default)

    def __str__(self) -> str:
        axes = " ".join(f"{axis}={size}" for axis, size in self.axes.items())
        return f"{self.op} {axes} {str(self.dtype).removeprefix('torch.')}"

    def randn(self, *shape: int, seed: int = 0) -> torch.Tensor:
        """Normal values of the case's type; the same for the same seed and shape."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(shape, generator=generator).to(self.dtype)
