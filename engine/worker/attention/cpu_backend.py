"""Attention in compiled kernels, which read keys and values where they lie: a CPU's backend where it has a compiler."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from pagedray.engine.layers.norm import HeadNorm
from pagedray.engine.layers.rotary import Rotation
from pagedray.engine.worker.attention.write_heads import write_heads
from pagedray.engine.worker.input_batch import InputBatch
from pagedray.engine.worker.kv_cache import KVCache
from pagedray.engine.worker.row_state import RowState
from pagedray.engine.worker.step_plan import LAST_SAMPLE, StepPlan
from pagedray.kernels.compiled_attention import CompiledPlan, CompiledWorkspace, compiled_attention, plan_compiled
from pagedray.kernels.paged_attention import PagedBatch


@dataclasses.dataclass(frozen=True)
class CpuPlan:
    kernel: CompiledPlan

    def attend(
        self,
        qkv: Tensor,
        pages: Tensor,
        rotation: Rotation,
        norm: HeadNorm | None,
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        write_heads(qkv, pages, self.kernel.slots, rotation, norm, 1.0)
        return compiled_attention(qkv, pages, self.kernel, scale, softcap)


class CpuAttention:
    """Plans steps for `kernels.compiled_attention`."""

    name = "cpu"
    wants_by_length = False

    def __init__(self, cache: KVCache, rows: RowState, num_heads: int):
        self._cache, self._rows = cache, rows
        self._group = num_heads // cache.pages[0].shape[2]
        self._workspace = CompiledWorkspace()

    def gather(self, step: StepPlan) -> InputBatch:
        width = -(-int(step.lengths.max()) // self._cache.block_size)
        tables = self._rows.block_tables_cpu
        batches = (
            PagedBatch(tables[group][step.row, :width], step.query_start, step.lengths, window)
            for group, window in enumerate(self._cache.windows)
        )
        return InputBatch(
            token_ids=self._token_ids(step),
            positions=torch.from_numpy(step.positions),
            plans=tuple(
                CpuPlan(plan_compiled(batch, self._cache.block_size, self._group, self._workspace)) for batch in batches
            ),
            wanted=None if (wanted := step.wanted_tokens) is None else torch.from_numpy(wanted),
        )

    def _token_ids(self, step: StepPlan) -> Tensor:
        """[T] int64. In numpy: on a CPU nothing is known to the device alone, and torch's indexing takes ten times as
        long for a few of them."""
        sampled = self._rows.last_token.numpy()[step.token_rows]
        return torch.from_numpy(np.where(step.token_ids == LAST_SAMPLE, sampled, step.token_ids))
