"""Between the projection and attention: norm of query and key heads, rotary embedding, keys and values to their pages.

    q, k = rotate(rms_norm(q) * w), rotate(rms_norm(k) * w);  pages[slot] = clamp(k / k_scale), clamp(v / v_scale)

The norm is that of rms_norm.py, and falls away without a weight; the rotation is that of rotary.py, on the first R dims
of a head. Slot s is offset s % B of block s // B. Only float8 pages are scaled, and clamped to ±448.

Keys and values that are no numbers don't enter the pages: NaN becomes 0, an infinity the largest number of qkv's type.
A weight of 0 would not keep them from other positions and sequences, which share pages, where finite ones vanish.

Shapes   qkv [T, H + 2K, D]: query, key and value heads, contiguous; pages [num_blocks, 2, K, B, D], contiguous;
         slots [T]; cos, sin [T, 1, R], R even and <= D, sin's first half negated, stride of T free; w [H + K, D].
Dtypes   qkv, cos and sin float32, bf16 or fp16; pages alike, or float8_e4m3fn; w alike, or float32; slots int64.
         Rounded to qkv's type: the norm, and x * cos before the other product is added.
Writes   query and key heads of qkv in place, value heads where they are no numbers, and pages. Rows that only pad a
         batch have slots in block 0, the null page, which nobody reads and where they may collide. Safe under CUDA
         graph capture.
Source   Zhang and Sennrich 2019, arXiv:1910.07467; Su et al. 2021, arXiv:2104.09864; Kwon et al. 2023, arXiv:2309.06180
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagedray.kernels.case import Case
from pagedray.kernels.cpu.library import TYPES, library_for
from pagedray.kernels.jit import launch, power_of_2, tl, triton
from pagedray.kernels.rms_norm import rms_norm_ref, rms_norm_torch
from pagedray.kernels.rotary import rotate, rotate_ref

_FP8_MAX = 448.0
_HEADS = 8  # of one program


def write_qkv_ref(
    qkv: Tensor,
    pages: Tensor,
    slots: Tensor,
    cos: Tensor,
    sin: Tensor,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    num_kv_heads, block_size = pages.shape[2:4]
    q_and_k, k, v = qkv[:, :-num_kv_heads], qkv[:, -2 * num_kv_heads : -num_kv_heads], qkv[:, -num_kv_heads:]
    if norm_weight is not None:
        q_and_k.copy_(rms_norm_ref(q_and_k, norm_weight, eps))
    rotate_ref(q_and_k, cos, sin)
    for x in (k, v):
        x.copy_(torch.nan_to_num(x))
    for token, slot in enumerate(slots.tolist()):
        for kind, (x, scale) in enumerate([(k, k_scale), (v, v_scale)]):
            row = x[token]
            if pages.dtype == torch.float8_e4m3fn:
                row = (row.float() / scale).clamp(-_FP8_MAX, _FP8_MAX).to(pages.dtype)
            pages[slot // block_size, kind, :, slot % block_size] = row


@triton.jit
def _load_part(row, w_row, column, inside, SIZE: tl.constexpr, HAS_NORM: tl.constexpr):  # type: ignore[no-untyped-def]
    """SIZE of the columns of some heads, and their norm weights; row, w_row [HEADS, 1], column [1, BLOCK]."""
    mask = inside & (column < SIZE)
    x = tl.load(row + column, mask, other=0.0).to(tl.float32)
    w = x
    if HAS_NORM:
        w = tl.load(w_row + column, mask, other=0.0).to(tl.float32)
    return x, w


@triton.jit
def _normed(x, w, factor, w_type: tl.constexpr, x_type: tl.constexpr):  # type: ignore[no-untyped-def]
    return ((x * factor).to(w_type).to(tl.float32) * w).to(x_type).to(tl.float32)


@triton.jit
def _rotated(x, other, cos_row, sin_row, column, HALF: tl.constexpr, x_type: tl.constexpr):  # type: ignore[no-untyped-def]
    """One half of the rotated dims. cos_row, sin_row: that half of the token's angles."""
    cos = tl.load(cos_row + column, column < HALF, other=0.0).to(tl.float32)
    sin = tl.load(sin_row + column, column < HALF, other=0.0).to(tl.float32)
    return ((x * cos).to(x_type).to(tl.float32) + other * sin).to(x_type)


