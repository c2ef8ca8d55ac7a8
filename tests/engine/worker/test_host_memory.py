import ctypes
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from pagedray.engine.worker.host_memory import _joined

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


def test_spans_are_joined_over_less_than_a_huge_page() -> None:
    page = 2**21
    spans = [(0, 10), (5, 9), (page, page + 4), (3 * page, 3 * page + 1), (9 * page, 9 * page)]
    assert _joined(spans) == [(0, page + 4), (3 * page, 3 * page + 1), (9 * page, 9 * page)]


HUGE_PAGES_PROGRAM = """
import torch
from pathlib import Path
from pagedray.engine.worker.host_memory import use_huge_pages

def huge_bytes():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages:"))

plain = torch.arange(2**22, dtype=torch.float32)
packed = torch.ops.mkldnn._reorder_linear_weight(torch.ones(1024, 4096), 1)
before = huge_bytes()
moved = use_huge_pages([plain, packed])
grown = huge_bytes() - before
assert torch.equal(plain, torch.arange(2**22, dtype=torch.float32)) and bool((packed.to_dense() == 1).all())
print(moved >> 20, grown >> 20)
"""


MODES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(
    not MODES.exists()
    or "[madvise]" not in MODES.read_text()
    or tuple(map(int, platform.release().split(".")[:2])) < (6, 1),
    reason="the system doesn't give huge pages on request, or not at once",
)
def test_weights_move_to_huge_pages() -> None:
    """In a process of its own, which has none before: two arrays of 16 MiB, less what lies beyond their borders."""
    done = subprocess.run([sys.executable, "-c", HUGE_PAGES_PROGRAM], capture_output=True, text=True, check=True)
    moved, grown = (int(number) for number in done.stdout.split())
    assert 28 <= moved <= grown + 2
