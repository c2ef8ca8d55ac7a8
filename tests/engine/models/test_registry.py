import dataclasses
import subprocess
import sys

import pytest
import torch

from pagedray.engine.errors import UnsupportedModel
from pagedray.engine.models.registry import build_model, get_model_class, register_model
from tests.engine.worker.test_input_batch import tiny_spec

FAMILIES = ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM"]


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_model_has_the_type_and_device_asked_for(architecture: str) -> None:
    spec = dataclasses.replace(tiny_spec(), architecture=architecture)
    before = torch.get_default_dtype()
    model = build_model(spec, torch.bfloat16, torch.device("cpu"))
    assert torch.get_default_dtype() is before
    slots = model.weight_slots()
    assert slots["model.layers.0.self_attn.k_proj.weight"].shape == (4, 8)
    assert {slot.tensor.dtype for slot in slots.values()} == {torch.bfloat16}
    assert "lm_head.weight" not in slots
    untied = build_model(dataclasses.replace(spec, tie_embeddings=False), torch.float32, torch.device("cpu"))
    assert untied.weight_slots()["lm_head.weight"].shape == (200, 8)


def test_slots_of_stacked_weights_are_disjoint_views() -> None:
    model = build_model(tiny_spec(), torch.float32, torch.device("cpu"))
    slots = model.weight_slots()
    for i, slot in enumerate(slots.values()):
        slot.tensor.fill_(i)
    for i, (name, slot) in enumerate(slots.items()):
        assert (slot.tensor == i).all(), name


def test_an_unknown_architecture_is_refused_with_near_names() -> None:
    with pytest.raises(UnsupportedModel) as raised:
        get_model_class("Qwen3NextForCausalLM")
    message = str(raised.value)
    assert "'Qwen3NextForCausalLM'" in message
    assert "did you mean Qwen3ForCausalLM" in message
    assert all(name in message for name in FAMILIES)


def test_nothing_is_near_a_strange_name() -> None:
    with pytest.raises(UnsupportedModel, match=r"'xyz' is not supported \(supported: .*LlamaForCausalLM"):
        get_model_class("xyz")


def test_a_name_belongs_to_one_class() -> None:
    get_model_class("LlamaForCausalLM")
    with pytest.raises(AssertionError, match="registered twice"):
        register_model("LlamaForCausalLM")(dict)


def test_model_files_are_imported_when_one_is_asked_for() -> None:
    code = (
        "import sys; import pagedray.engine.models.registry as r; f = 'pagedray.engine.models.llama';"
        "assert f not in sys.modules; r.get_model_class('LlamaForCausalLM'); assert f in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
