"""Rotary position embedding in the variants of published checkpoints."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from pagedray.engine.models.spec import RopeSpec
from pagedray.kernels.rotary import rotate

Rotation = tuple[Tensor, Tensor]  # cos and signed sin of the step's positions, [T, 1, R] each

_TABLE_BYTES = 2**28  # a longer table costs more memory than it saves launches


class Rotary(nn.Module):
    """Angles of a step's positions, found once for all layers that share a `RopeSpec`.

    A CPU computes them. A GPU, to which ten small launches cost more than a read, looks them up.
    """

    def __init__(self, rope: RopeSpec, head_dim: int, max_context: int):
        super().__init__()
        self.attention_factor, self.max_context = rope.attention_factor, max_context
        self.dtype = torch.get_default_dtype()
        self.frequencies = nn.Buffer(inverse_frequencies(rope, head_dim), persistent=False)
        self.table: Tensor | None = None  # [max_context, 2, R]

    def finish_loading(self) -> None:
        size = self.max_context * 4 * len(self.frequencies) * self.dtype.itemsize
        if self.frequencies.is_cuda and size <= _TABLE_BYTES:
            positions = torch.arange(self.max_context, device=self.frequencies.device)
            self.table = torch.cat(self._angles(positions), dim=1)

    def forward(self, positions: Tensor) -> Rotation:
        if self.table is None:
            return self._angles(positions)
        found = self.table[positions]
        return found[:, :1], found[:, 1:]

    def _angles(self, positions: Tensor) -> Rotation:
        angles = torch.outer(positions.float(), self.frequencies).unsqueeze(1)
        cos, sin = angles.cos(), angles.sin()
        if self.attention_factor != 1.0:
            cos, sin = cos * self.attention_factor, sin * self.attention_factor
        return torch.cat((cos, cos), -1).to(self.dtype), torch.cat((-sin, sin), -1).to(self.dtype)


def apply_rotary(qkv: Tensor, num_rotated: int, rotation: Rotation) -> None:
    """Rotate the query and key heads, the first num_rotated of qkv [T, H + 2K, D], in place."""
    rotate(qkv[:, :num_rotated], *rotation)


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    """[R / 2] float32, in the order of operations of the reference code: late positions magnify every rounding."""
    size = int(head_dim * rope.partial)
    powers = rope.theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    plain = 1.0 / powers
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(plain, rope)
    if rope.kind == "yarn":
        return _yarn(powers, rope, size)
    return plain


def _llama3(plain: Tensor, rope: RopeSpec) -> Tensor:
    """Long waves are stretched by `factor`, short ones stay, those between are blended. Source: Llama 3.1."""
    wavelength = 2 * math.pi / plain
    longest = rope.original_max_context / rope.low_freq_factor
    shortest = rope.original_max_context / rope.high_freq_factor
    stretched = torch.where(wavelength > longest, plain / rope.factor, plain)
    blend = (rope.original_max_context / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - blend) * stretched / rope.factor + blend * stretched
    is_between = (wavelength >= shortest) & (wavelength <= longest)
    return torch.where(is_between, blended, stretched)


def _yarn(powers: Tensor, rope: RopeSpec, size: int) -> Tensor:
    """Dims that turn often in the original context extrapolate, the others interpolate. Source: arXiv:2309.00071."""

    def dim_of(turns: float) -> float:
        return size * math.log(rope.original_max_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = max(math.floor(dim_of(rope.beta_fast)), 0)
    high = min(math.ceil(dim_of(rope.beta_slow)), size - 1)
    ramp = ((torch.arange(size // 2, dtype=torch.float32) - low) / (high - low or 0.001)).clamp(0, 1)
    keep = 1 - ramp
    return 1.0 / (rope.factor * powers) * (1 - keep) + 1.0 / powers * keep
