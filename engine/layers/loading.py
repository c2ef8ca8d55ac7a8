"""What is left to do once a model's weights are in place."""

from __future__ import annotations

from torch import Tensor, nn

from pagedray.engine.layers.linear import Linear
from pagedray.engine.layers.moe import Experts
from pagedray.engine.layers.norm import HeadNorm, RMSNorm
from pagedray.engine.layers.rotary import Rotary
from pagedray.engine.worker.host_memory import use_huge_pages


def finish_loading(model: nn.Module) -> None:
    """Let every layer that prepares its weights do so; called once, when all slots are filled."""
    matrices: list[Tensor] = []
    for module in model.modules():
        if isinstance(module, Linear | Experts | RMSNorm | HeadNorm | Rotary):
            module.finish_loading()
        if isinstance(module, Linear | Experts):
            matrices += (matrix for matrix in module.matrices() if matrix.device.type == "cpu")
    use_huge_pages(matrices)
