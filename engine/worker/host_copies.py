"""Results on their way to the host, beside the stream of steps."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopies:
    """Copies of one step's results. They wait for what is queued now, and what is queued next doesn't wait for them.

    On a CPU results are the copies.

    Args:
        stream: where copies run; None on a CPU.
    """

    def __init__(self, stream: torch.cuda.Stream | None):
        self._stream = stream
        self._sources: list[Tensor] = []  # their memory must not be used anew before they were read
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
            self._done = torch.cuda.Event()

    def add(self, tensor: Tensor) -> Tensor:
        """Start a copy; readable after `wait`."""
        if self._stream is None:
            return tensor
        self._sources.append(tensor)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
        return host

    def finish(self) -> HostCopies:
        """All copies have been started."""
        if self._stream is not None:
            self._done.record(self._stream)
        return self

    def wait(self) -> None:
        if self._stream is not None:
            self._done.synchronize()
            self._sources.clear()
