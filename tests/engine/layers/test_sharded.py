"""Layers over several ranks: together they are the layer of one rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pagedray.engine.errors import ConfigError
from pagedray.engine.layers.embedding import Embedding, Head
from pagedray.engine.layers.linear import GatedLinear, QKVLinear, RowLinear
from pagedray.engine.layers.mlp import GatedMLP
from pagedray.engine.layers.slot import Slot
from pagedray.engine.models.spec import ModelSpec
from pagedray.engine.worker.parallel import ALONE, Group
from tests.engine.layers.groups import on_ranks, place
from tests.engine.worker.test_input_batch import tiny_spec

SIZES = [1, 2, 4]


def spec_of(**changes: Any) -> ModelSpec:
    return dataclasses.replace(tiny_spec(), hidden=16, intermediate=24, **changes)


def fill(slots: dict[str, Slot]) -> None:
    """Each tensor's numbers depend on its name alone."""
    for name, slot in slots.items():
        whole = torch.randn(slot.shape, generator=torch.Generator().manual_seed(len(name) + ord(name[0])))
        slot.tensor.copy_(whole[slot.index])


def outputs(size: int, make: Callable[[Group], Any], names: tuple[str, ...], x: Tensor) -> list[Tensor]:
    """Of each rank's layer, loaded and packed."""

    @torch.inference_mode()
    def compute(tp: Group) -> Tensor:
        layer = make(tp)
        fill(layer.slots(*names))
        if hasattr(layer, "finish_loading"):
            layer.finish_loading()
        y: Tensor = layer(x)
        return y

    return on_ranks(size, compute)


