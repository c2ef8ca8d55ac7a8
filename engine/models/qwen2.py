"""Qwen2 dense decoder: GQA with a bias on query, key and value, SwiGLU. Source: arXiv:2407.10671."""

from __future__ import annotations

from torch import Tensor

from pagedray.engine.layers.attention import PagedAttention
from pagedray.engine.layers.embedding import Embedding, Head
from pagedray.engine.layers.layer import Block, Layer, Stack
from pagedray.engine.layers.linear import QKVLinear, RowLinear
from pagedray.engine.layers.loading import finish_loading
from pagedray.engine.layers.mlp import GatedMLP
from pagedray.engine.layers.norm import FinalNorm, RMSNorm
from pagedray.engine.layers.rotary import Rotary, Rotation
from pagedray.engine.layers.slot import Slot
from pagedray.engine.models.registry import register_model
from pagedray.engine.models.spec import ModelSpec
from pagedray.engine.worker.parallel import Group, Parallel


class Qwen2Attention(Layer):
    def __init__(self, spec: ModelSpec, layer: int, tp: Group):
        super().__init__()
        heads = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self.qkv = QKVLinear(spec.hidden, *heads, tp, spec.attention_bias)
        self.attn = PagedAttention(layer, spec)
        self.out = RowLinear(spec.num_heads * spec.head_dim, spec.hidden, tp, spec.attention_out_bias)

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:  # x [T, hidden]
        qkv = self.qkv(x)  # [T, H + 2K, D]
        y = self.attn(qkv, rotation)  # heads rotated, then attention: [T, H * D]
        return self.out(y)  # [T, hidden]


class Qwen2Block(Block):
    def __init__(self, spec: ModelSpec, layer: int, tp: Group):
        super().__init__()
        self.attn_norm = RMSNorm(spec.hidden, spec.norm_eps)
        self.attn = Qwen2Attention(spec, layer, tp)
        self.mlp_norm = RMSNorm(spec.hidden, spec.norm_eps)
        self.mlp = GatedMLP(spec, tp)

    def forward(self, x: Tensor, residual: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """x: what the block before leaves to add to the residual, which is updated in place."""
        x = self.attn(self.attn_norm(x, residual), rotation)
        residual = self.attn.attn.wanted(residual)
        return self.mlp(self.mlp_norm(x, residual)), residual


@register_model("Qwen2ForCausalLM")
class Qwen2ForCausalLM(Layer):
    def __init__(self, spec: ModelSpec, parallel: Parallel):
        super().__init__()
        tp, self.layers = parallel.tp, spec.layers
        self.embed = Embedding(spec, tp)
        self.rotary = Rotary(spec.rope, spec.head_dim, spec.max_context)
        self.blocks: Stack[Qwen2Block] = Stack(Qwen2Block(spec, layer, tp) for layer in spec.layers)
        self.norm = FinalNorm(spec)
        self.head = Head(spec, self.embed, tp)

    def forward(self, inputs: Tensor, positions: Tensor) -> Tensor:  # inputs [T] token ids, or of the stage before
        x, residual = self.embed(inputs)
        rotation = self.rotary(positions)
        for block in self.blocks:
            x, residual = block(x, residual, rotation)
        return self.norm(x, residual)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)

    def weight_slots(self) -> dict[str, Slot]:
        slots = self.embed.slots("model.embed_tokens") | self.norm.slots("model.norm") | self.head.slots("lm_head")
        for i, block in zip(self.layers, self.blocks, strict=True):
            layer = f"model.layers.{i}"
            slots |= block.attn_norm.slots(f"{layer}.input_layernorm")
            slots |= block.attn.qkv.slots(*(f"{layer}.self_attn.{p}_proj" for p in "qkv"))
            slots |= block.attn.out.slots(f"{layer}.self_attn.o_proj")
            slots |= block.mlp_norm.slots(f"{layer}.post_attention_layernorm")
            slots |= block.mlp.slots(f"{layer}.mlp")
        return slots

    def finish_loading(self) -> None:
        finish_loading(self)
