import ctypes
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, sys, torch
from pagedray.engine.worker.host_memory import keep_freed_memory

class Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]

info = ctypes.CDLL(None).mallinfo2
info.restype = Mallinfo2
if sys.argv[1] == "keep":
    keep_freed_memory()
before = info()
arrays = [torch.ones(15 * 2**20, dtype=torch.uint8) for _ in range(3)]
mapped = info().hblkhd - before.hblkhd
del arrays
print(mapped >> 20, (info().arena - before.arena) >> 20)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="the C library is not glibc")
def test_large_blocks_stay_with_the_process() -> None:
    """MiB that were mapped from the system for 45 MiB of arrays, and MiB that malloc still has once they are freed."""

    def mebibytes(mode: str) -> list[int]:
        done = subprocess.run([sys.executable, "-c", PROGRAM, mode], capture_output=True, text=True, check=True)
        return [int(number) for number in done.stdout.split()]

    mapped, kept = mebibytes("keep")
    assert (mapped, kept >= 30) == (0, True)
    mapped, kept = mebibytes("leave")
    assert (mapped >= 45, kept < 15) == (True, True)