@triton.jit
def _finite(x):  # type: ignore[no-untyped-def]
    SMALL: tl.constexpr = x.dtype == tl.float16
    SHORT: tl.constexpr = x.dtype == tl.bfloat16
    MOST: tl.constexpr = 65504.0 if SMALL else 3.3895313892515355e38 if SHORT else 3.4028234663852886e38
    wide = x.to(tl.float32)
    return tl.where(wide == wide, tl.minimum(tl.maximum(wide, -MOST), MOST), 0.0).to(x.dtype)


@triton.jit
def _store_kv(page_row, column, x, inside, scale, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    if page_row.dtype.element_ty == tl.float8e4nv:
        x = tl.minimum(tl.maximum(x.to(tl.float32) / scale, -448.0), 448.0)
    tl.store(page_row + column, x.to(page_row.dtype.element_ty), inside & (column < SIZE))


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _write_qkv(  # type: ignore[no-untyped-def]
    qkv_ptr,
    pages_ptr,
    slots_ptr,
    cos_ptr,
    sin_ptr,
    w_ptr,
    cos_token,
    sin_token,
    eps,
    k_scale,
    v_scale,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    B: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """HEADS heads of a token a program, its query and key heads first.

    A head is held as the two halves that are rotated into each other and the tail that is not. cos_token, sin_token:
    strides. BLOCK_…: powers of two that hold R / 2, D - R and D.
    """
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    slot = tl.load(slots_ptr + token)
    block, offset = slot // B, slot % B
    qkv_row = qkv_ptr + token * ((H + 2 * K) * D)
    page = pages_ptr + block * (2 * K * B * D) + offset * D
    NUM_TILES: tl.constexpr = (H + K + HEADS - 1) // HEADS
    HALF: tl.constexpr = R // 2
    x_type: tl.constexpr = qkv_ptr.dtype.element_ty
    w_type: tl.constexpr = w_ptr.dtype.element_ty
    if tile < NUM_TILES:
        head = tile * HEADS + tl.arange(0, HEADS)[:, None]
        inside = head < H + K
        is_key = inside & (head >= H)
        row, w_row, page_row = qkv_row + head * D, w_ptr + head * D, page + (head - H) * (B * D)
        column = tl.arange(0, BLOCK_HALF)[None, :]
        low, low_w = _load_part(row, w_row, column, inside, HALF, HAS_NORM)
        high, high_w = _load_part(row + HALF, w_row + HALF, column, inside, HALF, HAS_NORM)
        if D > R:
            tail_column = tl.arange(0, BLOCK_TAIL)[None, :]
            tail, tail_w = _load_part(row + R, w_row + R, tail_column, inside, D - R, HAS_NORM)
        if HAS_NORM:
            squares = tl.sum(low * low, 1) + tl.sum(high * high, 1)
            if D > R:
                squares += tl.sum(tail * tail, 1)
            factor = tl.rsqrt(squares / D + eps)[:, None]
            low = _normed(low, low_w, factor, w_type, x_type)
            high = _normed(high, high_w, factor, w_type, x_type)
            if D > R:
                tail = _normed(tail, tail_w, factor, w_type, x_type)
        column = tl.broadcast_to(
            column, [HEADS, BLOCK_HALF]
        )  # angles are loaded once for each head: no exchange of them
        cos_row, sin_row = cos_ptr + token * cos_token, sin_ptr + token * sin_token
        new_low = _rotated(low, high, cos_row, sin_row, column, HALF, x_type)
        new_high = _rotated(high, low, cos_row + HALF, sin_row + HALF, column, HALF, x_type)
        new_low = tl.where(is_key, _finite(new_low), new_low)
        new_high = tl.where(is_key, _finite(new_high), new_high)
        tl.debug_barrier()  # every thread has loaded before one stores
        tl.store(row + column, new_low, inside & (column < HALF))
        tl.store(row + HALF + column, new_high, inside & (column < HALF))
        _store_kv(page_row, column, new_low, is_key, k_scale, HALF)
        _store_kv(page_row + HALF, column, new_high, is_key, k_scale, HALF)
        if D > R:
            new_tail = tl.where(is_key, _finite(tail.to(x_type)), tail.to(x_type))
            tl.store(row + R + tail_column, new_tail, (inside if HAS_NORM else is_key) & (tail_column < D - R))
            _store_kv(page_row + R, tail_column, new_tail, is_key, k_scale, D - R)
    else:
        v_head = (tile - NUM_TILES) * HEADS + tl.arange(0, HEADS)[:, None]
        v_column = tl.arange(0, BLOCK_D)[None, :]
        v_mask = (v_head < K) & (v_column < D)
        v_row = qkv_row + (H + K + v_head) * D
        read = tl.load(v_row + v_column, v_mask, other=0.0)
        v = _finite(read)
        tl.store(v_row + v_column, v, v_mask & (v != read))
        _store_kv(page + (K + v_head) * (B * D), v_column, v, v_head < K, v_scale, D)


def write_qkv(
    qkv: Tensor,
    pages: Tensor,
    slots: Tensor,
    cos: Tensor,
    sin: Tensor,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    if qkv.is_cuda:
        return write_qkv_triton(qkv, pages, slots, cos, sin, norm_weight, eps, k_scale, v_scale)
    library = library_for(qkv, pages)
    if library is None or pages.dtype != qkv.dtype:
        return write_qkv_torch(qkv, pages, slots, cos, sin, norm_weight, eps, k_scale, v_scale)
    num_tokens, width, head_dim = qkv.shape
    num_kv_heads, block_size, page_dim = pages.shape[2:]
    assert qkv.is_contiguous() and pages.is_contiguous() and slots.dtype == torch.int64 and page_dim == head_dim
    assert cos.dtype == sin.dtype == qkv.dtype and cos.stride(-1) == sin.stride(-1) == 1
    weight, w_type = None, qkv.dtype
    if norm_weight is not None:
        assert norm_weight.shape == (width - num_kv_heads, head_dim) and norm_weight.is_contiguous()
        weight, w_type = norm_weight.data_ptr(), norm_weight.dtype
    library.pagedray_write_qkv(
        *(qkv.data_ptr(), pages.data_ptr(), slots.data_ptr(), cos.data_ptr(), sin.data_ptr(), weight),
        *(num_tokens, width - 2 * num_kv_heads, num_kv_heads, head_dim, cos.shape[-1], block_size),
        *(cos.stride(0), sin.stride(0), eps, TYPES[qkv.dtype], TYPES[w_type], torch.get_num_threads()),
    )


def make_finite(kv: Tensor) -> None:
    """In place, see above. Numbers are looked at first on a CPU, where that is cheaper; a GPU would be waited for."""
    if kv.device.type != "cpu" or not kv.isfinite().all():
        kv.copy_(torch.nan_to_num(kv))


def write_qkv_torch(
    qkv: Tensor,
    pages: Tensor,
    slots: Tensor,
    cos: Tensor,
    sin: Tensor,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    num_kv_heads, block_size, head_dim = pages.shape[2:]
    q_and_k, kv = qkv[:, :-num_kv_heads], qkv[:, -2 * num_kv_heads :]
    if norm_weight is not None:
        q_and_k.copy_(rms_norm_torch(q_and_k, norm_weight, eps))
    rotate(q_and_k, cos, sin)
    make_finite(kv)
    blocks = slots.div(block_size, rounding_mode="floor")
    heads = blocks[:, None] * (2 * num_kv_heads) + torch.arange(2 * num_kv_heads)
    rows = (heads * block_size + (slots - blocks * block_size)[:, None]).flatten()
    if pages.dtype == torch.float8_e4m3fn:
        scales = torch.tensor([k_scale, v_scale]).repeat_interleave(num_kv_heads)[:, None]
        kv = (kv / scales).clamp_(-_FP8_MAX, _FP8_MAX).to(pages.dtype).view(torch.uint8)
        pages = pages.view(torch.uint8)
    pages.view(-1, head_dim).index_copy_(0, rows, kv.reshape(-1, head_dim))


def write_qkv_triton(
    qkv: Tensor,
    pages: Tensor,
    slots: Tensor,
    cos: Tensor,
    sin: Tensor,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    num_tokens, width, head_dim = qkv.shape
    _, _, num_kv_heads, block_size, page_dim = pages.shape
    num_rotated, size = width - num_kv_heads, cos.shape[-1]
    assert qkv.is_contiguous() and pages.is_contiguous() and slots.dtype == torch.int64
    assert pages.dtype in (qkv.dtype, torch.float8_e4m3fn) and page_dim == head_dim
    assert norm_weight is None or (norm_weight.shape == (num_rotated, head_dim) and norm_weight.is_contiguous())
    if not num_tokens:
        return
    half = max(size // 2, 1)
    block_half = power_of_2(half)
    weight = qkv if norm_weight is None else norm_weight
    launch(
        _write_qkv,
        (num_tokens, -(-num_rotated // _HEADS) - (-num_kv_heads // _HEADS)),
        (qkv, pages, slots, cos, sin, weight, cos.stride(0), sin.stride(0), eps, k_scale, v_scale),
        {
            "H": num_rotated - num_kv_heads,
            "K": num_kv_heads,
            "D": head_dim,
            "R": size,
            "B": block_size,
            "HAS_NORM": norm_weight is not None,
            "HEADS": _HEADS,
            "BLOCK_HALF": block_half,
            "BLOCK_TAIL": power_of_2(max(head_dim - size, 1)),
            "BLOCK_D": power_of_2(head_dim),
        },
        num_warps=min(max(_HEADS * block_half // 256, 1), 8),
    )


def make_inputs(case: Case) -> tuple[Tensor | float | None, ...]:
    """`norm` 1: a weight of qkv's type, 2: float32. `padding` tokens at the end lie in the null page, one a slot."""
    num_tokens, head_dim, block_size, size = case["T"], case["D"], case["B"], case.get("R", case["D"])
    num_kv_heads, padding = case["K"], case.get("padding")
    num_blocks = 2 + -(-2 * num_tokens // block_size)
    generator = torch.Generator().manual_seed(1)
    slots = block_size + torch.randperm((num_blocks - 1) * block_size, generator=generator)[:num_tokens]
    slots[num_tokens - padding :] = torch.arange(padding)
    qkv = case.randn(num_tokens, case["H"] + 2 * num_kv_heads, head_dim, seed=2)
    pages = case.randn(num_blocks, 2, num_kv_heads, block_size, head_dim, seed=3)
    angles = 6 * case.randn(num_tokens, 1, size // 2, seed=4).float()
    cos, sin = angles.cos(), angles.sin()
    tables = torch.cat((cos, cos, -sin, sin), -1).to(case.dtype)  # cos and sin lie in rows of one tensor
    weight = None
    if case.get("norm"):
        weight = 1 + 0.3 * case.randn(case["H"] + num_kv_heads, head_dim, seed=5)
        weight = weight.float() if case["norm"] == 2 else weight
    scales = 1.0, 1.0
    if case.get("broken"):  # no numbers in a query, a key and a value head
        for head, value in ((0, float("nan")), (case["H"], float("nan")), (-1, float("nan")), (-1, float("inf"))):
            qkv[0, head, head_dim // 2 + (value == value)] = value
        qkv[-1, -1, 0] = -float("inf")
    if case.get("fp8"):
        pages, scales = pages.to(torch.float8_e4m3fn), (0.4, 0.004)  # the second makes many values clamp
    return qkv, pages, slots, tables[..., :size], tables[..., size:], weight, 0.5, *scales


CASES = [
    Case("write_qkv", T=1, H=9, K=3, D=64, B=16, dtype=torch.bfloat16),
    Case("write_qkv", T=9, padding=2, H=16, K=8, D=128, B=16, norm=1, dtype=torch.bfloat16),
    Case("write_qkv", T=5, H=4, K=2, D=16, R=8, B=4),
    Case("write_qkv", T=5, H=4, K=2, D=16, R=8, B=4, norm=1),
    Case("write_qkv", T=7, H=6, K=1, D=80, B=1, dtype=torch.float16),
    Case("write_qkv", T=3, H=8, K=4, D=80, R=32, B=16, norm=1, dtype=torch.float16),
    Case("write_qkv", T=3, H=5, K=5, D=96, B=32, norm=2, dtype=torch.bfloat16),
    Case("write_qkv", T=4, H=8, K=4, D=256, B=16, norm=2, dtype=torch.bfloat16),
    Case("write_qkv", T=6, H=3, K=3, D=8, B=4),
    Case("write_qkv", T=3, H=4, K=2, D=16, B=4, broken=1),
    Case("write_qkv", T=3, H=9, K=3, D=64, B=16, broken=1, norm=1, dtype=torch.bfloat16),
    Case("write_qkv", T=3, H=8, K=4, D=80, R=32, B=16, broken=1, dtype=torch.float16),
    Case("write_qkv", T=3, H=4, K=2, D=128, B=16, broken=1, fp8=1, dtype=torch.bfloat16),
    Case("write_qkv", T=9, H=12, K=12, D=32, B=4, fp8=1),
    Case("write_qkv", T=9, H=4, K=2, D=128, B=16, fp8=1, norm=1, dtype=torch.bfloat16),
]
