"""Captured steps of a pipeline: two stages in one process, one after the other. On a CPU a replay is a call."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from pagedray.engine.messages import SchedulerOutput
from pagedray.engine.worker import graphs
from pagedray.engine.worker.gpu_sampler import GpuSampler, GpuSamplingState
from pagedray.engine.worker.parallel import ALONE, GlooWire, Group, Parallel
from pagedray.engine.worker.runner import ModelRunner, PendingOutput
from tests.engine.worker.steps import SIZES, make_runner, reference_model
from tests.engine.worker.test_graphs import (
    NUM_ROWS,
    NUM_SEQS,
    NUM_TOKENS,
    OTHERS,
    call_instead,
    plain_plans,
    play,
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Line(GlooWire):
    """One end of a line between two ranks that take turns: what is received was sent before."""

    def __init__(self, line: dict[int, deque[Tensor]], rank: int):
        self._line, self._rank = line, rank

    def send(self, x: Tensor, to: int) -> None:
        self._line[to].append(x.clone())

    def receive(self, x: Tensor, source: int) -> None:
        x.copy_(self._line[self._rank].popleft())


class Stages:
    """Runners of all stages, as one."""

    def __init__(self, runners: list[ModelRunner]):
        self.runners = runners

    def run(self, out: SchedulerOutput) -> PendingOutput:
        *_, last = [runner.run(out) for runner in self.runners]
        return last


def two_stages(device: torch.device, family: str) -> Stages:
    lines: list[dict[int, deque[Tensor]]] = [{0: deque(), 1: deque()} for _ in range(2)]
    runners = []
    for rank in range(2):
        pp, pp_ids = (Group(rank, 2, Line(line, rank)) for line in lines)
        parallel: Parallel = dataclasses.replace(ALONE, pp=pp, pp_ids=pp_ids)
        runner = make_runner(
            reference_model(family), num_rows=NUM_ROWS, backend="triton", device=device, parallel=parallel
        )
        runner.sampling = GpuSamplingState(NUM_ROWS, SIZES["vocab_size"], device)
        runner.sampler = GpuSampler(runner.sampling)
        runners.append(runner)
    return Stages(runners)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_captured_stages_give_one_stages_tokens(device: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cpu":
        monkeypatch.setattr(graphs, "capture", call_instead)
    whole = make_runner(reference_model(family), num_rows=NUM_ROWS)
    plans = plain_plans(len(whole.cache.windows))
    plans.begin(6, 9, **OTHERS["penalties"])
    plans.step({6: 9, 0: 1})
    plans.decode(6, 0, times=2)
    plans.begin(7, 40, prompt_logprobs=1)  # more tokens than any captured step, and eager for its prompt's scores
    plans.step({7: 40, 6: 1})
    plans.decode(7, 6, 0)
    expected = [output.token_ids for output in play(whole, plans.outs)]
    eager, captured = two_stages(torch.device(device), family), two_stages(torch.device(device), family)
    for runner in captured.runners:
        runner.capture(NUM_SEQS, NUM_TOKENS)
    assert [output.token_ids for output in play(eager, plans.outs, run_ahead=3)] == expected
    assert [output.token_ids for output in play(captured, plans.outs, run_ahead=3)] == expected
