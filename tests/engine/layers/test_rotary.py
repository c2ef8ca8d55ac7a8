"""Angles of published rope settings, to the bit where transformers computes them so."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from pagedray.engine.layers.rotary import Rotary, apply_rotary
from pagedray.engine.models.spec import RopeSpec

LLAMA3: dict[str, Any] = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN: dict[str, Any] = {"factor": 4.0, "original_max_position_embeddings": 32768}
SETTINGS = [
    (RopeSpec(1e5), 64, {}),
    (RopeSpec(1e4, "linear", 4.0), 96, {"factor": 4.0}),
    (RopeSpec(5e5, "llama3", 8.0, 1.0, 4.0, 8192), 128, LLAMA3),
    (RopeSpec(1e6, "yarn", 4.0, original_max_context=32768, attention_factor=1.1386294361119891), 128, YARN),
    (
        RopeSpec(1e4, "yarn", 4.0, original_max_context=64, beta_fast=2.0, beta_slow=0.5, attention_factor=0.5),
        64,
        {
            **YARN,
            "original_max_position_embeddings": 64,
            "beta_fast": 2.0,
            "beta_slow": 0.5,
            "attention_factor": 0.5,
        },
    ),
]


@pytest.mark.parametrize(("rope", "head_dim", "parameters"), SETTINGS, ids=lambda value: getattr(value, "kind", ""))
def test_rotation_equals_that_of_transformers(rope: RopeSpec, head_dim: int, parameters: dict[str, Any]) -> None:
    parameters = {"rope_type": rope.kind, "rope_theta": rope.theta, **parameters}
    config = LlamaConfig(head_dim=head_dim, max_position_embeddings=131072, rope_parameters=parameters)
    positions = torch.tensor([0, 1, 2, 63, 1000, 8191, 100_000])
    qkv = torch.randn(len(positions), 5, head_dim, generator=torch.Generator().manual_seed(1))
    cos, sin = LlamaRotaryEmbedding(config)(qkv, positions[None])
    heads = qkv.transpose(0, 1)[None]
    expected, _ = apply_rotary_pos_emb(heads, heads, cos, sin)
    before = qkv.clone()
    apply_rotary(qkv, 3, Rotary(rope, head_dim, 64)(positions))
    torch.testing.assert_close(qkv[:, :3], expected[0].transpose(0, 1)[:, :3], rtol=1e-6, atol=1e-6)
    assert torch.equal(qkv[:, 3:], before[:, 3:])


def test_only_part_of_a_head_may_turn() -> None:
    qkv = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(1))
    whole, part = qkv.clone(), qkv.clone()
    apply_rotary(part, 2, Rotary(RopeSpec(100.0, partial=0.5), 8, 64)(torch.arange(3)))
    apply_rotary(whole[..., :4], 2, Rotary(RopeSpec(100.0), 4, 64)(torch.arange(3)))
    assert torch.equal(part, whole)
    assert torch.equal(part[..., 4:], qkv[..., 4:])
