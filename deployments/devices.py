"""What `device: auto` stands for: a GPU where there is one."""

from __future__ import annotations

import logging
from pathlib import Path

from pagedray.engine.config import Device


def device_here(folder: Path = Path("/dev")) -> Device:
    """Of this machine, by the driver's files: to ask torch would import it."""
    return "cuda" if any(folder.glob("nvidia[0-9]*")) else "cpu"


def device_of_cluster(address: str | None = None) -> Device:
    """Of the Ray cluster that this process belongs to, or joins at `address`."""
    import ray

    if address is not None and not ray.is_initialized():
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
    if not ray.is_initialized():
        return "cpu"
    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return "cuda" if resources.get("GPU", 0) >= 1 else "cpu"
