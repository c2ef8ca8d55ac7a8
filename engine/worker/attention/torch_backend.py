"""Attention in plain torch: runs on every CPU and GPU, slow but simple."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from pagedray.engine.layers.norm import HeadNorm
from pagedray.engine.layers.rotary import Rotation, apply_rotary
from pagedray.engine.worker.input_batch import InputBatch
from pagedray.engine.worker.kv_cache import KVCache
from pagedray.engine.worker.row_state import RowState
from pagedray.engine.worker.step_plan import LAST_SAMPLE, StepPlan
from pagedray.engine.worker.upload import upload
from pagedray.kernels.paged_attention import AttentionPlan, PagedBatch, Workspace, paged_attention, plan_attention


@dataclasses.dataclass(frozen=True)
class TorchPlan:
    kernel: AttentionPlan

    def attend(
        self,
        qkv: Tensor,
        pages: Tensor,
        rotation: Rotation,
        norm: HeadNorm | None,
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        if norm is not None:
            norm(qkv)
        apply_rotary(qkv, qkv.shape[1] - pages.shape[2], rotation)
        return paged_attention(qkv, pages, self.kernel, scale, softcap)


class TorchAttention:
    """Plans steps for `kernels.paged_attention`."""

    name = "torch"
    wants_by_length = True

    def __init__(self, cache: KVCache, rows: RowState):
        self._cache, self._rows, self._device = cache, rows, rows.last_token.device
        self._workspace = Workspace(cache.pages[0].dtype, self._device)

    def gather(self, step: StepPlan) -> InputBatch:
        """The step's tensors. Its sequences with one token must be ordered by length."""
        width = -(-int(step.lengths.max()) // self._cache.block_size)
        tables = self._rows.block_tables_cpu
        batches = (
            PagedBatch(tables[group][step.row, :width], step.query_start, step.lengths, window)
            for group, window in enumerate(self._cache.windows)
        )
        return InputBatch(
            token_ids=self._token_ids(step),
            positions=upload(step.positions, self._device),
            plans=tuple(TorchPlan(plan_attention(batch, self._cache.pages[0], self._workspace)) for batch in batches),
            wanted=None if (wanted := step.wanted_tokens) is None else upload(wanted, self._device),
        )

    def _token_ids(self, step: StepPlan) -> Tensor:
        token_ids = upload(step.token_ids, self._device)
        is_sampled = step.token_ids == LAST_SAMPLE
        if is_sampled.any():
            at = upload(is_sampled.nonzero()[0], self._device)
            token_ids[at] = self._rows.last_token[upload(step.token_rows[is_sampled], self._device)]
        return token_ids
