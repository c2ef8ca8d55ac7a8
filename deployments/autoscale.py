"""How many engines there should be: by what waits in their queues and what their KV caches hold.

Serve asks the policy in its controller and keeps to bounds and delays itself. Connections don't count: a hundred
clients that wait for one token each are less than a few long prompts. Without engines nobody reports a load: ingresses
that hold requests then call an engine replica that isn't there, and Serve counts such calls.

Which engines go says `victims.py`. An engine that goes drains; what it can't end in time moves.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from pagedray.deployments.victims import victim_order
from pagedray.engine.config import ServerConfig
from pagedray.engine.metrics import EngineLoad

REPORT_S = 1.0  # between reports of an engine, and of the calls that wait
LOOK_BACK_S = 5.0  # loads are averaged over it


def engines_wanted(loads: Sequence[EngineLoad | None], target_load: float, num_calls_waiting: float) -> int:
    """
    Args:
        loads: of the engines that run; None: it has not reported yet, and counts as loaded as it should be.
        target_load: what each should have.
        num_calls_waiting: calls to engines that can't be delivered.
    """
    total = sum(target_load if load is None else load.worst for load in loads)
    wanted = math.ceil(total / target_load - 1e-6)  # sums of floats are not exact
    return max(wanted, 1) if num_calls_waiting > 0 else wanted


class EngineAutoscaling:
    """Serve's policy for the engine deployment.

    Args:
        target_load: see `engines_wanted`.
    """

    def __init__(self, target_load: float):
        self._target_load = target_load
        self._victims = victim_order()

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        reported: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
        batch, kv = (reported.get(name, {}) for name in EngineLoad.__struct_fields__)
        loads = [
            EngineLoad(batch[replica], kv[replica]) if replica in batch and replica in kv else None
            for replica in context.running_replicas
        ]
        if self._victims is not None:
            self._victims.hear(context.deployment_id, _loads_now(context.raw_metrics or {}))
        return engines_wanted(loads, self._target_load, context.total_queued_requests or 0), {}


def _loads_now(reports: Mapping[str, Mapping[Any, Sequence[Any]]]) -> dict[Any, float]:
    """What each replica reported last: an average would hold what has ended against an idle one.

    Args:
        reports: by metric and replica, oldest first.
    """
    loads: dict[Any, float] = {}
    for by_replica in reports.values():
        for replica, series in by_replica.items():
            if series:
                loads[replica] = max(loads.get(replica, 0.0), series[-1].value)
    return loads


def autoscaling(server: ServerConfig) -> AutoscalingConfig:
    """Serve's settings. The first engine starts in any case: it shows that the model loads."""
    with warnings.catch_warnings():
        # Serve wants its interval in variables that this version does not read yet.
        warnings.simplefilter("ignore", DeprecationWarning)
        return AutoscalingConfig(
            min_replicas=server.fewest_engines,
            max_replicas=server.most_engines,
            initial_replicas=max(1, server.fewest_engines),
            metrics_interval_s=REPORT_S,
            look_back_period_s=LOOK_BACK_S,
            upscale_delay_s=server.upscale_delay_s,
            downscale_delay_s=server.downscale_delay_s,
            policy=AutoscalingPolicy(  # type: ignore[no-untyped-call]
                policy_function=f"{__name__}:{EngineAutoscaling.__name__}",
                policy_kwargs={"target_load": server.target_load},
            ),
        )
