"""Groups of ranks: what each method gives, over gloo in processes of this machine."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from pagedray.engine.worker.control import PeersLost
from pagedray.engine.worker.layout import Layout
from pagedray.engine.worker.parallel import ALONE, Group, Parallel, connect
from tests.engine.worker.ranks import run_ranks

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64)
CPU = torch.device("cpu")


def meet(meeting: Any, layout: Layout, step_timeout_s: float = 60.0, **more: Any) -> Parallel:
    return connect(meeting, layout, CPU, meet_timeout_s=120.0, step_timeout_s=step_timeout_s, **more)


def numbers(shape: tuple[int, ...], dtype: torch.dtype, start: int) -> torch.Tensor:
    return (torch.arange(torch.Size(shape).numel()) + start).view(shape).to(dtype)


def test_ranks_of_a_stage_follow_each_other() -> None:
    layout = Layout(tp_size=2, pp_size=3)
    assert layout.size == 6
    assert [layout.tp_ranks(rank) for rank in (0, 3)] == [[0, 1], [2, 3]]
    assert [layout.pp_ranks(rank) for rank in (0, 3)] == [[0, 2, 4], [1, 3, 5]]
    assert [layout.stage(rank) for rank in range(6)] == [0, 0, 1, 1, 2, 2]
    assert layout.result_rank == 4


def test_a_group_of_one_gives_back_what_it_gets() -> None:
    x = torch.arange(6.0).view(2, 3)
    group = ALONE.tp
    assert group.all_reduce(x) is group.all_gather(x, 1) is group.all_to_all(x, [2], [2]) is group.broadcast(x, 0) is x
    assert (ALONE.is_first_stage, ALONE.is_last_stage, ALONE.minimum(7)) == (True, True, 7)
    with pytest.raises(ValueError, match="rank 0 of 1 can't exchange tensors with rank 1"):
        group.send(x, 1)
    ALONE.abort()


@pytest.mark.parametrize(("rank", "size", "wire"), [(1, 1, None), (0, 2, None), (0, 1, object())])
def test_a_group_needs_a_wire_and_a_place(rank: int, size: int, wire: Any) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} of {size}"):
        Group(rank, size, wire)


def three_ranks(meeting: Any) -> None:
    parallel = meet(meeting, Layout(3, 1), expert_parallel=True)
    tp, rank = parallel.tp, meeting.rank
    assert (tp.rank, tp.size, parallel.ep is tp, parallel.pp.size) == (rank, 3, True, 1)
    assert (parallel.minimum(10 + rank), parallel.num_ranks_here) == (10, 3)
    for dtype in DTYPES:
        x = numbers((5, 2), dtype, rank)
        assert tp.all_reduce(x) is x
        assert torch.equal(x, sum(numbers((5, 2), dtype, r) for r in range(3)))
        apart = numbers((2, 5), dtype, rank).T  # not contiguous
        assert torch.equal(tp.all_reduce(apart), sum(numbers((2, 5), dtype, r) for r in range(3)).T)
        for dim in (0, 1, -1):
            parts = [numbers((2, 3, 4), dtype, 100 * r) for r in range(3)]
            assert torch.equal(tp.all_gather(parts[rank], dim), torch.cat(parts, dim))
        # rank r gives i + r rows to rank i, the first of which says from whom to whom
        send, receive = [i + rank for i in range(3)], [rank + r for r in range(3)]
        rows = torch.cat([torch.full((i + rank, 2), 10 * rank + i, dtype=dtype) for i in range(3)])
        expected = torch.cat([torch.full((rank + r, 2), 10 * r + rank, dtype=dtype) for r in range(3)])
        assert torch.equal(tp.all_to_all(rows, send, receive), expected)
        x = numbers((3,), dtype, 7 * rank)
        assert tp.broadcast(x, 2) is x
        assert torch.equal(x, numbers((3,), dtype, 14))
    # sums have the same bits on every rank, whatever the order they were taken in
    noise = torch.randn(10007, generator=torch.Generator().manual_seed(rank))
    total = tp.all_reduce(noise)
    assert all(torch.equal(part, total) for part in tp.all_gather(total[None], 0))
    with pytest.raises(ValueError, match="contiguous memory only"):
        tp.broadcast(torch.zeros(2, 3).T, 0)
    with pytest.raises(ValueError, match="rank 1 of 3 can't exchange tensors with rank 3" if rank == 1 else "can't"):
        tp.send(torch.zeros(1), 3 if rank == 1 else rank)


def test_three_ranks_exchange_tensors() -> None:
    run_ranks(3, three_ranks)


def four_ranks(meeting: Any) -> tuple[int, int, int, float]:
    parallel = meet(meeting, Layout(2, 2), step_timeout_s=2.0)
    rank, tp, pp = meeting.rank, parallel.tp, parallel.pp
    assert (tp.rank, pp.rank, parallel.ep.size) == (rank % 2, rank // 2, 1)
    assert (parallel.is_first_stage, parallel.is_last_stage) == (rank < 2, rank >= 2)
    assert tp.all_gather(torch.tensor([rank]), 0).tolist() == ([0, 1] if rank < 2 else [2, 3])
    # Hidden states forward and ids back, both sent before either is received: nothing waits.
    for step in range(100):
        group, other = (pp, parallel.pp_ids) if rank < 2 else (parallel.pp_ids, pp)
        x = torch.full((4, 8), 1000.0 * step + rank)
        group.send(x, 1 - pp.rank)
        x.fill_(-1)  # what was sent stays as it was
        if step % 3 == 2:
            for old in range(step - 2, step + 1):
                into = torch.empty(4, 8)
                other.receive(into, 1 - pp.rank)
                assert torch.equal(into, torch.full((4, 8), 1000.0 * old + (rank + 2) % 4))
    # One that doesn't come, then one that gives up.
    late_s = 0.0
    if rank != 3:
        began_s = time.monotonic()
        if rank == 2:
            with pytest.raises(PeersLost, match=r"rank 2 \(rank 0 of 2 in its tp group\) waited .* 2 s in all_reduce"):
                tp.all_reduce(torch.ones(3))
            late_s = time.monotonic() - began_s
        else:
            assert parallel.tp.all_reduce(torch.ones(1)).item() == 2
    parallel.minimum(0)  # all have come so far
    if rank == 0:
        threading.Timer(0.5, parallel.abort).start()
        with pytest.raises(PeersLost, match="lost its peers"):
            tp.all_reduce(torch.ones(3))
    return tp.rank, pp.rank, parallel.world.rank, late_s


def test_two_stages_of_two_ranks() -> None:
    places = run_ranks(4, four_ranks)
    assert [place[:3] for place in places] == [(0, 0, 0), (1, 0, 1), (0, 1, 2), (1, 1, 3)]
    assert places[2][3] >= 2.0
