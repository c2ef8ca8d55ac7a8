"""Mixture of experts: against transformers, and over ranks that have some of the experts or a part of each."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from pagedray.engine.errors import ConfigError
from pagedray.engine.layers.linear import can_pack
from pagedray.engine.layers.loading import finish_loading
from pagedray.engine.layers.moe import MoE, expert_loads, expert_share
from pagedray.engine.layers.slot import Slot
from pagedray.engine.models.spec import ExpertSpec, ModelSpec
from pagedray.engine.worker.forward_context import ForwardContext, forward_context
from pagedray.engine.worker.layout import Layout
from pagedray.engine.worker.parallel import ALONE, Group, connect
from tests.engine.layers.groups import on_ranks, place
from tests.engine.worker.ranks import run_ranks
from tests.engine.worker.test_input_batch import tiny_spec

NUM_EXPERTS, TOP_K, HIDDEN, INNER, SHARED = 8, 3, 32, 24, 40
BLOCK_SIZE = 4
NOTHING_PADS = ForwardContext((), ())


def spec_of(**changes: Any) -> ModelSpec:
    """Two layers; `changes` of the experts."""
    experts = dataclasses.replace(ExpertSpec(NUM_EXPERTS, TOP_K, INNER, True, (True, True)), **changes)
    return dataclasses.replace(
        tiny_spec(), hidden=HIDDEN, num_layers=2, windows=(None, None), activation="silu", experts=experts
    )


def loaded(layer: MoE, **names: str) -> MoE:
    """Each tensor's numbers depend on its name alone."""
    for name, slot in layer.slots("moe", **names).items():
        slot.tensor.copy_(weight(name, slot)[slot.index])
    finish_loading(layer)
    return layer


def weight(name: str, slot: Slot) -> Tensor:
    generator = torch.Generator().manual_seed(int.from_bytes(name.encode(), "big") % 2**40)
    return torch.randn(slot.shape, generator=generator, device="cpu") / slot.shape[-1] ** 0.5


def inputs(num_tokens: int) -> Tensor:
    return torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(num_tokens))


@torch.inference_mode()
def output(layer: MoE, x: Tensor, context: ForwardContext = NOTHING_PADS) -> Tensor:
    with forward_context(context):
        return layer(x)


def alone(spec: ModelSpec, dtype: torch.dtype = torch.float32) -> MoE:
    return loaded(MoE(spec, 0, ALONE.tp, ALONE.ep).to(dtype))


def transformers_layer(spec: ModelSpec) -> nn.Module:
    """The block of Qwen2-MoE, which has all there is, with the weights that `loaded` gives ours."""
    experts = spec.experts
    assert experts is not None
    config = transformers.Qwen2MoeConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=INNER,
        shared_expert_intermediate_size=experts.shared_intermediate or 8,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=experts.renormalise,
    )
    config._experts_implementation = "eager"
    block = transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock(config)
    ours = {name: weight(name, slot) for name, slot in MoE(spec, 0, ALONE.tp, ALONE.ep).slots("moe").items()}
    with torch.no_grad():
        block.gate.weight.copy_(ours["moe.gate.weight"])
        for i in range(NUM_EXPERTS):
            gate, up, down = (ours[f"moe.experts.{i}.{part}_proj.weight"] for part in ("gate", "up", "down"))
            block.experts.gate_up_proj[i] = torch.cat((gate, up))
            block.experts.down_proj[i] = down
        if experts.shared_intermediate:
            for part in ("gate", "up", "down"):
                projection = getattr(block.shared_expert, f"{part}_proj")
                projection.weight.copy_(ours[f"moe.shared_expert.{part}_proj.weight"])
            block.shared_expert_gate.weight.copy_(ours["moe.shared_expert_gate.weight"])
        else:
            block.shared_expert.down_proj.weight.zero_()
    return block


@pytest.mark.parametrize("shared", [0, SHARED])
@pytest.mark.parametrize("renormalise", [False, True])
def test_it_is_transformers_layer(renormalise: bool, shared: int) -> None:
    spec = spec_of(renormalise=renormalise, shared_intermediate=shared)
    block, layer = transformers_layer(spec), alone(spec)
    for num_tokens in (1, 2, 50):
        with torch.no_grad():
            expected = block(inputs(num_tokens)[None])[0]
        torch.testing.assert_close(output(layer, inputs(num_tokens)), expected, rtol=1e-4, atol=1e-5)


