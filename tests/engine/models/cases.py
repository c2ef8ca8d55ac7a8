"""One row for each kind of model: a tiny configuration that the whole engine is compared on.

Adding a model is its file in engine/models/ and a row here. `tests.tiny_models.tiny_model(name)` writes the directory.
"""

from __future__ import annotations

import dataclasses
from typing import Any

VOCAB_SIZE = 512
BOS_ID, EOS_ID = 1, 2

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.02,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": 0,
}
_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
_QWEN = {"hidden_act": "silu", "sliding_window": 16}
_QWEN3_MOE = {
    **_QWEN,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 16,
    "moe_intermediate_size": 48,
    "attention_bias": False,
    "use_sliding_window": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
}


@dataclasses.dataclass(frozen=True)
class ModelCase:
    """`seed` draws the weights; it was chosen so that float32 noise can't change a greedy choice: see test_families."""

    config: dict[str, Any]
    seed: int = 0
    shards: int = 1
    generation_config: dict[str, Any] = dataclasses.field(default_factory=lambda: {"eos_token_id": EOS_ID})

    def full_config(self) -> dict[str, Any]:
        return {**_COMMON, "dtype": "bfloat16", **self.config}


CASES = {
    "llama": ModelCase(
        {**_LLAMA, "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        seed=15,
    ),
    "llama-old-keys": ModelCase(  # as transformers 4 wrote them
        {
            **_LLAMA,
            "dtype": None,
            "torch_dtype": "bfloat16",
            "tie_word_embeddings": False,
            "rope_theta": 5000.0,
            "rope_scaling": None,
        },
        seed=5,
        shards=3,
    ),
    "llama-linear": ModelCase(
        {
            **_LLAMA,
            "tie_word_embeddings": False,
            "rope_theta": 10000.0,
            "rope_scaling": {"type": "linear", "factor": 4.0},
        },
        seed=3,
    ),
    "llama-llama3": ModelCase(
        {
            **_LLAMA,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
        seed=6,
    ),
    "llama-yarn": ModelCase(
        {
            **_LLAMA,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            },
        },
        seed=7,
        shards=2,
    ),
    "llama-bias": ModelCase(
        {
            **_LLAMA,
            "head_dim": 32,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
            "rope_theta": 10000.0,
        },
        seed=12,
    ),
    "mistral": ModelCase(
        {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "hidden_act": "silu",
            "sliding_window": 16,
            "head_dim": 16,
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        }
    ),
    "mixtral": ModelCase(
        {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "hidden_act": "silu",
            "intermediate_size": 64,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
        seed=7,
    ),
    "qwen2": ModelCase(
        {
            **_QWEN,
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "use_sliding_window": False,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
            "rope_theta": 1000000.0,
        },
        seed=13,
        generation_config={"eos_token_id": [EOS_ID, 0]},
    ),
    "qwen2-window": ModelCase(
        {
            **_QWEN,
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "use_sliding_window": True,
            "max_window_layers": 1,
            "tie_word_embeddings": False,
            "rope_theta": 10000.0,
        },
        seed=12,
    ),
    "qwen2-moe": ModelCase(  # with an expert that all tokens share, a dense layer, and a window in the first
        {
            "architectures": ["Qwen2MoeForCausalLM"],
            "model_type": "qwen2_moe",
            "hidden_act": "silu",
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 80,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [1],
            "use_sliding_window": True,
            "sliding_window": 16,
            "max_window_layers": 2,
            "tie_word_embeddings": False,
            "rope_theta": 1000000.0,
        },
        seed=15,
    ),
    "qwen3": ModelCase(
        {
            **_QWEN,
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "head_dim": 16,
            "attention_bias": False,
            "use_sliding_window": False,
            "max_window_layers": 3,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
        seed=1,
    ),
    "qwen3-moe": ModelCase(
        {
            **_QWEN3_MOE,
            "num_hidden_layers": 3,
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "tie_word_embeddings": True,
        },
        seed=4,
        shards=2,
    ),
    "qwen3-moe-dense-layers": ModelCase(  # experts in layers 1 and 5 alone
        {
            **_QWEN3_MOE,
            "num_hidden_layers": 6,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "tie_word_embeddings": False,
        },
        seed=2,
    ),
    "gemma3": ModelCase(
        {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "hidden_activation": "gelu_pytorch_tanh",
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "attention_bias": False,
            "final_logit_softcapping": None,
            "attn_logit_softcapping": None,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        seed=13,
    ),
}
