"""FlashInfer beside our own kernels: the same distribution, within bfloat16's noise."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from tests.engine.worker import steps
from tests.engine.worker.steps import Steps, make_runner, prompt, reference_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed"),
]


@pytest.mark.parametrize("options", [{}, {"sliding_window": 9}])
def test_log_probabilities_of_a_prompt_in_chunks_and_of_tokens(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, int]
) -> None:
    name = "Mistral" if options else "Llama"
    monkeypatch.setitem(steps.FAMILIES, "wide-heads", (name, {"head_dim": 64, **options}))
    reference, found = reference_model("wide-heads"), []
    for backend in ("triton", "flashinfer"):
        played = Steps(make_runner(reference, torch.bfloat16, backend=backend, device=torch.device("cuda")))
        played.begin("a", prompt(50, seed=1), prompt_logprobs=0)
        played.begin("b", prompt(7, seed=2))
        played.prefill("b", 7)
        entries = []
        for plan in ({"a": 17, "b": 1}, {"a": 16, "b": 1}, {"a": 16}, {"a": 1}):
            parts = played.run(plan).prompt_logprobs
            entries += [entry.logprob for part in parts if part for entry in part.entries]
        assert len(entries) == 49
        found.append(torch.tensor(entries))
    difference = (found[0] - found[1]).abs()
    assert difference.max() < 0.3
    assert difference.mean() < 0.03