def test_packed_experts_are_the_same_rounded() -> None:
    layer, wide = alone(spec_of(), torch.bfloat16), alone(spec_of())
    is_packed = can_pack(torch.empty(HIDDEN, INNER, dtype=torch.bfloat16))
    assert (layer.experts.gate_up is None, layer.experts.down is None) == (is_packed, is_packed)
    assert len(layer.experts.matrices()) == (3 * NUM_EXPERTS if is_packed else 2)
    for num_tokens in (1, 30):
        x = inputs(num_tokens).bfloat16()
        y, expected = output(layer, x), output(wide, x.float())
        assert y.dtype == torch.bfloat16
        assert (y.float() - expected).norm() < 0.02 * expected.norm()


def test_a_token_does_not_depend_on_the_others() -> None:
    layer, x = alone(spec_of()), inputs(40)
    whole = output(layer, x)
    for part in (slice(3, 4), slice(0, 17)):
        torch.testing.assert_close(output(layer, x[part]), whole[part], rtol=1e-5, atol=1e-6)
    assert torch.equal(output(layer, x), whole)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("shared", [0, SHARED])
@pytest.mark.parametrize("how", ["experts", "tensors"])
def test_ranks_have_together_what_one_has(how: str, shared: int, size: int) -> None:
    if shared and size == 3:  # 40 doesn't divide
        shared = 36
    spec, x = spec_of(shared_intermediate=shared), inputs(20)
    one = alone(spec)
    expected = output(one, x)

    def compute(tp: Group) -> tuple[Tensor, MoE]:
        layer = loaded(MoE(spec, 0, tp, tp if how == "experts" else ALONE.ep))
        return output(layer, x), layer

    results = on_ranks(size, compute)
    for y, layer in results:
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
        assert torch.equal(layer.loads, one.loads)  # of all experts, on every rank
    num_weights = [sum(matrix.numel() for matrix in layer.experts.matrices()) for _, layer in results]
    assert sum(num_weights) == sum(matrix.numel() for matrix in one.experts.matrices())
    most = -(-NUM_EXPERTS // size) * INNER if how == "experts" else NUM_EXPERTS * INNER // size
    assert max(num_weights) == 3 * most * HIDDEN


def test_a_rank_may_have_no_experts() -> None:
    spec, x = spec_of(num_experts=3, top_k=2), inputs(9)
    expected = output(alone(spec), x)
    for y in on_ranks(4, lambda ep: output(loaded(MoE(spec, 0, ep, ep)), x)):
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)


def test_experts_go_round_evenly() -> None:
    for num, size in [(8, 2), (8, 3), (128, 6), (3, 5)]:
        shares = [expert_share(num, rank, size) for rank in range(size)]
        assert [expert for share in shares for expert in range(num)[share.index]] == list(range(num))
        assert max(share.size for share in shares) - min(share.size for share in shares) <= 1


