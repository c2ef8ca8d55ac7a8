"""What is left to do once a model's weights are in place."""

from __future__ import annotations

from torch import nn

from pagedray.engine.layers.linear import Linear
from pagedray.engine.layers.norm import HeadNorm, RMSNorm


def finish_loading(model: nn.Module) -> None:
    """Let every layer that prepares its weights do so; called once, when all slots are filled."""
    for module in model.modules():
        if isinstance(module, Linear | RMSNorm | HeadNorm):
            module.finish_loading()
