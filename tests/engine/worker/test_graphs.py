"""Captured steps give the tokens of eager ones, whatever their rows ask for. On a CPU a replay is a call."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

from pagedray.engine.grammar.vocabulary import Vocabulary
from pagedray.engine.messages import (
    Constraint,
    NewSeq,
    ReasoningSpan,
    RunnerOutput,
    SamplingParams,
    ScheduledSeq,
    SchedulerOutput,
)
from pagedray.engine.worker import graphs
from pagedray.engine.worker.constraints import Constraints
from pagedray.engine.worker.gpu_sampler import GpuSampler, GpuSamplingState
from pagedray.engine.worker.runner import ModelRunner, PendingOutput
from pagedray.kernels import sample_rows as fields
from tests.engine.worker.grammars import Compiler
from tests.engine.worker.steps import BLOCK_SIZE, SIZES, make_runner, prompt, reference_model

R = TypeVar("R")
NUM_ROWS, NUM_SEQS, NUM_TOKENS = 12, (1, 2, 4, 8), (8, 16, 32)
PLAIN: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.9},
    "top_k and top_p": {"top_k": 12, "top_p": 0.8},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.05, "temperature": 1.3},
    "all": {},
}
OTHERS: dict[str, dict[str, Any]] = {
    "logprobs": {"temperature": 0.0, "logprobs": 2},
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.5},
    "bias": {"logit_bias": ((3, 2.5), (8, -50.0)), "top_k": 20},
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    if request.param == "cpu":
        monkeypatch.setattr(graphs, "capture", call_instead)
    return torch.device(request.param)


class Caller:
    """Stands in for a Recorder: queues a function again by calling it, and leaves what it makes at the same place."""

    def record(self, function: Callable[[], R]) -> tuple[Callable[[], None], R]:
        made = function()

        def again() -> None:
            fresh = function()
            if isinstance(made, torch.Tensor):
                made.copy_(fresh)  # type: ignore[arg-type]

        return again, made


@torch.inference_mode()
def call_instead(layouts: list[Any], make: Callable[[Any, Any], Any], device: torch.device) -> dict[Any, Any]:
    return {layout: make(layout, Caller()) for layout in layouts}


def gpu_runner(device: torch.device, family: str = "llama") -> ModelRunner:
    """Also on a CPU with the parts that a GPU has."""
    runner = make_runner(reference_model(family), num_rows=NUM_ROWS, backend="triton", device=device)
    runner.sampling = GpuSamplingState(NUM_ROWS, SIZES["vocab_size"], device)
    runner.sampler = GpuSampler(runner.sampling)
    return runner


class Plans:
    """Steps that are known before any token is: each sequence has as many tokens as its steps give it."""

    def __init__(self, num_groups: int):
        self.outs: list[SchedulerOutput] = []
        self._num_groups, self._next_block = num_groups, 1
        self._at: dict[int, int] = {}  # row → tokens that were computed
        self._ends: dict[int, int] = {}  # row → its prompt's length
        self._num_blocks: Counter[int] = Counter()
        self._added: list[NewSeq] = []
        self._freed: list[int] = []

    def begin(self, row: int, length: int, **params: Any) -> None:
        settings = SamplingParams(**{"max_tokens": 100, "seed": 1000 + row, **params})
        self._added.append(NewSeq(f"s{row}", row, tuple(prompt(length, seed=row)), length, settings, ()))
        self._at[row], self._ends[row] = 0, length

    def end(self, row: int) -> None:
        self._freed.append(row)
        del self._at[row], self._ends[row], self._num_blocks[row]

    def step(self, num_tokens: dict[int, int]) -> None:
        parts = []
        for row, count in num_tokens.items():
            start, end = self._at[row], self._at[row] + count
            blocks = []
            while self._num_blocks[row] * BLOCK_SIZE < end:
                blocks.append(self._next_block)
                self._next_block, self._num_blocks[row] = self._next_block + 1, self._num_blocks[row] + 1
            groups = range(self._num_groups)  # no block belongs to two
            new = tuple(tuple(block * self._num_groups + group for block in blocks) for group in groups)
            parts.append(ScheduledSeq(f"s{row}", row, start, count, end >= self._ends[row], new))
            self._at[row] = end
        out = SchedulerOutput(len(self.outs), tuple(self._added), tuple(parts), tuple(self._freed))
        self.outs.append(out)
        self._added, self._freed = [], []

    def decode(self, *rows: int, times: int = 1) -> None:
        for _ in range(times):
            self.step(dict.fromkeys(rows, 1))


def play(runner: ModelRunner, outs: list[SchedulerOutput], run_ahead: int = 1) -> list[RunnerOutput]:
    waiting: list[PendingOutput] = []
    found = []
    for out in outs:
        waiting.append(runner.run(out))
        if len(waiting) == run_ahead:
            found.append(waiting.pop(0).wait())
    return found + [pending.wait() for pending in waiting]


def tokens_of(found: list[RunnerOutput]) -> list[tuple[int, ...]]:
    return [output.token_ids for output in found]


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which way each step takes: "captured", "hidden" (captured, but sampled eagerly) or "eager"."""
    taken: list[str] = []

    def told(owner: type, name: str, way: str) -> None:
        inner = getattr(owner, name)

        def outer(*args: Any) -> Any:
            taken.append(way)
            return inner(*args)

        monkeypatch.setattr(owner, name, outer)

    told(graphs.StepGraph, "sample", "captured")
    told(graphs.StepGraph, "forward", "hidden")
    told(ModelRunner, "_forward", "eager")
    return taken


