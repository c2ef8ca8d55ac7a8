"""Reads a checkpoint's config into a `ModelSpec`. No torch here for the families below.

Keys are those of transformers 4 (rope_theta, rope_scaling) and 5 (rope_parameters). A missing key has the default of
the architecture's own config class. A value that would change the numbers and isn't implemented is refused by name.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from pagedray.engine.checkpoint import Checkpoint
from pagedray.engine.errors import ConfigError, UnsupportedModel
from pagedray.engine.models.spec import Activation, ExpertSpec, ModelSpec, RopeSpec

_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_DTYPES = ("float32", "bfloat16", "float16")

# Keys of any config that are only understood at one value.
_ONLY: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "compression_config": (None,),
    "is_causal": (None, True),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
    "use_bidirectional_attention": (None, False),
    "position_embedding_type": (None, "rope"),
    "attention_chunk_size": (None,),
    "no_rope_layers": (None, []),
}

_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclasses.dataclass(frozen=True)
class _Family:
    """Where the architectures differ: defaults of their config classes, and which keys they heed at all."""

    defaults: Mapping[str, Any]
    activation_key: str = "hidden_act"
    head_dim_default: int | None = None  # None: hidden / heads
    rope_theta: float = 10000.0
    bias_key: str = "attention_bias"
    qkv_bias: bool | None = None  # None: as `bias_key` says
    out_bias: bool | None = None
    mlp_bias: bool = False  # heeds `mlp_bias`
    num_experts: int | None = None  # where the config doesn't say; None: a dense model


_LLAMA = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
_QWEN = _LLAMA | {"max_position_embeddings": 32768, "num_key_value_heads": 32, "max_window_layers": 28}
_FAMILIES = {
    "LlamaForCausalLM": _Family(_LLAMA | {"bos_token_id": 1, "eos_token_id": 2}, mlp_bias=True),
    "MistralForCausalLM": _Family(
        _LLAMA
        | {
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        qkv_bias=False,
        out_bias=False,
    ),
    "MixtralForCausalLM": _Family(
        _LLAMA
        | {
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "num_experts_per_tok": 2,
        },
        rope_theta=1e6,
        qkv_bias=False,
        out_bias=False,
        num_experts=8,
    ),
    "Qwen2ForCausalLM": _Family(_QWEN | {"sliding_window": 4096}, qkv_bias=True, out_bias=False),
    "Qwen3ForCausalLM": _Family(_QWEN | {"sliding_window": 4096}, head_dim_default=128),
    "Qwen2MoeForCausalLM": _Family(
        _QWEN
        | {
            "intermediate_size": 5632,
            "num_key_value_heads": 16,
            "sliding_window": 4096,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "decoder_sparse_step": 1,
            "qkv_bias": True,
        },
        bias_key="qkv_bias",
        out_bias=False,
        num_experts=60,
    ),
    "Qwen3MoeForCausalLM": _Family(
        _LLAMA
        | {
            "intermediate_size": 6144,
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "decoder_sparse_step": 1,
        },
        num_experts=128,
    ),
    "Gemma3ForCausalLM": _Family(
        {
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "query_pre_attn_scalar": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "bos_token_id": 2,
            "eos_token_id": 1,
        },
        activation_key="hidden_activation",
        head_dim_default=256,
        rope_theta=1e6,
    ),
}


def model_spec(checkpoint: Checkpoint) -> ModelSpec:
    """The model in numbers.

    Raises:
        UnsupportedModel: a value that isn't implemented, by name, or an unknown architecture.
        ConfigError: a key that is missing or has no sensible value.
    """
    config, name = checkpoint.config, checkpoint.name
    architecture = _architecture(config, name)
    if architecture not in _FAMILIES:
        from pagedray.engine.models.registry import get_model_class  # needs torch

        get_model_class(architecture)  # knows what there is, and the names near to it
    family = _FAMILIES.get(architecture, _Family(_LLAMA, mlp_bias=True))
    values = _Values({**family.defaults, **config}, name)
    for key, allowed in _ONLY.items():
        if config.get(key) not in allowed:
            raise UnsupportedModel(f"{name}: config.json has {key} = {config[key]!r}, which is not implemented")
    hidden, num_heads = values.integer("hidden_size"), values.integer("num_attention_heads")
    head_dim = config.get("head_dim") or family.head_dim_default or hidden // num_heads
    num_kv_heads = config.get("num_key_value_heads", family.defaults.get("num_key_value_heads")) or num_heads
    if num_heads % num_kv_heads:
        raise ConfigError(f"{name}: {num_heads} attention heads don't divide into {num_kv_heads} key-value heads")
    layer_types = _layer_types(values, architecture)
    rope, rope_local = _ropes(values, family, architecture)
    bias = bool(values.config.get(family.bias_key, False))
    scale_of = values.number("query_pre_attn_scalar") if architecture == "Gemma3ForCausalLM" else head_dim
    is_gemma = architecture == "Gemma3ForCausalLM"
    window = config.get("sliding_window", family.defaults.get("sliding_window"))
    return ModelSpec(
        architecture=architecture,
        num_layers=values.integer("num_hidden_layers"),
        hidden=hidden,
        intermediate=values.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=values.integer("vocab_size"),
        max_context=_max_context(values, rope),
        norm_eps=values.number("rms_norm_eps"),
        tie_embeddings=bool(values["tie_word_embeddings"]),
        activation=_activation(values, family.activation_key),
        attention_bias=bias if family.qkv_bias is None else family.qkv_bias,
        attention_out_bias=bias if family.out_bias is None else family.out_bias,
        mlp_bias=family.mlp_bias and bool(config.get("mlp_bias", False)),
        rope=rope,
        rope_local=rope_local,
        windows=tuple(window if kind == _SLIDING else None for kind in layer_types),
        attention_scale=scale_of**-0.5,
        attention_softcap=config.get("attn_logit_softcapping") if is_gemma else None,
        logits_softcap=config.get("final_logit_softcapping") if is_gemma else None,
        embedding_scale=math.sqrt(hidden) if is_gemma else 1.0,
        bos_id=_first(_ids(checkpoint, family, "bos_token_id")),
        eos_ids=_ids(checkpoint, family, "eos_token_id"),
        dtype=_dtype(config, name),
        experts=_experts(values, family, architecture),
    )


class _Values:
    """A config with the family's defaults, whose lookups say what is missing and where."""

    def __init__(self, config: Mapping[str, Any], name: str):
        self.config, self.name = config, name

    def __getitem__(self, key: str) -> Any:
        value = self.config.get(key)
        if value is None:
            raise ConfigError(f"{self.name}: config.json lacks {key}")
        return value

    def integer(self, key: str, at_least: int = 1) -> int:
        value = self[key]
        if not isinstance(value, int) or value < at_least:
            raise ConfigError(f"{self.name}: {key} = {value!r}, an integer of at least {at_least} was expected")
        return value

    def number(self, key: str) -> float:
        value = self[key]
        if not isinstance(value, int | float) or value <= 0:
            raise ConfigError(f"{self.name}: {key} = {value!r}, a positive number was expected")
        return float(value)


