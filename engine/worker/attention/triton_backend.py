"""Attention with Triton kernels of our own, for eager steps and for captured ones."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagedray.engine.layers.norm import HeadNorm
from pagedray.engine.layers.rotary import Rotation
from pagedray.engine.worker.attention.step_ints import Ints, TokenInts, pack, packed_size, padded, unpack
from pagedray.engine.worker.input_batch import InputBatch
from pagedray.engine.worker.kv_cache import KVCache
from pagedray.engine.worker.row_state import RowState
from pagedray.engine.worker.step_plan import StepPlan
from pagedray.engine.worker.upload import upload
from pagedray.kernels.paged_decode import (
    DecodePlan,
    DecodeScratch,
    decode_plan_views,
    num_decode_items,
    paged_decode,
    plan_decode,
    plan_size,
)
from pagedray.kernels.paged_prefill import PrefillPlan, paged_prefill, plan_prefill, queries_per_tile
from pagedray.kernels.write_qkv import write_qkv


@dataclasses.dataclass(frozen=True)
class TritonPlan:
    slots: Tensor  # [T] int64, where each token's keys and values go: block * block_size + offset
    block_tables: Tensor  # [R + 1, max_blocks] int32
    num_decoding: int  # sequences with one token, the first of the batch
    decode: DecodePlan | None
    prefill: PrefillPlan | None
    window: int | None
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
        cos, sin = rotation
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        write_qkv(qkv, pages, self.slots, cos, sin, weight, eps, self.kv_scale, self.kv_scale)
        num_heads = qkv.shape[1] - 2 * pages.shape[2]
        q, tables = qkv[:, :num_heads], self.block_tables
        y = qkv.new_empty(len(qkv), num_heads * qkv.shape[2])
        how = self.window, softcap, self.kv_scale, self.kv_scale
        if self.decode is not None:
            n = self.num_decoding
            paged_decode(q[:n], pages, tables, self.decode, scale, *how, out=y[:n])
        if self.prefill is not None:
            fresh = qkv[:, num_heads:] if pages.dtype == qkv.dtype else None  # read what a later step would read
            paged_prefill(q, pages, tables, self.prefill, scale, *how, out=y, kv=fresh)
        return y


@dataclasses.dataclass(frozen=True)
class Layout:
    """Sizes of a step's integers on the device; with equal sizes they lie at equal places."""

    num_tokens: int
    num_decoding: int
    num_items: int = 0  # of the decoding sequences' work, per block group
    num_tile_ints: int = 0  # of the prefilling ones', for all groups
    num_wanted: int = 0  # tokens whose hidden states are wanted; 0: all


