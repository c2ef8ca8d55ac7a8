"""How the C library treats memory that a CPU worker frees."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_LARGEST = 32 * 2**20  # what glibc accepts


def keep_freed_memory() -> None:
    """Let malloc reuse large blocks instead of returning them to the system: each step asks for the same sizes again,
    and fresh pages cost more to fault in than most operations take. Without glibc, nothing changes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST)
        mallopt(_M_TRIM_THRESHOLD, 2**30)
