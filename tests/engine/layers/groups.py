"""Ranks of one process: a thread each, which meet at every exchange. Also groups that only know their place."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from pagedray.engine.worker.parallel import GlooWire, Group

T = TypeVar("T")


class ThreadWire:
    """Copies what the ranks of one group give each other, and counts the exchanges."""

    def __init__(self, size: int):
        self.num_exchanges = 0
        self._given: list[Tensor] = [torch.empty(0)] * size
        self._all_here = threading.Barrier(size, timeout=30)

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        self._given[rank] = x.clone()
        if self._all_here.wait() == 0:
            self.num_exchanges += 1
        parts = list(self._given)
        self._all_here.wait()  # nobody gives the next one before all have taken this
        return parts


class ThreadRank(GlooWire):
    """One rank's end."""

    def __init__(self, wire: ThreadWire, rank: int):
        self._wire, self._rank = wire, rank

    def all_reduce(self, x: Tensor) -> None:
        x.copy_(torch.stack(self._wire.exchange(self._rank, x)).sum(0))

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        out.copy_(torch.stack(self._wire.exchange(self._rank, x)))


def on_ranks(size: int, action: Callable[[Group], T]) -> list[T]:
    """What `action` returns on each of `size` ranks that run at once."""
    wire = ThreadWire(size)
    groups = [Group(rank, size, ThreadRank(wire, rank)) if size > 1 else Group() for rank in range(size)]
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(action, groups))


def place(rank: int, size: int) -> Group:
    """A group of which only rank and size are asked for."""
    return Group(rank, size, ThreadRank(ThreadWire(size), rank) if size > 1 else None)
