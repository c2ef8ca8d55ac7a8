"""Attention of one layer over the paged cache."""

from __future__ import annotations

from torch import Tensor

from pagedray.engine.layers.layer import Layer
from pagedray.engine.layers.norm import HeadNorm
from pagedray.engine.layers.rotary import Rotation
from pagedray.engine.models.spec import ModelSpec, layer_places
from pagedray.engine.worker.forward_context import current_forward


class PagedAttention(Layer):
    """Knows which block group and which slot of its pages belong to the layer; everything else is the step's.

    Args:
        norm: of query and key heads, where the model has one.
    """

    def __init__(self, layer: int, spec: ModelSpec, norm: HeadNorm | None = None):
        super().__init__()
        self.scale, self.softcap = spec.attention_scale, spec.attention_softcap
        self.norm = norm
        self.is_last = layer == spec.num_layers - 1
        self.group, self.slot = layer_places(spec.windows, spec.layers)[layer]

    def forward(self, qkv: Tensor, rotation: Rotation) -> Tensor:
        """qkv [T, H + 2K, D] as projected → [T, H * D]; of the last layer, the rows of `wanted`."""
        step = current_forward()
        plan, pages = step.plans[self.group], step.pages[self.slot]
        return self.wanted(plan.attend(qkv, pages, rotation, self.norm, self.scale, self.softcap))

    def wanted(self, x: Tensor) -> Tensor:
        """Behind the last layer's attention nothing mixes tokens: those that nobody asks for end here."""
        wanted = current_forward().wanted
        return x[wanted] if self.is_last and wanted is not None else x
