"""NCCL on one GPU and on several, and gloo among ranks that share one."""

from __future__ import annotations

import secrets
from typing import Any

import pytest
import torch

from pagedray.engine.worker.layout import Layout
from pagedray.engine.worker.parallel import NcclWire, Parallel, connect
from tests.engine.worker.ranks import run_ranks

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64)
CUDA = torch.device("cuda")


def meet(meeting: Any, layout: Layout, transport: Any) -> Parallel:
    return connect(meeting, layout, CUDA, meet_timeout_s=120.0, step_timeout_s=60.0, transport=transport)


@pytest.fixture(scope="module")
def alone() -> NcclWire:
    pytest.importorskip("cupy")
    store = torch.distributed.HashStore()
    return NcclWire(store, 0, 1, f"rank 0 {secrets.token_hex(2)}")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_rank_of_nccl(alone: NcclWire, dtype: torch.dtype) -> None:
    x = torch.arange(40, device=CUDA).view(10, 4).to(dtype)
    y = x.clone()
    alone.all_reduce(y)
    alone.broadcast(y, 0)
    gathered, moved = torch.empty_like(x)[None], torch.empty_like(x)
    alone.all_gather(gathered, x)
    alone.all_to_all(moved, x, [10], [10])
    for other in (y, gathered[0], moved):
        assert torch.equal(other, x)


@pytest.mark.gpu
def test_a_captured_all_reduce_is_replayed(alone: NcclWire) -> None:
    x = torch.ones(4096, device=CUDA, dtype=torch.bfloat16)
    with torch.cuda.stream(torch.cuda.Stream()):
        alone.all_reduce(x)
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        y = x * 2
        alone.all_reduce(y)
        z = y + 1
        graph.capture_end()
        for value in (3, 5):
            x.fill_(value)
            graph.replay()
            assert torch.equal(z, torch.full_like(z, 2 * value + 1))


def exchange(meeting: Any, transport: str, own_gpu: bool) -> None:
    if own_gpu:
        torch.cuda.set_device(meeting.rank)
    parallel = meet(meeting, Layout(2, 1), transport)
    tp, rank = parallel.tp, meeting.rank
    for dtype in DTYPES:
        x = torch.full((8, 3), rank + 1, dtype=dtype, device=CUDA)
        assert tp.all_reduce(x.clone()).eq(3).all()
        assert tp.all_gather(x, 1)[0].tolist() == [1, 1, 1, 2, 2, 2]
        assert tp.broadcast(x.clone(), 1).eq(2).all()
        moved = tp.all_to_all(x, [5, 3] if rank == 0 else [8, 0], [5, 8] if rank == 0 else [3, 0])
        assert moved[:, 0].tolist() == ([1] * 5 + [2] * 8 if rank == 0 else [1] * 3)
    pipeline = meet(meeting, Layout(1, 2), transport)
    for step in range(50):  # hidden states forward, ids back, on streams of their own
        side = torch.cuda.Stream()
        if rank == 0:
            pipeline.pp.send(torch.full((4, 8), step, dtype=torch.bfloat16, device=CUDA), 1)
            with torch.cuda.stream(side):
                ids = torch.empty(4, dtype=torch.int64, device=CUDA)
                pipeline.pp_ids.receive(ids, 1)
        else:
            into = torch.empty(4, 8, dtype=torch.bfloat16, device=CUDA)
            pipeline.pp.receive(into, 0)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                ids = into[:, 0].long()
                pipeline.pp_ids.send(ids, 0)
        side.synchronize()
        assert ids.eq(step).all()
    torch.cuda.synchronize()
    parallel.minimum(0)


@pytest.mark.gpu
def test_ranks_that_share_a_gpu() -> None:
    run_ranks(2, exchange, "gloo", False)


@pytest.mark.multi_gpu
def test_ranks_with_a_gpu_each() -> None:
    pytest.importorskip("cupy")
    run_ranks(2, exchange, "nccl", True)
