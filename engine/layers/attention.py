"""Attention of one layer over the paged cache."""

from __future__ import annotations

from torch import Tensor

from pagedray.engine.layers.layer import Layer
from pagedray.engine.models.spec import ModelSpec, layer_groups
from pagedray.engine.worker.forward_context import current_forward
from pagedray.kernels.paged_attention import paged_attention


class PagedAttention(Layer):
    """Knows which block group and which slot of its pages belong to the layer; everything else is the step's."""

    def __init__(self, layer: int, spec: ModelSpec):
        super().__init__()
        self.scale, self.softcap = spec.attention_scale, spec.attention_softcap
        self.group, self.slot = next(
            (index, group.layers.index(layer))
            for index, group in enumerate(layer_groups(spec.windows))
            if layer in group.layers
        )

    def forward(self, qkv: Tensor) -> Tensor:
        """qkv [T, H + 2K, D], rotated → [T, H * D]."""
        step = current_forward()
        return paged_attention(qkv, step.pages[self.slot], step.plans[self.group], self.scale, self.softcap)
