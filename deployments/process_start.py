"""When a process began, as the kernel knows it."""

from __future__ import annotations

import os
import time
from pathlib import Path


def began_s(process: int) -> float:
    """Seconds between the machine's boot and the process's beginning."""
    ticks = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
    return ticks / os.sysconf("SC_CLK_TCK")


def began_at_s(process: int) -> float:
    """Wall clock of its beginning."""
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - began_s(process))
