"""Tiny models with random weights, written as real Hugging Face directories: `tiny_model(name)` gives the path.

Weights come from one seeded generator per model and are rounded to bfloat16 once, so that every reader sees the same
numbers. They are scaled for activations near 1 and logits far enough apart that float32 noise can't change a greedy
choice; a seed whose choices are too close is caught by the tests that compare them.
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.engine.models import cases
from tests.engine.models.cases import BOS_ID, CASES, EOS_ID, VOCAB_SIZE, ModelCase

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CACHE = Path(__file__).parent.parent / ".cache" / "tiny_models"


@functools.cache
def tiny_model(name: str) -> Path:
    """Directory of the named model; written on first use and kept as long as this file and the cases don't change."""
    sources = Path(__file__).read_bytes() + Path(cases.__file__).read_bytes()
    target = CACHE / f"{zlib.crc32(sources):08x}" / name
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            folder = Path(scratch) / name
            write_model(CASES[name], folder, name)
            try:
                os.replace(folder, target)
            except OSError:
                if not target.exists():  # else another test process wrote the same
                    raise
    return target


def write_model(model: ModelCase, folder: Path, name: str = "", config: dict[str, Any] | None = None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config = config or model.full_config()
    _write_json(folder / "config.json", {k: v for k, v in config.items() if k != "dtype" or v is not None})
    _write_json(folder / "generation_config.json", model.generation_config)
    _write_weights(random_weights(config, f"{name}#{model.seed}"), folder, model.shards)
    _write_tokenizer(folder)


def weight_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Tensor names and shapes of a decoder of the families in cases.py."""
    family = config["model_type"]
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    linears = {
        "self_attn.q_proj": (heads * head_dim, hidden),
        "self_attn.k_proj": (kv_heads * head_dim, hidden),
        "self_attn.v_proj": (kv_heads * head_dim, hidden),
        "self_attn.o_proj": (hidden, heads * head_dim),
    }
    dense = {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
    biased = []
    if config.get("attention_bias"):
        biased += list(linears)
    if config.get("mlp_bias"):
        biased += list(dense)
    if family in ("qwen2", "qwen2_moe"):
        biased = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
    norms = ["input_layernorm", "post_attention_layernorm"]
    if family == "gemma3_text":
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    head_norms = ["self_attn.q_norm", "self_attn.k_norm"] if family in ("qwen3", "qwen3_moe", "gemma3_text") else []
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        matrices = linears | (expert_shapes(config) if is_sparse(config, layer) else dense)
        shapes |= {f"{prefix}{name}.weight": shape for name, shape in matrices.items()}
        shapes |= {f"{prefix}{name}.bias": matrices[name][:1] for name in biased}
        shapes |= {f"{prefix}{name}.weight": (hidden,) for name in norms}
        shapes |= {f"{prefix}{name}.weight": (head_dim,) for name in head_norms}
    return shapes


def is_sparse(config: dict[str, Any], layer: int) -> bool:
    if config["model_type"] in ("qwen2_moe", "qwen3_moe"):
        return layer not in config["mlp_only_layers"] and (layer + 1) % config["decoder_sparse_step"] == 0
    return config["model_type"] == "mixtral"


def expert_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Of a layer's router, experts and shared expert."""
    hidden = config["hidden_size"]
    if config["model_type"] == "mixtral":
        name, num, inner = "block_sparse_moe", config["num_local_experts"], config["intermediate_size"]
        parts = {"w1": (inner, hidden), "w3": (inner, hidden), "w2": (hidden, inner)}
    else:
        name, num, inner = "mlp", config["num_experts"], config["moe_intermediate_size"]
        parts = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    experts = {f"{name}.experts.{i}.{part}": shape for i in range(num) for part, shape in parts.items()}
    shared: dict[str, tuple[int, ...]] = {}
    if "shared_expert_intermediate_size" in config:
        inner = config["shared_expert_intermediate_size"]
        shared = {
            "mlp.shared_expert.gate_proj": (inner, hidden),
            "mlp.shared_expert.up_proj": (inner, hidden),
            "mlp.shared_expert.down_proj": (hidden, inner),
            "mlp.shared_expert_gate": (1, hidden),
        }
    return {f"{name}.gate": (num, hidden), **experts, **shared}


def random_weights(config: dict[str, Any], seed: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
    is_gemma = config["model_type"] == "gemma3_text"
    norm_mean = 0.0 if is_gemma else 1.0  # Gemma multiplies by 1 + weight

    def draw(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        values = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            # Gemma norms what a layer adds, and q and k: louder, so that layers decide and look at few tokens
            louder = 1.0 if is_gemma and any(part in name for part in ("post_", "q_norm", "k_norm")) else 0.0
            return values * 0.1 + norm_mean + louder
        if name.endswith(".bias"):
            return values * 0.1
        if "embed_tokens" in name:
            # a tied embedding is small, so that the layers and not the input token decide what comes next
            return values * (0.15 if config["tie_word_embeddings"] else 1.0)
        gain = (
            4.0
            if name == "lm_head.weight"
            else 2.0
            if any(part in name for part in ("o_proj", "down_proj", ".w2."))
            else 1.0
        )
        return values * gain / shape[-1] ** 0.5

    return {name: draw(name, shape).bfloat16() for name, shape in weight_shapes(config).items()}


def _write_weights(weights: dict[str, torch.Tensor], folder: Path, shards: int) -> None:
    if shards == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    names = sorted(weights)
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: weights[name] for name in names[shard::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    size = sum(tensor.nbytes for tensor in weights.values())
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": weight_map})


_TEXT = """
The capital of France is Paris, and the river that runs through the middle of it is called the Seine. One two three
four five six seven eight nine ten eleven twelve. When people ask a question they want an answer that is short, right
and easy to read; they don't want to wait for it. A server that reads every prompt once and remembers what it has read
can answer faster the next time. There was a small house near the forest where an old man lived with his dog and some
chickens. In the morning he would walk down to the village and buy bread, cheese and sometimes a newspaper. def add(a,
b): return a + b; for i in range(10): print(i) # that is how such a program could look. Numbers like 2, 3, 5, 7, 11
and 13 are primes. Could you please write a story about the mountains, the weather and the long winter? Yes, here it
is: once upon a time.
"""


def _write_tokenizer(folder: Path) -> None:
    """Byte-level BPE over the text above: any input can be written, and most of the vocabulary is words and parts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE, tokenizer.get_vocab_size()
    tokenizer.save(str(folder / "tokenizer.json"))
    bos, eos, pad = SPECIAL_TOKENS[BOS_ID], SPECIAL_TOKENS[EOS_ID], SPECIAL_TOKENS[0]
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": bos,
            "eos_token": eos,
            "pad_token": pad,
            "clean_up_tokenization_spaces": False,
            "model_max_length": 512,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
