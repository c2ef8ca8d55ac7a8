"""Logits that are not numbers: NaN and infinities hurt their own row only."""

from math import inf, nan

import pytest
import torch

from pagedray.engine.messages import TokenLogprobs
from tests.engine.worker.sampling_reference import (
    STOP_IDS,
    VOCAB,
    ReferenceSequence,
    Rows,
    hash_seed,
    params,
    sample_one,
    step_logits,
)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.0},
        {},
        {"top_k": 5},
        {"top_p": 0.5},
        {"min_p": 0.1},
        {"repetition_penalty": 1e-60, "logprobs": 3},
        {"allowed_token_ids": (7, 9)},
        {"min_tokens": 4, "frequency_penalty": 1.0},
        {"logit_bias": ((7, 1.0),), "logprobs": 20},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_broken_rows_do_not_touch_their_neighbours(settings, dtype):
    broken = {
        "nan": torch.full((VOCAB,), nan),
        "one nan": torch.zeros(VOCAB).index_fill(0, torch.tensor([40]), nan),
        "-inf": torch.full((VOCAB,), -inf),
        "inf": torch.zeros(VOCAB).index_fill(0, torch.tensor([20, 30]), inf),
    }
    sound = {f"sound {i}": step_logits(f"sound {i}", 0) for i in range(4)}
    mixed = [name for pair in zip(broken, sound, strict=True) for name in pair]

    def run(names: list[str]) -> dict[str, tuple[int, TokenLogprobs | None]]:
        rows = Rows(len(names))
        for row, name in enumerate(names):
            rows.add(row, ReferenceSequence(params(seed=hash_seed(name, 0), **settings), [1, 2], STOP_IDS))
        logits = torch.stack([(broken | sound)[name] for name in names]).to(dtype)
        before = logits.clone()
        token_ids, logprobs = rows.sample(logits, list(range(len(names)))).to_messages()
        torch.testing.assert_close(logits, before, rtol=0, atol=0, equal_nan=True)
        return {name: (token_ids[i], logprobs.get(i)) for i, name in enumerate(names)}

    together, alone = run(mixed), run(list(sound))
    assert {name: together[name] for name in sound} == alone
    for name in broken:
        token_id, logprobs = together[name]
        assert 0 <= token_id < VOCAB
        assert token_id in settings.get("allowed_token_ids", range(VOCAB))
        if logprobs is not None:
            assert all(-9999 <= x <= 0 for x in (logprobs.logprob, *logprobs.top_logprobs))


def test_what_broken_rows_give():
    greedy = params(temperature=0.0)
    assert sample_one([nan] * 5, ReferenceSequence(greedy, [0])) == 0
    assert sample_one([nan, 1.0, 2.0], ReferenceSequence(greedy, [0])) == 2
    assert sample_one([0.0, inf, inf], ReferenceSequence(greedy, [0])) == 1
    assert sample_one([nan] * 5, ReferenceSequence(params(temperature=0.0, allowed_token_ids=(3, 4)), [0])) == 3
    # the allowed tokens are all impossible, the others are not: the mask wins
    assert sample_one([1.0, -inf, -inf], ReferenceSequence(params(allowed_token_ids=(1, 2)), [0])) in (1, 2)
    assert {sample_one([nan] * 3, ReferenceSequence(params(seed=seed), [0])) for seed in range(30)} == {0, 1, 2}
