"""What the worker processes of a Ray of our own import beforehand; Ray imports this module in each, before its work.

That is for the processes that wait for an application's actors. One that begins later is being waited for, and its
actor may need less: an engine that is rebuilt should not wait for what only replicas use.
"""

from __future__ import annotations

import importlib
import os

from pagedray.deployments.process_start import began_s

MODULES = ("pagedray.deployments.engine_replica", "pagedray.deployments.ingress")
BEFOREHAND_S = 10.0


def is_beforehand(process: int, raylet: int) -> bool:
    """Whether the process belongs to Ray's own start."""
    return began_s(process) - began_s(raylet) < BEFOREHAND_S


if is_beforehand(os.getpid(), os.getppid()):
    for _name in MODULES:
        importlib.import_module(_name)
