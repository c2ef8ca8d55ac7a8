"""Which engine gets a request: pure functions of what the ingress knows. Prefix affinity plugs in here."""

from __future__ import annotations

from collections.abc import Sequence


def least_loaded(loads: Sequence[int], turn: int) -> int:
    """Index of the smallest load; among equals the `turn`-th, so that a growing turn goes round.

    Args:
        loads: requests in flight per engine, counted by the caller: reported figures lag behind a burst.
        turn: grows with every call.
    """
    lowest = min(loads)
    equals = [index for index, load in enumerate(loads) if load == lowest]
    return equals[turn % len(equals)]
