"""Mixture of experts: a feed-forward layer of which each token uses a few parts, its experts, that a router chooses.

Source: Shazeer et al. 2017, arXiv:1701.06538; the shared expert: Rajbhandari et al. 2022, arXiv:2201.05596.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from pagedray.engine.layers.layer import Layer
from pagedray.engine.layers.linear import GatedLinear, Linear, should_pack
from pagedray.engine.layers.mlp import GatedMLP
from pagedray.engine.layers.share import Share, all_of, even_share, none_of
from pagedray.engine.layers.slot import Slot
from pagedray.engine.models.spec import ExpertSpec, ModelSpec
from pagedray.engine.worker.forward_context import current_forward
from pagedray.engine.worker.parallel import ALONE, Group
from pagedray.kernels.grouped_linear import ExpertPairs, by_tile, grouped_gated_linear, grouped_sum_linear, pairs_of
from pagedray.kernels.route_experts import route_experts


class MoE(Layer):
    """The weighted sum of each token's experts, and of the shared one where there is one.

    Args:
        layer: of the model.
        tp: ranks that split every expert, unless `ep` has several ranks.
        ep: ranks that have whole experts each.

    Attributes:
        loads: [num_experts] int64: tokens that each expert of the model got so far, whichever rank has it.
    """

    def __init__(self, spec: ModelSpec, layer: int, tp: Group, ep: Group):
        super().__init__()
        experts = _experts_of(spec)
        self.top_k, self.renormalise = experts.top_k, experts.renormalise
        self.layer, self.is_last = layer, layer == spec.num_layers - 1
        self.router = Linear(spec.hidden, experts.num_experts)
        self.experts = Experts(spec, tp, ep)
        self.shared = SharedExpert(spec, tp) if experts.shared_intermediate else None
        self.loads: Tensor = nn.Buffer(torch.zeros(experts.num_experts, dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        step = current_forward()
        slots, num_null = step.padded_slots, 0
        if self.is_last and step.wanted is not None:
            slots = step.wanted  # only these are left behind the last attention, and negative ones hold a place
        elif slots is not None:
            num_null = step.pages[0].shape[3]  # of the null block
        weights, experts = route_experts(self.router(x), self.top_k, self.renormalise, self.loads, slots, num_null)
        y = self.experts(x, weights, experts)
        return y if self.shared is None else y.add_(self.shared(x))

    def slots(
        self, name: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
    ) -> dict[str, Slot]:
        """
        Args:
            gate, up, down: names of an expert's projections.
        """
        found = self.router.slots(f"{name}.gate") | self.experts.slots(f"{name}.experts", gate, up, down)
        return found if self.shared is None else found | self.shared.slots(name)


class Experts(Layer):
    """Those of this rank: y[t] = sum over t's experts e of weight * down_e(act(gate_e(x[t])) * up_e(x[t])).

    With a group of several ranks every rank has all tokens, computes its part, and gets the sum of all parts.
    """

    def __init__(self, spec: ModelSpec, tp: Group, ep: Group):
        super().__init__()
        experts = _experts_of(spec)
        self.activation = spec.activation
        if ep.size > 1:
            self.group, self.inner = ep, all_of(experts.intermediate)
            self.share = expert_share(experts.num_experts, ep.rank, ep.size)
        else:
            self.group, self.share = tp, all_of(experts.num_experts)
            self.inner = even_share(experts.intermediate, tp.rank, tp.size, "intermediate size of an expert")
        self.hidden, num, inner = spec.hidden, self.share.size, self.inner.size
        self.gate_up: Tensor | None = _parameter(num, 2 * inner, spec.hidden)
        self.down: Tensor | None = _parameter(num, spec.hidden, inner)
        self.packed: list[tuple[GatedLinear, Linear]] = []  # per expert, on a CPU whose kernels want it

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """x [T, hidden]; weights, experts [T, k] as `route_experts` gives them → [T, hidden]"""
        pairs = pairs_of(experts, self.share.whole, self.share.first, self.share.size, x.dtype)
        if self.packed:
            y = self._sum_packed(x, weights, pairs)
        else:
            assert self.gate_up is not None and self.down is not None
            h = grouped_gated_linear(x, self.gate_up, pairs, self.activation)
            y = grouped_sum_linear(h, self.down, weights, pairs)
        return y if self.group.size == 1 else self.group.all_reduce(y)

    def _sum_packed(self, x: Tensor, weights: Tensor, pairs: ExpertPairs) -> Tensor:
        top_k, weights = weights.shape[1], weights.view(-1, 1)
        y = torch.zeros(x.shape, dtype=torch.float32)
        for expert, _, members in by_tile(pairs):
            gate_up, down = self.packed[expert]
            tokens = members // top_k
            y.index_add_(0, tokens, down(gate_up(x[tokens])) * weights[members])
        return y.to(x.dtype)

    def slots(self, name: str, gate: str, up: str, down: str) -> dict[str, Slot]:
        """Of every rank's experts; those of others go nowhere."""
        assert self.gate_up is not None and self.down is not None, "the weights were packed already"
        found, size, hidden = {}, self.inner.size, all_of(self.hidden)
        nowhere, no_rows = self.gate_up.new_empty(0, self.hidden), none_of(self.inner.whole)
        for expert in range(self.share.whole):
            prefix, local = f"{name}.{expert}", expert - self.share.first
            if 0 <= local < self.share.size:
                rows, columns = self.gate_up.data[local], self.down.data[local]
                found[f"{prefix}.{gate}.weight"] = Slot(rows[:size], self.inner, hidden)
                found[f"{prefix}.{up}.weight"] = Slot(rows[size:], self.inner, hidden)
                found[f"{prefix}.{down}.weight"] = Slot(columns, hidden, self.inner)
            else:
                found[f"{prefix}.{gate}.weight"] = found[f"{prefix}.{up}.weight"] = Slot(nowhere, no_rows, hidden)
                found[f"{prefix}.{down}.weight"] = Slot(nowhere.T, hidden, no_rows)
        return found

    def finish_loading(self) -> None:
        """Pack each expert by itself where linear layers are packed too."""
        assert self.gate_up is not None and self.down is not None
        if self.share.size and should_pack(self.down[0]):
            self.packed = [self._pack(*weights) for weights in zip(self.gate_up, self.down, strict=True)]
            self.gate_up = self.down = None

    def _pack(self, gate_up: Tensor, down: Tensor) -> tuple[GatedLinear, Linear]:
        with torch.device("meta"):
            layers = GatedLinear(self.hidden, self.inner.size, self.activation, ALONE.tp), Linear(*reversed(down.shape))
        for layer, weight in zip(layers, (gate_up, down), strict=True):
            layer.weight = nn.Parameter(weight, requires_grad=False)
            layer.finish_loading()
        return layers

    def matrices(self) -> list[Tensor]:
        """What steps read."""
        if self.packed:
            return [matrix for layers in self.packed for layer in layers for matrix in layer.matrices()]
        return [matrix for matrix in (self.gate_up, self.down) if matrix is not None]


