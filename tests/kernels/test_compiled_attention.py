"""What the cases of compiled_attention.py don't show: a row's result is the same however it is computed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from pagedray.kernels.compiled_attention import CompiledWorkspace, compiled_attention, plan_compiled
from pagedray.kernels.cpu.library import compiled_kernels
from pagedray.kernels.paged_attention import PagedBatch

H, K, D, B = 8, 2, 64, 16
LENGTHS = (3, 700, 130, 256, 257, 90)


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    if compiled_kernels().library is None:
        pytest.skip(compiled_kernels().reason)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class Sequences:
    """Six sequences with their pages; queries for the last `num_queries` positions of each."""

    def __init__(self, dtype: torch.dtype, window: int | None):
        width = -(-max(LENGTHS) // B)
        generator = torch.Generator().manual_seed(1)
        self.tables = 1 + np.arange(len(LENGTHS) * width, dtype=np.int32).reshape(len(LENGTHS), width)
        self.pages = torch.randn(self.tables.size + 1, 2, K, B, D, generator=generator).to(dtype)
        self.queries = torch.randn(len(LENGTHS), max(LENGTHS), H + 2 * K, D, generator=generator).to(dtype)
        self.window, self.workspace = window, CompiledWorkspace()

    def attend(self, seqs: list[int], num_queries: list[int]) -> list[Tensor]:
        """[num_queries, H * D] of each."""
        lengths = np.array([LENGTHS[seq] for seq in seqs])
        starts = np.concatenate([[0], np.cumsum(num_queries)])
        batch = PagedBatch(self.tables[seqs], starts, lengths, self.window)
        spans = zip(seqs, num_queries, strict=True)
        qkv = torch.cat([self.queries[seq, LENGTHS[seq] - count : LENGTHS[seq]] for seq, count in spans])
        y = compiled_attention(qkv, self.pages, plan_compiled(batch, B, H // K, self.workspace), D**-0.5)
        assert not self.workspace.num_done.any()
        return list(y.split(num_queries))


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_the_same_alone_in_a_batch_and_in_a_prompt(dtype: torch.dtype, window: int | None) -> None:
    sequences = Sequences(dtype, window)
    together = sequences.attend([0, 1, 2, 3, 4, 5], [1] * 6)
    prompts = sequences.attend([0, 1, 2, 3, 4, 5], [3, 400, 130, 2, 257, 37])
    for seq in range(6):
        (alone,) = sequences.attend([seq], [1])
        assert torch.equal(together[seq], alone)
        assert torch.equal(prompts[seq][-1:], alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_number_of_threads_changes_nothing(dtype: torch.dtype) -> None:
    sequences = Sequences(dtype, None)
    runs = []
    for threads in (1, 2, 2, 2):
        torch.set_num_threads(threads)
        runs.append(torch.cat(sequences.attend([1, 0, 2], [1, 1, 130])))
    assert all(torch.equal(run, runs[0]) for run in runs)


def test_units_of_a_step() -> None:
    """A long sequence in parts, a short one whole, a prompt in runs of as many queries as make 64 rows."""
    batch = PagedBatch(np.ones((3, 40), np.int32), np.array([0, 1, 2, 22]), np.array([600, 256, 50]), None)
    plan = plan_compiled(batch, B, 4, CompiledWorkspace())
    assert plan.workspace is not None
    assert plan.units.tolist() == [
        [0, 0, 1, 599, 0, 256, 0, 3],
        [0, 0, 1, 599, 256, 512, 1, 3],
        [0, 0, 1, 599, 512, 600, 2, 3],
        [1, 1, 1, 255, 0, 256, 0, 1],
        [2, 2, 16, 30, 0, 46, 0, 1],
        [2, 18, 4, 46, 0, 50, 0, 1],
    ]


def test_a_window_leaves_out_what_nobody_sees() -> None:
    batch = PagedBatch(np.ones((2, 40), np.int32), np.array([0, 1, 11]), np.array([600, 50]), 100)
    plan = plan_compiled(batch, B, 4, CompiledWorkspace())
    assert plan.units.tolist() == [
        [0, 0, 1, 599, 500, 512, 0, 2],
        [0, 0, 1, 599, 512, 600, 1, 2],
        [1, 1, 10, 40, 0, 50, 0, 1],
    ]


def test_no_query_cut_needs_no_workspace() -> None:
    batch = PagedBatch(np.ones((1, 40), np.int32), np.array([0, 1]), np.array([256]), None)
    assert plan_compiled(batch, B, 4, CompiledWorkspace()).workspace is None


def test_slots() -> None:
    batch = PagedBatch(np.array([[5, 9], [2, 7]], np.int32), np.array([0, 1, 4]), np.array([20, 17]), None)
    plan = plan_compiled(batch, B, 4, CompiledWorkspace())
    assert plan.slots.tolist() == [9 * B + 3, 2 * B + 14, 2 * B + 15, 7 * B]
