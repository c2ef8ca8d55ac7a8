"""Settings of the whole suite; fixtures stand in the folder whose tests use them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# No test may depend on a model hub, whatever the machine can reach; set before huggingface_hub is imported.
os.environ["HF_HUB_OFFLINE"] = "1"

# Without a GPU, Triton's kernels run in its interpreter, which must be chosen before triton is imported. To ask torch
# whether there is one would import it for tests that need none.
NUM_GPUS = len(list(Path("/dev").glob("nvidia[0-9]*")))
if not NUM_GPUS:
    os.environ["TRITON_INTERPRET"] = "1"

# A busy machine must not fail a test, so Hypothesis judges results and never their speed. In CI its own profile makes
# the examples the same in every run.
settings.register_profile(
    "pagedray",
    settings.get_profile("ci" if os.environ.get("CI") else "default"),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("pagedray")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if NUM_GPUS == 1 and item.get_closest_marker("multi_gpu") is not None:
        pytest.skip("needs several GPUs, this machine has one")
