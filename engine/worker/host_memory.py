"""How the C library treats memory that a CPU worker frees."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h
_LARGEST = 32 * 2**20  # what glibc accepts


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
