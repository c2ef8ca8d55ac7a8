"""How many threads torch uses on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """Run torch's operators on this thread alone.

    For chains of many short operators. A parallel one waits for its slowest thread: on a machine whose cores are also
    wanted by others, that is a time slice now and then, and a hundred times what a second thread would save.
    Switching costs less than a microsecond and keeps the pool of threads.
    """
    if device.type != "cpu":
        yield
        return
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