@pytest.mark.parametrize("how", ["experts", "tensors"])
def test_every_rank_names_every_tensor(how: str) -> None:
    """Or loading would call those of other ranks unexpected."""
    spec = spec_of(shared_intermediate=SHARED)
    expected = {name: slot.shape for name, slot in alone_slots(spec).items()}
    assert expected["moe.gate.weight"] == (NUM_EXPERTS, HIDDEN)
    assert expected["moe.experts.7.w1.weight"] == expected["moe.experts.0.w3.weight"] == (INNER, HIDDEN)
    assert expected["moe.experts.3.w2.weight"] == (HIDDEN, INNER)
    assert len(expected) == 1 + 3 * NUM_EXPERTS + 4
    for rank in range(4):
        tp = place(rank, 4)
        slots = MoE(spec, 0, tp, tp if how == "experts" else ALONE.ep).slots("moe", gate="w1", up="w3", down="w2")
        assert {name: slot.shape for name, slot in slots.items()} == expected
        sizes = [slots[f"moe.experts.{i}.w2.weight"].tensor.numel() for i in range(NUM_EXPERTS)]
        mine = [HIDDEN * INNER if i // 2 == rank else 0 for i in range(NUM_EXPERTS)]
        assert sizes == (mine if how == "experts" else [HIDDEN * INNER // 4] * NUM_EXPERTS)


def alone_slots(spec: ModelSpec) -> dict[str, Slot]:
    return MoE(spec, 0, ALONE.tp, ALONE.ep).slots("moe", gate="w1", up="w3", down="w2")


def test_an_expert_that_does_not_divide_is_refused_with_the_numbers() -> None:
    tp = place(0, 5)
    with pytest.raises(ConfigError, match=r"intermediate size of an expert of 24 doesn't divide by .* 5"):
        MoE(spec_of(), 0, tp, ALONE.ep)
    MoE(spec_of(), 0, tp, tp)  # whole experts needn't


def test_counters() -> None:
    first, second = (loaded(MoE(spec_of(), layer, ALONE.tp, ALONE.ep)) for layer in (3, 7))
    model = nn.Sequential(first, nn.Identity(), second)
    for layer in (first, second, second):
        output(layer, inputs(10))
    layers, loads = expert_loads(model)
    assert layers == (3, 7)
    assert loads is not None and loads.shape == (2, NUM_EXPERTS)
    assert loads.sum(1).tolist() == [10 * TOP_K, 20 * TOP_K]
    assert torch.equal(loads[1], 2 * loads[0])
    assert expert_loads(nn.Identity()) == ((), None)


def test_padding_is_not_computed_nor_counted() -> None:
    layer, x = alone(spec_of()), inputs(5)
    expected = output(layer, x)
    before = layer.loads.clone()
    slots = torch.tensor([4, 0, 17, 3, 900])
    pages = (torch.empty(1, 2, 1, BLOCK_SIZE, 1),)
    y = output(layer, x, ForwardContext(pages, (), padded_slots=slots))
    torch.testing.assert_close(y[[0, 2, 4]], expected[[0, 2, 4]])
    assert torch.equal(y[[1, 3]], torch.zeros(2, HIDDEN))
    assert (layer.loads - before).sum() == 3 * TOP_K


def test_behind_the_last_attention_rows_are_not_the_steps_tokens() -> None:
    """Of a padded step whose wanted tokens are as many as its slots."""
    last = loaded(MoE(spec_of(), 1, ALONE.tp, ALONE.ep))
    pages, slots = (torch.empty(1, 2, 1, BLOCK_SIZE, 1),), torch.tensor([5, 6, 0, 0])
    wanted = torch.tensor([1, 0, 0, 0])
    y = output(last, inputs(4), ForwardContext(pages, (), wanted, slots))
    torch.testing.assert_close(y, output(last, inputs(4)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # the second packs its experts where the CPU can
def test_what_holds_a_place_is_neither_computed_nor_counted(dtype: torch.dtype) -> None:
    last = loaded(MoE(spec_of(), 1, ALONE.tp, ALONE.ep).to(dtype))
    x = inputs(3).to(dtype)
    expected, before = output(last, x), last.loads.clone()
    for wanted in ([6, -9, 2], [-9, -9, -9]):
        y = output(last, x, ForwardContext((), (), torch.tensor(wanted)))
        is_real = torch.tensor(wanted) >= 0
        torch.testing.assert_close(y[is_real], expected[is_real])
        assert not y[~is_real].any()
    assert (last.loads - before).sum() == 2 * TOP_K


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_tokens", [1, 2, 5, 64, 300])
def test_on_a_gpu_captured_and_not(num_tokens: int, dtype: torch.dtype) -> None:
    spec = spec_of(shared_intermediate=SHARED)
    with torch.device("cuda"):
        layer = loaded(MoE(spec, 0, ALONE.tp, ALONE.ep).to(dtype))
    x = inputs(num_tokens).to("cuda", dtype)
    output(layer, x)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = output(layer, x)
    layer.loads.zero_()
    for seed in range(3):
        new = torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(dtype)
        x.copy_(new)
        graph.replay()
        assert torch.equal(y, output(layer, x))
        expected = output(alone(spec), new.float())
        errors = (y.float().cpu() - expected).norm(dim=1) / expected.norm(dim=1)
        if dtype == torch.float32:
            assert errors.max() < 1e-5
        else:  # a rounded router may choose another expert now and then
            assert errors.median() < 0.02
    assert layer.loads.sum() == 2 * 3 * num_tokens * TOP_K


def gloo_ranks(meeting: Any) -> None:
    """Four ranks share experts or split them; then two pairs of ranks do."""
    spec, x = spec_of(shared_intermediate=SHARED), inputs(20)
    expected = output(alone(spec), x)
    for layout in (Layout(4, 1), Layout(2, 2)):
        parallel = connect(meeting, layout, torch.device("cpu"), meet_timeout_s=120, step_timeout_s=60)
        for ep in (parallel.tp, parallel.ep):
            layer = loaded(MoE(spec, 0, parallel.tp, ep))
            for num_tokens in (20, 1, 0):
                y = output(layer, x[:num_tokens])
                torch.testing.assert_close(y, expected[:num_tokens], rtol=1e-4, atol=1e-5)
            same = parallel.tp.all_gather(output(layer, x)[None], 0)
            assert all(torch.equal(y, same[0]) for y in same)
        parallel.minimum(0)


def test_over_gloo() -> None:
    assert run_ranks(4, gloo_ranks) == [None] * 4
