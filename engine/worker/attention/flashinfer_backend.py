"""Attention with FlashInfer's kernels. Eager steps only: its plans are made on the host for each step anew."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagedray.engine.layers.norm import HeadNorm
from pagedray.engine.layers.rotary import Rotation
from pagedray.engine.models.spec import ModelSpec
from pagedray.engine.worker.attention.step_ints import TokenInts, pack, unpack
from pagedray.engine.worker.attention.write_heads import write_heads
from pagedray.engine.worker.input_batch import InputBatch
from pagedray.engine.worker.kv_cache import KVCache
from pagedray.engine.worker.row_state import RowState
from pagedray.engine.worker.step_plan import StepPlan
from pagedray.engine.worker.upload import upload

_WORKSPACE_BYTES = 256 * 2**20


@dataclasses.dataclass(frozen=True)
class FlashInferPlan:
    slots: Tensor  # [T] int64, where each token's keys and values go: block * block_size + offset
    num_decoding: int  # sequences with one token, the first of the batch
    decode: Any  # wrappers that were planned for this step; None: it has no such sequences
    prefill: Any
    kv_scale: float

    def attend(
        self,
        qkv: Tensor,
        pages: Tensor,
        rotation: Rotation,
        norm: HeadNorm | None,
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        """Scale and softcap are the plan's."""
        q = write_heads(qkv, pages, self.slots, rotation, norm, self.kv_scale).contiguous()
        y, n = torch.empty_like(q), self.num_decoding
        scales = {"k_scale": self.kv_scale, "v_scale": self.kv_scale}
        if self.decode is not None:
            self.decode.run(q[:n], pages, out=y[:n], **scales)
        if self.prefill is not None:
            self.prefill.run(q[n:], pages, out=y[n:], **scales)
        return y.flatten(1)


class FlashInferAttention:
    """Plans steps for FlashInfer's wrappers, one pair per block group.

    Args:
        dtype: of queries.
        kv_scale: what stored keys and values were divided by; 1 unless they are fp8.
    """

    name = "flashinfer"
    wants_by_length = False

    def __init__(self, cache: KVCache, rows: RowState, spec: ModelSpec, dtype: torch.dtype, kv_scale: float):
        import flashinfer

        self._rows, self._windows = rows, cache.windows
        self._device = rows.last_token.device
        self._kv_scale = kv_scale
        self._block_size = cache.block_size
        self._tokens = TokenInts(rows, cache.block_size)
        workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)  # shared: one stream
        self._decodes = [
            flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
            for _ in self._windows
        ]
        self._prefills = [flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND") for _ in self._windows]
        self._heads = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self._how = {
            "sm_scale": spec.attention_scale,
            "logits_soft_cap": spec.attention_softcap,
            "q_data_type": dtype,
            "kv_data_type": cache.pages[0].dtype,
        }

    def gather(self, step: StepPlan) -> InputBatch:
        """The step's tensors."""
        wanted = step.wanted_tokens
        arrays = [*self._tokens.arrays(step, step.num_tokens), *([] if wanted is None else [wanted])]
        parts = unpack(upload(pack(arrays), self._device), [len(array) for array in arrays])
        token_ids, positions, slots = self._tokens.begin(parts[: self._tokens.num_arrays])
        n = step.num_decoding
        plans = []
        for group, window in enumerate(self._windows):
            left = -1 if window is None else window - 1
            decode = prefill = None
            if n:
                decode = self._decodes[group]
                decode.plan(
                    *self._pages(step, group, slice(n)), *self._heads, self._block_size, window_left=left, **self._how
                )
            if n < step.num_seqs:
                prefill = self._prefills[group]
                queries = torch.from_numpy((step.query_start[n:] - step.query_start[n]).astype(np.int32))
                prefill.plan(
                    queries,
                    *self._pages(step, group, slice(n, None)),
                    *self._heads,
                    self._block_size,
                    causal=True,
                    window_left=left,
                    **self._how,
                )
            plans.append(FlashInferPlan(slots[group], n, decode, prefill, self._kv_scale))
        return InputBatch(token_ids, positions, tuple(plans), None if wanted is None else parts[-1].long())

    def _pages(self, step: StepPlan, group: int, seqs: slice) -> tuple[Tensor, Tensor, Tensor]:
        """What pages sequences have, as the wrappers want it: first of each, all in one list, tokens in the last."""
        lengths: NDArray[np.int64] = step.lengths[seqs]
        counts = -(-lengths // self._block_size)
        start = np.concatenate([[0], np.cumsum(counts)])
        seq = np.repeat(np.arange(len(counts)), counts)
        blocks = self._rows.block_tables_cpu[group][step.row[seqs][seq], np.arange(len(seq)) - start[:-1][seq]]
        last = lengths - (counts - 1) * self._block_size
        return (
            torch.from_numpy(start.astype(np.int32)),
            upload(blocks.astype(np.int32), self._device),
            torch.from_numpy(last.astype(np.int32)),
        )
