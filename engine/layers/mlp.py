"""Gated feed-forward layer."""

from __future__ import annotations

from torch import Tensor

from pagedray.engine.layers.layer import Layer
from pagedray.engine.layers.linear import Linear, SiluGatedLinear
from pagedray.engine.models.spec import ModelSpec
from pagedray.kernels.activation import gelu_tanh_and_mul, silu_and_mul
from pagedray.kernels.small_linear import small_gated_linear

_ACTIVATIONS = {"silu": silu_and_mul, "gelu_tanh": gelu_tanh_and_mul}


class GatedMLP(Layer):
    """down(act(gate(x)) * up(x)), gate and up in one product."""

    def __init__(self, spec: ModelSpec):
        super().__init__()
        self.is_fused = spec.activation == "silu" and not spec.mlp_bias
        if self.is_fused:
            self.gate_up: Linear = SiluGatedLinear(spec.hidden, spec.intermediate)
        else:
            self.gate_up = Linear(spec.hidden, spec.intermediate, spec.intermediate, bias=spec.mlp_bias)
        self.down = Linear(spec.intermediate, spec.hidden, bias=spec.mlp_bias)
        self.activation = spec.activation
        self.activate = _ACTIVATIONS[spec.activation]

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self._gated(x))

    def _gated(self, x: Tensor) -> Tensor:
        if self.is_fused:
            return self.gate_up(x)
        weight = self.gate_up.weight
        if weight is None or self.gate_up.bias is not None:
            return self.activate(self.gate_up(x))
        return small_gated_linear(x, weight, self.activation)

    def slots(self, name: str) -> dict[str, Tensor]:
        return self.gate_up.slots(f"{name}.gate_proj", f"{name}.up_proj") | self.down.slots(f"{name}.down_proj")
