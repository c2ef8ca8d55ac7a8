"""Gated feed-forward layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from pagedray.engine.layers.layer import Layer
from pagedray.engine.layers.linear import GatedLinear, RowLinear
from pagedray.engine.layers.slot import Slot
from pagedray.engine.models.spec import ModelSpec

if TYPE_CHECKING:
    from pagedray.engine.worker.parallel import Group


class GatedMLP(Layer):
    """down(act(gate(x)) * up(x)), gate and up in one product."""

    def __init__(self, spec: ModelSpec, tp: Group):
        super().__init__()
        self.gate_up = GatedLinear(spec.hidden, spec.intermediate, spec.activation, tp, spec.mlp_bias)
        self.down = RowLinear(spec.intermediate, spec.hidden, tp, spec.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.gate_up(x))

    def slots(self, name: str) -> dict[str, Slot]:
        return self.gate_up.slots(f"{name}.gate_proj", f"{name}.up_proj") | self.down.slots(f"{name}.down_proj")
