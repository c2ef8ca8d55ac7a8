"""Which engines go when there should be fewer: those that start first, then idle ones, then the least loaded.

Serve asks where replicas lie, not how busy they are, and no setting changes that. Its choice is made in its controller,
where our autoscaling policy runs as well: so the policy's first act puts this order around Serve's method, for engines
alone and for as long as their loads are known. Ray's version is pinned; where the method isn't as expected, Serve's own
order stands and the log says so. What goes drains in any case.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from ray.serve._private.deployment_scheduler import DeploymentScheduler

log = logging.getLogger(__name__)

METHOD = "_get_replicas_to_stop"
LOADS_LAST_S = 10.0  # a policy is asked every second; older loads say nothing
Chooser = Callable[..., set[Any]]


class LeastLoadedFirst:
    """
    Args:
        serves_choice: (scheduler, deployment id, number, …) → the replicas that Serve would stop.
    """

    def __init__(self, serves_choice: Chooser, clock: Callable[[], float] = time.monotonic):
        self._serves_choice, self._clock = serves_choice, clock
        self._loads: dict[Any, tuple[float, Mapping[Any, float]]] = {}

    def hear(self, deployment_id: Any, loads: Mapping[Any, float]) -> None:
        """Loads of a deployment's replicas by their id, as far as they have reported."""
        self._loads[deployment_id] = self._clock(), dict(loads)

    def choose(self, scheduler: Any, deployment_id: Any, number: int, **gangs: Any) -> set[Any]:
        """As many replicas as Serve would stop, by our order."""
        heard_s, loads = self._loads.get(deployment_id, (-LOADS_LAST_S, {}))
        chosen = self._serves_choice(scheduler, deployment_id, number, **gangs)
        if self._clock() - heard_s >= LOADS_LAST_S or any(value is not None for value in gangs.values()):
            return chosen
        try:
            running = list(reversed(scheduler._running_replicas[deployment_id]))  # newest first
        except (AttributeError, KeyError, TypeError) as error:
            log.warning("Serve's own order of stopping engines stands: %r", error)
            return chosen
        starting = chosen - set(running)
        # One that runs and has not reported yet has nothing to do.
        by_load = sorted(running, key=lambda replica: loads.get(replica, 0.0))
        return starting | set(by_load[: len(chosen) - len(starting)])


def victim_order(scheduler_class: type[Any] = DeploymentScheduler) -> LeastLoadedFirst | None:
    """The order of this controller, put in place by the first call; None where there is nothing to put it around."""
    method = getattr(scheduler_class, METHOD, None)
    if method is None:
        log.warning("Serve's own order of stopping engines stands: it has no %s", METHOD)
        return None
    order: LeastLoadedFirst | None = getattr(method, "order", None)
    if order is None:
        order = LeastLoadedFirst(method)

        def choose(scheduler: Any, deployment_id: Any, number: int, **gangs: Any) -> set[Any]:
            return order.choose(scheduler, deployment_id, number, **gangs)

        choose.order = order  # type: ignore[attr-defined]
        setattr(scheduler_class, METHOD, choose)
    return order