def x(num_tokens: int, size: int) -> Tensor:
    return torch.randn(num_tokens, size, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bias", [False, True])
def test_a_row_layer_sums_and_adds_its_bias_once(size: int, bias: bool) -> None:
    def run(size: int) -> list[Tensor]:
        def make(tp: Group) -> RowLinear:
            first = tp.rank * 24 // tp.size
            layer = RowLinear(24, 10, tp, bias)
            forward = layer.forward
            layer.forward = lambda x: forward(x[:, first : first + 24 // tp.size])  # type: ignore[method-assign]
            return layer

        return outputs(size, make, ("out",), x(5, 24))

    (expected,) = run(1)
    for y in run(size):
        torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_names_a_row_layers_bias(size: int) -> None:
    """Or loading would call the checkpoint's unexpected."""
    for rank in range(size):
        slots = RowLinear(24, 10, place(rank, size), bias=True).slots("o")
        assert {name: slot.shape for name, slot in slots.items()} == {"o.weight": (10, 24), "o.bias": (10,)}
        assert slots["o.bias"].tensor.numel() == (10 if rank == 0 else 0)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gated_layer_splits_gate_and_up_alike(size: int, dtype: torch.dtype) -> None:
    def make(tp: Group) -> GatedLinear:
        return GatedLinear(16, 24, "silu", tp).to(dtype)

    names = "gate", "up"
    (expected,) = outputs(1, make, names, x(5, 16).to(dtype))
    torch.testing.assert_close(torch.cat(outputs(size, make, names, x(5, 16).to(dtype)), 1), expected)


@pytest.mark.parametrize("size", SIZES)
def test_a_gated_mlp_with_biases(size: int) -> None:
    spec = spec_of(mlp_bias=True)
    (expected,) = outputs(1, lambda tp: GatedMLP(spec, tp), ("mlp",), x(5, 16))
    for y in outputs(size, lambda tp: GatedMLP(spec, tp), ("mlp",), x(5, 16)):
        torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_the_heads_of_a_rank(size: int, num_kv_heads: int) -> None:
    def make(tp: Group) -> QKVLinear:
        return QKVLinear(16, 4, num_kv_heads, 6, tp, bias=True)

    (whole,) = outputs(1, make, ("q", "k", "v"), x(3, 16))
    q, k, v = whole.split((4, num_kv_heads, num_kv_heads), 1)
    for rank, y in enumerate(outputs(size, make, ("q", "k", "v"), x(3, 16))):
        heads = make(place(rank, size)).heads
        assert heads == (4 // size, max(num_kv_heads // size, 1))
        mine = slice(rank * num_kv_heads // size, rank * num_kv_heads // size + heads[1])
        expected = torch.cat((q[:, rank * heads[0] : (rank + 1) * heads[0]], k[:, mine], v[:, mine]), 1)
        torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("vocab_size", [64, 61, 20])  # 20: of four ranks the last has nothing but padding
@pytest.mark.parametrize("is_tied", [False, True])
def test_embedding_and_head_over_a_split_vocabulary(size: int, vocab_size: int, is_tied: bool) -> None:
    spec = spec_of(vocab_size=vocab_size, tie_embeddings=is_tied, embedding_scale=3.3, logits_softcap=5.0)
    token_ids = torch.tensor([0, vocab_size - 1, 7, 15, 16, 8])

    @torch.inference_mode()
    def compute(tp: Group) -> tuple[Tensor, Tensor, Tensor]:
        embed = Embedding(spec, tp)
        head = Head(spec, embed, tp)
        fill(embed.slots("model.embed_tokens") | head.slots("lm_head"))
        head.finish_loading()
        return *embed(token_ids), head(x(3, 16))

    (expected,) = on_ranks(1, compute)
    for found in on_ranks(size, compute):
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], torch.zeros(6, 16))
        torch.testing.assert_close(found[2], expected[2])
        assert found[2].shape == (3, vocab_size) and found[2].is_contiguous()


@pytest.mark.parametrize("is_tied", [False, True])
def test_tables_lie_where_a_pipeline_needs_them(is_tied: bool) -> None:
    """A tied head's stage holds the embedding's table too; the stages between hold none, but name it."""
    spec = spec_of(vocab_size=64, tie_embeddings=is_tied, num_layers=3, windows=(None,) * 3)
    rows = []
    for stage in range(3):
        here = dataclasses.replace(spec, stage=(stage, stage + 1))
        embed = Embedding(here, ALONE.tp)
        head = Head(here, embed, ALONE.tp)
        slots = embed.slots("embed") | head.slots("head")
        assert {name: slot.shape for name, slot in slots.items()} == dict.fromkeys(
            ["embed.weight"] if is_tied else ["embed.weight", "head.weight"], (64, 16)
        )
        head.finish_loading()
        rows.append((len(embed.weight), sum(len(matrix) for matrix in head.matrices())))
    assert rows == [(64, 0), (0, 0), (64 if is_tied else 0, 64)]


def test_a_later_stage_begins_with_what_the_one_before_left() -> None:
    embed = Embedding(dataclasses.replace(spec_of(num_layers=2, windows=(None, None)), stage=(1, 2)), ALONE.tp)
    inputs = torch.arange(12.0).view(2, 3, 2)
    x, residual = embed(inputs)
    assert torch.equal(x, inputs[0]) and torch.equal(residual, inputs[1])
    assert x.data_ptr() == inputs.data_ptr()


def test_one_rank_exchanges_nothing() -> None:
    """A group of one has no wire, and layers don't even ask it."""

    class Silent(Group):
        def all_reduce(self, x: Tensor) -> Tensor:
            raise AssertionError

        all_gather = all_reduce  # type: ignore[assignment]

    spec, tp = spec_of(mlp_bias=True), Silent()
    with torch.inference_mode():
        embed = Embedding(spec, tp)
        embed(torch.tensor([1]))
        GatedMLP(spec, tp)(torch.zeros(1, 16))
        Head(spec, embed, tp)(torch.zeros(1, 16))


def test_sizes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="intermediate size of 24 doesn't divide by tensor_parallel_size 5"):
        GatedMLP(spec_of(), place(0, 5))
