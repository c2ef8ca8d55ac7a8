"""Pinned memory of the steps in flight: what a captured step gets from the host, and what it leaves there."""

from __future__ import annotations

import itertools
import threading

import torch
from torch import Tensor

from pagedray.engine.messages import TokenLogprobs

NUM_SLOTS = 8  # as a rule more than there are steps in flight, so that taking one doesn't wait
_ALIGNED_INTS = 16


class HostTokens:
    """Tokens of a step, which the device writes straight to the host's memory."""

    def __init__(self, slot: StepSlot, num_tokens: int):
        self._slot, self._num_tokens = slot, num_tokens
        self._lock = threading.Lock()  # one thread takes slots, others wait for tokens
        self._found: list[int] | None = None

    def read(self) -> list[int]:
        """Waits until the step is done; the slot's memory is free afterwards."""
        with self._lock:
            if self._found is None:
                self._found = self._slot.wait_and_read(self._num_tokens)
            return self._found

    def to_messages(self) -> tuple[list[int], dict[int, TokenLogprobs]]:
        """As those of `SampledTokens`; nobody asked for log-probabilities."""
        return self.read(), {}


class StepSlot:
    """
    Args:
        done: to be recorded behind a step; None on a CPU, where nothing runs behind the host's back.

    Attributes:
        ints_cpu: where to write the step's integers before `send`.
        first_result: index of the slot's first token in `StepSlots.tokens`.
    """

    def __init__(self, ints: Tensor, tokens: Tensor, first_result: int, done: torch.cuda.Event | None):
        self._ints, self.ints_cpu = ints, ints.numpy()
        self._tokens_cpu = tokens.numpy()
        self.first_result = first_result
        self._done = done
        self._last = HostTokens(self, 0)
        self._last.read()

    def free(self) -> None:
        """Nobody reads or writes the slot's memory any more; waits until that is so."""
        self._last.read()

    def send(self, ints: Tensor) -> None:
        """Queue the copy of the first integers to the device."""
        ints.copy_(self._ints[: len(ints)], non_blocking=True)

    def end(self, num_tokens: int) -> HostTokens:
        """All of the step was queued; its tokens will be the slot's first ones."""
        if self._done is not None:
            self._done.record()
        self._last = HostTokens(self, num_tokens)
        return self._last

    def wait_and_read(self, num_tokens: int) -> list[int]:
        if self._done is not None:
            self._done.synchronize()
        found: list[int] = self._tokens_cpu[:num_tokens].tolist()
        return found


class StepSlots:
    """A ring. A slot is taken again only when its step is done and its tokens were read.

    Args:
        num_ints: most integers of a step.
        num_tokens: most tokens of a step.

    Attributes:
        tokens: [NUM_SLOTS * num_tokens] int64, for kernels that write them.
    """

    def __init__(self, num_ints: int, num_tokens: int, device: torch.device):
        is_gpu = device.type == "cuda"
        width = -(-num_ints // _ALIGNED_INTS) * _ALIGNED_INTS
        ints = torch.zeros(NUM_SLOTS, width, dtype=torch.int32, pin_memory=is_gpu)
        self.tokens = torch.zeros(NUM_SLOTS * num_tokens, dtype=torch.int64, pin_memory=is_gpu)
        self._ring = itertools.cycle(
            [
                StepSlot(ints[i], tokens, i * num_tokens, torch.cuda.Event() if is_gpu else None)
                for i, tokens in enumerate(self.tokens.split(num_tokens))
            ]
        )

    def take(self) -> StepSlot:
        slot = next(self._ring)
        slot.free()
        return slot
