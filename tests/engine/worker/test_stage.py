"""The exchanges of a pipeline, with a transport that holds each sender until its peer receives."""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pagedray.engine.worker.parallel import ALONE, Group, Parallel
from pagedray.engine.worker.stage import OnlyStage, PipelineStage
from pagedray.engine.worker.step_plan import LAST_SAMPLE

TIMEOUT_S = 20.0
NUM_ROWS = 6


class Holding:
    """Sends that end when they are received, between the ranks of one group."""

    def __init__(self, size: int):
        self._lines = {(a, b): (queue.Queue(), queue.Queue()) for a in range(size) for b in range(size)}

    def send(self, x: Tensor, source: int, to: int) -> None:
        line, taken = self._lines[source, to]
        line.put(x.clone())
        taken.get(timeout=TIMEOUT_S)

    def receive(self, x: Tensor, source: int, to: int) -> None:
        line, taken = self._lines[source, to]
        x.copy_(line.get(timeout=TIMEOUT_S))
        taken.put(None)


class HoldingWire:
    def __init__(self, lines: Holding, rank: int):
        self._lines, self._rank = lines, rank

    def send(self, x: Tensor, to: int) -> None:
        self._lines.send(x, self._rank, to)

    def receive(self, x: Tensor, source: int) -> None:
        self._lines.receive(x, source, self._rank)


def step(rows: list[int], sampled: list[int], embedded: list[int]) -> Any:
    """One token a row; of the embedded ones the id that was sampled last."""
    return SimpleNamespace(
        token_rows=np.array(rows),
        token_ids=np.array([LAST_SAMPLE if row in embedded else 7 for row in rows]),
        num_tokens=len(rows),
        sampled=tuple(range(len(sampled))),
        sampling_row=np.array(sampled, dtype=np.int64),
    )


def sampled_id(number: int, row: int) -> int:
    return 1000 * number + row


def run(
    steps: list[Any], num_stages: int, compute: Callable[[int, int], None] = lambda stage, number: None
) -> list[Any]:
    """All stages at once. Of each step what the first stage embeds, and what the last one gets as hidden states."""
    pp, pp_ids = Holding(num_stages), Holding(num_stages)

    def one(rank: int) -> list[Any]:
        groups = (Group(rank, num_stages, HoldingWire(lines, rank)) for lines in (pp, pp_ids))
        last_token = torch.full((NUM_ROWS,), -5)
        parallel = Parallel(ALONE.world, ALONE.tp, *groups, ALONE.ep)
        stage, seen = PipelineStage(parallel, last_token, 1, torch.float32), []
        for number, plan in enumerate(steps):
            stage.begin(number, plan)
            inputs = stage.empty_inputs(plan.num_tokens)
            if inputs is None:
                seen.append(last_token[plan.token_rows[plan.token_ids == LAST_SAMPLE]].tolist())
                hidden = torch.full((2, plan.num_tokens, 1), float(number))
            else:
                stage.receive(inputs)
                hidden = inputs + 0.25
            compute(rank, number)
            if stage.is_last:
                seen.append(hidden.unique().tolist())
                for row in plan.sampling_row:
                    last_token[row] = sampled_id(number, int(row))
                stage.send_ids(plan)
            else:
                stage.give(hidden, plan)
        stage.catch_up()
        return seen

    with ThreadPoolExecutor(num_stages) as threads:
        results = list(threads.map(one, range(num_stages)))
    return [results[0], results[-1]]


@pytest.mark.parametrize("num_stages", [2, 3, 5])
@pytest.mark.parametrize("seed", range(10))
def test_ids_are_there_when_a_step_embeds_them_and_nobody_waits_in_a_circle(num_stages: int, seed: int) -> None:
    draw = random.Random(seed)
    newest: dict[int, int] = {}
    steps, expected = [], []
    for number in range(60):
        rows = draw.sample(range(NUM_ROWS), draw.randint(1, NUM_ROWS))
        embedded = [row for row in rows if row in newest and draw.random() < draw.choice((0.1, 0.9))]
        sampled = [row for row in rows if draw.random() < 0.5]
        steps.append(step(rows, sampled, embedded))
        expected.append([sampled_id(newest[row], row) for row in rows if row in embedded])
        newest |= dict.fromkeys(sampled, number)
    embedded_ids, hidden = run(steps, num_stages)
    assert embedded_ids == expected
    assert hidden == [[number + 0.25 * (num_stages - 1)] for number in range(60)]


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_all_stages_compute_at_once_where_steps_do_not_need_each_other(num_stages: int) -> None:
    """The last stage holds its step until the first one computes the step that is a pipeline's length ahead."""
    steps = [step([number % NUM_ROWS], [number % NUM_ROWS], []) for number in range(20)]
    begun = [threading.Event() for _ in steps]

    def compute(stage: int, number: int) -> None:
        if stage == 0:
            begun[number].set()
        ahead = number + num_stages - 1
        if stage == num_stages - 1 and ahead < len(steps):
            assert begun[ahead].wait(TIMEOUT_S), f"step {ahead} did not begin before step {number} was done"

    run(steps, num_stages, compute)


def test_a_model_of_one_stage_begins_with_token_ids() -> None:
    stage = OnlyStage()
    assert stage.is_last and stage.empty_inputs(3) is None
