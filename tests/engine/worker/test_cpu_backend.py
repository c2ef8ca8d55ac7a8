"""The backend of compiled kernels inside the runner, against transformers."""

from __future__ import annotations

import pytest
import torch

from pagedray.kernels.cpu.library import compiled_kernels
from tests.engine.worker.steps import FAMILIES, Steps, make_runner, prompt, reference_model
from tests.engine.worker.test_triton_backend import play


@pytest.fixture(autouse=True)
def needs_compiled_kernels() -> None:
    if compiled_kernels().library is None:
        pytest.skip(compiled_kernels().reason)


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_are_transformers_own(family: str) -> None:
    reference = reference_model(family)
    play(reference, make_runner(reference, backend="cpu"), num_tokens=20)


def test_bfloat16_stays_as_near_as_with_torch() -> None:
    """Torch's own products of bfloat16 may shape the CPU's tile registers otherwise between two layers."""
    reference = reference_model("llama", torch.bfloat16)
    found: dict[str, list[float]] = {}
    for backend in ("cpu", "torch"):
        steps = Steps(make_runner(reference, torch.bfloat16, backend=backend))
        steps.begin("a", prompt(60, seed=4), prompt_logprobs=0)
        result = steps.prefill("a", chunk=60)
        assert result.prompt_logprobs[0] is not None
        found[backend] = [entry.logprob for entry in result.prompt_logprobs[0].entries]
    assert found["cpu"] == pytest.approx(found["torch"], abs=0.15)
