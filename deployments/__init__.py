"""pagedray on Ray: `build` makes the Serve application of some settings, `app` is the one of the default settings."""

from __future__ import annotations

from typing import Any

from pagedray.deployments.build import build

__all__ = ["app", "build"]


def __getattr__(name: str) -> Any:
    """Build `app` on first use: building imports Ray, whose environment others may still want to set."""
    if name == "app":
        return build({})
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