class TritonAttention:
    """Plans steps for the Triton kernels.

    Args:
        num_heads: query heads of a layer.
        dtype: of queries.
        kv_scale: what stored keys and values were divided by; 1 unless they are fp8.
        num_sms: multiprocessors of the GPU.
    """

    name = "triton"
    wants_by_length = False

    def __init__(
        self, cache: KVCache, rows: RowState, num_heads: int, dtype: torch.dtype, kv_scale: float, num_sms: int
    ):
        self._rows, self._windows = rows, cache.windows
        self._device = rows.last_token.device
        self._kv_scale, self._num_sms = kv_scale, num_sms
        _, _, self._num_kv_heads, block_size, head_dim = cache.pages[0].shape
        self._tokens = TokenInts(rows, block_size)
        self._tile_queries = queries_per_tile(num_heads, self._num_kv_heads, head_dim, dtype)
        self._scratch = DecodeScratch(self._num_items(rows.num_rows), num_heads, head_dim, self._device)

    def gather(self, step: StepPlan) -> InputBatch:
        """The tensors of an eager step."""
        layout, ints, tiles = self._pack(step, step.num_tokens)
        self._tokens.send_old_blocks()
        return self._batch(layout, upload(ints, self._device), tiles)

    def decode_layout(self, size: int) -> Layout:
        """Of a captured step of `size` sequences with one token each, all of which sample."""
        return Layout(size, size, self._num_items(size))

    def num_ints(self, layout: Layout) -> int:
        return packed_size(self._sizes(layout))

    def decode_batch(self, layout: Layout, ints: Tensor) -> InputBatch:
        """The tensors of a captured step, whose integers `fill` brings before each replay."""
        return self._batch(layout, ints, None)

    def fill(self, step: StepPlan, size: int, into: Tensor) -> None:
        """Send a decode step, padded to `size` sequences, to where its graph reads it."""
        _, ints, _ = self._pack(step, size)
        self._tokens.send_old_blocks()
        into.copy_(upload(ints, self._device))

    def fill_empty(self, layout: Layout, into: Tensor) -> None:
        """A step of padding alone, to warm up and capture with."""
        none = np.zeros(0, np.int64)
        nothing = StepPlan(none, none, np.zeros(1, np.int64), none, 0, none, none, (), (), (), none, ())
        self.fill(nothing, layout.num_tokens, into)

    def _batch(self, layout: Layout, ints: Tensor, tiles: Ints | None) -> InputBatch:
        """The tensors in a step's integers; queues the kernel that completes them on the device."""
        arrays, num_groups = unpack(ints, self._sizes(layout)), len(self._windows)
        token_ids, positions, slots = self._tokens.begin(arrays[: self._tokens.num_arrays])
        *decodes, tile_ints, wanted = arrays[self._tokens.num_arrays :]
        assert len(decodes) == num_groups
        prefill = None if tiles is None else PrefillPlan.of(tiles, tile_ints, self._tile_queries)
        size = layout.num_decoding, layout.num_items
        plans = tuple(
            TritonPlan(
                slots=slots[group],
                block_tables=self._rows.block_tables[group],
                num_decoding=layout.num_decoding,
                decode=decode_plan_views(decodes[group], *size, window, self._scratch) if layout.num_decoding else None,
                prefill=prefill,
                window=window,
                kv_scale=self._kv_scale,
            )
            for group, window in enumerate(self._windows)
        )
        return InputBatch(token_ids, positions, plans, wanted.long() if layout.num_wanted else None)

    def _sizes(self, layout: Layout) -> list[int]:
        """Of the arrays in order: the tokens', a decode plan per group, prefill tiles, wanted tokens."""
        tokens = [layout.num_tokens] * self._tokens.num_arrays
        decode = plan_size(layout.num_decoding, layout.num_items) if layout.num_decoding else 0
        return [*tokens, *[decode] * len(self._windows), layout.num_tile_ints, layout.num_wanted]

    def _pack(self, step: StepPlan, size: int) -> tuple[Layout, Ints, Ints | None]:
        """A step's integers, padded up to `size` tokens, and among them those of the prefilling sequences.

        Padding has no length: nothing is read for it.
        """
        num_chunks, extra = step.num_seqs - step.num_decoding, size - step.num_tokens
        num_decoding = step.num_decoding + extra
        num_items = self._num_items(num_decoding) if num_decoding else 0
        decodes: list[NDArray[Any]] = [np.zeros(0, np.int32)] * len(self._windows)
        if num_decoding:
            rows = padded(step.row[: step.num_decoding], extra, self._rows.num_rows).astype(np.int32)
            lengths = padded(step.lengths[: step.num_decoding], extra).astype(np.int32)
            decodes = [plan_decode(rows, lengths, window, num_items) for window in self._windows]
        tiles = None
        if num_chunks:
            chunks = slice(step.num_decoding, None)
            tiles = plan_prefill(step.row[chunks], step.query_start[chunks], step.lengths[chunks], self._tile_queries)
        none = np.zeros(0, np.int32)
        wanted = none if step.wanted_tokens is None else step.wanted_tokens
        ints = pack([*self._tokens.arrays(step, size), *decodes, none if tiles is None else tiles, wanted])
        layout = Layout(size, num_decoding, num_items, 0 if tiles is None else len(tiles), len(wanted))
        return layout, ints, tiles

    def _num_items(self, num_seqs: int) -> int:
        return num_decode_items(num_seqs, self._num_kv_heads, self._num_sms)
