"""The engine replica: a Serve replica that owns a placement group, starts an engine in it, watches it and rebuilds it.

No request passes through it: ingresses find the scheduler by name. When any part of the engine dies or hangs, the
replica kills the rest and starts anew in the same placement group. Only when that fails again and again does Serve
replace the replica.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections.abc import Coroutine
from typing import Any

import msgspec
from ray import serve
from ray.util import get_current_placement_group

from pagedray.deployments.directory import Directory
from pagedray.deployments.engine_unit import EngineUnit
from pagedray.deployments.logs import log_to_serve
from pagedray.deployments.worker_actor import WORKER_CLASS
from pagedray.engine.config import Config
from pagedray.engine.errors import EngineDead, PagedrayError

log = logging.getLogger(__name__)

MAX_FAILURES = 3  # in a row: deaths soon after a start, and starts that fail
STEADY_S = 60.0  # an engine that ran for so long ends the row
BACKOFF_S = 1.0  # pause before the second start of a row, doubled each time


class State(enum.Enum):
    STARTING = "starting"
    RUNNING = "running"
    REBUILDING = "rebuilding"
    FAILED = "failed"
    STOPPING = "stopping"


MOVES = {
    State.STARTING: {State.RUNNING, State.STOPPING},
    State.RUNNING: {State.REBUILDING, State.STOPPING},
    State.REBUILDING: {State.RUNNING, State.FAILED, State.STOPPING},
    State.FAILED: {State.STOPPING},
    State.STOPPING: set(),
}


class EngineReplica:
    """
    Args:
        config: the whole tree.
        drain_timeout_s: how long running requests may go on once Serve stops this replica.
        worker_class: what does the work, see `WorkerActor`.
    """

    _state = State.STARTING

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: Config, drain_timeout_s: float, worker_class: str = WORKER_CLASS
    ):
        log_to_serve()
        placement = get_current_placement_group()
        if placement is None:
            raise RuntimeError(
                "an engine replica needs a placement group; deploy it through pagedray.deployments.build"
            )
        self._config, self._placement, self._worker_class = config, placement, worker_class
        self._directory = Directory(serve.get_replica_context().app_name, config.model)
        self._drain_timeout_s = drain_timeout_s
        self._unit = await self._start()
        self._supervisor = asyncio.create_task(self._supervise())

    async def check_health(self) -> None:
        """Raise once the engine can't be rebuilt; while it is being rebuilt, replacing the replica would not help."""
        if self._supervisor.done():
            raise EngineDead(f"the engine can't be rebuilt: {self._supervisor.exception()}")

    async def wake(self) -> None:
        """Nothing to do: a call that waits for a replica is how ingresses ask for one."""

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What Serve passes on to `autoscale.EngineAutoscaling`; an engine that doesn't run has no load to tell of."""
        load = self._unit.load if self._state is State.RUNNING else None
        return {} if load is None else msgspec.to_builtins(load)

    def __del__(self) -> Coroutine[Any, Any, None] | None:
        """Serve calls this when the replica is to stop and awaits the result; Python's own calls find nothing to do."""
        if self._state in (State.STARTING, State.STOPPING):
            return None  # nothing was accepted, and the actors of a start that failed are gone
        return self._stop()

    async def _stop(self) -> None:
        """Drain, then leave nothing behind."""
        self._move(State.STOPPING)
        self._supervisor.cancel()
        await asyncio.wait([self._supervisor])
        await self._unit.drain(self._drain_timeout_s)
        await self._unit.kill()

    async def _start(self) -> EngineUnit:
        unit = EngineUnit(self._config, self._placement, self._directory, self._worker_class)
        begun = time.monotonic()
        facts = await unit.start()
        self._move(State.RUNNING)
        log.info(
            "engine started engine_id=%s seconds=%.1f kv_blocks=%d longest_sequence=%d attention=%s (%s)",
            facts.engine_id,
            time.monotonic() - begun,
            facts.num_blocks,
            facts.kv_capacity_tokens,
            facts.attention_backend,
            facts.attention_backend_reason,
        )
        return unit

    async def _supervise(self) -> None:
        """Keep an engine running. Raises EngineDead when too many starts fail in a row."""
        num_failures = 0
        while True:
            begun = time.monotonic()
            reason = await self._unit.failed()
            if time.monotonic() - begun > STEADY_S:
                num_failures = 0
            self._move(State.REBUILDING)
            log.error("engine failed, rebuilding it engine_id=%s reason=%s", self._unit.engine_id, reason)
            await self._unit.kill()
            while self._state is State.REBUILDING:
                num_failures += 1
                if num_failures > MAX_FAILURES:
                    self._move(State.FAILED)
                    raise EngineDead(f"{num_failures} failures in a row, the last: {reason}")
                if num_failures > 1:
                    await asyncio.sleep(BACKOFF_S * 2 ** (num_failures - 2))
                try:
                    self._unit = await self._start()
                except PagedrayError as error:
                    reason = str(error)
                    log.error("engine did not start failures=%d reason=%s", num_failures, reason)

    def _move(self, state: State) -> None:
        if state not in MOVES[self._state]:
            raise RuntimeError(f"an engine replica can't go from {self._state.value} to {state.value}")
        self._state = state
