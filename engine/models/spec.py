"""What a model is, in numbers: read from its checkpoint, used by layers, KV cache and scheduler. No torch here."""

from __future__ import annotations

import dataclasses
from typing import Literal

from pagedray.engine.layers.share import local_heads

Activation = Literal["silu", "gelu_tanh"]


@dataclasses.dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding. `kind` is the checkpoint's rope_type; fields that a kind doesn't use keep their defaults."""

    theta: float
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_max_context: int = 0  # llama3, yarn
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float = 1.0  # yarn: cos and sin are multiplied by it
    partial: float = 1.0  # share of head_dim that is rotated


@dataclasses.dataclass(frozen=True)
class ExpertSpec:
    """Mixture of experts."""

    num_experts: int
    top_k: int  # experts of a token
    intermediate: int  # of one expert
    renormalise: bool  # whether the weights of a token's experts sum to 1
    is_sparse: tuple[bool, ...]  # per layer: experts, or one feed-forward layer as in dense models
    shared_intermediate: int = 0  # of the expert that every token goes through; 0: there is none


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    architecture: str  # Hugging Face class name, e.g. "LlamaForCausalLM"
    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context: int  # tokens
    norm_eps: float
    tie_embeddings: bool
    activation: Activation
    attention_bias: bool  # on q, k and v
    attention_out_bias: bool
    mlp_bias: bool
    rope: RopeSpec
    rope_local: RopeSpec | None  # for sliding-window layers where they differ (Gemma 3)
    windows: tuple[int | None, ...]  # per layer: sliding window in tokens, itself included; None: full attention
    attention_scale: float  # multiplies q·k
    attention_softcap: float | None
    logits_softcap: float | None
    embedding_scale: float  # multiplies token embeddings (Gemma: sqrt(hidden))
    bos_id: int | None
    eos_ids: tuple[int, ...]
    dtype: str  # the checkpoint's: "float32", "bfloat16", "float16"
    experts: ExpertSpec | None = None
    stage: tuple[int, int] | None = None  # of a pipeline: its first layer, and the next stage's; None: all layers

    @property
    def layers(self) -> range:
        """Those of this stage, numbered over the whole model."""
        return range(*(self.stage or (0, self.num_layers)))

    @property
    def is_first_stage(self) -> bool:
        return self.layers.start == 0

    @property
    def is_last_stage(self) -> bool:
        return self.layers.stop == self.num_layers

    def of_one_rank(self, num_ranks: int) -> ModelSpec:
        """With the heads that one of so many tensor-parallel ranks has. Raises: ConfigError when they don't divide."""
        heads, kv_heads = local_heads(self.num_heads, self.num_kv_heads, num_ranks)
        return dataclasses.replace(self, num_heads=heads, num_kv_heads=kv_heads)


@dataclasses.dataclass(frozen=True)
class LayerGroup:
    """Layers that share one block table. Slot i of a block's page holds K and V of layers[i]."""

    window: int | None
    layers: tuple[int, ...]


def layer_groups(windows: tuple[int | None, ...]) -> tuple[LayerGroup, ...]:
    """Split layers by attention type into groups of equal size, so that one pool of equal pages serves all groups.

    The size is that of the smallest type; a larger type gets several groups, the last one perhaps short. Full attention
    comes first, then windows in ascending order.
    """
    types = sorted(set(windows), key=lambda w: (w is not None, w or 0))
    members = {t: [i for i, w in enumerate(windows) if w == t] for t in types}
    size = min(len(layers) for layers in members.values())
    return tuple(LayerGroup(t, tuple(members[t][i : i + size])) for t in types for i in range(0, len(members[t]), size))


def layer_places(windows: tuple[int | None, ...], layers: range) -> dict[int, tuple[int, int]]:
    """Block group, and slot of its pages, of each of a stage's layers.

    Groups are those of the whole model, since every stage reads the same block tables. The layers of one attention type
    are dealt to that type's groups anew, so that a stage's pages have no slot more than its layers need; for all layers
    this is `layer_groups`.
    """
    groups: dict[int | None, list[int]] = {}
    for index, group in enumerate(layer_groups(windows)):
        groups.setdefault(group.window, []).append(index)
    members = {window: [layer for layer in layers if windows[layer] == window] for window in groups}
    size = max(-(-len(members[window]) // len(indices)) for window, indices in groups.items())
    return {
        layer: (groups[window][i // size], i % size) for window in groups for i, layer in enumerate(members[window])
    }


def num_page_slots(spec: ModelSpec) -> int:
    """Layers of this stage that a block holds keys and values of."""
    return 1 + max(slot for _, slot in layer_places(spec.windows, spec.layers).values())
