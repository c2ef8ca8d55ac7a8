"""Results on their way to the host, beside the stream of steps."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopies:
    """Copies of one step's results. They wait for what is queued before, and what is queued next doesn't wait for them.

    On a CPU results are the copies.

    Args:
        stream: where copies run; None on a CPU.
    """

    def __init__(self, stream: torch.cuda.Stream | None):
        self._stream = stream
        # Copies and their sources, whose memory must not be used anew before they were read.
        self._added: list[tuple[Tensor, Tensor]] = []
        self._done: torch.cuda.Event | None = None

    def add(self, tensor: Tensor) -> Tensor:
        """A copy that `finish` starts; readable after `wait`."""
        if self._stream is None:
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._added.append((host, tensor))
        return host

    def finish(self) -> HostCopies:
        """Start all copies."""
        if self._stream is not None and self._added:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
            with torch.cuda.stream(self._stream):
                for host, source in self._added:
                    host.copy_(source, non_blocking=True)
            self._done = self._stream.record_event()
        return self

    def wait(self) -> None:
        if self._done is not None:
            self._done.synchronize()
            self._added.clear()
