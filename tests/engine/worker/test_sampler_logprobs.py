"""Log-probabilities of sampled and of prompt tokens."""

from math import inf

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedray.engine.messages import TokenLogprobs
from pagedray.engine.worker import sampler as sampler_module
from pagedray.engine.worker.sampler import score_tokens
from tests.engine.worker.sampling_reference import (
    STOP_IDS,
    VOCAB,
    ReferenceSequence,
    Rows,
    params,
    sample_one,
    step_logits,
)


def expected_logprobs(z: np.ndarray, token_id: int, k: int) -> TokenLogprobs:
    exact = z.astype(np.float64)
    logprobs = exact - exact.max() - np.log(np.exp(exact - exact.max()).sum())
    order = sorted(range(len(z)), key=lambda i: (-z[i], i))[:k]
    rank = 1 + int((z > z[token_id]).sum())
    return TokenLogprobs(token_id, logprobs[token_id], rank, tuple(order), tuple(logprobs[order]))


def assert_logprobs(found: TokenLogprobs | None, expected: TokenLogprobs) -> None:
    assert found is not None
    assert (found.token_id, found.rank, found.top_ids) == (expected.token_id, expected.rank, expected.top_ids)
    assert found.logprob == pytest.approx(expected.logprob, abs=2e-5)
    assert found.top_logprobs == pytest.approx(expected.top_logprobs, abs=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_of_the_raw_distribution_for_the_rows_that_asked(dtype):
    asked = [None, 0, 3, None, 20, 1]
    changes = {"temperature": 3.0, "top_k": 4, "repetition_penalty": 2.0, "logit_bias": ((5, 4.0),), "min_tokens": 2}
    rows = Rows(len(asked))
    for row, k in enumerate(asked):
        rows.add(row, ReferenceSequence(params(seed=row, logprobs=k, **changes), [5, 6], STOP_IDS))
    logits = torch.stack([step_logits(str(row), 0, dtype=dtype) for row in range(len(asked))])
    token_ids, found = rows.sample(logits, list(range(len(asked)))).to_messages()
    for row, k in enumerate(asked):
        if k is None:
            assert row not in found
        else:
            z = logits[row].float().numpy()
            assert_logprobs(found[row], expected_logprobs(z, token_ids[row], k))


def test_nothing_is_computed_for_logprobs_that_nobody_asked_for(monkeypatch):
    monkeypatch.setattr(sampler_module, "token_logprobs", None)
    assert sample_one([0.0, 1.0], ReferenceSequence(params(temperature=0.0), [0])) == 1
    with pytest.raises(TypeError):
        sample_one([0.0, 1.0], ReferenceSequence(params(logprobs=0), [0]))


@settings(max_examples=40)
@given(num=st.integers(0, 30), rows_at_once=st.integers(1, 40), k=st.integers(0, 20), seed=st.integers(0, 99))
def test_prompt_logprobs_in_chunks_of_any_size(num, rows_at_once, k, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn((num, VOCAB), generator=generator).mul(3).bfloat16()
    targets = torch.randint(0, VOCAB, (num,), generator=generator)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler_module, "max_rows", lambda vocab, device: rows_at_once)
        found = score_tokens(logits, targets, k).to_messages()
    assert len(found) == num
    for i, entry in enumerate(found):
        assert_logprobs(entry, expected_logprobs(logits[i].float().numpy(), int(targets[i]), k))


def test_impossible_tokens_have_a_finite_logprob():
    (entry,) = score_tokens(torch.tensor([[0.0, -inf, 0.0]]), torch.tensor([1]), 3).to_messages()
    assert entry.logprob == -9999.0 and entry.rank == 3
    assert entry.top_ids == (0, 2, 1) and entry.top_logprobs[2] == -9999.0
