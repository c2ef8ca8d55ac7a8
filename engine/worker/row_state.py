"""What a worker remembers of each sequence between steps, by row."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from pagedray.engine.messages import NewSeq, ScheduledSeq, SchedulerOutput


class RowState:
    """One fixed row per running sequence. `apply` alone changes it, but for `last_token`, which sampling fills.

    Args:
        num_rows: most sequences that run at once.
        num_groups: block groups, each with a block table per row.
        max_blocks: entries of a block table.
        device: where sampled tokens stay.

    Attributes:
        block_tables: for kernels that read them; these fill them too, except for what `take_old_blocks` returns.
        last_token: by row. Here and in `block_tables` a spare row, the last, belongs to padding.
    """

    def __init__(self, num_rows: int, num_groups: int, max_blocks: int, device: torch.device):
        self.num_rows = num_rows
        self.block_tables_cpu = np.zeros((num_groups, num_rows, max_blocks), dtype=np.int32)
        self.num_blocks_cpu = np.zeros((num_groups, num_rows), dtype=np.int64)
        self.token_ids_cpu: list[NDArray[np.int64]] = [np.zeros(0, np.int64)] * num_rows  # known when the row was taken
        self.num_known_cpu = np.zeros(num_rows, dtype=np.int64)
        self.num_prompt_cpu = np.zeros(num_rows, dtype=np.int64)
        self.num_prompt_logprobs: dict[int, int] = {}  # rows that want any → how many alternatives
        self.last_token = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)  # sampled, maybe known only here
        self.block_tables = torch.zeros(num_groups, num_rows + 1, max_blocks, dtype=torch.int32, device=device)
        self._old_blocks: list[NDArray[np.int64]] = []

    def apply(self, out: SchedulerOutput) -> None:
        for row in out.freed_rows:
            self._free(row)
        for new in out.added:
            self._add(new)
        for seq in out.scheduled:
            self._append_blocks(seq)

    def _free(self, row: int) -> None:
        self.block_tables_cpu[:, row, : self.num_blocks_cpu[:, row].max()] = 0
        self.num_blocks_cpu[:, row] = 0
        self.num_known_cpu[row] = 0
        self.token_ids_cpu[row] = self.token_ids_cpu[row][:0]
        self.num_prompt_logprobs.pop(row, None)

    def _add(self, new: NewSeq) -> None:
        assert self.num_known_cpu[new.row] == 0, f"row {new.row} is taken"
        self.token_ids_cpu[new.row] = np.array(new.token_ids, dtype=np.int64)
        self.num_known_cpu[new.row] = len(new.token_ids)
        self.num_prompt_cpu[new.row] = new.num_prompt_tokens
        if new.params.prompt_logprobs is not None:
            self.num_prompt_logprobs[new.row] = new.params.prompt_logprobs

    def _append_blocks(self, seq: ScheduledSeq) -> None:
        for group, blocks in enumerate(seq.new_blocks):
            if blocks:
                held = self.num_blocks_cpu[group, seq.row]
                self.block_tables_cpu[group, seq.row, held : held + len(blocks)] = blocks
                self.num_blocks_cpu[group, seq.row] = held + len(blocks)
                if held == 0 and seq.start > 0:
                    first = int(np.ravel_multi_index((group, seq.row, 0), self.block_tables.shape))
                    self._old_blocks.append(np.array((first + np.arange(len(blocks)), blocks)))

    def take_old_blocks(self) -> NDArray[np.int64] | None:
        """Blocks that a row began with and that hold tokens of before: flat indices in block_tables, and the blocks."""
        found, self._old_blocks = self._old_blocks, []
        return np.concatenate(found, axis=1) if found else None
