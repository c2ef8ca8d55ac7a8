"""Constrained requests on a GPU: fp32 gives the CPU's tokens, with graphs and without, however far ahead steps run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagedray.engine import LLM, GenerationParams
from pagedray.engine.messages import Constraint
from tests.engine.models.test_families_gpu import GRAPHS, NO_GRAPHS
from tests.engine.worker.grammars import PERSON, Compiler
from tests.engine.worker.test_constrained_steps import MODEL, Answer, check, complete, made_loop, requests, vocabulary

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def alone() -> dict[str, Answer]:
    """Each request by itself, on the CPU."""
    with made_loop(enable_prefix_caching=False, run_ahead=1) as loop:
        return {request.id: complete(loop, [request])[request.id] for request in requests()}


WAYS: dict[str, dict[str, Any]] = {
    "run_ahead 1": {"run_ahead": 1, **GRAPHS},
    "run_ahead 2": {"run_ahead": 2, **GRAPHS},
    "run_ahead 3": {"run_ahead": 3, **GRAPHS},
    "no graphs": {"run_ahead": 3, **NO_GRAPHS},
    "chunks": {"run_ahead": 3, "prefill_chunk_tokens": 5, **GRAPHS},
    "preemption": {"run_ahead": 3, "num_kv_blocks": 44, **GRAPHS},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("per_step", [1, 1000])
def test_tokens_are_those_of_each_request_alone_on_the_cpu(alone: dict[str, Answer], way: str, per_step: int) -> None:
    with made_loop(device="cuda", dtype="float32", **WAYS[way]) as loop:
        check(complete(loop, requests(), per_step), alone)
        check(complete(loop, requests()[::-1], per_step), alone)
        assert (loop.scheduler.stats().num_preemptions > 0) == (way == "preemption")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_constrained_steps_compile_nothing_and_wait_for_tokens_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    compiled: list[str] = []
    prompts = [list(request.prompt_ids) for request in requests()]
    params = [
        GenerationParams(max_tokens=30, temperature=i % 2, seed=i, constraint=request.params.constraint)
        for i, request in enumerate(requests())
    ]
    with LLM(MODEL, device="cuda", dtype="bfloat16", num_kv_blocks=1000, block_size=4) as llm:
        llm.generate(prompts[2:3], GenerationParams(max_tokens=2, constraint=person()), progress=False)
        monkeypatch.setattr(
            triton.knobs.runtime, "jit_post_compile_hook", lambda *args, **kw: compiled.append(kw["repr"])
        )
        torch.cuda.set_sync_debug_mode("error")
        try:
            answers = llm.generate(prompts, params, progress=False)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert compiled == []
    assert all(answer.choices[0].token_ids for answer in answers)


def person() -> Constraint:
    return Constraint(Compiler(vocabulary()).schema(PERSON))
