"""When a process began, as the kernel knows it."""

from __future__ import annotations

import os
import time
from pathlib import Path


def began_ticks(process: int) -> int:
    """The kernel's ticks between the machine's boot and the process's beginning. Source: proc(5), stat, field 22.

    Raises:
        ProcessLookupError: it is gone.
    """
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        raise ProcessLookupError(process) from None
    return int(stat.rpartition(")")[2].split()[19])  # names, field 2, may hold anything but end there


def began_s(process: int) -> float:
    """Seconds between the machine's boot and the process's beginning. Raises: ProcessLookupError, it is gone."""
    return began_ticks(process) / os.sysconf("SC_CLK_TCK")


def began_at_s(process: int) -> float:
    """Wall clock of its beginning."""
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - began_s(process))
