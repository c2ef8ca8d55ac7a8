"""A GGUF model in Hugging Face's words: config keys, tensor names, and weights as the model classes expect them.

Converters to GGUF change two things, undone here: llama's q and k rows are interleaved for another form of rope, and
Gemma's norm weights are stored with 1 added. Gemma 3's local rope theta and layer pattern are not in the file.

Source: https://github.com/ggml-org/llama.cpp, convert_hf_to_gguf.py and src/llama-model.cpp
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedray.engine.errors import UnsupportedModel
from pagedray.engine.gguf_file import GgufFile

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}

# Metadata of an architecture (after "llama." and so on). A key that stands in neither table is refused: it would change
# the numbers in a way that is not implemented.
_CONFIG_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
_GEMMA_CONFIG_KEYS = {
    "attention.sliding_window": "sliding_window",
    "attention.sliding_window_pattern": "sliding_window_pattern",
    "rope.freq_base_swa": "rope_local_base_freq",
    "final_logit_softcapping": "final_logit_softcapping",
}
_OTHER_KEYS = {
    "vocab_size",  # the embedding's shape says it
    "attention.value_length",
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "expert_count",
    "expert_used_count",
}

_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_LAYER_TENSORS = _LAYER_TENSORS | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

_ROPE_FACTORS = "rope_freqs.weight"  # Llama 3's rope scaling comes as a tensor of divisors
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>")


class GgufModel:
    """Config and weights of one GGUF file.

    Attributes:
        file: the file, whose metadata also holds the tokenizer.
        config: as config.json of the same model would have it.
        names: Hugging Face tensor name → name in the file.
    """

    def __init__(self, path: Path):
        self.file = GgufFile(path)
        arch = self.file.metadata.get("general.architecture")
        if arch not in _ARCHITECTURES:
            known = ", ".join(_ARCHITECTURES)
            raise UnsupportedModel(f"{path} has the GGUF architecture {arch!r}; supported: {known}")
        self._arch: str = arch
        self.names = {self._hf_name(name): name for name in self.file.tensors if name != _ROPE_FACTORS}
        self.config = self._config()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.file.tensors[self.names[name]].shape

    def num_bytes(self, name: str) -> int:
        return self.file.num_bytes(self.names[name])

    def read(self, name: str, index: tuple[slice, ...] = ()) -> NDArray[np.float32]:
        """One tensor by its Hugging Face name, dequantized to float32, or a part of it; of q and k whole heads."""
        weight = self.file.read(self.names[name], index)
        if self._arch == "gemma3" and name.endswith("norm.weight"):
            return weight - 1
        if self._arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            # rows of a head: (pair, half) in the file, (half, pair) in the model
            paired = weight.reshape(-1, self.config["head_dim"] // 2, 2, math.prod(weight.shape[1:]))
            return paired.swapaxes(1, 2).reshape(weight.shape)
        return weight

    def _hf_name(self, name: str) -> str:
        """Unknown names stay as they are: loading reports them as unexpected."""
        stem, _, kind = name.rpartition(".")
        if stem in _TENSORS:
            return f"{_TENSORS[stem]}.{kind}"
        block, _, part = stem.removeprefix("blk.").partition(".")
        table = _GEMMA_LAYER_TENSORS if self._arch == "gemma3" else _LAYER_TENSORS
        return f"model.layers.{block}.{table[part]}.{kind}" if part in table else name

    def _config(self) -> dict[str, Any]:
        arch, metadata, tensors = self._arch, self.file.metadata, self.file.tensors
        values = {k.removeprefix(arch + "."): v for k, v in metadata.items() if k.startswith(arch + ".")}
        table = _CONFIG_KEYS | (_GEMMA_CONFIG_KEYS if arch == "gemma3" else {})
        for key, value in values.items():
            if key not in table and key not in _OTHER_KEYS:
                raise UnsupportedModel(f"{self.file.path}: metadata {arch}.{key} = {value!r} is not implemented")
        config = {hf: values[key] for key, hf in table.items() if key in values}
        missing = [f"{arch}.{k}" for k, hf in _CONFIG_KEYS.items() if hf not in config and hf in _REQUIRED]
        if missing or "token_embd.weight" not in tensors:
            raise UnsupportedModel(f"{self.file.path} lacks {', '.join(missing) or 'tensor token_embd.weight'}")
        config.setdefault("num_key_value_heads", config["num_attention_heads"])
        config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
        config.setdefault("rope_theta", 10000.0)
        head_dim = config["head_dim"]
        for key, allowed in (
            ("attention.value_length", head_dim),
            ("rope.dimension_count", head_dim),
            ("expert_count", 0),
            ("expert_used_count", 0),
        ):
            if values.get(key, allowed) != allowed:
                raise UnsupportedModel(f"{self.file.path}: {arch}.{key} = {values[key]}; only {allowed} is implemented")
        config |= {
            "architectures": [_ARCHITECTURES[arch]],
            "model_type": "gemma3_text" if arch == "gemma3" else arch,
            "vocab_size": tensors["token_embd.weight"].shape[0],
            "tie_word_embeddings": "output.weight" not in tensors,
            "dtype": "float32",  # what dequantization gives
        }
        if arch == "llama":
            config["attention_bias"] = "blk.0.attn_q.bias" in tensors
            config["mlp_bias"] = "blk.0.ffn_gate.bias" in tensors
        if arch == "gemma3":
            self._add_gemma_defaults(config)
        config["rope_scaling"] = self._rope_scaling(values, config)
        return config | self._special_ids()

    def _add_gemma_defaults(self, config: dict[str, Any]) -> None:
        config.setdefault("rope_local_base_freq", 10000.0)
        pattern = config.setdefault("sliding_window_pattern", 6)
        if isinstance(pattern, list):  # one flag per layer: is it a sliding one?
            config["layer_types"] = ["sliding_attention" if sliding else "full_attention" for sliding in pattern]
            del config["sliding_window_pattern"]
        # all sizes scale attention by their head_dim but the 27B, which has 62 layers
        by_hidden = config["num_hidden_layers"] == 62
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        config["query_pre_attn_scalar"] = hidden // heads if by_hidden else config["head_dim"]

    def _rope_scaling(self, values: dict[str, Any], config: dict[str, Any]) -> dict[str, Any] | None:
        kind = values.get("rope.scaling.type", "none")
        if _ROPE_FACTORS in self.file.tensors:
            if kind != "none":
                raise UnsupportedModel(f"{self.file.path} has {_ROPE_FACTORS} and rope.scaling.type {kind!r}")
            return self._llama3_scaling(config)
        if kind == "none":
            return None
        scaling = {"rope_type": kind, "factor": values.get("rope.scaling.factor", 1.0)}
        if "rope.scaling.original_context_length" in values:
            scaling["original_max_position_embeddings"] = values["rope.scaling.original_context_length"]
        return scaling

    def _llama3_scaling(self, config: dict[str, Any]) -> dict[str, Any]:
        """The parameters that give the file's divisors: those Llama 3.1 … 3.3 were published with, or none we know."""
        factors = [float(f) for f in self.file.read(_ROPE_FACTORS)]
        scaling = {
            "rope_type": "llama3",
            "factor": max(factors),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        if len(factors) * 2 != config["head_dim"] or not all(
            math.isclose(factor, expected, rel_tol=1e-4)
            for factor, expected in zip(factors, _llama3_divisors(scaling, config), strict=True)
        ):
            raise UnsupportedModel(
                f"{self.file.path}: {_ROPE_FACTORS} is not the rope scaling of Llama 3.1, 3.2 or 3.3"
            )
        return scaling

    def _special_ids(self) -> dict[str, Any]:
        metadata = self.file.metadata
        ids: list[int] = []
        for name in ("eos", "eot", "eom"):
            ids.append(metadata.get(f"tokenizer.ggml.{name}_token_id", -1))
        # a chat model's answer ends with what its template writes there, which some files don't list
        tokens, template = metadata.get("tokenizer.ggml.tokens", []), metadata.get("tokenizer.chat_template", "")
        ids += [tokens.index(text) for text in _TURN_ENDS if text in template and text in tokens]
        return {
            "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": list(dict.fromkeys(i for i in ids if i >= 0)),
            "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        }


_REQUIRED = {
    "num_hidden_layers",
    "max_position_embeddings",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "rms_norm_eps",
}


def _llama3_divisors(scaling: dict[str, Any], config: dict[str, Any]) -> list[float]:
    """What rope divides each inverse frequency by."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    divisors = []
    for i in range(0, config["head_dim"], 2):
        wavelength = 2 * math.pi * config["rope_theta"] ** (i / config["head_dim"])
        turns = scaling["original_max_position_embeddings"] / wavelength
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        divisors.append(1 / ((1 - smooth) / factor + smooth))
    return divisors
