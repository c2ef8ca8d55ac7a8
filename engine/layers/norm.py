"""RMS norms: of the residual stream, and of attention heads."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pagedray.engine.layers.layer import Layer
from pagedray.engine.layers.share import none_of
from pagedray.engine.layers.slot import Slot
from pagedray.engine.models.spec import ModelSpec
from pagedray.kernels.rms_norm import add_rms_norm, rms_norm


class RMSNorm(Layer):
    """Norm of the last dimension. `zero_centred`: the checkpoint stores the weight minus one (Gemma)."""

    def __init__(self, size: int, eps: float, zero_centred: bool = False):
        super().__init__()
        self.eps, self.zero_centred = eps, zero_centred
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Norm of x; with a residual, add x to it in place and return the norm of the sum."""
        if residual is None:
            return rms_norm(x, self.weight, self.eps)
        return add_rms_norm(x, residual, self.weight, self.eps)

    def slots(self, name: str) -> dict[str, Slot]:
        return {f"{name}.weight": Slot(self.weight.data)}

    def finish_loading(self) -> None:
        if self.zero_centred:
            self.weight = nn.Parameter(1 + self.weight.float(), requires_grad=False)


class FinalNorm(Layer):
    """Ends the stack: the norm of its sum, or on a stage before the last what the next one begins with."""

    def __init__(self, spec: ModelSpec, zero_centred: bool = False):
        super().__init__()
        self.hidden = spec.hidden
        self.norm = RMSNorm(spec.hidden, spec.norm_eps, zero_centred) if spec.is_last_stage else None

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """→ [T, hidden]; before the last stage x and residual as they are, [2, T, hidden]."""
        return torch.stack((x, residual)) if self.norm is None else self.norm(x, residual)

    def slots(self, name: str) -> dict[str, Slot]:
        if self.norm is None:
            return {f"{name}.weight": Slot(torch.empty(0), none_of(self.hidden))}
        return self.norm.slots(name)


class HeadNorm(nn.Module):
    """Norm of each query head with one weight and of each key head with another, in place and in one pass.

    Args:
        num_heads, num_kv_heads: of this rank.
    """

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, eps: float, zero_centred: bool = False):
        super().__init__()
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.eps, self.zero_centred = eps, zero_centred
        self.q_weight = nn.Parameter(torch.empty(head_dim), requires_grad=False)
        self.k_weight = nn.Parameter(torch.empty(head_dim), requires_grad=False)
        self.weight: Tensor | None = None  # [H + K, D]

    def forward(self, qkv: Tensor) -> None:
        """qkv [T, H + 2K, D]: the value heads stay as they are."""
        assert self.weight is not None, "finish_loading was not called"
        qk = qkv[:, : len(self.weight)]
        qk.copy_(rms_norm(qk, self.weight, self.eps))

    def slots(self, q_name: str, k_name: str) -> dict[str, Slot]:
        return {f"{q_name}.weight": Slot(self.q_weight.data), f"{k_name}.weight": Slot(self.k_weight.data)}

    def finish_loading(self) -> None:
        weight = torch.cat((self.q_weight.expand(self.num_heads, -1), self.k_weight.expand(self.num_kv_heads, -1)))
        self.weight = 1 + weight.float() if self.zero_centred else weight
