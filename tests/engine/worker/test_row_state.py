import numpy as np
import pytest
import torch

from pagedray.engine.messages import NewSeq, SamplingParams, ScheduledSeq, SchedulerOutput
from pagedray.engine.worker.row_state import RowState


def new(row: int, ids: tuple[int, ...], num_prompt: int, prompt_logprobs: int | None = None) -> NewSeq:
    params = SamplingParams(max_tokens=5, seed=0, prompt_logprobs=prompt_logprobs)
    return NewSeq(f"seq{row}", row, ids, num_prompt, params, ())


def scheduled(row: int, *blocks: tuple[int, ...]) -> ScheduledSeq:
    return ScheduledSeq(f"seq{row}", row, 0, 1, False, blocks)


@pytest.fixture
def rows() -> RowState:
    return RowState(num_rows=3, num_groups=2, max_blocks=6, device=torch.device("cpu"))


def test_blocks_are_appended_per_group(rows: RowState) -> None:
    rows.apply(SchedulerOutput(0, (new(1, (5, 6), 2),), (scheduled(1, (7, 8), (9, 10)),), ()))
    rows.apply(SchedulerOutput(1, (), (scheduled(1, (), ()),), ()))
    rows.apply(SchedulerOutput(2, (), (scheduled(1, (11,), (12,)),), ()))
    assert rows.block_tables_cpu[:, 1].tolist() == [[7, 8, 11, 0, 0, 0], [9, 10, 12, 0, 0, 0]]
    assert not rows.block_tables_cpu[:, [0, 2]].any()


def test_what_is_known_of_a_sequence(rows: RowState) -> None:
    rows.apply(SchedulerOutput(0, (new(2, (5, 6, 7), 2, prompt_logprobs=4), new(0, (1,), 1)), (), ()))
    assert rows.token_ids_cpu[2].tolist() == [5, 6, 7]
    assert (rows.num_known_cpu.tolist(), rows.num_prompt_cpu.tolist()) == ([1, 0, 3], [1, 0, 2])
    assert rows.num_prompt_logprobs == {2: 4}


def test_a_row_is_freed_before_it_is_taken(rows: RowState) -> None:
    rows.apply(SchedulerOutput(0, (new(1, (5, 6), 2, 0),), (scheduled(1, (7, 8, 9), (1, 2, 3)),), ()))
    rows.apply(SchedulerOutput(1, (new(1, (3,), 1),), (scheduled(1, (4,), (5,)),), (1,)))
    assert rows.block_tables_cpu[:, 1].tolist() == [[4, 0, 0, 0, 0, 0], [5, 0, 0, 0, 0, 0]]
    assert rows.token_ids_cpu[1].tolist() == [3]
    assert rows.num_prompt_logprobs == {}


def test_freeing_leaves_nothing(rows: RowState) -> None:
    rows.apply(SchedulerOutput(0, (new(1, (5, 6), 2, 0),), (scheduled(1, (7, 8, 9), (1, 2, 3)),), ()))
    rows.apply(SchedulerOutput(1, (), (), (1,)))
    empty = RowState(num_rows=3, num_groups=2, max_blocks=6, device=torch.device("cpu"))
    assert np.array_equal(rows.block_tables_cpu, empty.block_tables_cpu)
    assert np.array_equal(rows.num_blocks_cpu, empty.num_blocks_cpu)
    assert np.array_equal(rows.num_known_cpu, empty.num_known_cpu)
    assert [len(ids) for ids in rows.token_ids_cpu] == [0, 0, 0]
    assert rows.num_prompt_logprobs == {}


def test_a_row_that_is_taken_is_not_given_away(rows: RowState) -> None:
    rows.apply(SchedulerOutput(0, (new(1, (5,), 1),), (), ()))
    with pytest.raises(AssertionError, match="row 1 is taken"):
        rows.apply(SchedulerOutput(1, (new(1, (6,), 1),), (), ()))
