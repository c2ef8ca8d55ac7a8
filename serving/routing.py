"""Which engine gets a request: pure functions of what an ingress knows. A policy is a `Situation` → a `Choice`.

The bound that affinity keeps to: with the new request, an engine must not carry more than `factor` times what the least
loaded one would carry with it. So it holds from the first request on, and no prefix or session can overload an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

# affinity: an engine that knows the prompt's beginning, or the session's own. overflow: there was one, but beyond the
# bound. balance: load alone decided.
Outcome = Literal["affinity", "overflow", "balance"]

TOKENS_PER_REQUEST = 1024  # a request weighs one, and one more for so many tokens that it comes with
OUTCOMES: tuple[Outcome, ...] = ("affinity", "overflow", "balance")
_MASK = 2**64 - 1


class Choice(NamedTuple):
    engine: int  # its place in the situation
    outcome: Outcome


class Situation(NamedTuple):
    """Engines in a fixed order, and the request to place."""

    loads: Sequence[float]  # in flight per engine, in requests
    cost: float  # what the request adds to one of them
    factor: float  # of the bound, at least 1
    turn: int  # grows with every decision: ties go round
    matches: Sequence[int] = ()  # leading prompt blocks that each engine holds; empty: nothing is known
    ranks: Sequence[int] = ()  # the session's liking for each engine; empty: no session


Policy = Callable[[Situation], Choice]


def load(num_requests: int, num_tokens: int) -> float:
    """Of requests together, in requests: each holds a place in the batch, long ones also hold up the others."""
    return num_requests + num_tokens / TOKENS_PER_REQUEST


def least_loaded(situation: Situation) -> Choice:
    lowest = min(situation.loads)
    equals = [index for index, load in enumerate(situation.loads) if load == lowest]
    return Choice(equals[situation.turn % len(equals)], "balance")


def round_robin(situation: Situation) -> Choice:
    return Choice(situation.turn % len(situation.loads), "balance")


def prefix(situation: Situation) -> Choice:
    """The engine within the bound that holds most of the prompt, the least loaded of equals; without one, by load."""
    loads, matches, limit = situation.loads, situation.matches, _limit(situation)
    most = max(matches, default=0)
    if not most:
        return least_loaded(situation)
    within = [index for index, match in enumerate(matches) if match and loads[index] <= limit]
    if not within:
        return Choice(least_loaded(situation).engine, "overflow")
    best = max(matches[index] for index in within)
    within = [index for index in within if matches[index] == best]
    lowest = min(loads[index] for index in within)
    equals = [index for index in within if loads[index] == lowest]
    return Choice(equals[situation.turn % len(equals)], "affinity")


def session(situation: Situation) -> Choice:
    """The engine within the bound that the session likes best. One that is too loaded hands over to the next."""
    loads, ranks, limit = situation.loads, situation.ranks, _limit(situation)
    favourite = max(range(len(loads)), key=ranks.__getitem__)
    if loads[favourite] <= limit:
        return Choice(favourite, "affinity")
    within = [index for index, load in enumerate(loads) if load <= limit]
    return Choice(max(within, key=ranks.__getitem__), "overflow")


POLICIES: dict[str, Policy] = {"prefix": prefix, "least_loaded": least_loaded, "round_robin": round_robin}


def session_rank(session_key: int, engine_key: int) -> int:
    """How much a session likes an engine (rendezvous hashing): when engines come or go, only their sessions move."""
    mixed = ((session_key ^ engine_key) * 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ mixed >> 32) * 0xD6E8FEB86659FD93) & _MASK
    return mixed ^ mixed >> 32


def _limit(situation: Situation) -> float:
    """Most that an engine may carry before this request for affinity to hold; the least loaded one is always within."""
    least, factor = min(situation.loads), situation.factor
    return factor * least + (factor - 1) * situation.cost