class SharedExpert(Layer):
    """A feed-forward layer that every token goes through, times sigmoid(x w) (Qwen2-MoE)."""

    def __init__(self, spec: ModelSpec, tp: Group):
        super().__init__()
        self.mlp = GatedMLP(dataclasses.replace(spec, intermediate=_experts_of(spec).shared_intermediate), tp)
        self.gate = Linear(spec.hidden, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x).mul_(self.gate(x).sigmoid())

    def slots(self, name: str) -> dict[str, Slot]:
        return self.mlp.slots(f"{name}.shared_expert") | self.gate.slots(f"{name}.shared_expert_gate")


def expert_share(num_experts: int, rank: int, num_ranks: int) -> Share:
    """Which experts a rank has; counts differ by one at most."""
    first = rank * num_experts // num_ranks
    return Share(first, (rank + 1) * num_experts // num_ranks - first, num_experts)


def expert_loads(model: object) -> tuple[tuple[int, ...], Tensor | None]:
    """The layers of this stage that have experts, and [layers, num_experts] int64 on the device: tokens that each
    expert got in the steps that were queued so far. None: there are no such layers."""
    layers = _sparse_layers(model)
    loads = torch.stack([layer.loads for layer in layers]) if layers else None
    return tuple(layer.layer for layer in layers), loads


def forget_expert_loads(model: object) -> None:
    for layer in _sparse_layers(model):
        layer.loads.zero_()


def _sparse_layers(model: object) -> list[MoE]:
    assert isinstance(model, nn.Module)
    return [module for module in model.modules() if isinstance(module, MoE)]


def _experts_of(spec: ModelSpec) -> ExpertSpec:
    assert spec.experts is not None, f"{spec.architecture} has no experts"
    return spec.experts


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape), requires_grad=False)
