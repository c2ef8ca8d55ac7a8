"""How the system treats the memory of a CPU worker: page sizes, and what becomes of what is freed."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import torch
from torch import Tensor

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h
_LARGEST = 32 * 2**20  # what glibc accepts
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25  # linux/mman.h
_HUGE_PAGE = 2 * 2**20


def keep_freed_memory() -> None:
    """Let malloc reuse large blocks instead of returning them to the system: each step asks for the same sizes again,
    and fresh pages cost more to fault in than many operations take. Without glibc, nothing changes.

    Threads that start later share one arena, since the small ones of a thread are returned whatever the threshold.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_THRESHOLD, _LARGEST)
        mallopt(_M_TRIM_THRESHOLD, 2**30)


def use_huge_pages(tensors: Iterable[Tensor]) -> int:
    """Put CPU tensors on 2 MiB pages: a decode step reads every weight once, and finding 4 KiB pages takes a quarter of
    that time. Whatever lies between two of them moves along.

    Returns:
        Bytes that the system moved at once; where it can't, or only later, nothing else changes.
    """
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is None:
        return 0
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    moved = 0
    for first, last in _joined(sorted(map(_span, tensors))):
        begin, end = -(-first // _HUGE_PAGE) * _HUGE_PAGE, last // _HUGE_PAGE * _HUGE_PAGE
        if begin < end and madvise(begin, end - begin, _MADV_HUGEPAGE) == 0:
            moved += (end - begin) * (madvise(begin, end - begin, _MADV_COLLAPSE) == 0)
    return moved


def _span(tensor: Tensor) -> tuple[int, int]:
    if tensor.is_mkldnn:
        first: int = torch.ops.mkldnn.data_ptr(tensor)
        return first, first + int(torch.ops.mkldnn._nbytes(tensor))
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ascending spans, as one where less than a huge page lies between."""
    joined: list[tuple[int, int]] = []
    for first, last in spans:
        if joined and first - joined[-1][1] < _HUGE_PAGE:
            joined[-1] = joined[-1][0], max(last, joined[-1][1])
        else:
            joined.append((first, last))
    return joined
