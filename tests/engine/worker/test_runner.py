"""The runner against transformers: the same distribution at every position, however the work is cut into steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pagedray.engine.messages import TokenLogprobs
from tests.engine.worker.steps import (
    BLOCK_SIZE,
    FAMILIES,
    Steps,
    make_runner,
    prompt,
    reference_logprobs,
    reference_model,
    spec_of,
)

TOLERANCE = 2e-4  # of a log-probability, float32


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small only wait for each other's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def references() -> dict[str, Any]:
    return {family: reference_model(family) for family in FAMILIES}


def check_sampled(reference: Any, ids: list[int], entries: list[TokenLogprobs | None]) -> None:
    """The last len(entries) of ids were sampled greedily with 4 alternatives."""
    expected = reference_logprobs(reference, ids)
    first = len(ids) - len(entries)
    for position, entry in enumerate(entries, first):
        assert entry is not None
        assert entry.token_id == ids[position]
        row = expected[position - 1]
        assert entry.logprob == pytest.approx(row[entry.token_id].item(), abs=TOLERANCE)
        assert entry.logprob == pytest.approx(row.max().item(), abs=TOLERANCE)
        torch.testing.assert_close(
            torch.tensor(entry.top_logprobs, dtype=torch.float64), row.topk(4).values, rtol=0, atol=TOLERANCE
        )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [1, 7, 16, 1000])
def test_one_sequence_in_chunks(references: dict[str, Any], family: str, chunk: int) -> None:
    reference = references[family]
    steps = Steps(make_runner(reference))
    steps.begin("a", prompt(41, seed=1), logprobs=4)
    entries = [steps.prefill("a", chunk).logprobs[0]]
    entries += [steps.run({"a": 1}).logprobs[0] for _ in range(9)]
    check_sampled(reference, steps.seqs["a"].ids, entries)


@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_and_prefilling_sequences_in_one_step(references: dict[str, Any], family: str) -> None:
    reference = references[family]
    steps = Steps(make_runner(reference))
    entries: dict[str, list[TokenLogprobs | None]] = {}
    waiting = {f"s{i}": prompt(length, seed=length) for i, length in enumerate([3, 50, 1, 18, 31, 2, 66, 9])}
    for turn in range(30):
        if waiting and turn % 2 == 0:
            name = next(iter(waiting))
            steps.begin(name, waiting.pop(name), logprobs=4)
            entries[name] = []
        # newest first, so that the plan's order is not the batch's
        plan = {name: min(len(s.ids) - s.num_computed, 11) for name, s in reversed(steps.seqs.items())}
        result = steps.run(plan)
        for name, entry in zip(plan, result.logprobs or [None] * len(plan), strict=True):
            if entry is not None:
                entries[name].append(entry)
    assert min(map(len, entries.values())) > 8
    for name, found in entries.items():
        check_sampled(reference, steps.seqs[name].ids, found)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_blocks_of_another_sequence_serve_as_a_prefix(references: dict[str, Any], family: str) -> None:
    reference, ids = references[family], prompt(30, seed=3)
    steps = Steps(make_runner(reference))
    steps.begin("cold", ids, logprobs=4)
    steps.prefill("cold", 30)
    steps.begin("warm", ids[:24] + prompt(9, seed=4), shares="cold", num_shared=24, logprobs=4)
    steps.begin("same step", ids[:29], shares="cold", num_shared=28, logprobs=4)
    result = steps.run({"warm": 9, "cold": 1, "same step": 1})
    for i, name in enumerate(["warm", "cold", "same step"]):
        check_sampled(reference, steps.seqs[name].ids, [result.logprobs[i]])


def test_a_prefix_written_and_read_in_one_step(references: dict[str, Any]) -> None:
    reference, ids = references["llama"], prompt(30, seed=3)
    steps = Steps(make_runner(reference))
    steps.begin("first", ids, logprobs=4)
    steps._extend(steps.seqs["first"], 30)
    steps.begin("second", ids[:12] + prompt(5, seed=5), shares="first", num_shared=12, logprobs=4)
    steps.begin("third", ids[:13], shares="first", num_shared=12, logprobs=4)
    result = steps.run({"third": 1, "second": 5, "first": 30})
    for i, name in enumerate(["third", "second", "first"]):
        check_sampled(reference, steps.seqs[name].ids, [result.logprobs[i]])


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_pages_outside_the_window_are_never_read(references: dict[str, Any], family: str) -> None:
    """They may belong to another sequence by then: here they hold what would spoil everything."""
    reference = references[family]
    runner = make_runner(reference)
    steps = Steps(runner)
    for name, length in [("a", 37), ("b", 23)]:
        steps.begin(name, prompt(length, seed=length), logprobs=4)
    for chunk in (13, 10, 1, 1):
        steps.run({name: min(chunk, len(seq.ids) - seq.num_computed) for name, seq in steps.seqs.items()})
        for seq in steps.seqs.values():
            for group, window in enumerate(runner.cache.windows):
                if window is not None:
                    for block in seq.blocks[group][: max(0, seq.num_computed + 1 - window) // BLOCK_SIZE]:
                        for pages in runner.cache.pages:
                            pages[block] = torch.nan
    while len(steps.seqs["a"].ids) < 45:
        result = steps.run({name: min(3, len(seq.ids) - seq.num_computed) for name, seq in steps.seqs.items()})
    for i, name in enumerate(["a", "b"]):
        check_sampled(reference, steps.seqs[name].ids, [result.logprobs[i]])


def test_a_row_is_reused_in_the_step_that_frees_it(references: dict[str, Any]) -> None:
    reference = references["llama"]
    steps = Steps(make_runner(reference, num_rows=1))
    steps.begin("old", prompt(20, seed=1))
    steps.prefill("old", 20)
    steps.end("old")
    steps.begin("new", prompt(6, seed=2), logprobs=4)
    entries = [steps.run({"new": 6}).logprobs[0], steps.run({"new": 1}).logprobs[0]]
    check_sampled(reference, steps.seqs["new"].ids, entries)


def test_a_preempted_sequence_comes_back_in_another_row(references: dict[str, Any]) -> None:
    reference, ids = references["qwen3"], prompt(10, seed=8)
    steps = Steps(make_runner(reference))
    steps.begin("a", ids)
    steps.prefill("a", 10)
    for _ in range(7):
        steps.run({"a": 1})
    so_far = steps.seqs["a"].ids
    steps.begin("other", prompt(3, seed=1))
    steps.end("a")
    steps.begin("back", so_far, num_prompt=10, logprobs=4)
    steps.run({"other": 3, "back": 5})
    entries = [steps.prefill("back", 100).logprobs[0], steps.run({"back": 1, "other": 1}).logprobs[0]]
    check_sampled(reference, steps.seqs["back"].ids, entries)


@pytest.mark.parametrize("chunk", [1, 7, 16, 1000])
@pytest.mark.parametrize("max_logits", [3, 128])
def test_prompt_logprobs(
    references: dict[str, Any], chunk: int, max_logits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagedray.engine.worker.runner._PROMPT_LOGITS_ROWS", max_logits)
    reference, ids = references["gemma3"], prompt(19, seed=6)
    steps = Steps(make_runner(reference))
    steps.begin("asks", ids, prompt_logprobs=2)
    steps.begin("doesn't", prompt(40, seed=7))
    found: list[TokenLogprobs] = []
    while len(steps.seqs["asks"].ids) < 23:
        left = len(steps.seqs["asks"].ids) - steps.seqs["asks"].num_computed
        result = steps.run({"doesn't": 1, "asks": min(chunk, left)})
        if result.prompt_logprobs:
            assert result.prompt_logprobs[0] is None
            part = result.prompt_logprobs[1]
            assert part is not None
            assert part.start == len(found) + 1
            found += part.entries
        else:
            assert len(found) == 18
    expected = reference_logprobs(reference, ids)
    assert [entry.token_id for entry in found] == ids[1:]
    for position, entry in enumerate(found):
        row = expected[position]
        assert entry.logprob == pytest.approx(row[entry.token_id].item(), abs=TOLERANCE)
        assert entry.top_logprobs == pytest.approx(row.topk(2).values.tolist(), abs=TOLERANCE)
        assert entry.rank == 1 + int((row > row[entry.token_id]).sum())


def test_prompt_logprobs_of_a_resumed_sequence_stop_at_its_prompt(references: dict[str, Any]) -> None:
    steps = Steps(make_runner(references["llama"]))
    steps.begin("a", prompt(12, seed=1), num_prompt=8, prompt_logprobs=0)
    part = steps.run({"a": 12}).prompt_logprobs[0]
    assert part is not None
    assert (part.start, [entry.token_id for entry in part.entries]) == (1, prompt(12, seed=1)[1:8])


def test_a_step_that_only_frees_rows(references: dict[str, Any]) -> None:
    steps = Steps(make_runner(references["llama"]))
    steps.begin("a", prompt(4, seed=1))
    steps.run({"a": 4})
    steps.end("a")
    assert steps.run({}).token_ids == ()
    assert steps.runner.rows.num_known_cpu.sum() == 0


def test_nobody_asked_for_logprobs(references: dict[str, Any]) -> None:
    steps = Steps(make_runner(references["llama"]))
    steps.begin("a", prompt(4, seed=1))
    result = steps.run({"a": 4})
    assert (result.logprobs, result.prompt_logprobs) == ((), ())


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_rounds_about_as_much_as_transformers_does(references: dict[str, Any], family: str) -> None:
    coarse = reference_model(family, torch.bfloat16)
    exact = reference_model(family, torch.bfloat16).float()  # the same weights
    ids = prompt(60, seed=5)
    steps = Steps(make_runner(coarse, dtype=torch.bfloat16))
    steps.begin("a", ids, prompt_logprobs=0)
    found = []
    for chunk in (30, 20, 9, 1):
        part = steps.run({"a": chunk}).prompt_logprobs
        found += [entry.logprob for entry in part[0].entries] if part and part[0] else []
    at = torch.arange(59), torch.tensor(ids[1:])
    truth = reference_logprobs(exact, ids)[at]
    ours, theirs = torch.tensor(found) - truth, reference_logprobs(coarse, ids)[at] - truth
    assert theirs.norm() > 0.01  # otherwise this compares nothing
    assert ours.norm() < 1.5 * theirs.norm()


def test_groups_have_tables_of_their_own(references: dict[str, Any]) -> None:
    spec = spec_of(references["gemma3"])
    assert spec.windows == (7, 7, None, 7, 7)
    assert make_runner(references["gemma3"]).cache.windows == (None, 7, 7, 7, 7)
