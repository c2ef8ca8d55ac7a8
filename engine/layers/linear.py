"""Linear layers, packed once for the CPU's matrix kernels; on a GPU few rows have a kernel of their own.

Over the ranks of a tensor-parallel group, column layers (QKVLinear, GatedLinear) split their outputs, and the row layer
behind them its inputs, whose products the ranks then add up. Source: Shoeybi et al. 2019, arXiv:1909.08053.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pagedray.engine.layers.layer import Layer
from pagedray.engine.layers.share import Share, all_of, even_share, head_shares, none_of
from pagedray.engine.layers.slot import Slot
from pagedray.engine.models.spec import Activation
from pagedray.kernels.activation import gelu_tanh_and_mul, silu_and_mul
from pagedray.kernels.small_linear import small_gated_linear, small_linear

if TYPE_CHECKING:
    from pagedray.engine.worker.parallel import Group

_GATES = {"silu": silu_and_mul, "gelu_tanh": gelu_tanh_and_mul}
_WIDE = 16  # outputs per input: those of a head


class Linear(Layer):
    """y = x W^T + b. Several projections of one input may be stacked: their rows lie one after the other.

    Args:
        num_in, num_out: sizes, or what this rank has of them.
    """

    def __init__(self, num_in: int | Share, *num_out: int | Share, bias: bool = False):
        super().__init__()
        self.input, *self.outputs = (all_of(size) if isinstance(size, int) else size for size in (num_in, *num_out))
        rows = sum(share.size for share in self.outputs)
        self.weight: Tensor | None = nn.Parameter(torch.empty(rows, self.input.size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(rows), requires_grad=False) if bias else None
        self.packed: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.packed is None:
            assert self.weight is not None
            return small_linear(x, self.weight, self.bias)
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return y

    def slots(self, *names: str) -> dict[str, Slot]:
        """Checkpoint names of each projection's weight and bias → where to put them."""
        assert self.weight is not None, "the weight was packed already"
        sizes = [share.size for share in self.outputs]
        weights = zip(names, self.weight.data.split(sizes), self.outputs, strict=True)
        found = {f"{name}.weight": Slot(rows, share, self.input) for name, rows, share in weights}
        if self.bias is not None:
            biases = zip(names, self.bias.data.split(sizes), self.outputs, strict=True)
            found |= {f"{name}.bias": Slot(part, share) for name, part, share in biases}
        return found

    def finish_loading(self) -> None:
        """Reorder the weight for oneDNN where it has a kernel: 1.1 to 2 times as fast as without, most at few rows."""
        assert self.weight is not None
        if should_pack(self.weight):
            self.packed = pack(self.weight.data)
            self.weight = None

    def matrices(self) -> list[Tensor]:
        """What a step reads: the weight, packed or as it is."""
        return [matrix for matrix in (self.weight, self.packed) if matrix is not None]


class RowLinear(Linear):
    """A linear layer whose inputs are split over ranks; every rank gets the sum. The first rank adds the bias."""

    def __init__(self, num_in: int, num_out: int, tp: Group, bias: bool = False):
        share = even_share(num_in, tp.rank, tp.size, "input of a row layer")
        super().__init__(share, num_out, bias=bias and tp.rank == 0)
        self.tp, self.has_bias = tp, bias

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if self.tp.size == 1 else self.tp.all_reduce(y)

    def slots(self, *names: str) -> dict[str, Slot]:
        found = super().slots(*names)
        if self.has_bias and self.bias is None:
            assert self.weight is not None
            found |= {f"{name}.bias": Slot(self.weight.new_empty(0), none_of(len(self.weight))) for name in names}
        return found


class GatedLinear(Linear):
    """act(x G^T) * (x U^T), two stacked projections, each split over ranks."""

    def __init__(self, num_in: int, num_out: int, activation: Activation, tp: Group, bias: bool = False):
        share = even_share(num_out, tp.rank, tp.size, "intermediate size")
        super().__init__(num_in, share, share, bias=bias)
        self.activation = activation
        self.packed_up: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.packed_up is not None:
            gate = torch.ops.mkldnn._linear_pointwise(x, self.packed, None, "swish", [], "")
            y: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, gate, self.packed_up, None, "mul")
            return y
        if self.weight is not None and self.bias is None:
            return small_gated_linear(x, self.weight, self.activation)
        return _GATES[self.activation](super().forward(x))

    def matrices(self) -> list[Tensor]:
        return super().matrices() if self.packed_up is None else [*super().matrices(), self.packed_up]

    def finish_loading(self) -> None:
        """Pack silu's as two products that end with silu and with the multiplication, on numbers still in registers:
        over the thousands of tokens that prompts bring, passes of their own would take half as long as the products."""
        assert self.weight is not None
        if self.activation == "silu" and self.bias is None and should_pack(self.weight):
            self.packed, self.packed_up = map(pack, self.weight.data.chunk(2))
            self.weight = None
        else:
            super().finish_loading()


class QKVLinear(Linear):
    """The three inputs of attention in one product: [T, hidden] → [T, H + 2K, D].

    Args:
        num_heads, num_kv_heads: of all ranks.

    Attributes:
        heads: query heads and key-value heads of this rank, H and K.
    """

    def __init__(self, hidden: int, num_heads: int, num_kv_heads: int, head_dim: int, tp: Group, bias: bool = False):
        q, kv = head_shares(num_heads, num_kv_heads, tp.rank, tp.size)
        super().__init__(hidden, *(share.times(head_dim) for share in (q, kv, kv)), bias=bias)
        self.heads = q.size, kv.size
        self.shape = (-1, q.size + 2 * kv.size, head_dim)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).view(self.shape)


def can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return weight.dtype == torch.float32 or (
        weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def should_pack(weight: Tensor) -> bool:
    """In float32 only the head: of packed layers, the narrow ones can be half as fast for one row as they are unpacked,
    and are no faster for many."""
    is_wide = weight.shape[0] >= _WIDE * weight.shape[1]
    return weight.numel() > 0 and can_pack(weight) and (is_wide or weight.dtype != torch.float32)


def pack(weight: Tensor) -> Tensor:
    """The hint is the number of rows to pack for. In float32, a layout for one would be slow with several."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, 64 if weight.dtype == torch.float32 else 1)
    return packed
