"""Writes tiny models as GGUF files, the way llama.cpp's converter does it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file

from tests.tiny_models import tiny_model

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
}
_GEMMA_NAMES = _NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def write_gguf(
    name: str,
    path: Path,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
) -> None:
    """Write tiny model `name` in float32. `metadata` replaces keys (None: leaves them out), `tensors` adds some."""
    folder = tiny_model(name)
    config = json.loads((folder / "config.json").read_text())
    arch = config["model_type"].removesuffix("_text")
    values = {"general.architecture": arch, **_metadata(arch, config), **(metadata or {})}
    writer = gguf.GGUFWriter(path, values.pop("general.architecture"))
    for key, value in values.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            kind = {bool: gguf.GGUFValueType.BOOL, int: gguf.GGUFValueType.UINT32, str: gguf.GGUFValueType.STRING}
            writer.add_key_value(key, value, kind.get(type(value), gguf.GGUFValueType.FLOAT32))
    for file in sorted(folder.glob("*.safetensors")):
        for tensor, weight in load_file(file).items():
            writer.add_tensor(_gguf_name(arch, tensor), _stored(arch, config, tensor, weight.float().numpy()))
    for tensor, weight in (tensors or {}).items():
        writer.add_tensor(tensor, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _metadata(arch: str, config: dict[str, Any]) -> dict[str, Any]:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = config.get("rope_parameters") or {
        "rope_theta": config.get("rope_theta"),
        **(config.get("rope_scaling") or {}),
    }
    rope = rope.get("full_attention", rope)
    values = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": rope["rope_theta"],
        "rope.dimension_count": head_dim,
    }
    if "factor" in rope:
        values |= {"rope.scaling.type": rope.get("rope_type", rope.get("type")), "rope.scaling.factor": rope["factor"]}
    if arch == "gemma3":
        values["attention.sliding_window"] = config["sliding_window"]
    special = {
        "tokenizer.ggml.bos_token_id": config["bos_token_id"],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
    }
    return {f"{arch}.{key}": value for key, value in values.items()} | special


def _gguf_name(arch: str, tensor: str) -> str:
    stem, _, kind = tensor.rpartition(".")
    names = _GEMMA_NAMES if arch == "gemma3" else _NAMES
    if stem.startswith("model.layers."):
        layer, _, part = stem.removeprefix("model.layers.").partition(".")
        return f"blk.{layer}.{names[part]}.{kind}"
    return f"{names[stem]}.{kind}"


def _stored(arch: str, config: dict[str, Any], tensor: str, weight: np.ndarray) -> np.ndarray:
    if arch == "gemma3" and tensor.endswith("norm.weight"):
        return weight + 1
    for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        if arch == "llama" and f".{part}." in tensor:
            # first and second half of a head's rows, taken in turns
            halves = weight.reshape(config[heads], 2, -1, *weight.shape[1:])
            return np.stack([halves[:, 0], halves[:, 1]], axis=2).reshape(weight.shape)
    return weight
