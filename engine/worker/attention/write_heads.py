"""What precedes attention on a GPU, whatever computes it: heads are normed, rotated and written in one launch."""

from __future__ import annotations

from torch import Tensor

from pagedray.engine.layers.norm import HeadNorm
from pagedray.engine.layers.rotary import Rotation
from pagedray.kernels.write_qkv import write_qkv


def write_heads(
    qkv: Tensor, pages: Tensor, slots: Tensor, rotation: Rotation, norm: HeadNorm | None, kv_scale: float
) -> Tensor:
    """The query heads of qkv [T, H + 2K, D], normed and rotated like the key heads: a view [T, H, D].

    Args:
        slots: [T] int64, where each token's keys and values go in `pages`: block * block_size + offset.
        kv_scale: what stored keys and values are divided by.
    """
    weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
    write_qkv(qkv, pages, slots, *rotation, weight, eps, kv_scale, kv_scale)
    return qkv[:, : qkv.shape[1] - 2 * pages.shape[2]]
