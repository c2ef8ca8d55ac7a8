"""A token whose values are no numbers harms what comes after it, never what came before or shares its pages."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagedray.engine.generation import GenerationParams
from pagedray.engine.llm import LLM
from pagedray.kernels.cpu.library import library_for
from tests.tiny_models import tiny_model

BROKEN = 77  # the token
BEFORE, AFTER = [5, 6, 7, 8, 9, 10], [11, 12, 13]


@pytest.fixture(scope="module", params=[float("nan"), float("inf")], ids=str)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with one broken row of its embedding."""
    target = tmp_path_factory.mktemp("broken") / "model"
    shutil.copytree(tiny_model("llama"), target)
    for path in target.glob("*.safetensors"):
        weights = load_file(path)
        if "model.embed_tokens.weight" in weights:
            weights["model.embed_tokens.weight"][BROKEN] = request.param
            save_file(weights, path, {"format": "pt"})
    return target


def backends() -> list[str]:
    x = torch.zeros(1)
    return ["torch"] if library_for(x, x) is None else ["torch", "cpu"]


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("chunk", [None, 4])
def test_earlier_positions_and_shared_blocks_stay_as_they_are(folder: Path, backend: str, chunk: int | None) -> None:
    params = GenerationParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    follow = GenerationParams(max_tokens=4, temperature=0)
    settings = {"dtype": "float32", "block_size": 4, "num_kv_blocks": 32, "attention_backend": backend}
    with LLM(str(folder), prefill_chunk_tokens=chunk, **settings) as llm:
        clean = llm.generate([BEFORE], params, progress=False)[0].prompt_logprobs
        broken = llm.generate([[*BEFORE, BROKEN, *AFTER]], params, progress=False)[0].prompt_logprobs
        for ours, theirs in zip(broken, clean, strict=False):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-5)
    with LLM(str(folder), prefill_chunk_tokens=chunk, **settings) as llm:
        alone = llm.generate([[*BEFORE, *AFTER]], follow, progress=False)[0].choices[0].token_ids
    with LLM(str(folder), prefill_chunk_tokens=chunk, **settings) as llm:
        llm.generate([[*BEFORE, BROKEN, *AFTER]], follow, progress=False)
        after = llm.generate([[*BEFORE, *AFTER]], follow, progress=False)[0]
    assert after.num_cached_tokens == 4
    assert after.choices[0].token_ids == alone
