"""The Triton backend inside the runner, against transformers: interpreted on a CPU, and compiled on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pagedray.engine.messages import TokenLogprobs
from pagedray.engine.worker.attention import step_ints, triton_backend, write_heads
from pagedray.engine.worker.runner import ModelRunner
from pagedray.kernels import paged_decode, paged_prefill, step_tokens, write_qkv
from tests.engine.worker.steps import (
    BLOCK_SIZE,
    FAMILIES,
    Steps,
    make_runner,
    prompt,
    reference_logprobs,
    reference_model,
)
from tests.kernels.conftest import interpreter as interpreter

TOLERANCE = 2e-4  # of a log-probability, float32
ON_A_GPU = [pytest.param(family, marks=pytest.mark.gpu) for family in FAMILIES]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def interpreted(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels launched on CPU tensors, which otherwise take the torch paths."""
    monkeypatch.setattr(triton_backend, "paged_decode", paged_decode.paged_decode_triton)
    monkeypatch.setattr(triton_backend, "paged_prefill", paged_prefill.paged_prefill_triton)
    monkeypatch.setattr(write_heads, "write_qkv", write_qkv.write_qkv_triton)
    monkeypatch.setattr(step_ints, "begin_step", step_tokens.begin_step_triton)


def check(reference: Any, ids: list[int], entries: list[TokenLogprobs | None], tolerance: float = TOLERANCE) -> None:
    """The last len(entries) of ids were sampled greedily."""
    expected = reference_logprobs(reference, ids)
    for position, entry in enumerate(entries, len(ids) - len(entries)):
        assert entry is not None
        assert entry.token_id == ids[position]
        assert entry.logprob == pytest.approx(expected[position - 1].max().item(), abs=tolerance)


def play(reference: Any, runner: ModelRunner, num_tokens: int) -> None:
    """Two prompts of which one comes in chunks while the other decodes; then a third that shares blocks with one."""
    steps = Steps(runner)
    entries: dict[str, list[TokenLogprobs | None]] = {"a": [], "b": [], "c": []}

    def run(plan: dict[str, int]) -> None:
        result = steps.run(plan)
        for name, entry in zip(plan, result.logprobs or [None] * len(plan), strict=True):
            entries[name] += [] if entry is None else [entry]

    steps.begin("a", prompt(9, seed=1), logprobs=2)
    steps.begin("b", prompt(30, seed=2), logprobs=2)
    run({"a": 9})
    run({"b": 13, "a": 1})
    run({"b": 17, "a": 1})
    shared = 5 * BLOCK_SIZE
    steps.begin("c", steps.seqs["b"].ids[:shared] + prompt(6, seed=3), shares="b", num_shared=shared, logprobs=2)
    run({"c": 6, "b": 1, "a": 1})
    for _ in range(num_tokens):
        run({"c": 1, "a": 1, "b": 1})
    for name, found in entries.items():
        check(reference, steps.seqs[name].ids, found)


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3"])
def test_interpreted(interpreted: None, family: str) -> None:
    reference = reference_model(family)
    play(reference, make_runner(reference, backend="triton"), num_tokens=2)


@pytest.mark.parametrize("family", ON_A_GPU)
def test_eager_steps(family: str) -> None:
    reference = reference_model(family)
    play(reference, make_runner(reference, backend="triton", device=torch.device("cuda")), num_tokens=20)


@pytest.mark.parametrize("family", ON_A_GPU)
def test_captured_steps(family: str) -> None:
    reference = reference_model(family)
    runner = make_runner(reference, backend="triton", device=torch.device("cuda"))
    runner.capture((1, 2, 4), (4, 8, 16, 32))
    play(reference, runner, num_tokens=20)


@pytest.mark.gpu
def test_torch_runs_on_a_gpu_too() -> None:
    reference = reference_model("gemma3")
    play(reference, make_runner(reference, device=torch.device("cuda")), num_tokens=5)


@pytest.mark.gpu
def test_fp8_pages_stay_near() -> None:
    """e4m3 has 3 bits after the leading one, so that keys and values are off by up to 6 %: see the README's bound."""
    reference = reference_model("llama")
    device, found = torch.device("cuda"), []
    for dtype, kv_dtype in ((torch.float32, None), (torch.bfloat16, torch.float8_e4m3fn)):
        steps = Steps(make_runner(reference, dtype, backend="triton", device=device, kv_dtype=kv_dtype))
        steps.begin("a", prompt(60, seed=5), prompt_logprobs=0)
        (scored,) = steps.prefill("a", 60).prompt_logprobs
        assert scored is not None and len(scored.entries) == 59
        found.append(torch.tensor([entry.logprob for entry in scored.entries]))
    difference = (found[0] - found[1]).abs()
    assert 0 < difference.mean() < 0.25
