"""Gated feed-forward layer."""

from __future__ import annotations

from torch import Tensor

from pagedray.engine.layers.layer import Layer
from pagedray.engine.layers.linear import GatedLinear, Linear
from pagedray.engine.models.spec import ModelSpec


class GatedMLP(Layer):
    """down(act(gate(x)) * up(x)), gate and up in one product."""

    def __init__(self, spec: ModelSpec):
        super().__init__()
        self.gate_up = GatedLinear(spec.hidden, spec.intermediate, spec.activation, spec.mlp_bias)
        self.down = Linear(spec.intermediate, spec.hidden, bias=spec.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.gate_up(x))

    def slots(self, name: str) -> dict[str, Tensor]:
        return self.gate_up.slots(f"{name}.gate_proj", f"{name}.up_proj") | self.down.slots(f"{name}.down_proj")
