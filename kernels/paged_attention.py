"""Attention over paged keys and values, for a step that mixes decoding and prefilling sequences.

    write K, V of the step's tokens to their pages;  y = softmax(cap(q K^T * scale) + mask) V  over a sequence's pages

A query at position p sees positions max(0, p - window + 1) … p; cap(s) = softcap * tanh(s / softcap), or s without one.

Shapes   qkv [T, H + 2K, D]: query, key and value heads of each token; pages [num_blocks, 2, K, B, D]; y [T, H * D].
         Query head h reads key head h // (H / K).
Dtypes   float32, bf16 or fp16, all alike.
Writes   pages, before anything is read: sequences of one step may share blocks. Block 0 is the null page. Keys and
         values that are no numbers become finite, as in write_qkv.py, in qkv too.
Source   Kwon et al. 2023, arXiv:2309.06180; the softcap: Gemma 2, arXiv:2408.00118

A batch becomes a plan once a step (index arithmetic in numpy, no loop over decoding sequences); every layer of the
group uses that plan. Decoding sequences are gathered in buckets of similar length and attended together; a loop runs
over the prefilling ones alone.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from pagedray.kernels.case import Case
from pagedray.kernels.write_qkv import make_finite

# Gathered keys and values of one bucket should still be in the cache when they are read.
_BUCKET_BYTES = 16 * 2**20
# A narrow product of bf16 costs more to start than to compute: below this many scores one fused call is faster.
_FEW_SCORES = 2048

# Matrix units read 16 rows at a time: with fewer queries than that, the keys are the better rows.
_FEW_QUERIES = 16


@dataclasses.dataclass(frozen=True)
class PagedBatch:
    """Where the tokens of one step lie, for one group of layers.

    Sequences with one query come first, ordered by length.
    """

    block_tables_cpu: NDArray[np.int32]  # [S, max_blocks]; entry i holds positions i * block_size … of that sequence
    query_start_cpu: NDArray[np.int64]  # [S + 1]: first token of each sequence in the batch
    lengths_cpu: NDArray[np.int64]  # [S]: tokens of each sequence, this step's included
    window: int | None


@dataclasses.dataclass(frozen=True)
class _Bucket:
    """Decoding sequences of similar length: tokens first … last of the batch."""

    first: int
    last: int
    rows: Tensor  # [2, S * K * blocks] int64: what to gather, as rows of pages.view(-1, B * D)
    gathered: Tensor  # [2 * S * K * blocks, B * D]: where to; all gathers of a step share this memory
    seen: slice  # of the gathered positions
    mask: Tensor | None  # [S, 1, L] of the pages' type, 0 or -inf; None: one sequence, which sees all of `seen`
    hidden: Tensor | None  # [S, 1, L, 1]: what others left there is cleared, since a weight of 0 doesn't keep NaN out


@dataclasses.dataclass(frozen=True)
class _Chunk:
    """Tokens first … last of the batch: a piece of one prompt, or the beginnings of several, equally long."""

    first: int
    last: int
    num_seqs: int
    rows: Tensor | None  # [2 * K * blocks] int64; None: nothing was cached, so the step's own keys and values are all
    gathered: Tensor  # as for buckets
    length: int
    mask: Tensor | None  # [T, L] of each sequence; None: causal from the first position on


@dataclasses.dataclass(frozen=True)
class AttentionPlan:
    slots: Tensor  # [T * 2 * K] int64: where to write, as rows of pages.view(-1, D)
    buckets: tuple[_Bucket, ...]
    chunks: tuple[_Chunk, ...]


class Workspace:
    """Memory that is kept from step to step: fresh pages from the system cost more than filling them."""

    def __init__(self, dtype: torch.dtype, device: torch.device):
        self._room = torch.empty(0, dtype=dtype, device=device)

    def take(self, rows: int, width: int) -> Tensor:
        if rows * width > len(self._room):
            self._room = self._room.new_empty(rows * width * 5 // 4)
        return self._room[: rows * width].view(rows, width)


def paged_attention_ref(
    qkv: Tensor, pages: Tensor, batch: PagedBatch, scale: float, softcap: float | None = None
) -> Tensor:
    num_kv_heads, block_size = pages.shape[2:4]
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    q, kv = qkv.split((num_heads, 2 * num_kv_heads), dim=1)
    kv = torch.nan_to_num(kv)
    spans = [
        (table, int(first), int(last), int(length))
        for table, first, last, length in zip(
            batch.block_tables_cpu,
            batch.query_start_cpu[:-1],
            batch.query_start_cpu[1:],
            batch.lengths_cpu,
            strict=True,
        )
    ]
    for table, first, last, length in spans:
        for token, position in zip(range(first, last), range(length - (last - first), length), strict=True):
            page = pages[int(table[position // block_size])]
            page[:, :, position % block_size] = kv[token].unflatten(0, (2, num_kv_heads))
    y = torch.empty_like(q)
    for table, first, last, length in spans:
        for token, position in zip(range(first, last), range(length - (last - first), length), strict=True):
            low = 0 if batch.window is None else max(0, position - batch.window + 1)
            seen = torch.stack(
                [pages[int(table[p // block_size]), :, :, p % block_size] for p in range(low, position + 1)], dim=2
            ).float()  # [2, K, L, D]
            keys, values = seen.repeat_interleave(num_heads // num_kv_heads, dim=1)
            scores = torch.einsum("hd,hld->hl", q[token].float(), keys) * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            y[token] = torch.einsum("hl,hld->hd", scores.softmax(-1), values)
    return y.flatten(1)


def paged_attention(
    qkv: Tensor, pages: Tensor, plan: AttentionPlan, scale: float, softcap: float | None = None
) -> Tensor:
    num_kv_heads, block_size, head_dim = pages.shape[2:]
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    make_finite(qkv[:, num_heads:])
    pages.view(-1, head_dim)[plan.slots] = qkv[:, num_heads:].reshape(-1, head_dim)
    page_rows = pages.view(-1, block_size * head_dim)
    if len(plan.buckets) == 1 and not plan.chunks:
        return _decode(qkv[:, :num_heads], page_rows, plan.buckets[0], num_kv_heads, scale, softcap)
    y = qkv.new_empty(len(qkv), num_heads * head_dim)
    for bucket in plan.buckets:
        q = qkv[bucket.first : bucket.last, :num_heads]
        y[bucket.first : bucket.last] = _decode(q, page_rows, bucket, num_kv_heads, scale, softcap)
    for chunk in plan.chunks:
        tokens = qkv[chunk.first : chunk.last]
        y[chunk.first : chunk.last] = _prefill(tokens, page_rows, chunk, num_kv_heads, scale, softcap)
    return y


def _decode(
    q: Tensor, page_rows: Tensor, bucket: _Bucket, num_kv_heads: int, scale: float, softcap: float | None
) -> Tensor:
    """One query a sequence: the query heads of one key head are the rows of a product of their own. q [S, H, D]."""
    num_seqs, num_heads, head_dim = q.shape
    num_products, group = num_seqs * num_kv_heads, num_heads // num_kv_heads
    num_seen = bucket.rows.shape[1] // num_products * page_rows.shape[1] // head_dim
    if softcap is None and q.dtype != torch.float32 and num_products * num_seen <= _FEW_SCORES:
        torch.index_select(page_rows, 0, bucket.rows.view(-1), out=bucket.gathered)
        seen = bucket.gathered.view(2, num_seqs, num_kv_heads, -1, head_dim)
        if bucket.hidden is not None:
            seen.masked_fill_(bucket.hidden, 0)
        keys, values = seen[:, :, :, bucket.seen]
        mask = None if bucket.mask is None else bucket.mask.unsqueeze(1)
        q = q.view(num_seqs, num_kv_heads, group, head_dim)
        y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale)
        return y.reshape(num_seqs, num_heads * head_dim)
    keys = _gather(page_rows, bucket, 0, num_seqs, num_kv_heads, head_dim)
    scores = _scores(q.reshape(num_products, group, head_dim), keys, bucket.mask, scale, softcap)
    p = torch.softmax(scores, -1)
    values = _gather(page_rows, bucket, 1, num_seqs, num_kv_heads, head_dim)
    return torch.bmm(p, values).view(num_seqs, num_heads * head_dim)


def _gather(page_rows: Tensor, bucket: _Bucket, kind: int, num_seqs: int, num_kv_heads: int, head_dim: int) -> Tensor:
    """Keys (0) or values (1) of a bucket, [S * K, L, D], in the same memory: half as much goes through the cache."""
    rows = bucket.rows[kind]
    gathered = torch.index_select(page_rows, 0, rows, out=bucket.gathered[: len(rows)])
    if bucket.hidden is not None:
        gathered.view(num_seqs, num_kv_heads, -1, head_dim).masked_fill_(bucket.hidden, 0)
    return gathered.view(num_seqs * num_kv_heads, -1, head_dim)[:, bucket.seen]


def _prefill(
    qkv: Tensor, page_rows: Tensor, chunk: _Chunk, num_kv_heads: int, scale: float, softcap: float | None
) -> Tensor:
    """Several queries of each sequence. qkv [T, H + 2K, D]."""
    num_tokens, width, head_dim = qkv.shape
    num_heads = width - 2 * num_kv_heads
    heads = qkv.unflatten(0, (chunk.num_seqs, -1)).transpose(1, 2)  # [S, H + 2K, T, D]
    q = heads[:, :num_heads]
    if chunk.rows is None:
        keys, values = heads[:, num_heads:].split(num_kv_heads, 1)  # [S, K, L, D]
    else:
        torch.index_select(page_rows, 0, chunk.rows, out=chunk.gathered)
        keys, values = chunk.gathered.view(2, 1, num_kv_heads, -1, head_dim)[:, :, :, : chunk.length]
    if softcap is None:
        y = F.scaled_dot_product_attention(
            q,
            keys,
            values,
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None,
            scale=scale,
            enable_gqa=num_heads != num_kv_heads,
        )
    else:
        group = num_heads // num_kv_heads
        mask = _causal_mask(q.shape[2], chunk.length, None, q) if chunk.mask is None else chunk.mask
        keys, values = (x.repeat_interleave(group, 1).flatten(0, 1) for x in (keys, values))
        scores = _scores(q.flatten(0, 1), keys, mask, scale, softcap)
        y = torch.bmm(torch.softmax(scores, -1), values).unflatten(0, (chunk.num_seqs, -1))
    return y.transpose(1, 2).reshape(num_tokens, num_heads * head_dim)


def _scores(q: Tensor, keys: Tensor, mask: Tensor | None, scale: float, softcap: float | None) -> Tensor:
    """q [N, G, D], keys [N, L, D] → [N, G, L]. A mask [S, 1, L] is shared by N / S products each, one [G, L] by all."""
    if q.shape[1] < _FEW_QUERIES and q.dtype == torch.bfloat16:
        scores = q.new_empty(*q.shape[:2], keys.shape[1]).copy_(torch.bmm(keys, q.transpose(1, 2)).transpose(1, 2))
    else:
        scores = torch.bmm(q, keys.transpose(1, 2))
    if softcap is not None:
        scores, scale = scores.mul_(scale / softcap).tanh_(), softcap
    if mask is None:
        return scores.mul_(scale)
    by_mask = scores if mask.dim() == 2 else scores.view(len(mask), -1, scores.shape[-1])
    return torch.add(mask, by_mask, alpha=scale).view(scores.shape)


def plan_attention(batch: PagedBatch, pages: Tensor, workspace: Workspace) -> AttentionPlan:
    """Index arithmetic that all layers of a group share. `pages` are those of any layer of the group."""
    num_kv_heads, block_size, head_dim = pages.shape[2:]
    num_queries = np.diff(batch.query_start_cpu)
    num_decoding = int(np.argmax(num_queries != 1)) if (num_queries != 1).any() else len(num_queries)
    assert (num_queries[num_decoding:] > 1).all(), "sequences with one query come first"
    slots = _write_slots(batch, num_queries, num_kv_heads, block_size)
    buckets = _buckets(batch, pages, num_decoding)
    chunks = _chunks(batch, pages, num_decoding)
    sizes = [b.rows.numel() for b in buckets] + [len(c.rows) for c in chunks if c.rows is not None]
    room = workspace.take(max(sizes, default=0), block_size * head_dim)
    return AttentionPlan(
        slots=torch.from_numpy(slots).to(pages.device),
        buckets=tuple(dataclasses.replace(b, gathered=room[: b.rows.numel()]) for b in buckets),
        chunks=tuple(c if c.rows is None else dataclasses.replace(c, gathered=room[: len(c.rows)]) for c in chunks),
    )


def _write_slots(
    batch: PagedBatch, num_queries: NDArray[np.int64], num_kv_heads: int, block_size: int
) -> NDArray[np.int64]:
    seq = np.repeat(np.arange(len(num_queries)), num_queries)
    position = np.arange(len(seq)) - batch.query_start_cpu[:-1][seq] + (batch.lengths_cpu - num_queries)[seq]
    block, offset = batch.block_tables_cpu[seq, position // block_size].astype(np.int64), position % block_size
    head = np.arange(2 * num_kv_heads)
    slots: NDArray[np.int64] = ((block * 2 * num_kv_heads)[:, None] + head) * block_size + offset[:, None]
    return slots.ravel()


def _buckets(batch: PagedBatch, pages: Tensor, num_decoding: int) -> list[_Bucket]:
    """Cut the decoding sequences, longest first, where a shorter one would be padded by half its own length or more."""
    num_kv_heads, block_size, head_dim = pages.shape[2:]
    lengths = batch.lengths_cpu[:num_decoding]
    low = np.zeros_like(lengths) if batch.window is None else np.maximum(lengths - batch.window, 0)
    first_block = low // block_size
    num_blocks = -(-lengths // block_size) - first_block
    block_bytes = 2 * num_kv_heads * block_size * head_dim * pages.element_size()
    nowhere = pages.new_empty(0)  # until the room that all gathers need is known
    buckets = []
    end = num_decoding
    while end > 0:
        longest = int(num_blocks[:end].max())
        begin = int(np.argmax(num_blocks[:end] >= longest - max(longest // 3, 2)))
        begin = max(begin, end - max(_BUCKET_BYTES // (longest * block_bytes), 1))
        seqs = slice(begin, end)
        index = first_block[seqs, None] + np.arange(longest)
        tables = batch.block_tables_cpu[seqs]
        inside = index < (-(-lengths[seqs] // block_size))[:, None]
        blocks = np.where(inside, np.take_along_axis(tables, np.minimum(index, tables.shape[1] - 1), 1), 0)
        mask, cleared, seen = None, None, slice(None)
        if end - begin == 1:
            offset = int(first_block[begin]) * block_size
            seen = slice(int(low[begin]) - offset, int(lengths[begin]) - offset)
        else:
            position = first_block[seqs, None] * block_size + np.arange(longest * block_size)
            hidden = torch.from_numpy((position >= lengths[seqs, None]) | (position < low[seqs, None]))
            mask, cleared = _additive(hidden, pages).unsqueeze(1), hidden[:, None, :, None].to(pages.device)
        rows = torch.from_numpy(_page_rows(blocks, num_kv_heads)).view(2, -1).to(pages.device)
        buckets.append(_Bucket(begin, end, rows, nowhere, seen, mask, cleared))
        end = begin
    return buckets


def _chunks(batch: PagedBatch, pages: Tensor, num_decoding: int) -> list[_Chunk]:
    """Neighbours with equally long beginnings share a chunk."""
    num_queries = np.diff(batch.query_start_cpu)
    is_fresh = batch.lengths_cpu == num_queries
    chunks, seq = [], num_decoding
    while seq < len(num_queries):
        end = seq + 1
        while is_fresh[seq] and end < len(num_queries) and is_fresh[end] and num_queries[end] == num_queries[seq]:
            end += 1
        chunks.append(_chunk(batch, pages, seq, end))
        seq = end
    return chunks


def _chunk(batch: PagedBatch, pages: Tensor, seq: int, end: int) -> _Chunk:
    num_kv_heads, block_size, _ = pages.shape[2:]
    first, last = int(batch.query_start_cpu[seq]), int(batch.query_start_cpu[end])
    num_queries = (last - first) // (end - seq)
    length, window = int(batch.lengths_cpu[seq]), batch.window
    start, nowhere = length - num_queries, pages.new_empty(0)
    if start == 0:
        mask = None if window is None or window >= length else _causal_mask(length, length, window, pages)
        return _Chunk(first, last, end - seq, None, nowhere, length, mask)
    first_block = 0 if window is None else max(start - window + 1, 0) // block_size
    blocks = batch.block_tables_cpu[seq, first_block : -(-length // block_size)]
    rows = torch.from_numpy(_page_rows(blocks[None], num_kv_heads)).to(pages.device)
    num_seen = length - first_block * block_size
    return _Chunk(first, last, 1, rows, nowhere, num_seen, _causal_mask(num_queries, num_seen, window, pages))


def _page_rows(blocks: NDArray[np.int32], num_kv_heads: int) -> NDArray[np.int64]:
    """blocks [S, blocks] → rows of pages.view(-1, B * D) in the order [2, S, K, blocks], flat."""
    kind = np.arange(2)[:, None, None, None] * num_kv_heads + np.arange(num_kv_heads)[:, None]
    rows: NDArray[np.int64] = blocks.astype(np.int64)[None, :, None, :] * 2 * num_kv_heads + kind
    return rows.ravel()


def _causal_mask(num_queries: int, length: int, window: int | None, like: Tensor) -> Tensor:
    """[num_queries, length] for the last num_queries of `length` positions."""
    query = torch.arange(length - num_queries, length)[:, None]
    key = torch.arange(length)[None]
    hidden = key > query
    if window is not None:
        hidden |= key <= query - window
    return _additive(hidden, like)


def _additive(hidden: Tensor, like: Tensor) -> Tensor:
    return torch.zeros(hidden.shape, dtype=like.dtype).masked_fill_(hidden, -torch.inf).to(like.device)


def make_inputs(case: Case) -> tuple[Tensor, Tensor, PagedBatch, float, float | None]:
    """`S` sequences decode, `P` prefill chunks of up to `T` tokens; lengths up to `L`, in shuffled blocks.
    even: the chunks are whole prompts of `T` tokens.
    """
    rng = np.random.default_rng(case["L"] + case["S"])
    num_decoding, num_chunks, block_size = case["S"], case.get("P"), case.get("B", 4)
    starts = np.sort(rng.integers(0, case["L"], num_decoding))
    starts = np.concatenate([starts, rng.integers(0, case["L"], num_chunks) * (np.arange(num_chunks) % 2)])
    num_queries = np.concatenate([np.ones(num_decoding, np.int64), rng.integers(2, case.get("T", 2) + 1, num_chunks)])
    if case.get("even"):
        starts[num_decoding:], num_queries[num_decoding:] = 0, case["T"]
    lengths = starts + num_queries
    width = -(-int(lengths.max()) // block_size) + 1
    blocks = rng.permutation(np.arange(1, len(lengths) * width + 1)).reshape(len(lengths), width)
    tables = np.where(np.arange(width) < (-(-lengths // block_size))[:, None], blocks, 0).astype(np.int32)
    pages = case.randn(blocks.size + 1, 2, case["K"], block_size, case["D"], seed=1)
    qkv = case.randn(int(num_queries.sum()), case["H"] + 2 * case["K"], case["D"], seed=2)
    batch = PagedBatch(tables, np.concatenate([[0], np.cumsum(num_queries)]), lengths, case.get("W") or None)
    return qkv, pages, batch, case["D"] ** -0.5, float(case.get("softcap")) or None


CASES = [
    Case("paged_attention", S=1, L=20, H=9, K=3, D=64, B=16, dtype=torch.bfloat16),
    Case("paged_attention", S=1, L=1, H=4, K=4, D=16),
    Case("paged_attention", S=1, L=40, W=9, H=4, K=1, D=16),
    Case("paged_attention", S=8, L=60, H=9, K=3, D=64, B=16),
    Case("paged_attention", S=8, L=60, H=9, K=3, D=64, B=16, dtype=torch.bfloat16),
    Case("paged_attention", S=40, L=300, H=4, K=2, D=8),
    Case("paged_attention", S=9, L=70, W=16, H=4, K=2, D=32),
    Case("paged_attention", S=9, L=70, W=5, H=4, K=2, D=32, softcap=2),
    Case("paged_attention", S=0, P=3, L=30, T=25, H=9, K=3, D=64, B=16, dtype=torch.bfloat16),
    Case("paged_attention", S=3, P=4, L=30, T=25, H=4, K=2, D=16),
    Case("paged_attention", S=3, P=4, L=30, T=25, W=7, H=4, K=2, D=16),
    Case("paged_attention", S=2, P=4, L=30, T=9, W=7, H=6, K=1, D=16, B=1, softcap=2),
    Case("paged_attention", S=2, P=4, L=30, T=9, H=2, K=2, D=16, softcap=3),
    Case("paged_attention", S=2, P=3, L=30, T=20, even=1, H=6, K=2, D=16),
    Case("paged_attention", S=2, P=3, L=30, T=20, even=1, W=7, H=6, K=2, D=16),
    Case("paged_attention", S=2, P=3, L=30, T=20, even=1, W=7, H=6, K=2, D=16, softcap=3),
]