def plain_plans(num_groups: int) -> Plans:
    """Prompts whole and in chunks, some that end, rows that are taken again; steps of all sizes and paddings."""
    plans = Plans(num_groups)
    for row, (settings, length) in enumerate(zip(PLAIN.values(), (5, 9, 3, 14, 6, 1), strict=True)):
        plans.begin(row, length, **settings)
    plans.step({0: 5, 1: 4})
    plans.step({0: 1, 1: 5, 2: 3})
    plans.decode(2, 0, 1, times=2)
    plans.step({3: 7, 0: 1, 2: 1})
    plans.step({3: 7, 4: 6, 5: 1, 1: 1, 0: 1})
    plans.decode(5, 4, 3, 2, 1, 0, times=2)
    plans.end(2)
    plans.decode(0, 1, 3, 4, 5, times=3)
    plans.begin(2, 6, top_k=5, seed=77)
    plans.step({4: 1, 2: 6})
    plans.decode(4, times=3)
    plans.decode(2, 4, times=2)
    plans.decode(5, 2, 3, times=6)
    return plans


@pytest.mark.parametrize("run_ahead", [1, 2, 3])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_plain_rows(device: torch.device, family: str, run_ahead: int, ways: list[str]) -> None:
    eager, captured = gpu_runner(device, family), gpu_runner(device, family)
    captured.capture(NUM_SEQS, NUM_TOKENS)
    outs = plain_plans(len(eager.cache.windows)).outs
    expected = play(eager, outs)
    assert ways == ["eager"] * len(outs)
    ways.clear()
    found = play(captured, outs, run_ahead)
    assert ways == ["captured"] * len(outs)
    assert found == expected
    assert torch.equal(captured.rows.last_token[:NUM_ROWS], eager.rows.last_token[:NUM_ROWS])


