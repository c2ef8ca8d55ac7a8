"""Linear layers, packed once for the CPU's matrix kernels; on a GPU few rows have a kernel of their own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pagedray.engine.layers.layer import Layer
from pagedray.kernels.small_linear import small_linear


class Linear(Layer):
    """y = x W^T + b. Several projections of one input may be stacked: their rows lie one after the other."""

    def __init__(self, num_in: int, *num_out: int, bias: bool = False):
        super().__init__()
        self.num_out = num_out
        self.weight: Tensor | None = nn.Parameter(torch.empty(sum(num_out), num_in), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(sum(num_out)), requires_grad=False) if bias else None
        self.packed: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.packed is None:
            assert self.weight is not None
            return small_linear(x, self.weight, self.bias)
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return y

    def slots(self, *names: str) -> dict[str, Tensor]:
        """Checkpoint names of each projection's weight and bias → where to put them."""
        assert self.weight is not None, "the weight was packed already"
        found: dict[str, Tensor] = {}
        for suffix, tensor in (("weight", self.weight), ("bias", self.bias)):
            if tensor is not None:
                views = tensor.data.split(self.num_out)
                found |= {f"{name}.{suffix}": view for name, view in zip(names, views, strict=True)}
        return found

    def finish_loading(self) -> None:
        """Reorder the weight for oneDNN where it has a kernel: 1.1 to 2 times as fast as without, most at few rows."""
        assert self.weight is not None
        if not can_pack(self.weight):
            return
        self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.data, 1)
        self.weight = None


class QKVLinear(Linear):
    """The three inputs of attention in one product: [T, hidden] → [T, H + 2K, D]."""

    def __init__(self, hidden: int, num_heads: int, num_kv_heads: int, head_dim: int, bias: bool = False):
        super().__init__(hidden, *(n * head_dim for n in (num_heads, num_kv_heads, num_kv_heads)), bias=bias)
        self.shape = (-1, num_heads + 2 * num_kv_heads, head_dim)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).view(self.shape)


def can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return weight.dtype == torch.float32 or (
        weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
