"""A step's integers: made in numpy, sent to the GPU in one copy, and completed there by the step's first kernel.

The block tables stay on the device and grow there: a token's slot tells its block, so the first kernel enters the
blocks of the step's own tokens. Only blocks that hold what was computed before (prefix hits) are sent as such.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pagedray.engine.worker.row_state import RowState
from pagedray.engine.worker.step_plan import StepPlan
from pagedray.engine.worker.upload import upload
from pagedray.kernels.step_tokens import begin_step

Ints = NDArray[np.int32]
N = TypeVar("N", bound=np.integer[Any])


def pack(arrays: Iterable[NDArray[Any]], into: Ints | None = None) -> Ints:
    """One array of all; each begins at a multiple of 16 bytes, or Triton would compile for every alignment it meets."""
    arrays = list(arrays)
    ints = np.zeros(packed_size(map(len, arrays)), np.int32) if into is None else into
    first = 0
    for array in arrays:
        ints[first : first + len(array)] = array
        first += _aligned(len(array))
    return ints


def packed_size(sizes: Iterable[int]) -> int:
    return sum(map(_aligned, sizes))


def unpack(ints: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """The arrays of these sizes again, as views."""
    parts = ints.split([_aligned(size) for size in sizes])
    return [part[:size] for part, size in zip(parts, sizes, strict=True)]


def _aligned(size: int) -> int:
    return -(-size // 4) * 4


def padded(array: NDArray[N], extra: int, value: int = 0) -> NDArray[N]:
    return np.concatenate((array, np.full(extra, value, array.dtype))) if extra else array


class TokenInts:
    """What every backend needs of a step's tokens: ids, positions, rows, and a slot per block group."""

    def __init__(self, rows: RowState, block_size: int):
        self._rows, self._block_size = rows, block_size
        self.num_arrays = 3 + len(rows.block_tables)

    def arrays(self, step: StepPlan, size: int) -> list[NDArray[Any]]:
        """`num_arrays` of `size` integers. Padding belongs to the spare row and writes to the null block."""
        rows, extra = self._rows, size - step.num_tokens
        token_rows = step.token_rows
        index, offset = np.divmod(step.positions, self._block_size)
        slots = rows.block_tables_cpu[:, token_rows, index].astype(np.int64) * self._block_size + offset
        return [
            padded(step.token_ids, extra),
            padded(step.positions, extra),
            padded(token_rows, extra, rows.num_rows),
            *(padded(of_group, extra) for of_group in slots),
        ]

    def begin(self, arrays: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queue the step's first kernel; token_ids and positions [T], slots [G, T], all int64.

        Args:
            arrays: those of `arrays`, unpacked from one tensor.
        """
        token_ids, positions, token_rows, *slots = arrays
        distance = slots[1].storage_offset() - slots[0].storage_offset() if len(slots) > 1 else len(slots[0])
        all_slots = slots[0].as_strided((len(slots), len(slots[0])), (distance, 1))
        rows = self._rows
        return begin_step(
            token_ids, positions, token_rows, all_slots, rows.last_token, rows.block_tables, self._block_size
        )

    def send_old_blocks(self) -> None:
        """Enter blocks that a row got with their contents; every other one enters with the tokens written to it."""
        old = self._rows.take_old_blocks()
        if old is not None:
            where, blocks = upload(old, self._rows.last_token.device)
            self._rows.block_tables.view(-1)[where] = blocks.int()
