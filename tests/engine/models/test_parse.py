import dataclasses
import json
from pathlib import Path

import pytest

from pagedray.engine.checkpoint import Checkpoint, open_checkpoint
from pagedray.engine.errors import ConfigError, UnsupportedModel
from pagedray.engine.models.parse import model_spec
from pagedray.engine.models.spec import ExpertSpec, ModelSpec, RopeSpec
from tests.engine.models.cases import CASES
from tests.tiny_models import tiny_model

SIZES = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "max_position_embeddings": 1024,
}
FAMILIES = {
    "LlamaForCausalLM": "LlamaConfig",
    "MistralForCausalLM": "MistralConfig",
    "MixtralForCausalLM": "MixtralConfig",
    "Qwen2ForCausalLM": "Qwen2Config",
    "Qwen2MoeForCausalLM": "Qwen2MoeConfig",
    "Qwen3ForCausalLM": "Qwen3Config",
    "Qwen3MoeForCausalLM": "Qwen3MoeConfig",
    "Gemma3ForCausalLM": "Gemma3TextConfig",
}


def spec_of(architecture: str, generation: dict | None = None, **keys) -> ModelSpec:
    config = {**SIZES, "architectures": [architecture], **keys}
    return model_spec(Checkpoint("m", Path("m"), "safetensors", config, generation or {}))


def transformers_config(architecture: str, **keys):
    import transformers

    return getattr(transformers, FAMILIES[architecture])(**{**SIZES, **keys})


def windows_in_transformers(config) -> tuple[int | None, ...]:
    types = getattr(config, "layer_types", None)
    if types is None:
        types = ["sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"]
        types = types * config.num_hidden_layers
    return tuple(config.sliding_window if kind == "sliding_attention" else None for kind in types)


def experts_in_transformers(config) -> ExpertSpec | None:
    if not hasattr(config, "num_experts_per_tok"):
        return None
    layers = range(config.num_hidden_layers)
    return ExpertSpec(
        config.num_experts,
        config.num_experts_per_tok,
        getattr(config, "moe_intermediate_size", config.intermediate_size),
        getattr(config, "norm_topk_prob", True),  # Mixtral always does
        tuple(
            i not in getattr(config, "mlp_only_layers", []) and (i + 1) % getattr(config, "decoder_sparse_step", 1) == 0
            for i in layers
        ),
        getattr(config, "shared_expert_intermediate_size", 0),
    )