def _architecture(config: Mapping[str, Any], name: str) -> str:
    architectures = config.get("architectures") or []
    if len(architectures) != 1:
        raise UnsupportedModel(f"{name}: config.json should name one architecture, it has {architectures!r}")
    architecture: str = architectures[0]
    if "text_config" in config:
        raise UnsupportedModel(
            f"{name}: {architecture} is multimodal (its config has a text_config); text models alone are served"
        )
    return architecture


def _activation(values: _Values, key: str) -> Activation:
    name = values.config.get(key) or "silu"
    if name not in _ACTIVATIONS:
        raise UnsupportedModel(f"{values.name}: {key} = {name!r} is not implemented; known: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _dtype(config: Mapping[str, Any], name: str) -> str:
    """transformers 5 writes dtype, 4 wrote torch_dtype."""
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in _DTYPES:
        raise UnsupportedModel(f"{name}: dtype {dtype!r} is not implemented; known: {', '.join(_DTYPES)}")
    return dtype


def _layer_types(values: _Values, architecture: str) -> list[str]:
    """Attention of each layer. Llama knows no windows and heeds neither key."""
    config, num_layers = values.config, values.integer("num_hidden_layers")
    if architecture == "LlamaForCausalLM":
        return [_FULL] * num_layers
    if architecture in ("MistralForCausalLM", "MixtralForCausalLM"):
        return [_FULL if config.get("sliding_window") is None else _SLIDING] * num_layers
    if architecture == "Qwen3MoeForCausalLM":  # all layers or none
        has_window = config.get("use_sliding_window") and config.get("sliding_window") is not None
        return [_SLIDING if has_window else _FULL] * num_layers
    types = config.get("layer_types")
    if types is None and architecture == "Gemma3ForCausalLM":
        pattern = values.integer("sliding_window_pattern")
        types = [_SLIDING if (i + 1) % pattern else _FULL for i in range(num_layers)]
    elif types is None and architecture == "Qwen2MoeForCausalLM":  # every other one of the first layers
        num_first = values.integer("max_window_layers", at_least=0) if config.get("use_sliding_window") else 0
        types = [_SLIDING if i % 2 == 0 and i < num_first else _FULL for i in range(num_layers)]
    elif types is None:
        first = values.integer("max_window_layers", at_least=0) if config.get("use_sliding_window") else num_layers
        types = [_SLIDING if i >= first else _FULL for i in range(num_layers)]
    if len(types) != num_layers or not set(types) <= {_FULL, _SLIDING}:
        raise UnsupportedModel(
            f"{values.name}: layer_types should have {num_layers} entries, {_FULL!r} or {_SLIDING!r}; "
            f"it has {len(types)}: {sorted(set(types))}"
        )
    if _SLIDING in types:
        values.integer("sliding_window")
        if architecture.startswith("Qwen") and not config.get("use_sliding_window"):
            raise ConfigError(f"{values.name}: layer_types has sliding layers, but use_sliding_window is off")
    return list(types)


def _experts(values: _Values, family: _Family, architecture: str) -> ExpertSpec | None:
    if family.num_experts is None:
        return None
    num_layers, num_experts = values.integer("num_hidden_layers"), family.num_experts
    for key in ("num_local_experts", "num_experts"):  # transformers 5 writes the first for both families
        if values.config.get(key) is not None:
            num_experts = values.integer(key)
    top_k = values.integer("num_experts_per_tok")
    if top_k > num_experts:
        raise ConfigError(f"{values.name}: num_experts_per_tok = {top_k}, there are {num_experts} experts")
    if architecture == "MixtralForCausalLM":
        return ExpertSpec(num_experts, top_k, values.integer("intermediate_size"), True, (True,) * num_layers)
    step, dense = values.integer("decoder_sparse_step"), values.config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise ConfigError(f"{values.name}: mlp_only_layers = {dense!r}, a list of layer numbers was expected")
    return ExpertSpec(
        num_experts,
        top_k,
        values.integer("moe_intermediate_size"),
        bool(values.config.get("norm_topk_prob", False)),
        tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)),
        values.integer("shared_expert_intermediate_size") if architecture == "Qwen2MoeForCausalLM" else 0,
    )


