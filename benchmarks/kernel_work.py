"""What gpu_kernels.py times: for each op of kernels/ that has a Triton launch, its inputs at a model's shapes.

A function named after an op makes its `Work`: ours as the engine calls it, baselines that compute the same, and the
comparison with the op's reference. Inputs come in copies: call i works on copy i.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.model_shapes import CONFIGS
from pagedray.kernels import (
    activation,
    block_copy,
    logprobs,
    step_tokens,
)  # fmt: skip
from pagedray.kernels import (
    embedding as embedding_op,
)
from pagedray.kernels import (
    gather_logits as gather_op,
)
from pagedray.kernels import (
    grouped_linear as grouped_op,
)
from pagedray.kernels import (
    paged_decode as decode_op,
)
from pagedray.kernels import (
    paged_prefill as prefill_op,
)
from pagedray.kernels import (
    penalties as penalties_op,
)
from pagedray.kernels import (
    rms_norm as norm_op,
)
from pagedray.kernels import (
    route_experts as route_op,
)
from pagedray.kernels import (
    sample_rows as sample_op,
)
from pagedray.kernels import (
    small_linear as linear_op,
)
from pagedray.kernels import (
    sort_pairs as sort_op,
)
from pagedray.kernels import (
    token_bitmask as mask_op,
)
from pagedray.kernels import (
    write_qkv as write_op,
)

EPS, BLOCK_SIZE, NUM_PARTS, NUM_TOP = 1e-5, 16, 4, 5
HISTORY = 64  # distinct tokens of a row with penalties
ROTATED_BYTES = 150_000_000  # three times the L2 cache of an H200
MAX_COPIES = 64  # inputs smaller than their share of it stay in the cache, as they do in a model's step
PREFILL_GOAL = 1 / 1.3  # of torch's own flash attention, at 4096 tokens

Call = Callable[[int], object]


class Shape(NamedTuple):
    """Sizes of a model, by the letters of the kernels' docstrings."""

    hidden: int
    inner: int
    H: int
    K: int
    D: int
    vocab: int
    has_qk_norm: bool
    E: int  # experts; 0: dense
    top_k: int  # of a token
    expert_inner: int

    @staticmethod
    def of(name: str) -> Shape:
        config = CONFIGS[name]
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        return Shape(
            hidden,
            config["intermediate_size"],
            heads,
            config["num_key_value_heads"],
            config.get("head_dim", hidden // heads),
            config["vocab_size"],
            config["model_type"].startswith("qwen3"),
            config.get("num_local_experts") or config.get("num_experts", 0),
            config.get("num_experts_per_tok", 0),
            config.get("moe_intermediate_size", config["intermediate_size"]),
        )


@dataclass
class Work:
    ours: Call
    baselines: dict[str, Call]
    is_correct: Callable[[], bool]
    num_copies: int
    num_bytes: float  # that must be read or written at least
    flops: float = 0.0
    backend: str = "triton"
    goal: float | None = None
    skipped: list[str] = field(default_factory=list)  # baselines that can't run, and why


class Job(NamedTuple):
    """One row of the table: `WORKS[op](Maker, *axes)`."""

    op: str
    shape: str
    case: str
    axes: tuple[Any, ...]


class Maker:
    """Random inputs on a device.

    Args:
        is_rotated: make as many copies as exceed the L2 cache, not one.
        uses_flashinfer: add it to the baselines where it has the op.
    """

    def __init__(self, shape: Shape, device: str, is_rotated: bool, uses_flashinfer: bool):
        self.shape, self.device = shape, torch.device(device)
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.is_rotated, self.uses_flashinfer = is_rotated, uses_flashinfer
        self.itemsize = self.dtype.itemsize

    def num_copies(self, num_bytes: float) -> int:
        return min(max(1, math.ceil(ROTATED_BYTES / num_bytes)), MAX_COPIES) if self.is_rotated else 1

    def randn(self, *size: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(size, dtype=dtype or self.dtype, device=self.device).normal_(0, scale)

    def copies(self, *size: int, scale: float = 1.0, num: int | None = None) -> Sequence[Tensor]:
        return self.randn(num or self.num_copies(math.prod(size) * self.itemsize), *size, scale=scale).unbind(0)

    def integers(self, high: int, *size: int) -> Tensor:
        return torch.randint(0, high, size, device=self.device)

    def on_device(self, array: Any) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def add_flashinfer(self, work: Work, make: Callable[[], Call]) -> None:
        if not self.uses_flashinfer:
            return
        try:
            work.baselines["flashinfer"] = make()
        except Exception as error:  # whatever its compiler or its planner says, the other rows should come
            work.skipped.append(f"flashinfer: {type(error).__name__}: {str(error)[:200]}")


def close(a: Tensor, b: Tensor, limit: float = 1.6e-2) -> bool:
    return torch.allclose(a.float(), b.float(), rtol=limit, atol=limit)


def is_near(a: Tensor, b: Tensor, limit: float = 5e-3) -> bool:
    """By the size of the whole difference: sums of thousands of products have no bound for each element."""
    return bool((a.float() - b.float()).norm() <= limit * b.float().norm())


def rms_norm(m: Maker, T: int) -> Work:
    N = m.shape.hidden
    x, w = m.copies(T, N), m.randn(N)
    return Work(
        lambda i: norm_op.rms_norm(x[i], w, EPS),
        {"torch": lambda i: F.rms_norm(x[i], (N,), w, EPS)},
        lambda: close(norm_op.rms_norm(x[0], w, EPS), norm_op.rms_norm_ref(x[0], w, EPS)),
        len(x),
        2 * T * N * m.itemsize,
    )


def add_rms_norm(m: Maker, T: int) -> Work:
    N = m.shape.hidden
    x, w = m.copies(T, N, scale=1e-3), m.randn(N)  # small: each call adds x once more
    r = m.copies(T, N, num=len(x))

    def torch_op(i: int) -> Tensor:
        r[i].add_(x[i])
        return F.rms_norm(r[i], (N,), w, EPS)

    def is_correct() -> bool:
        a, b = r[0].clone(), r[0].clone()
        y, expected = norm_op.add_rms_norm(x[0], a, w, EPS), norm_op.add_rms_norm_ref(x[0], b, w, EPS)
        return close(y, expected) and close(a, b)

    return Work(
        lambda i: norm_op.add_rms_norm(x[i], r[i], w, EPS),
        {"torch": torch_op},
        is_correct,
        len(x),
        4 * T * N * m.itemsize,
    )


def silu_and_mul(m: Maker, T: int) -> Work:
    N = m.shape.inner
    x = m.copies(T, 2 * N)
    return Work(
        lambda i: activation.silu_and_mul(x[i]),
        {"torch": lambda i: F.silu(x[i][:, :N]) * x[i][:, N:]},
        lambda: close(activation.silu_and_mul(x[0]), activation.silu_and_mul_ref(x[0])),
        len(x),
        3 * T * N * m.itemsize,
    )


def gelu_tanh_and_mul(m: Maker, T: int) -> Work:
    N = m.shape.inner
    x = m.copies(T, 2 * N)
    return Work(
        lambda i: activation.gelu_tanh_and_mul(x[i]),
        {"torch": lambda i: F.gelu(x[i][:, :N], approximate="tanh") * x[i][:, N:]},
        lambda: close(activation.gelu_tanh_and_mul(x[0]), activation.gelu_tanh_and_mul_ref(x[0])),
        len(x),
        3 * T * N * m.itemsize,
    )


def write_qkv(m: Maker, T: int) -> Work:
    """With a norm on query and key heads where the model has one."""
    H, K, D = m.shape.H, m.shape.K, m.shape.D
    qkv = m.copies(T, H + 2 * K, D)
    pages = m.copies(T // BLOCK_SIZE + 3, 2, K, BLOCK_SIZE, D, num=len(qkv))
    slots = torch.arange(T, device=m.device) + BLOCK_SIZE
    block, offset = slots // BLOCK_SIZE, slots % BLOCK_SIZE
    angle = m.randn(T, 1, D // 2, dtype=torch.float32)
    cos = torch.cat((angle.cos(), angle.cos()), -1).to(m.dtype)
    sin = torch.cat((-angle.sin(), angle.sin()), -1).to(m.dtype)
    w = m.randn(H + K, D) if m.shape.has_qk_norm else None

    def torch_op(i: int) -> None:
        qk, kv = qkv[i][:, : H + K], qkv[i][:, H:]
        if w is not None:
            qk.copy_(F.rms_norm(qk, (D,), None, EPS).mul_(w))
        rolled = qk.roll(D // 2, -1)
        qk.mul_(cos).addcmul_(rolled, sin)
        pages[i][block, :, :, offset] = kv.unflatten(1, (2, K))

    def is_correct() -> bool:
        a, b = (qkv[0].clone(), pages[0].clone()), (qkv[0].clone(), pages[0].clone())
        write_op.write_qkv(*a, slots, cos, sin, w, EPS)
        write_op.write_qkv_ref(*b, slots, cos, sin, w, EPS)
        return close(a[0], b[0]) and close(a[1], b[1])

    return Work(
        lambda i: write_op.write_qkv(qkv[i], pages[i], slots, cos, sin, w, EPS),
        {"torch": torch_op},
        is_correct,
        len(qkv),
        T * D * (2 * H + 5 * K) * m.itemsize,
    )


def embedding(m: Maker, T: int) -> Work:
    N, V = m.shape.hidden, m.shape.vocab
    table = m.randn(V, N)
    ids = m.integers(V, m.num_copies(T * N * m.itemsize), T).unbind(0)
    return Work(
        lambda i: embedding_op.embedding(ids[i], table),
        {"torch": lambda i: F.embedding(ids[i], table)},
        lambda: torch.equal(embedding_op.embedding(ids[0], table), embedding_op.embedding_ref(ids[0], table)),
        len(ids),
        2 * T * N * m.itemsize,
    )


def gather_logits(m: Maker, S: int) -> Work:
    """Of four ranks."""
    V = m.shape.vocab
    parts = m.copies(NUM_PARTS, S, V // NUM_PARTS)
    return Work(
        lambda i: gather_op.gather_logits(parts[i], V),
        {"torch": lambda i: parts[i].transpose(0, 1).reshape(S, V)},
        lambda: torch.equal(gather_op.gather_logits(parts[0], V), gather_op.gather_logits_ref(parts[0], V)),
        len(parts),
        2 * S * V * m.itemsize,
    )


def copy_blocks(m: Maker, N: int) -> Work:
    """In the pages of one layer."""
    pools = m.copies(2 * N + 1, 2, m.shape.K, BLOCK_SIZE, m.shape.D)
    pairs = (1 + torch.randperm(2 * N, device=m.device)).view(N, 2)
    source, target = (part.contiguous() for part in pairs.unbind(1))

    def is_correct() -> bool:
        a, b = pools[0].clone(), pools[0].clone()
        block_copy.copy_blocks((a,), pairs)
        block_copy.copy_blocks_ref((b,), pairs)
        return torch.equal(a, b)

    return Work(
        lambda i: block_copy.copy_blocks((pools[i],), pairs),
        {"torch": lambda i: pools[i].index_copy_(0, target, pools[i].index_select(0, source))},
        is_correct,
        len(pools),
        2 * N * pools[0][0].numel() * m.itemsize,
    )


def begin_step(m: Maker, T: int) -> Work:
    """One block group and up to 256 rows; its reference is the baseline."""
    num_rows, width = min(T, 256), 1024
    rows = torch.arange(T, device=m.device) % num_rows
    positions = 512 + torch.arange(T, device=m.device) // num_rows
    blocks = m.integers(10_000, 1, num_rows, width)
    slots = blocks[:, rows, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    ids = (m.integers(m.shape.vocab, T) - 1).clamp(max=3)
    last = m.integers(m.shape.vocab, num_rows + 1)
    args = ids.int(), positions.int(), rows.int(), slots.int(), last
    tables = torch.zeros(1, num_rows + 1, width, dtype=torch.int32, device=m.device)

    def is_correct() -> bool:
        a, b = tables.clone(), tables.clone()
        got = step_tokens.begin_step(*args, a, BLOCK_SIZE)
        expected = step_tokens.begin_step_ref(*args, b, BLOCK_SIZE)
        return all(map(torch.equal, (*got, a), (*expected, b)))

    return Work(
        lambda i: step_tokens.begin_step(*args, tables, BLOCK_SIZE),
        {"torch": lambda i: step_tokens.begin_step_ref(*args, tables, BLOCK_SIZE)},
        is_correct,
        1,
        T * 44,
    )


def token_logprobs(m: Maker, S: int) -> Work:
    V = m.shape.vocab
    logits, targets = m.copies(S, V, scale=5.0), m.integers(V, S)

    def torch_op(i: int) -> tuple[Tensor, ...]:
        z = logits[i].float().log_softmax(-1)
        chosen = z.gather(1, targets[:, None])
        return chosen, (z > chosen).sum(-1), *z.topk(NUM_TOP)

    def is_correct() -> bool:
        got = logprobs.token_logprobs(logits[0], targets, NUM_TOP)
        expected = logprobs.token_logprobs_ref(logits[0], targets, NUM_TOP)
        same = torch.equal(got.rank, expected.rank) and torch.equal(got.top_ids, expected.top_ids)
        return (
            same and close(got.logprob, expected.logprob, 1e-4) and close(got.top_logprobs, expected.top_logprobs, 1e-4)
        )

    return Work(
        lambda i: logprobs.token_logprobs(logits[i], targets, NUM_TOP),
        {"torch": torch_op},
        is_correct,
        len(logits),
        S * V * m.itemsize,
    )


def apply_penalties(m: Maker, S: int) -> Work:
    """Rows with HISTORY distinct tokens each; plain torch keeps a count for every token of the vocabulary."""
    V = m.shape.vocab
    logits = m.randn(S, V, dtype=torch.float32)
    ids = torch.stack([torch.randperm(V, device=m.device)[:HISTORY] for _ in range(S)])
    counts, num_unique = m.integers(4, S, HISTORY).int(), torch.full((S,), HISTORY, device=m.device)
    rows, penalties = torch.arange(S, device=m.device), [torch.full((S,), x, device=m.device) for x in (1.1, 0.2, 0.1)]
    dense = torch.zeros(S, V, device=m.device).scatter_(1, ids, counts.float())
    seen = torch.zeros(S, V, dtype=torch.bool, device=m.device).scatter_(1, ids, True)
    args = rows, ids, counts, num_unique, *penalties

    def torch_op(i: int) -> Tensor:
        z = torch.where(seen, torch.where(logits > 0, logits / 1.1, logits * 1.1), logits)
        return z - 0.1 * dense - 0.2 * (dense > 0)

    def is_correct() -> bool:
        got, expected = logits.clone(), logits.cpu()
        penalties_op.apply_penalties(got, *args)
        penalties_op.apply_penalties_ref(expected, *(arg.cpu() for arg in args))
        return close(got.cpu(), expected, 1e-5)

    scratch = logits.clone()
    return Work(
        lambda i: penalties_op.apply_penalties(scratch, *args), {"torch": torch_op}, is_correct, 1, S * HISTORY * 20
    )


def count_tokens(m: Maker, S: int) -> Work:
    """One more token for each of S rows; plain torch adds it to a count for every token of the vocabulary."""
    V = m.shape.vocab
    ids = torch.stack([torch.randperm(V, device=m.device)[:HISTORY] for _ in range(S)])
    counts, num_unique = m.integers(4, S, HISTORY).int(), torch.full((S,), HISTORY - 1, device=m.device)
    slots, tokens = torch.arange(S, device=m.device), ids[:, HISTORY // 2].clone()
    dense, ones = torch.zeros(S, V, device=m.device), torch.ones(S, 1, device=m.device)

    def is_correct() -> bool:
        got, expected = [x.clone() for x in (ids, counts, num_unique)], [x.cpu() for x in (ids, counts, num_unique)]
        penalties_op.count_tokens(*got, slots, tokens)
        penalties_op.count_tokens_ref(*expected, slots.cpu(), tokens.cpu())
        return all(torch.equal(a.cpu(), b) for a, b in zip(got, expected, strict=True))

    return Work(
        lambda i: penalties_op.count_tokens(ids, counts, num_unique, slots, tokens),
        {"torch": lambda i: dense.scatter_add_(1, tokens[:, None], ones)},
        is_correct,
        1,
        S * HISTORY * 8,
    )


def mask_tokens(m: Maker, S: int) -> Work:
    """S rows that may choose few tokens, as within JSON's punctuation; plain torch has a byte for each token."""
    V = m.shape.vocab
    num_copies = m.num_copies(S * V * 4)
    logits = m.randn(num_copies, S, V, dtype=torch.float32).unbind(0)
    is_allowed = torch.rand(S, V, device=m.device) < 0.01
    bits = F.pad(is_allowed.cpu(), (0, -V % 32)).numpy()
    words = m.on_device(np.packbits(bits, axis=1, bitorder="little").view(np.int32))
    rows, is_forbidden = torch.arange(S, device=m.device), ~is_allowed

    def is_correct() -> bool:
        few = min(S, 2)  # the reference looks at each bit
        got, expected = logits[0].clone(), logits[0][:few].cpu()
        mask_op.mask_tokens(got, rows, words)
        mask_op.mask_tokens_ref(expected, rows[:few].cpu(), words[:few].cpu())
        return torch.equal(got[:few].cpu(), expected)

    return Work(
        lambda i: mask_op.mask_tokens(logits[i], rows, words),
        {"torch": lambda i: logits[i].masked_fill_(is_forbidden, -torch.inf)},
        is_correct,
        num_copies,
        S * V * 4,
    )


def sample_rows(m: Maker, S: int, method: str) -> Work:
    """All rows alike. Torch draws by argmax of p / exponential noise, which needs no sum over the vocabulary."""
    V = m.shape.vocab
    temperature = 0.0 if method == "greedy" else 0.8
    top_k, top_p, min_p = (50, 0.9, 0.02) if method == "filters" else (0, 1.0, 0.0)
    logits = m.copies(S, V, scale=5.0)
    rng = np.random.default_rng(1)
    packed = sample_op.pack_fields(
        rng.integers(0, 1 << 62, S),
        rng.integers(0, 4096, S),
        np.full(S, temperature, np.float32),
        np.full(S, top_k),
        np.full(S, top_p, np.float32),
        np.full(S, min_p, np.float32),
    )
    fields, num_filtered = m.on_device(packed), S if method == "filters" else 0

    def torch_op(i: int) -> Tensor:
        if method == "greedy":
            return logits[i].argmax(-1)
        z = logits[i].float() / temperature
        if method == "temperature":
            p = z.softmax(-1)
            return (p / torch.empty_like(p).exponential_(1)).argmax(-1)
        values, ids = z.sort(-1, descending=True)
        values[:, top_k:] = -torch.inf
        p = values.softmax(-1)
        p = p.masked_fill((p.cumsum(-1) - p >= top_p) | (p < min_p * p[:, :1]), 0)
        return ids.gather(1, (p / torch.empty_like(p).exponential_(1)).argmax(-1, keepdim=True)).squeeze(1)

    def is_correct() -> bool:
        few = min(S, 8)  # of each row the reference sorts all
        expected = sample_op.sample_rows_ref(logits[0], fields[:, :few], min(num_filtered, few))
        return torch.equal(sample_op.sample_rows(logits[0], fields, num_filtered)[:few], expected)

    return Work(
        lambda i: sample_op.sample_rows(logits[i], fields, num_filtered),
        {"torch": torch_op},
        is_correct,
        len(logits),
        S * V * m.itemsize,
    )


def linears(shape: Shape) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of a layer's linears and of the head."""
    hidden, heads = shape.hidden, shape.H * shape.D
    return {
        "qkv": ((shape.H + 2 * shape.K) * shape.D, hidden),
        "o": (hidden, heads),
        "down": (hidden, shape.inner),
        "head": (shape.vocab, hidden),
    }


def small_linear(m: Maker, T: int, part: str) -> Work:
    N, K = linears(m.shape)[part]
    x, w = m.randn(T, K), m.copies(N, K, scale=K**-0.5)
    return Work(
        lambda i: linear_op.small_linear(x, w[i]),
        {"torch": lambda i: F.linear(x, w[i])},
        lambda: is_near(linear_op.small_linear(x, w[0]), linear_op.small_linear_ref(x, w[0])),
        len(w),
        N * K * m.itemsize,
        backend="torch" if linear_op.tile_of(T, N, K, m.dtype) is None else "triton",
    )


def small_gated_linear(m: Maker, T: int) -> Work:
    N, K = m.shape.inner, m.shape.hidden
    x, w = m.randn(T, K), m.copies(2 * N, K, scale=K**-0.5)

    def torch_op(i: int) -> Tensor:
        y = F.linear(x, w[i])
        return F.silu(y[:, :N]) * y[:, N:]

    return Work(
        lambda i: linear_op.small_gated_linear(x, w[i]),
        {"torch": torch_op},
        lambda: is_near(linear_op.small_gated_linear(x, w[0]), linear_op.small_gated_linear_ref(x, w[0])),
        len(w),
        2 * N * K * m.itemsize,
        backend="torch" if linear_op.tile_of(T, 2 * N, K, m.dtype) is None else "triton",
    )


def route_experts(m: Maker, T: int) -> Work:
    E, k = m.shape.E, m.shape.top_k
    logits, loads = m.copies(T, E), torch.zeros(E, dtype=torch.int64, device=m.device)

    def torch_op(i: int) -> tuple[Tensor, Tensor]:
        weights, experts = logits[i].float().softmax(-1).topk(k)
        return weights / weights.sum(-1, keepdim=True), experts

    def is_correct() -> bool:
        got, expected = route_op.route_experts(logits[0], k, True), route_op.route_experts_ref(logits[0], k, True)
        return close(got[0], expected[0], 1e-5) and torch.equal(got[1], expected[1])

    num_bytes = T * (E * m.itemsize + 8 * k)
    return Work(
        lambda i: route_op.route_experts(logits[i], k, True, loads),
        {"torch": torch_op},
        is_correct,
        len(logits),
        num_bytes,
    )


def routed(m: Maker, T: int) -> Tensor:
    """Experts of T tokens, each of which is as likely as any other."""
    return torch.rand(T, m.shape.E, device=m.device).topk(m.shape.top_k).indices.int()


def sort_pairs(m: Maker, T: int) -> Work:
    E, experts = m.shape.E, routed(m, T)
    block_m = grouped_op.pick_block_m(experts.numel(), E, m.dtype) or 16

    def is_correct() -> bool:
        got, expected = sort_op.sort_pairs(experts, E, 0, E, block_m), sort_op.sort_pairs_ref(experts, E, 0, E, block_m)
        return all(map(torch.equal, got, expected))

    return Work(
        lambda i: sort_op.sort_pairs(experts, E, 0, E, block_m),
        {"torch sort": lambda i: experts.flatten().sort(stable=True)},
        is_correct,
        1,
        8 * experts.numel(),
    )


class RoutedWork:
    """T tokens with other experts in each copy, of one layer's weights [E, N, K], and plain torch's way to use them."""

    def __init__(self, m: Maker, T: int, N: int, K: int):
        E = m.shape.E
        self.w = m.randn(E, N, K, scale=K**-0.5)
        num_used = E * (1 - (1 - m.shape.top_k / E) ** T)
        self.num_bytes = num_used * N * K * m.itemsize
        self.experts = [routed(m, T) for _ in range(m.num_copies(self.num_bytes))]
        self.pairs = [grouped_op.pairs_of(experts, E, 0, E, m.dtype) for experts in self.experts]
        # By expert: its pairs. Known to the host, as plain torch needs it.
        self.members = [
            [(e, pairs) for e in range(E) if len(pairs := (experts.flatten() == e).nonzero()[:, 0])]
            for experts in self.experts
        ]


def grouped_gated_linear(m: Maker, T: int) -> Work:
    N, K, k = m.shape.expert_inner, m.shape.hidden, m.shape.top_k
    of, x = RoutedWork(m, T, 2 * N, K), m.randn(T, K)

    def torch_op(i: int) -> None:
        for expert, members in of.members[i]:
            y = F.linear(x[members // k], of.w[expert])
            F.silu(y[:, :N]).mul_(y[:, N:])

    return Work(
        lambda i: grouped_op.grouped_gated_linear(x, of.w, of.pairs[i]),
        {"torch by expert": torch_op},
        lambda: is_near(
            grouped_op.grouped_gated_linear(x, of.w, of.pairs[0]),
            grouped_op.grouped_gated_linear_ref(x, of.w, of.pairs[0]),
        ),
        len(of.pairs),
        of.num_bytes + T * (K + k * N) * m.itemsize,
        flops=4 * T * k * N * K,
    )


def grouped_sum_linear(m: Maker, T: int) -> Work:
    N, K, k = m.shape.hidden, m.shape.expert_inner, m.shape.top_k
    of, h = RoutedWork(m, T, N, K), m.randn(T * k, K)
    weights = torch.rand(T, k, device=m.device)

    def torch_op(i: int) -> None:
        y = torch.zeros(T, N, dtype=torch.float32, device=m.device)
        for expert, members in of.members[i]:
            y.index_add_(0, members // k, F.linear(h[members], of.w[expert]) * weights.view(-1, 1)[members])

    return Work(
        lambda i: grouped_op.grouped_sum_linear(h, of.w, weights, of.pairs[i]),
        {"torch by expert": torch_op},
        lambda: is_near(
            grouped_op.grouped_sum_linear(h, of.w, weights, of.pairs[0]),
            grouped_op.grouped_sum_linear_ref(h, of.w, weights, of.pairs[0]),
        ),
        len(of.pairs),
        of.num_bytes + T * (k * K + N) * m.itemsize,
        flops=2 * T * k * N * K,
    )


def paged_decode(m: Maker, S: int, L: int) -> Work:
    """S sequences of L tokens in shuffled blocks. Torch's attention reads keys and values that lie in order."""
    H, K, D = m.shape.H, m.shape.K, m.shape.D
    width = -(-L // BLOCK_SIZE)
    pages = m.copies(S * width + 1, 2, K, BLOCK_SIZE, D)
    tables = (1 + torch.randperm(S * width, device=m.device)).int().view(S, width)
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count if m.device.type == "cuda" else 2
    num_items = decode_op.num_decode_items(S, K, num_sms)
    planned = decode_op.plan_decode(np.arange(S, dtype=np.int32), np.full(S, L, np.int32), None, num_items)
    scratch = decode_op.DecodeScratch(num_items, H, D, m.device)
    plan = decode_op.decode_plan_views(m.on_device(planned), S, num_items, None, scratch)
    q, scale = m.randn(S, H, D), D**-0.5
    keys, values = (m.copies(S, K, L, D, num=len(pages)) for _ in range(2))
    work = Work(
        lambda i: decode_op.paged_decode(q, pages[i], tables, plan, scale),
        {"torch sdpa": lambda i: F.scaled_dot_product_attention(q[:, :, None], keys[i], values[i], enable_gqa=True)},
        lambda: close(
            decode_op.paged_decode(q, pages[0], tables, plan, scale),
            decode_op.paged_decode_ref(q, pages[0], tables, plan, scale),
        ),
        len(pages),
        2 * S * L * K * D * m.itemsize,
        flops=4 * S * L * H * D,
    )

    def flashinfer() -> Call:
        library = importlib.import_module("flashinfer")
        workspace = torch.empty(256 << 20, dtype=torch.uint8, device=m.device)
        # One sequence is faster without tensor cores there, several are with them.
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=S > 1)
        starts = torch.arange(S + 1, dtype=torch.int32) * width
        last = torch.full((S,), (L - 1) % BLOCK_SIZE + 1, dtype=torch.int32)
        types = {"q_data_type": m.dtype, "kv_data_type": m.dtype}
        wrapper.plan(starts, tables.flatten(), last, H, K, D, BLOCK_SIZE, **types)
        if not close(wrapper.run(q, pages[0]).flatten(1), decode_op.paged_decode(q, pages[0], tables, plan, scale)):
            raise ValueError("its output differs")
        return lambda i: wrapper.run(q, pages[i])

    m.add_flashinfer(work, flashinfer)
    return work


def paged_prefill(m: Maker, P: int, L: int, source: str) -> Work:
    """P prompts of L tokens with nothing cached; keys and values from the step itself ("fresh") or from the pages."""
    H, K, D = m.shape.H, m.shape.K, m.shape.D
    width, T, scale = -(-L // BLOCK_SIZE), P * L, D**-0.5
    qkv = m.copies(T, H + 2 * K, D)
    tables = (1 + torch.randperm(P * width, device=m.device)).int().view(P, width)
    pages = m.copies(P * width + 1, 2, K, BLOCK_SIZE, D, num=len(qkv))
    position = torch.arange(T, device=m.device) % L
    sequence = torch.arange(T, device=m.device) // L
    blocks = tables[sequence, position // BLOCK_SIZE].long()
    for one, page in zip(qkv, pages, strict=True):
        page[blocks, :, :, position % BLOCK_SIZE] = one[:, H:].unflatten(1, (2, K))
    starts = np.arange(P + 1) * L
    tile = prefill_op.queries_per_tile(H, K, D, m.dtype)
    planned = prefill_op.plan_prefill(np.arange(P), starts, np.full(P, L), tile)
    plan = prefill_op.PrefillPlan.of(planned, m.on_device(planned), tile)
    out = torch.empty(T, H * D, dtype=m.dtype, device=m.device)
    by_head = [
        [part.reshape(P, L, -1, D).transpose(1, 2).contiguous() for part in one.split((H, K, K), 1)] for one in qkv
    ]

    def ours(i: int) -> Tensor:
        kv = qkv[i][:, H:] if source == "fresh" else None
        return prefill_op.paged_prefill(qkv[i][:, :H], pages[i], tables, plan, scale, out=out, kv=kv)

    def sdpa(i: int) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            query, key, value = by_head[i]
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    work = Work(
        ours,
        {"torch flash sdpa": sdpa},
        lambda: close(ours(0), prefill_op.paged_prefill_ref(qkv[0][:, :H], pages[0], tables, plan, scale)),
        len(qkv),
        T * (2 * H + 2 * K) * D * m.itemsize,
        flops=2 * P * L * (L + 1) * H * D,
        goal=PREFILL_GOAL if L == 4096 else None,
    )

    def flashinfer() -> Call:
        library = importlib.import_module("flashinfer")
        workspace = torch.empty(256 << 20, dtype=torch.uint8, device=m.device)
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND", backend="auto")
        last = torch.full((P,), (L - 1) % BLOCK_SIZE + 1, dtype=torch.int32)
        first_block = torch.arange(P + 1, dtype=torch.int32) * width
        how = {"causal": True, "q_data_type": m.dtype, "kv_data_type": m.dtype}
        first_query = torch.from_numpy(starts.astype(np.int32))
        wrapper.plan(first_query, first_block, tables.flatten(), last, H, K, D, BLOCK_SIZE, **how)
        q = [one[:, :H].contiguous() for one in qkv]
        if not close(wrapper.run(q[0], pages[0]).flatten(1), ours(0)):
            raise ValueError("its output differs")
        return lambda i: wrapper.run(q[i], pages[i])

    m.add_flashinfer(work, flashinfer)
    return work


WORKS: dict[str, Callable[..., Work]] = {
    work.__name__: work
    for work in (
        rms_norm,
        add_rms_norm,
        silu_and_mul,
        gelu_tanh_and_mul,
        write_qkv,
        embedding,
        gather_logits,
        copy_blocks,
        begin_step,
        token_logprobs,
        apply_penalties,
        count_tokens,
        mask_tokens,
        sample_rows,
        small_linear,
        small_gated_linear,
        route_experts,
        sort_pairs,
        grouped_gated_linear,
        grouped_sum_linear,
        paged_decode,
        paged_prefill,
    )
}
BY_EXPERT = ("route_experts", "sort_pairs", "grouped_gated_linear", "grouped_sum_linear")
BY_TOKEN = ("rms_norm", "add_rms_norm", "silu_and_mul", "gelu_tanh_and_mul", "write_qkv", "embedding", "begin_step")


class Axes(NamedTuple):
    tokens: tuple[int, ...] = (1, 64, 256, 8192)
    rows: tuple[int, ...] = (1, 64, 256)
    small: tuple[int, ...] = (1, 8, 16)
    routed: tuple[int, ...] = (1, 4, 16, 64, 256, 8192)
    decode: tuple[tuple[int, int], ...] = ((1, 576), (256, 576), (16, 8192), (1, 131072))
    prefill: tuple[tuple[int, int, str], ...] = (
        (1, 512, "fresh"),
        (1, 4096, "fresh"),
        (1, 4096, "paged"),
        (16, 512, "fresh"),
    )


TINY = Axes((1, 3), (1, 3), (1, 2), (1, 5), ((1, 20), (2, 40)), ((1, 20, "fresh"), (2, 20, "paged")))


def jobs_of(shape: str, axes: Axes) -> list[Job]:
    """Rows of one model's shapes; attention first, since it takes longest to compile. Of experts nothing but theirs."""
    if Shape.of(shape).E:
        return [Job(op, shape, f"T={T}", (T,)) for op in BY_EXPERT for T in axes.routed]
    jobs = [Job("paged_prefill", shape, f"{P}x{L} {source}", (P, L, source)) for P, L, source in axes.prefill]
    jobs += [Job("paged_decode", shape, f"{S}x{L}", (S, L)) for S, L in axes.decode]
    jobs += [
        Job("sample_rows", shape, f"S={S} {method}", (S, method))
        for method in ("greedy", "temperature", "filters")
        for S in axes.rows
    ]
    jobs += [Job("token_logprobs", shape, f"S={S} k={NUM_TOP}", (S,)) for S in axes.rows]
    jobs += [
        Job(op, shape, f"S={S} L={HISTORY}", (S,)) for op in ("apply_penalties", "count_tokens") for S in axes.rows
    ]
    jobs += [Job("mask_tokens", shape, f"S={S}", (S,)) for S in axes.rows]
    for part in linears(Shape.of(shape)):
        jobs += [Job("small_linear", shape, f"T={T} {part}", (T, part)) for T in axes.small]
    jobs += [Job("small_gated_linear", shape, f"T={T}", (T,)) for T in axes.small]
    jobs += [Job(op, shape, f"T={T}", (T,)) for op in BY_TOKEN for T in axes.tokens]
    jobs += [Job("gather_logits", shape, f"S={S} W={NUM_PARTS}", (S,)) for S in axes.rows]
    jobs += [Job("copy_blocks", shape, f"N={N}", (N,)) for N in axes.rows]
    return jobs
