import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, threading, torch
from pagedray.engine.worker.host_memory import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
def work():
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        arrays = [torch.ones(15 * 2**20, dtype=torch.uint8) for _ in range(3)]  # 11520 pages of 4 KiB
        del arrays
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    print(faults)
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="page faults are counted as Linux does")
def test_memory_is_used_again_without_page_faults() -> None:
    def faults(mode: str) -> int:
        done = subprocess.run([sys.executable, "-c", PROGRAM, mode], capture_output=True, text=True, check=True)
        return int(done.stdout)

    assert faults("keep") < 6000 < faults("leave")
