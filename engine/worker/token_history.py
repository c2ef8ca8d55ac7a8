"""Distinct tokens of the rows that have penalties, with their output counts. Other rows take no memory here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pagedray.engine.worker.upload import upload, upload_all
from pagedray.kernels.penalties import apply_penalties, count_tokens

FIRST_SLOTS = 4
FIRST_WIDTH = 256


class Slots(NamedTuple):
    """Of some rows, in their order."""

    numbers: list[int]
    at: Tensor  # the same on the device, int64


class TokenHistory:
    """A slot per row with penalties: ids and counts [slots, width], of which the first num_unique [slots] are used.

    A sampled token is counted on the device, because the next step may be planned before the host has seen it. So the
    host only knows a bound of num_unique: what was there at the start and one more per sampled token.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.ids = torch.zeros((0, FIRST_WIDTH), dtype=torch.int64, device=device)
        self.counts = torch.zeros((0, FIRST_WIDTH), dtype=torch.int32, device=device)
        self.num_unique = torch.zeros(0, dtype=torch.int64, device=device)
        self._slots: dict[int, int] = {}  # row → slot
        self._free: list[int] = []
        self._bounds: list[int] = []  # by slot: num_unique is at most this

    def add(self, row: int, seen: Iterable[int], output: Iterable[int]) -> None:
        """Take a slot for `row`.

        Args:
            seen: prompt tokens, for the repetition penalty; empty when the row has none.
            output: tokens generated so far.
        """
        if not self._free:
            self._add_slots(max(FIRST_SLOTS, len(self._bounds)))
        slot = self._slots[row] = self._free.pop()
        counts = Counter(output)
        for token_id in seen:
            counts.setdefault(token_id, 0)
        self._bounds[slot] = len(counts)
        self._widen(len(counts))
        known = np.array([*counts.items()] or [(0, 0)]).T  # an empty history shows token 0, never counted
        ids, numbers, unique = upload_all((known[0], known[1].astype(np.int32), np.array([len(counts)])), self.device)
        self.ids[slot, : len(ids)] = ids
        self.counts[slot, : len(ids)] = numbers
        self.num_unique[slot : slot + 1] = unique

    def free(self, row: int) -> None:
        slot = self._slots.pop(row, None)
        if slot is not None:
            self._free.append(slot)

    def slots(self, rows: Sequence[int]) -> Slots:
        numbers = self.slot_numbers(rows)
        return Slots(numbers, upload(numbers, self.device, torch.int64))

    def slot_numbers(self, rows: Sequence[int]) -> list[int]:
        return [self._slots[row] for row in rows]

    def penalise(self, logits: Tensor, at: Tensor, slots: Slots, penalties: Tensor) -> None:
        """Change rows `at` of logits; penalties [E, 3] float32: repetition, presence, frequency."""
        width = max(1, max(self._bounds[slot] for slot in slots.numbers))
        index = slots.at
        apply_penalties(
            logits,
            at,
            self.ids[index, :width],
            self.counts[index, :width],
            self.num_unique[index],
            *penalties.unbind(1),
        )

    def count(self, slots: Slots, tokens: Tensor) -> None:
        """Add one output token [E] to each slot."""
        for slot in slots.numbers:
            self._bounds[slot] += 1
        width = max(self._bounds[slot] for slot in slots.numbers)
        self._widen(width)
        count_tokens(self.ids[:, :width], self.counts[:, :width], self.num_unique, slots.at, tokens)

    def _add_slots(self, number: int) -> None:
        first = len(self._bounds)
        self.ids = torch.cat((self.ids, self.ids.new_zeros((number, self.ids.shape[1]))))
        self.counts = torch.cat((self.counts, self.counts.new_zeros((number, self.counts.shape[1]))))
        self.num_unique = torch.cat((self.num_unique, self.num_unique.new_zeros(number)))
        self._bounds += [0] * number
        self._free += range(first, first + number)

    def _widen(self, width: int) -> None:
        grow = width - self.ids.shape[1]
        if grow > 0:
            grow = max(grow, self.ids.shape[1])  # doubling: a long answer is copied a few times, not at every step
            self.ids = torch.nn.functional.pad(self.ids, (0, grow))
            self.counts = torch.nn.functional.pad(self.counts, (0, grow))
