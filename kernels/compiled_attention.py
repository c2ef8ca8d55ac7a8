"""Attention over paged keys and values on a CPU: prompts, chunks of prompts and single tokens alike.

    y = softmax(cap(q K^T * scale) + mask) V  over a sequence's pages, which hold the step's own keys and values already

The definition is that of paged_attention.py without the writing, see write_qkv.py. Keys and values are read where they
lie. A sequence with one query is cut in parts of PART positions, which threads share; every query's sums run over the
same blocks of positions and are joined at the same places, whatever else the step holds, and however it is cut.

Shapes   qkv [T, H + 2K, D]: of it the query heads are read, contiguous; pages [num_blocks, 2, K, B, D], contiguous;
         y [T, H * D]. Query head h reads key head h // (H / K). D <= 256.
Dtypes   float32 or bf16, all alike. Scores, weights and sums in float32; where the CPU multiplies pairs of bf16,
         weights are rounded to bf16 before they meet the values.
Writes   y alone, and the plan's workspace. Positions beyond a sequence's length are never read.
Source   Kwon et al. 2023, arXiv:2309.06180; Milakov and Gimelshein 2018, arXiv:1805.02867 (running maxima)
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagedray.kernels import paged_attention
from pagedray.kernels.case import Case
from pagedray.kernels.cpu.library import TYPES, library_for
from pagedray.kernels.paged_attention import PagedBatch, paged_attention_ref

LARGEST_HEAD = 256
PART = 256  # as in attention.c
_ROWS = 64  # rows of a task, as in attention.c; more would be cut there
_PAD = 32  # a row of sums is padded to a multiple of it


@dataclasses.dataclass(frozen=True)
class CompiledPlan:
    """Work of one step for one group of layers.

    A unit is a run of queries of one sequence, or a part of the positions that one query sees. Its columns: sequence,
    first token, number of queries, position of the first; first position and end of what it reads; which part of how
    many, where it is one.
    """

    units: Tensor  # [U, 8] int32
    block_tables: Tensor  # [S, max_blocks] int32
    slots: Tensor  # [T] int64: block * block_size + offset of each token
    window: int  # more than any position where there is none
    workspace: CompiledWorkspace | None  # None: no query is cut


class CompiledWorkspace:
    """What parts leave for the thread that joins them; kept from step to step."""

    def __init__(self) -> None:
        self.partial = torch.empty(0)
        self.num_done = torch.zeros(0, dtype=torch.int32)  # zeros between calls

    def reserve(self, num_units: int, num_heads: int, num_kv_heads: int, head_dim: int) -> CompiledWorkspace:
        size = num_units * num_heads * (-(-head_dim // _PAD) * _PAD + 2)
        if size > len(self.partial):
            self.partial = torch.empty(size * 5 // 4)
        if num_units * num_kv_heads > len(self.num_done):
            self.num_done = torch.zeros(num_units * num_kv_heads * 5 // 4, dtype=torch.int32)
        return self


def compiled_attention_ref(
    qkv: Tensor, pages: Tensor, batch: PagedBatch, scale: float, softcap: float | None = None
) -> Tensor:
    return paged_attention_ref(qkv, pages, batch, scale, softcap)


def compiled_attention(
    qkv: Tensor, pages: Tensor, plan: CompiledPlan, scale: float, softcap: float | None = None
) -> Tensor:
    num_kv_heads, block_size, head_dim = pages.shape[2:]
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    library = library_for(qkv, pages)
    assert library is not None and head_dim <= LARGEST_HEAD and qkv.dtype == pages.dtype
    assert qkv.is_contiguous() and pages.is_contiguous()
    y = torch.empty(len(qkv), num_heads * head_dim, dtype=qkv.dtype)
    partial = num_done = None
    if plan.workspace is not None:
        room = plan.workspace.reserve(len(plan.units), num_heads, num_kv_heads, head_dim)
        partial, num_done = room.partial.data_ptr(), room.num_done.data_ptr()
    library.pagedray_attention(
        *(qkv.data_ptr(), pages.data_ptr(), y.data_ptr(), plan.block_tables.data_ptr(), plan.units.data_ptr()),
        *(partial, num_done, len(plan.units), plan.block_tables.shape[1], num_heads, num_kv_heads, head_dim),
        *(block_size, plan.window, scale, softcap or 0.0, TYPES[qkv.dtype], torch.get_num_threads()),
    )
    return y


def plan_compiled(batch: PagedBatch, block_size: int, group: int, workspace: CompiledWorkspace) -> CompiledPlan:
    """
    Args:
        group: query heads of each key head.
    """
    num_queries = np.diff(batch.query_start_cpu)
    window = 2**31 - 1 if batch.window is None else batch.window
    units = _units(batch, num_queries, window, group)
    tables = np.ascontiguousarray(batch.block_tables_cpu)
    return CompiledPlan(
        units=torch.from_numpy(units),
        block_tables=torch.from_numpy(tables),
        slots=torch.from_numpy(_slots(batch, num_queries, block_size)),
        window=window,
        workspace=workspace if len(units) and units[:, 7].max() > 1 else None,
    )


def _slots(batch: PagedBatch, num_queries: NDArray[np.int64], block_size: int) -> NDArray[np.int64]:
    seq = np.repeat(np.arange(len(num_queries)), num_queries)
    start = batch.lengths_cpu - num_queries
    position = np.arange(len(seq)) + (start - batch.query_start_cpu[:-1])[seq]
    block = batch.block_tables_cpu[seq, position // block_size].astype(np.int64)
    slots: NDArray[np.int64] = block * block_size + position % block_size
    return slots


def _units(batch: PagedBatch, num_queries: NDArray[np.int64], window: int, group: int) -> NDArray[np.int32]:
    """Each run of up to _ROWS rows; of sequences with one query, each part."""
    most = max(_ROWS // group, 1)
    first_part = np.maximum(batch.lengths_cpu - window, 0) // PART
    num_parts = np.where(num_queries == 1, -(-batch.lengths_cpu // PART) - first_part, 1)
    num_runs = -(-num_queries // most)
    counts = num_parts * num_runs
    seq = np.repeat(np.arange(len(counts)), counts)
    index = np.arange(len(seq)) - np.repeat(np.cumsum(counts) - counts, counts)  # of the unit in its sequence
    is_single = num_queries[seq] == 1
    query = np.where(is_single, 0, index * most)
    count = np.minimum(num_queries[seq] - query, most)
    position = (batch.lengths_cpu - num_queries)[seq] + query
    low, end = np.maximum(position - window + 1, 0), position + count
    begin = (first_part[seq] + index) * PART
    low = np.where(is_single, np.maximum(low, begin), low)
    end = np.where(is_single, np.minimum(end, begin + PART), end)
    part = np.where(is_single, index, 0)
    token = batch.query_start_cpu[:-1][seq] + query
    return np.stack([seq, token, count, position, low, end, part, num_parts[seq]], axis=1).astype(np.int32)


def kernel_inputs(name: str, inputs: tuple[object, ...]) -> tuple[object, ...]:
    """A plan made from the batch."""
    qkv, pages, batch, *rest = inputs
    assert isinstance(qkv, Tensor) and isinstance(pages, Tensor) and isinstance(batch, PagedBatch)
    num_kv_heads, block_size = pages.shape[2:4]
    group = qkv.shape[1] // num_kv_heads - 2
    return qkv, pages, plan_compiled(batch, block_size, group, CompiledWorkspace()), *rest


def make_inputs(case: Case) -> tuple[Tensor, Tensor, PagedBatch, float, float | None]:
    """As those of paged_attention.py, with the step's keys and values in their pages. What lies beyond a sequence's
    length, and in blocks that a window has left behind, is no number."""
    qkv, pages, batch, scale, softcap = paged_attention.make_inputs(case)
    paged_attention_ref(qkv, pages, batch, scale, softcap)  # writes them
    block_size = pages.shape[3]
    is_used = torch.zeros(pages.shape[0], block_size, dtype=torch.bool)
    num_queries = np.diff(batch.query_start_cpu)
    for table, length, count in zip(batch.block_tables_cpu, batch.lengths_cpu, num_queries, strict=True):
        low = 0 if batch.window is None else max(int(length - count) - batch.window + 1, 0)
        position = np.arange(low, int(length))
        is_used[table[position // block_size], position % block_size] = True
    pages.masked_fill_(~is_used[:, None, None, :, None], torch.nan)
    return qkv, pages, batch, scale, softcap


CASES = [Case("compiled_attention", dtype=case.dtype, **case.axes) for case in paged_attention.CASES] + [
    Case("compiled_attention", S=2, L=700, B=16, H=9, K=3, D=64, dtype=torch.bfloat16),
    Case("compiled_attention", S=3, L=900, B=16, H=4, K=2, D=80),
    Case("compiled_attention", S=3, L=900, W=300, B=8, H=4, K=2, D=24, softcap=5),
    Case("compiled_attention", S=2, P=2, L=500, T=90, B=16, H=8, K=1, D=256, dtype=torch.bfloat16),
    Case("compiled_attention", S=1, P=2, L=600, T=200, W=320, B=5, H=6, K=2, D=40, dtype=torch.bfloat16),
    Case("compiled_attention", S=1, P=1, L=40, T=9, B=16, H=71, K=1, D=64),
    Case("compiled_attention", S=2, P=1, L=70, T=40, B=16, H=4, K=4, D=8, dtype=torch.bfloat16),
    Case("compiled_attention", S=2, P=1, L=70, T=40, B=16, H=4, K=2, D=12),
]
