"""Checkpoint directories without weights, for load_format="dummy": the configs of published models, and a tiny one.

    from benchmarks.model_shapes import write_model
    path = write_model("llama-3.1-8b", "/tmp/models", tokenizer="/path/of/a/checkpoint")

or  python -m benchmarks.model_shapes llama-3.1-8b /tmp/models [--tokenizer FOLDER]  which prints the directory.
Source: the config.json and generation_config.json that their authors published.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rms_norm_eps": 1e-5,
    "dtype": "bfloat16",
}
_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "dtype": "bfloat16",
    "use_sliding_window": False,
    "sliding_window": None,
    "head_dim": 128,
    "vocab_size": 151936,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
}

_MIXTRAL: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}


def _size(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, tied: bool) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": tied,
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        **_LLAMA,
        **_size(4096, 14336, 32, 32, 8, tied=False),
        "head_dim": 128,
        "vocab_size": 128256,
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "qwen3-0.6b": {**_QWEN3, **_size(1024, 3072, 28, 16, 8, tied=True)},
    "qwen3-8b": {**_QWEN3, **_size(4096, 12288, 36, 32, 8, tied=False)},
    "mixtral-8x7b": {
        **_size(4096, 14336, 32, 32, 8, tied=False),
        **_MIXTRAL,
        "vocab_size": 32000,
        "max_position_embeddings": 32768,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen3-30b-a3b": {
        **_QWEN3,
        **_size(2048, 6144, 48, 32, 4, tied=False),
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "max_window_layers": 48,
    },
    "smollm2-135m": {
        **_LLAMA,
        **_size(576, 1536, 30, 9, 3, tied=True),
        "vocab_size": 49152,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
    },
    "tiny": {
        **_LLAMA,
        **_size(64, 96, 2, 4, 2, tied=False),
        "vocab_size": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "dtype": "float32",
    },
    "tiny-moe": {
        **_size(64, 48, 2, 4, 2, tied=False),
        **_MIXTRAL,
        "vocab_size": 512,
        "max_position_embeddings": 2048,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "dtype": "float32",
    },
}
_TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "vocab.json", "merges.txt", "*.jinja")


def write_model(name: str, folder: str | Path, tokenizer: str | Path | None = None) -> Path:
    """Make the directory `folder`/`name`; what it held before of these files is replaced.

    Args:
        name: a key of CONFIGS.
        tokenizer: a directory whose tokenizer files are copied. Its vocabulary may be smaller than the model's: ids
            beyond it have no text. Without one, the model can be given token ids alone.
    """
    if name not in CONFIGS:
        raise ValueError(f"unknown model shape {name!r}; known: {', '.join(CONFIGS)}")
    path, config = Path(folder) / name, CONFIGS[name]
    path.mkdir(parents=True, exist_ok=True)
    _write_json(path / "config.json", config)
    generation: dict[str, Any] = {
        key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config
    }
    _write_json(path / "generation_config.json", generation)
    if tokenizer is not None:
        files = [file for pattern in _TOKENIZER_FILES for file in sorted(Path(tokenizer).glob(pattern))]
        if not files:
            raise ValueError(f"{tokenizer} has no tokenizer files; looked for {', '.join(_TOKENIZER_FILES)}")
        for file in files:
            shutil.copy(file, path / file.name)
    return path


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def command_line() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=CONFIGS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", type=Path)
    args = parser.parse_args()
    print(write_model(args.name, args.folder, args.tokenizer))


if __name__ == "__main__":
    command_line()