@pytest.mark.parametrize("run_ahead", [1, 3])
def test_rows_that_ask_for_more_between_plain_ones(device: torch.device, run_ahead: int, ways: list[str]) -> None:
    plans = Plans(1)
    for row, settings in enumerate([*PLAIN.values(), *OTHERS.values()]):
        plans.begin(row, 2 + row, **settings)
    plans.step({row: 2 + row for row in range(4)})  # captured, as are all steps of rows 0 to 5
    plans.step({**dict.fromkeys(range(4), 1), 4: 6, 5: 7})
    plans.decode(*range(6))
    plans.step({**dict.fromkeys(range(6), 1), 6: 8})  # logprobs are asked for from here on
    plans.decode(6, 0, 5)
    plans.decode(0, 5)
    plans.step({7: 9, 8: 10, 0: 1})
    plans.decode(*range(8))
    plans.decode(*range(9))  # more than any graph holds
    plans.decode(0, 1, 2, 7)
    plans.decode(0, 1, 2, 3)
    expected_ways = ["captured"] * 3 + ["hidden"] * 2 + ["captured"] + ["hidden"] * 2 + ["eager", "hidden", "captured"]
    eager, captured = gpu_runner(device), gpu_runner(device)
    captured.capture(NUM_SEQS, NUM_TOKENS)
    expected = play(eager, plans.outs)
    ways.clear()
    found = play(captured, plans.outs, run_ahead)
    assert ways == expected_ways
    assert tokens_of(found) == tokens_of(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert [entry is None for entry in ours.logprobs] == [entry is None for entry in theirs.logprobs]
        for one, other in zip(ours.logprobs, theirs.logprobs, strict=True):
            if one is not None and other is not None:
                assert (one.token_id, one.rank, one.top_ids) == (other.token_id, other.rank, other.top_ids)
                assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
    assert any(output.logprobs for output in found)


LETTERS = Vocabulary((*(bytes([32 + i]) for i in range(95)), b"<eos>"), (95,), (95,))


@pytest.mark.parametrize("run_ahead", [1, 2, 3])
def test_constrained_rows_between_plain_ones(device: torch.device, run_ahead: int, ways: list[str]) -> None:
    """Steps that have one among them are replayed up to the hidden states; the others are as fast as ever."""
    word, digits = (Constraint(Compiler(LETTERS).regex(regex)) for regex in ("[a-f]{30}", "[0-9]{30}"))
    budget = Constraint(reasoning=ReasoningSpan(b"", b"~~", (94, 94), is_open=True, max_tokens=7))
    plans = Plans(1)
    for row, settings in enumerate([*PLAIN.values(), *OTHERS.values()]):
        plans.begin(row, 2 + row, **settings, **({"constraint": word} if row == 6 else {}))
    plans.begin(9, 4, constraint=word)
    plans.begin(10, 5, constraint=digits, top_k=5, frequency_penalty=1.0)
    plans.begin(11, 3, constraint=budget)
    plans.step({0: 2, 1: 3, 11: 3})
    plans.decode(0, 1, 11, times=6)
    plans.step({9: 4, 0: 1, 10: 5})
    plans.decode(0, 9, 10, times=2)
    plans.decode(0, 1)
    plans.decode(11, 0, times=4)  # the budget is spent; with its last forced token known, nothing restricts the row
    plans.step({2: 4, 3: 5, 6: 8})
    plans.decode(9, 10, 2, 6, times=3)
    plans.step({4: 6, 5: 7, 7: 9, 8: 10})
    plans.decode(*range(12))  # more than any graph holds
    plans.end(9)
    plans.begin(9, 7, constraint=digits)
    plans.step({9: 7})
    plans.decode(9, 10, times=2)
    eager, captured = gpu_runner(device), gpu_runner(device)
    captured.capture(NUM_SEQS, NUM_TOKENS)
    for runner in (eager, captured):
        runner.constraints = Constraints(NUM_ROWS, SIZES["vocab_size"], lambda: LETTERS)
    expected = play(eager, plans.outs)
    ways.clear()
    found = play(captured, plans.outs, run_ahead)
    assert tokens_of(found) == tokens_of(expected)
    assert all(output.failed == () for output in found + expected)
    assert ways[:7] == ["captured"] * 7 and ways[7:10] == ["hidden"] * 3 and ways[10] == "captured"
    assert ways[11:15] == ["hidden"] * 3 + ["captured"]
    output: dict[str, list[int]] = {}
    for plan, result in zip(plans.outs, found, strict=True):
        for seq, token_id in zip(plan.scheduled, result.token_ids, strict=True):
            if seq.samples and (seq.seq_id != "s9" or result.step < len(plans.outs) - 3):
                output.setdefault(seq.seq_id, []).append(token_id)
    for name, regex in (("s6", "[a-f]+"), ("s9", "[a-f]+"), ("s10", "[0-9]+")):
        assert re.fullmatch(regex, "".join(chr(32 + token_id) for token_id in output[name]))
    assert output["s11"][7:9] == [94, 94] and 94 not in output["s11"][:7]


def test_a_prompt_that_is_scored_runs_eagerly(device: torch.device, ways: list[str]) -> None:
    plans = Plans(1)
    plans.begin(0, 7, temperature=0.0, prompt_logprobs=1)
    plans.step({0: 7})
    plans.decode(0, times=2)
    captured = gpu_runner(device)
    captured.capture(NUM_SEQS, NUM_TOKENS)
    found = play(captured, plans.outs)
    assert ways == ["eager", "captured", "captured"]
    assert tokens_of(found) == tokens_of(play(gpu_runner(device), plans.outs))
    assert found[0].prompt_logprobs[0] is not None


def test_chunks_that_sample_nothing_leave_the_last_tokens_alone(device: torch.device) -> None:
    plans = Plans(1)
    plans.begin(0, 3, temperature=0.0)
    plans.begin(1, 30, temperature=0.0)
    plans.step({0: 3})
    plans.step({1: 8})
    plans.step({1: 8})
    runner = gpu_runner(device)
    runner.capture(NUM_SEQS, NUM_TOKENS)
    found = tokens_of(play(runner, plans.outs[:1]))
    before = runner.rows.last_token[:NUM_ROWS].tolist()
    assert before[0] == found[0][0]
    assert tokens_of(play(runner, plans.outs[1:])) == [(-1,), (-1,)]
    assert runner.rows.last_token[:NUM_ROWS].tolist() == before


def test_results_may_be_read_long_after(device: torch.device) -> None:
    """Later than their memory is used again."""
    plans = Plans(1)
    for row in range(3):
        plans.begin(row, 4, seed=row)
    plans.step(dict.fromkeys(range(3), 4))
    plans.decode(0, 1, 2, times=20)
    runner = gpu_runner(device)
    runner.capture(NUM_SEQS, NUM_TOKENS)
    pending = [runner.run(out) for out in plans.outs]
    assert [p.wait().token_ids for p in pending[::-1]][::-1] == tokens_of(play(gpu_runner(device), plans.outs))


def test_fields_of_a_captured_step() -> None:
    state = GpuSamplingState(5, 50, torch.device("cpu"))
    for row, settings in ((1, {"temperature": 0.0, "top_k": 7}), (3, {"temperature": 0.5, "top_k": 9, "seed": 12})):
        state.add(NewSeq("s", row, (1, 2), 2, SamplingParams(**{"max_tokens": 9, "seed": 4, **settings}), ()))
    into = np.full((len(fields.FIELDS), 4), -1)
    assert not state.fill(np.array([3, 1]), np.array([8, 6]), 20, into)
    assert into[fields.SOURCE].tolist() == [0, 1, 2, 3]
    assert into[fields.TARGET].tolist() == [3, 1, 5, 5]  # padding goes to the spare row, and to results of its own
    assert into[fields.RESULT].tolist() == [20, 21, 22, 23]
    assert into[fields.SEED].tolist() == [12, 4, 0, 0]
    assert into[fields.POSITION, :2].tolist() == [8, 6]
    assert into[fields.TOP_K, :2].tolist() == [9, 7]
    assert into[fields.TEMPERATURE].view(np.float64).tolist() == [0.5, 0.0, 0.0, 0.0]
    assert state.fill(np.array([1]), np.array([3]), 0, into)


def test_which_rows_are_plain() -> None:
    state = GpuSamplingState(6, 50, torch.device("cpu"))
    settings = [{}, {"min_tokens": 2}, {"logprobs": 0}, {"logit_bias": ((1, 1.0),)}, {"top_k": 3}]
    for row, changes in enumerate(settings):
        params = SamplingParams(**{"max_tokens": 9, "seed": 4, **changes})
        state.add(NewSeq("s", row, (1, 2), 2, params, stop_ids=(1,)))

    def is_plain(*rows: int, position: int = 2) -> bool:
        return state.is_plain(np.array(rows, dtype=np.int64), np.full(len(rows), position))

    assert is_plain(0, 4) and is_plain()
    assert not is_plain(0, 1) and is_plain(0, 1, position=4)  # two tokens later it may stop
    assert not is_plain(2) and not is_plain(0, 3)
    assert not is_plain(5)  # it has no sequence, as the eager sampler will say
