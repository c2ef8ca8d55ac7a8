"""The same on a GPU: float32 gives the same tokens with graphs and without, in every mode and on every backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagedray.engine import LLM, GenerationParams
from tests.engine.models.cases import CASES
from tests.engine.models.test_families import MAX_TOKENS, expected, prompts, settings, smallest_pool
from tests.fakes import ByteTokenizer
from tests.step_loop import StepLoop
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.gpu
NO_GRAPHS = {"cuda_graphs": False}
GRAPHS = {"cuda_graph_sizes": (1, 2, 4, 8), "cuda_graph_token_sizes": (8, 16, 32, 64)}


def on_gpu(**more: Any) -> dict[str, Any]:
    return settings(device="cuda", dtype="float32", **more)


@pytest.mark.parametrize("run_ahead,chunk,graphs", [(1, 7, NO_GRAPHS), (2, None, GRAPHS), (3, 16, GRAPHS)])
@pytest.mark.parametrize("name", CASES)
def test_a_batch_cold_then_warm(name: str, run_ahead: int, chunk: int | None, graphs: dict[str, Any]) -> None:
    with StepLoop(str(tiny_model(name)), **on_gpu(run_ahead=run_ahead, prefill_chunk_tokens=chunk, **graphs)) as loop:
        cold = loop.generate(prompts(), MAX_TOKENS)
        warm = loop.generate(prompts(), MAX_TOKENS)
    assert [output.token_ids for output in cold] == expected(name)
    assert [output.token_ids for output in warm] == expected(name)


@pytest.mark.parametrize("name", CASES)
def test_preempted_sequences_go_on_as_if_nothing_happened(name: str) -> None:
    tight = {"num_kv_blocks": smallest_pool(name, 7), "run_ahead": 3, "prefill_chunk_tokens": 7}
    with StepLoop(str(tiny_model(name)), **on_gpu(**tight, **GRAPHS)) as loop:
        outputs = loop.generate(prompts(), MAX_TOKENS)
    assert [output.token_ids for output in outputs] == expected(name)


def test_the_torch_backend_too() -> None:
    with StepLoop(str(tiny_model("gemma3")), **on_gpu(attention_backend="torch")) as loop:
        assert [output.token_ids for output in loop.generate(prompts(), MAX_TOKENS)] == expected("gemma3")


PARAMS = [
    GenerationParams(max_tokens=12, seed=5, temperature=0.8, ignore_eos=True),
    GenerationParams(max_tokens=12, seed=6, top_p=0.8, ignore_eos=True),
    GenerationParams(max_tokens=12, seed=7, top_k=20, min_p=0.05, ignore_eos=True),
    GenerationParams(max_tokens=12, seed=8, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2),
    GenerationParams(max_tokens=12, seed=9, logit_bias=((5, 3.0), (6, -100.0)), min_tokens=4),
    GenerationParams(max_tokens=12, temperature=0.0, bad_token_ids=(7, 8), logprobs=3, prompt_logprobs=1),
    GenerationParams(max_tokens=12, seed=11, allowed_token_ids=(10, 11, 12, 13), n=2),
    GenerationParams(max_tokens=12, temperature=0.0, ignore_eos=True),
]


def generate(name: str, **more: Any) -> Any:
    with LLM(str(tiny_model(name)), tokenizer=ByteTokenizer(), **settings(dtype="float32", **more)) as llm:  # type: ignore[arg-type]
        return llm.generate(prompts(), PARAMS, progress=False)


@pytest.mark.parametrize("run_ahead", [1, 3])
def test_seeded_sampling_gives_the_tokens_of_the_cpu(run_ahead: int) -> None:
    there = generate("llama", device="cpu")
    here = generate("llama", device="cuda", run_ahead=run_ahead, **GRAPHS)
    for a, b in zip(there, here, strict=True):
        assert [choice.token_ids for choice in a.choices] == [choice.token_ids for choice in b.choices]
        for one, other in zip(a.choices, b.choices, strict=True):
            assert [entry.top_ids for entry in one.logprobs] == [entry.top_ids for entry in other.logprobs]
            assert [e.logprob for e in one.logprobs] == pytest.approx([e.logprob for e in other.logprobs], abs=2e-4)
        assert [e.logprob for e in a.prompt_logprobs] == pytest.approx([e.logprob for e in b.prompt_logprobs], abs=2e-4)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_steps_wait_for_nothing_and_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the start: every kernel was compiled, and no step makes the host wait for the device."""
    import triton

    compiled: list[str] = []
    with LLM(str(tiny_model("qwen3")), tokenizer=ByteTokenizer(), **settings(device="cuda", dtype="bfloat16")) as llm:  # type: ignore[arg-type]
        monkeypatch.setattr(
            triton.knobs.runtime, "jit_post_compile_hook", lambda *args, **kw: compiled.append(kw["repr"])
        )
        torch.cuda.set_sync_debug_mode("error")
        try:
            params = GenerationParams(max_tokens=12, temperature=0.7, top_p=0.9, seed=1, ignore_eos=True)
            llm.generate(prompts(), params, progress=False)
            llm.generate(prompts()[::-1], GenerationParams(max_tokens=30, temperature=0.0), progress=False)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert compiled == []
