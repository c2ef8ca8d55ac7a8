"""Who goes first: a policy is a sort key over requests, computed once when a request is accepted.

The key is a pair: class, then place in the class. Lower is first. A request may preempt running ones of a higher class
number to be admitted; within a class nobody is overtaken. The place is the order of acceptance, never a client's clock:
a wrong clock must not starve the others.
"""

from __future__ import annotations

from collections.abc import Callable

from pagedray.engine.messages import Request

Rank = tuple[int, int]


def fcfs(request: Request, number: int) -> Rank:
    return 0, number


def priority(request: Request, number: int) -> Rank:
    return request.priority, number


POLICIES: dict[str, Callable[[Request, int], Rank]] = {"fcfs": fcfs, "priority": priority}