@pytest.mark.parametrize("name", CASES)
def test_a_directory_means_what_transformers_takes_it_for(name):
    from transformers import AutoConfig

    spec, config = model_spec(open_checkpoint(str(tiny_model(name)))), AutoConfig.from_pretrained(tiny_model(name))
    assert spec.architecture == config.architectures[0]
    for ours, theirs in {
        "num_layers": "num_hidden_layers",
        "hidden": "hidden_size",
        "intermediate": "intermediate_size",
        "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
        "vocab_size": "vocab_size",
        "norm_eps": "rms_norm_eps",
        "tie_embeddings": "tie_word_embeddings",
    }.items():
        assert getattr(spec, ours) == getattr(config, theirs), ours
    assert spec.head_dim == (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    assert spec.windows == windows_in_transformers(config)
    assert spec.dtype == "bfloat16" and str(config.dtype) == "torch.bfloat16"
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    assert (spec.rope.kind, spec.rope.theta) == (rope["rope_type"], rope["rope_theta"])
    assert spec.experts == experts_in_transformers(config)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_missing_keys_have_the_defaults_of_the_config_class(architecture):
    keys = {"num_hidden_layers": 32, "num_attention_heads": 32}
    spec, config = spec_of(architecture, **keys), transformers_config(architecture, **keys)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    assert spec.norm_eps == config.rms_norm_eps
    assert spec.tie_embeddings == config.tie_word_embeddings
    assert spec.head_dim == head_dim
    assert spec.rope == RopeSpec(rope["rope_theta"])
    assert spec.windows == windows_in_transformers(config)
    assert spec.bos_id == config.bos_token_id
    assert spec.eos_ids == (() if config.eos_token_id is None else (config.eos_token_id,))
    assert spec.attention_scale == getattr(config, "query_pre_attn_scalar", head_dim) ** -0.5
    assert spec.experts == experts_in_transformers(config)
    bias = architecture in ("Qwen2ForCausalLM", "Qwen2MoeForCausalLM")
    assert (spec.attention_bias, spec.attention_out_bias, spec.mlp_bias) == (bias, False, False)
    if architecture == "Gemma3ForCausalLM":
        assert spec.rope_local == RopeSpec(config.rope_parameters["sliding_attention"]["rope_theta"])
        assert (spec.activation, spec.embedding_scale) == ("gelu_tanh", 8.0)
    else:
        assert spec.rope_local is None
        assert (spec.activation, spec.embedding_scale) == ("silu", 1.0)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize("kv_heads", [{}, {"num_key_value_heads": None}, {"num_key_value_heads": 2}])
def test_key_value_heads(architecture, kv_heads):
    keys = {"num_attention_heads": 32, **kv_heads}
    assert spec_of(architecture, **keys).num_kv_heads == transformers_config(architecture, **keys).num_key_value_heads


def test_published_configs():
    """Values copied from config.json files as their makers published them."""
    llama31 = spec_of(
        "LlamaForCausalLM",
        {"eos_token_id": [128001, 128008, 128009]},
        max_position_embeddings=131072,
        rope_theta=500000.0,
        eos_token_id=[128001, 128008, 128009],
        rope_scaling={
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        pretraining_tp=1,
        attention_bias=False,
    )
    assert llama31.rope == RopeSpec(500000.0, "llama3", 8.0, 1.0, 4.0, 8192)
    assert llama31.eos_ids == (128001, 128008, 128009) and llama31.max_context == 131072
    qwen_long = spec_of(
        "Qwen2ForCausalLM",
        {"eos_token_id": [151645, 151643]},
        max_position_embeddings=32768,
        num_key_value_heads=2,
        max_window_layers=28,
        sliding_window=131072,
        use_sliding_window=False,
        rope_theta=1000000.0,
        rope_scaling={"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
        eos_token_id=151645,
    )
    assert qwen_long.rope.kind == "yarn" and qwen_long.rope.attention_factor == pytest.approx(1.13862944)
    assert qwen_long.max_context == 131072 and qwen_long.windows == (None,) * 4
    assert qwen_long.eos_ids == (151645, 151643)
    gemma = spec_of(
        "Gemma3ForCausalLM",
        num_hidden_layers=12,
        head_dim=256,
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=168,
        rope_theta=1000000,
        rope_local_base_freq=10000,
        rope_scaling={"factor": 8.0, "rope_type": "linear"},
        sliding_window=1024,
        sliding_window_pattern=6,
        eos_token_id=[1, 106],
        attn_logit_softcapping=None,
        final_logit_softcapping=30.0,
    )
    assert gemma.windows == ((1024,) * 5 + (None,)) * 2
    assert gemma.rope == RopeSpec(1e6, "linear", 8.0) and gemma.rope_local == RopeSpec(1e4)
    assert gemma.attention_scale == 168**-0.5 and gemma.eos_ids == (1, 106)
    assert (gemma.attention_softcap, gemma.logits_softcap) == (None, 30.0)


@pytest.mark.parametrize(
    "given",
    [
        {"factor": 4.0},
        {"factor": 0.5},
        {"factor": 4.0, "attention_factor": 0.7},
        {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.8},
        {"factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0},
    ],
)
@pytest.mark.parametrize("style", [4, 5])
def test_yarn_reads_as_in_transformers(given, style):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    given = {"rope_type": "yarn", "original_max_position_embeddings": 256, **given}
    keys = (
        {"rope_theta": 5e5, "rope_scaling": given} if style == 4 else {"rope_parameters": {"rope_theta": 5e5, **given}}
    )
    rope = spec_of("LlamaForCausalLM", **keys).rope
    config = transformers_config("LlamaForCausalLM", rope_parameters={"rope_theta": 5e5, **given})
    _, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    assert rope.attention_factor == pytest.approx(attention_factor)
    assert (rope.theta, rope.factor, rope.original_max_context) == (5e5, given["factor"], 256)
    assert (rope.beta_fast, rope.beta_slow) == (given.get("beta_fast", 32), given.get("beta_slow", 1))


def test_old_and_new_keys_give_the_same_spec():
    heads = {"num_key_value_heads": 8}
    old = spec_of(
        "Qwen3ForCausalLM",
        **heads,
        rope_theta=1e6,
        rope_scaling={"type": "linear", "factor": 2},
        torch_dtype="float16",
    )
    new = spec_of(
        "Qwen3ForCausalLM",
        **heads,
        rope_parameters={"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0},
        rope_scaling=None,
        dtype="float16",
    )
    assert old == new and new.rope == RopeSpec(1e6, "linear", 2.0) and new.dtype == "float16"
    nested = {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    old = spec_of("Gemma3ForCausalLM", rope_scaling={"rope_type": "linear", "factor": 8.0}, rope_local_base_freq=2e4)
    assert old == spec_of("Gemma3ForCausalLM", rope_parameters=nested)


def test_windows_of_each_family():
    assert spec_of("LlamaForCausalLM", sliding_window=8).windows == (None,) * 4  # no key of Llama's
    assert spec_of("MistralForCausalLM", sliding_window=8).windows == (8,) * 4
    assert spec_of("MistralForCausalLM", sliding_window=None).windows == (None,) * 4
    assert spec_of("MixtralForCausalLM", sliding_window=8).windows == (8,) * 4
    assert spec_of("MixtralForCausalLM").windows == (None,) * 4
    for on, window in {True: 8, False: None}.items():
        moe = spec_of("Qwen3MoeForCausalLM", sliding_window=8, use_sliding_window=on, max_window_layers=4)
        assert moe.windows == (window,) * 4
    assert spec_of("Qwen3MoeForCausalLM", sliding_window=None, use_sliding_window=True).windows == (None,) * 4
    keys = {"num_key_value_heads": 8, "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3}
    assert spec_of("Qwen2MoeForCausalLM", **keys).windows == (8, None, 8, None)
    assert spec_of("Qwen2MoeForCausalLM", **{**keys, "use_sliding_window": False}).windows == (None,) * 4
    for family in ("Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        window = {"num_key_value_heads": 8, "sliding_window": 8, "max_window_layers": 3}
        assert spec_of(family, **window, use_sliding_window=False).windows == (None,) * 4
        assert spec_of(family, **window, use_sliding_window=True).windows == (None, None, None, 8)
        assert spec_of(family, **window | {"max_window_layers": 0}, use_sliding_window=True).windows == (8,) * 4
        types = ["full_attention", "sliding_attention"] * 2
        assert spec_of(family, **window, use_sliding_window=True, layer_types=types).windows == (None, 8, None, 8)
    types = ["sliding_attention", "full_attention"] * 2
    assert spec_of("Gemma3ForCausalLM", sliding_window=8, layer_types=types).windows == (8, None, 8, None)


def test_biases_follow_the_config_where_the_family_heeds_it():
    on = {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 8}
    for family, expected in {
        "LlamaForCausalLM": (True, True, True),
        "MistralForCausalLM": (False, False, False),
        "MixtralForCausalLM": (False, False, False),
        "Qwen2MoeForCausalLM": (True, False, False),
        "Qwen3MoeForCausalLM": (True, True, False),
        "Qwen2ForCausalLM": (True, False, False),
        "Qwen3ForCausalLM": (True, True, False),
        "Gemma3ForCausalLM": (True, True, False),
    }.items():
        spec = spec_of(family, **on)
        assert (spec.attention_bias, spec.attention_out_bias, spec.mlp_bias) == expected, family


def test_eos_comes_from_the_generation_config_first():
    assert spec_of("LlamaForCausalLM", {"eos_token_id": [7, 8]}, eos_token_id=3).eos_ids == (7, 8)
    assert spec_of("LlamaForCausalLM", {"eos_token_id": 0}, eos_token_id=3).eos_ids == (0,)
    assert spec_of("LlamaForCausalLM", {"eos_token_id": None}, eos_token_id=3).eos_ids == (3,)
    assert spec_of("LlamaForCausalLM", {"temperature": 0.6}, eos_token_id=[3, 4]).eos_ids == (3, 4)
    assert spec_of("LlamaForCausalLM").eos_ids == (2,)


REFUSED = [
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic' is not implemented"),
    ({"rope_scaling": {"type": "longrope", "short_factor": [1], "long_factor": [2]}}, "rope_type 'longrope'"),
    ({"rope_parameters": {"rope_type": "proportional"}}, "rope_type 'proportional'"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "low_freq_factor": 1.0}}, "with low_freq_factor"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": False}}, "truncate = false"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "per layer type are not implemented for LlamaFor"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not implemented; known: silu, gelu_pytorch_tanh"),
    ({"quantization_config": {"quant_method": "awq"}}, "quantization_config = {'quant_method': 'awq'}"),
    ({"is_causal": False}, "is_causal = False"),
    ({"dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn'"),
    ({"architectures": []}, "should name one architecture"),
    ({"architectures": ["LlamaForCausalLM", "Other"]}, "should name one architecture"),
]


@pytest.mark.parametrize("keys,part", REFUSED)
def test_values_that_are_not_implemented_are_refused_by_name(keys, part):
    with pytest.raises(UnsupportedModel) as caught:
        spec_of("LlamaForCausalLM", **keys)
    assert part in str(caught.value) and str(caught.value).startswith("m: ")


@pytest.mark.parametrize(
    "architecture,keys,part",
    [
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        ("Gemma3ForCausalLM", {"hidden_activation": "gelu"}, "hidden_activation = 'gelu'"),
        ("Gemma3ForCausalLM", {"layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
        ("Qwen3ForCausalLM", {"layer_types": ["full_attention"] * 3, "num_key_value_heads": 8}, "4 entries"),
        ("LlamaForCausalLn", {"hidden_size": None}, "did you mean LlamaForCausalLM"),
        ("Gemma3ForConditionalGeneration", {"text_config": SIZES}, "Gemma3ForConditionalGeneration is multimodal"),
    ],
)
def test_values_of_one_family_that_are_not_implemented(architecture, keys, part):
    with pytest.raises(UnsupportedModel) as caught:
        spec_of(architecture, **keys)
    assert part in str(caught.value)


@pytest.mark.parametrize(
    "architecture,keys,part",
    [
        ("LlamaForCausalLM", {"hidden_size": None}, "lacks hidden_size"),
        ("LlamaForCausalLM", {"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ("LlamaForCausalLM", {"vocab_size": "many"}, "vocab_size = 'many'"),
        ("LlamaForCausalLM", {"num_key_value_heads": 3}, "8 attention heads don't divide into 3"),
        ("LlamaForCausalLM", {"rope_scaling": {"rope_type": "linear"}}, "lacks factor"),
        ("LlamaForCausalLM", {"eos_token_id": "</s>"}, "eos_token_id = '</s>'"),
        ("Gemma3ForCausalLM", {"rope_parameters": {"rope_type": "default"}}, "an entry for 'full_attention'"),
        (
            "Qwen2ForCausalLM",
            {"layer_types": ["sliding_attention"] * 4, "num_key_value_heads": 8},
            "use_sliding_window is off",
        ),
    ],
)
def test_values_without_sense_name_their_key(architecture, keys, part):
    with pytest.raises(ConfigError) as caught:
        spec_of(architecture, **keys)
    assert part in str(caught.value)


def test_a_spec_is_plain_data():
    spec = model_spec(open_checkpoint(str(tiny_model("gemma3"))))
    assert json.loads(json.dumps(dataclasses.asdict(spec)))["rope_local"]["theta"] == 10000.0


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
@pytest.mark.parametrize("architecture", ["MixtralForCausalLM", "Qwen3MoeForCausalLM"])
def test_the_number_of_experts_has_two_names(architecture, key):
    """The families' own, and that which transformers 5 writes."""
    experts = spec_of(architecture, **{key: 12}, num_experts_per_tok=3).experts
    assert (experts.num_experts, experts.top_k) == (12, 3)


def test_which_layers_are_sparse():
    keys = {"num_hidden_layers": 6, "mlp_only_layers": [3], "decoder_sparse_step": 2, "norm_topk_prob": True}
    experts = spec_of("Qwen3MoeForCausalLM", **keys).experts
    assert experts.is_sparse == (False, True, False, False, False, True)
    assert (experts.renormalise, experts.intermediate) == (True, 768)
    assert spec_of("Qwen3MoeForCausalLM", mlp_only_layers=None).experts.is_sparse == (True,) * 4
    assert spec_of("LlamaForCausalLM", num_experts=8).experts is None


def test_impossible_experts_are_refused():
    with pytest.raises(ConfigError, match="num_experts_per_tok = 9, there are 8 experts"):
        spec_of("MixtralForCausalLM", num_experts_per_tok=9)
    with pytest.raises(ConfigError, match="num_experts = 0, an integer of at least 1"):
        spec_of("Qwen3MoeForCausalLM", num_experts=0)
    with pytest.raises(ConfigError, match="mlp_only_layers = 3, a list of layer numbers"):
        spec_of("Qwen3MoeForCausalLM", mlp_only_layers=3)


def test_a_bias_may_have_a_name_of_its_own():
    keys = {"num_key_value_heads": 8, "attention_bias": True}
    assert not spec_of("Qwen2MoeForCausalLM", **keys, qkv_bias=False).attention_bias
    assert spec_of("Qwen2MoeForCausalLM", **keys).attention_bias
