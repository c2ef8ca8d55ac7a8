"""CPUs need no Triton."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
sys.modules["triton"] = None
import torch
from pagedray.kernels.jit import triton
from pagedray.kernels.rms_norm import rms_norm
from pagedray.kernels import activation, block_copy, embedding, gather_logits, write_qkv

@triton.jit(do_not_specialize=["n"])
def kernel(n): ...

assert rms_norm(torch.ones(2, 8), torch.ones(8)).shape == (2, 8)
"""


def test_without_triton_kernels_can_be_declared() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