def _ropes(values: _Values, family: _Family, architecture: str) -> tuple[RopeSpec, RopeSpec | None]:
    """The rope of full layers (or all), and that of sliding ones where they have their own."""
    config = values.config
    parameters = config.get("rope_parameters") or {}
    theta = config.get("rope_theta") or family.rope_theta
    nested = _FULL in parameters or _SLIDING in parameters
    if architecture != "Gemma3ForCausalLM":
        if nested:
            raise UnsupportedModel(
                f"{values.name}: rope_parameters per layer type are not implemented for {architecture}"
            )
        return _rope(values, config.get("rope_scaling") or parameters, theta), None
    if parameters and not nested:
        raise ConfigError(f"{values.name}: rope_parameters should have an entry for {_FULL!r} and {_SLIDING!r}")
    full = config.get("rope_scaling") or parameters.get(_FULL) or {}
    local_theta = config.get("rope_local_base_freq") or 10000.0
    return _rope(values, full, theta), _rope(values, parameters.get(_SLIDING) or {}, local_theta)


# What each kind of rope heeds, beside rope_type and rope_theta.
_ROPE_KEYS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
    },
}


def _rope(values: _Values, given: Mapping[str, Any], theta: float) -> RopeSpec:
    name, config = values.name, values.config
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in _ROPE_KEYS:
        raise UnsupportedModel(f"{name}: rope_type {kind!r} is not implemented; known: {', '.join(_ROPE_KEYS)}")
    theta = float(given.get("rope_theta") or theta)
    partial = float(given.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0)
    if partial != 1.0:
        raise UnsupportedModel(
            f"{name}: partial_rotary_factor = {partial} is not implemented for {config['architectures'][0]}"
        )
    known = _ROPE_KEYS[kind] | {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    unknown = sorted(key for key, value in given.items() if key not in known and value is not None)
    if kind != "default" and unknown:
        raise UnsupportedModel(f"{name}: rope_type {kind!r} with {', '.join(unknown)} is not implemented")
    if kind == "default":
        return RopeSpec(theta)
    options = _Values(given, f"{name}: rope scaling")
    factor = options.number("factor")
    if kind == "linear":
        return RopeSpec(theta, "linear", factor)
    original = int(
        config.get("original_max_position_embeddings")
        or given.get("original_max_position_embeddings")
        or values.integer("max_position_embeddings")
    )
    if kind == "llama3":
        low, high = options.number("low_freq_factor"), options.number("high_freq_factor")
        return RopeSpec(theta, "llama3", factor, low, high, original)
    if given.get("truncate") is False:
        raise UnsupportedModel(f"{name}: yarn with truncate = false is not implemented")
    return RopeSpec(
        theta,
        "yarn",
        factor,
        original_max_context=original,
        beta_fast=float(given.get("beta_fast") or 32),
        beta_slow=float(given.get("beta_slow") or 1),
        attention_factor=_yarn_attention_factor(given, factor),
    )


def _yarn_attention_factor(given: Mapping[str, Any], factor: float) -> float:
    """Source: Peng et al. 2023, arXiv:2309.00071, section 3.4; mscale is DeepSeek's generalization."""
    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])

    def gain(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if given.get("mscale") and given.get("mscale_all_dim"):
        return gain(given["mscale"]) / gain(given["mscale_all_dim"])
    return gain(1.0)


def _max_context(values: _Values, rope: RopeSpec) -> int:
    """Configs that ask for yarn keep max_position_embeddings at what the model was trained with."""
    trained = values.integer("max_position_embeddings")
    return max(trained, int(rope.original_max_context * rope.factor)) if rope.kind == "yarn" else trained


def _ids(checkpoint: Checkpoint, family: _Family, key: str) -> tuple[int, ...]:
    """generation_config.json wins: chat models list the ids that end a turn there, and the base's in config.json."""
    for source in (checkpoint.generation_config, checkpoint.config, family.defaults):
        value = source.get(key)
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            if not all(isinstance(i, int) for i in ids):
                raise ConfigError(f"{checkpoint.name}: {key} = {value!r}, an integer or a list of them was expected")
            return tuple(ids)
    return ()


def _first(ids: tuple[int, ...]) -> int | None:
    return ids[0] if ids else None
