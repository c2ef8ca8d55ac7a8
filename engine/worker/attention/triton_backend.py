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
from pagedray.engine.worker.attention.write_heads import write_heads
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
from pagedray.kernels.paged_prefill import TILE_INTS, PrefillPlan, paged_prefill, plan_prefill, queries_per_tile

_CAPTURED_CHUNKS = 8  # most prompt chunks of a captured step


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
        q, tables = write_heads(qkv, pages, self.slots, rotation, norm, self.kv_scale), self.block_tables
        num_tokens, num_heads, head_dim = q.shape
        y = qkv.new_empty(num_tokens, num_heads * head_dim)
        how = self.window, softcap, self.kv_scale, self.kv_scale
        if self.decode is not None:
            n = self.num_decoding
            paged_decode(q[:n], pages, tables, self.decode, scale, *how, out=y[:n])
        if self.prefill is not None:
            # Not from rounded pages: a result must not depend on where a prompt was cut.
            fresh = qkv[:, num_heads:] if pages.dtype == qkv.dtype else None
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

    @property
    def num_hidden(self) -> int:
        """Hidden states that come out."""
        return self.num_wanted or self.num_tokens


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
        tiles = self._tiles(step)
        layout = Layout(
            num_tokens=step.num_tokens,
            num_decoding=step.num_decoding,
            num_items=self._num_items(step.num_decoding) if step.num_decoding else 0,
            num_tile_ints=len(tiles),
            num_wanted=0 if step.wanted_tokens is None else len(step.wanted_tokens),
        )
        ints = self._pack(step, layout, tiles)
        self._tokens.send_old_blocks()
        return self._batch(layout, upload(ints, self._device), tiles)

    def decode_layout(self, size: int) -> Layout:
        """Of a captured step of up to `size` sequences with one token each, all of which sample."""
        return Layout(size, size, self._num_items(size))

    def prompt_layout(self, num_tokens: int) -> Layout:
        """Of a captured step of up to so many tokens, half of which may belong to decoding sequences."""
        num_decoding = max(min(num_tokens // 2, self._rows.num_rows), 1)
        num_tiles = -(-num_tokens // self._tile_queries) + _CAPTURED_CHUNKS
        num_wanted = num_decoding + _CAPTURED_CHUNKS
        return Layout(num_tokens, num_decoding, self._num_items(num_decoding), num_tiles * TILE_INTS, num_wanted)

    def fits(self, step: StepPlan, layout: Layout) -> bool:
        """Whether a captured step of this layout can compute `step`."""
        if step.wanted_tokens is None:
            return layout.num_wanted == 0 and step.num_tokens == step.num_seqs <= layout.num_decoding
        return (
            step.num_tokens <= layout.num_tokens
            and step.num_decoding <= layout.num_decoding
            and step.num_seqs - step.num_decoding <= _CAPTURED_CHUNKS
            and len(step.wanted_tokens) <= layout.num_wanted
        )

    def num_ints(self, layout: Layout) -> int:
        """Integers of a step of this layout."""
        return packed_size(self._sizes(layout))

    def batch(self, layout: Layout, ints: Tensor) -> InputBatch:
        """The tensors of a captured step; queues the kernel that completes them on the device."""
        return self._batch(layout, ints, None)

    def fill(self, step: StepPlan, layout: Layout, ints: Ints) -> None:
        """Write the `num_ints` integers of a step that fits `layout`."""
        self._pack(step, layout, self._tiles(step), ints)
        self._tokens.send_old_blocks()

    def _batch(self, layout: Layout, ints: Tensor, tiles: Ints | None) -> InputBatch:
        """The tensors in a step's integers; queues the kernel that completes them on the device.

        Args:
            tiles: of an eager step, whose fresh tiles need not read pages; None: any tile may come.
        """
        arrays, num_groups = unpack(ints, self._sizes(layout)), len(self._windows)
        token_ids, positions, slots = self._tokens.begin(arrays[: self._tokens.num_arrays])
        *decodes, tile_ints, wanted = arrays[self._tokens.num_arrays :]
        assert len(decodes) == num_groups
        prefill = None
        if layout.num_tile_ints:
            prefill = PrefillPlan(tile_ints, layout.num_tile_ints // TILE_INTS, 0, self._tile_queries)
            if tiles is not None:
                prefill = PrefillPlan.of(tiles, tile_ints, self._tile_queries)
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
        padded_slots = slots[0] if tiles is None else None
        return InputBatch(token_ids, positions, plans, wanted.long() if layout.num_wanted else None, padded_slots)

    def _sizes(self, layout: Layout) -> list[int]:
        """Of the arrays in order: the tokens', a decode plan per group, prefill tiles, wanted tokens."""
        tokens = [layout.num_tokens] * self._tokens.num_arrays
        decode = plan_size(layout.num_decoding, layout.num_items) if layout.num_decoding else 0
        return [*tokens, *[decode] * len(self._windows), layout.num_tile_ints, layout.num_wanted]

    def _tiles(self, step: StepPlan) -> Ints:
        """Of the sequences with several tokens."""
        if step.num_decoding == step.num_seqs:
            return np.zeros(0, np.int32)
        chunks = slice(step.num_decoding, None)
        return plan_prefill(step.row[chunks], step.query_start[chunks], step.lengths[chunks], self._tile_queries)

    def _pack(self, step: StepPlan, layout: Layout, tiles: Ints, into: Ints | None = None) -> Ints:
        """A step's integers, padded to its layout. Padding has no length: nothing is read for it."""
        n, extra = step.num_decoding, layout.num_decoding - step.num_decoding
        decodes: list[NDArray[Any]] = [np.zeros(0, np.int32)] * len(self._windows)
        if layout.num_decoding:
            rows = padded(step.row[:n], extra, self._rows.num_rows).astype(np.int32)
            lengths = padded(step.lengths[:n], extra).astype(np.int32)
            decodes = [plan_decode(rows, lengths, window, layout.num_items) for window in self._windows]
        wanted = np.full(layout.num_wanted, -layout.num_tokens)  # what holds a place finds the first token
        if layout.num_wanted:
            wanted[: len(step.sampling_tokens)] = step.sampling_tokens
        all_tiles = padded(tiles, layout.num_tile_ints - len(tiles))
        return pack([*self._tokens.arrays(step, layout.num_tokens), *decodes, all_tiles, wanted], into)

    def _num_items(self, num_seqs: int) -> int:
        return num_decode_items(num_seqs, self._num_kv_heads, self._num_sms)
