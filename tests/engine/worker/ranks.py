"""Ranks as processes of this machine: each runs one function, whose results come back in rank order."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from pagedray.engine.worker.control import Listener, Member

LIMIT_S = 240.0  # a machine may be busy with anything
HOST = "127.0.0.1"


def run_ranks(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """`function(meeting, *args)` in each of `size` new processes, which import torch first: some seconds."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(size):
        ours, theirs = context.Pipe()
        process = context.Process(target=_main, args=(rank, size, theirs, function, args), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        address = _receive(pipes[0], "rank 0's address")
        for pipe in pipes[1:]:
            pipe.send(address)
        found: dict[int, Any] = {}
        while len(found) < size:  # whoever fails first is told of: others may wait for it for ever
            left = [pipe for rank, pipe in enumerate(pipes) if rank not in found]
            ready = [pipes.index(pipe) for pipe in wait(left, LIMIT_S)]
            assert ready, f"nothing came within {LIMIT_S:g} s from {size - len(found)} of {size} ranks"
            found |= {rank: _receive(pipes[rank], f"rank {rank}") for rank in ready}
        return [found[rank] for rank in range(size)]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _receive(pipe: Connection, what: str) -> Any:
    assert pipe.poll(LIMIT_S), f"{what}: nothing came within {LIMIT_S:g} s"
    is_good, value = pipe.recv()
    assert is_good, f"{what} failed:\n{value}"
    return value


def _main(rank: int, size: int, pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        if rank == 0:
            listener = Listener(HOST)
            pipe.send((True, listener.address))
            meeting: Any = listener.accept(size, LIMIT_S)
        else:
            meeting = Member(pipe.recv(), rank, f"process {rank}", HOST, LIMIT_S)
        pipe.send((True, function(meeting, *args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    pipe.poll(None)  # until all have answered: others may still need this one's store
