"""Ray for the tests of this folder: own folders and ports, no tokens, and every process ends with its test module."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Serve declares its settings in a way that pydantic deprecates
    import ray.serve  # noqa: F401

from tests.deployments.served import Served


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    """A server of fakes in a process of its own; `request.param` are its settings."""
    with Served("-m", "tests.deployments.serve_fakes", *request.param) as server:
        server.wait_until_ready()
        yield server
