"""Qwen2 dense decoder: GQA with a bias on query, key and value, SwiGLU. Source: arXiv:2407.10671."""

from __future__ import annotations

import torch
from torch import Tensor

from pagedray.engine.layers.attention import PagedAttention
from pagedray.engine.layers.embedding import Embedding, Head
from pagedray.engine.layers.layer import Block, Layer, Stack
from pagedray.engine.layers.linear import Linear, QKVLinear
from pagedray.engine.layers.loading import finish_loading
from pagedray.engine.layers.mlp import GatedMLP
from pagedray.engine.layers.norm import RMSNorm
from pagedray.engine.layers.rotary import Rotary, Rotation
from pagedray.engine.models.registry import register_model
from pagedray.engine.models.spec import ModelSpec


class Qwen2Attention(Layer):
    def __init__(self, spec: ModelSpec, layer: int):
        super().__init__()
        self.qkv = QKVLinear(spec.hidden, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.attention_bias)
        self.attn = PagedAttention(layer, spec)
        self.out = Linear(spec.num_heads * spec.head_dim, spec.hidden, bias=spec.attention_out_bias)

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:  # x [T, hidden]
        qkv = self.qkv(x)  # [T, H + 2K, D]
        y = self.attn(qkv, rotation)  # heads rotated, then attention: [T, H * D]
        return self.out(y)  # [T, hidden]


class Qwen2Block(Block):
    def __init__(self, spec: ModelSpec, layer: int):
        super().__init__()
        self.attn_norm = RMSNorm(spec.hidden, spec.norm_eps)
        self.attn = Qwen2Attention(spec, layer)
        self.mlp_norm = RMSNorm(spec.hidden, spec.norm_eps)
        self.mlp = GatedMLP(spec)

    def forward(self, x: Tensor, residual: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """x: what the block before leaves to add to the residual, which is updated in place."""
        x = self.attn(self.attn_norm(x, residual), rotation)
        residual = self.attn.attn.wanted(residual)
        return self.mlp(self.mlp_norm(x, residual)), residual


@register_model("Qwen2ForCausalLM")
class Qwen2ForCausalLM(Layer):
    def __init__(self, spec: ModelSpec):
        super().__init__()
        self.embed = Embedding(spec)
        self.rotary = Rotary(spec.rope, spec.head_dim, spec.max_context)
        self.blocks: Stack[Qwen2Block] = Stack(Qwen2Block(spec, layer) for layer in range(spec.num_layers))
        self.norm = RMSNorm(spec.hidden, spec.norm_eps)
        self.head = Head(spec, self.embed)

    def forward(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(token_ids)
        residual = torch.zeros_like(x)
        rotation = self.rotary(positions)
        for block in self.blocks:
            x, residual = block(x, residual, rotation)
        return self.norm(x, residual)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)

    def weight_slots(self) -> dict[str, Tensor]:
        slots = self.embed.slots("model.embed_tokens") | self.norm.slots("model.norm") | self.head.slots("lm_head")
        for i, block in enumerate(self.blocks):
            layer = f"model.layers.{i}"
            slots |= block.attn_norm.slots(f"{layer}.input_layernorm")
            slots |= block.attn.qkv.slots(*(f"{layer}.self_attn.{p}_proj" for p in "qkv"))
            slots |= block.attn.out.slots(f"{layer}.self_attn.o_proj")
            slots |= block.mlp_norm.slots(f"{layer}.post_attention_layernorm")
            slots |= block.mlp.slots(f"{layer}.mlp")
        return slots

    def finish_loading(self) -> None:
        finish_loading(self)
