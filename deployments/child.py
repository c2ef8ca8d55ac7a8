"""An actor that an engine replica owns, together with its process, which may run on another node."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import ray
from ray import ObjectRef
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pagedray.deployments.calls import Actor, answer
from pagedray.deployments.place import EXIT_TIMEOUT_S, LocalProcess, Place, kill_process
from pagedray.engine.errors import EngineDead, PagedrayError
from pagedray.engine.messages import decode

log = logging.getLogger(__name__)

KILL_GRACE_S = 1.0  # for a process that follows Ray's order to exit


class Child:
    """
    Args:
        role: what it is, for messages.
        handle: the actor, which has a method `place`.
        life: object ref of a call that ends only when the actor dies or gives up; None before that call is made.

    Attributes:
        place: where its process runs, once attached.
    """

    def __init__(self, role: str, handle: Actor, life: ObjectRef[Any] | None = None):
        self.handle, self.life = handle, life
        self.place: Place | None = None
        self._role = role
        self._process: LocalProcess | None = None  # on this node
        self._far_process: Place | None = None  # on another one

    @property
    def name(self) -> str:
        return self._role if self.place is None else f"{self._role} on {self.place}"

    async def attach(self, own_node_id: str) -> None:
        """Get hold of the process, once its constructor is done.

        Raises:
            EngineDead: it died while starting.
        """
        place = decode(Place, await answer(self.handle.place.remote(), None, self.name))
        if place.node_id == own_node_id:
            try:
                self._process = LocalProcess(place)
            except ProcessLookupError:
                raise EngineDead(f"{self.name} died while starting") from None
        else:
            self._far_process = place
        self.place = place

    async def kill(self) -> None:
        """End the process, however stuck it is, and wait until it is gone with all its memory."""
        # Ray's order leaves no complaint about an unexpected death, but a stopped process doesn't follow it.
        await asyncio.to_thread(ray.kill, self.handle)
        if self._process is not None:
            process, self._process = self._process, None
            try:
                if not await asyncio.to_thread(process.ends_within, KILL_GRACE_S):
                    await asyncio.to_thread(process.kill)
            finally:
                process.close()
        elif self._far_process is not None:
            place, self._far_process = self._far_process, None
            await self._kill_far_away(place)

    async def _kill_far_away(self, place: Place) -> None:
        """On its own node. A node that is gone has taken its processes along; one out of reach can't be helped."""
        where = NodeAffinitySchedulingStrategy(place.node_id, soft=False)
        task: Any = ray.remote(kill_process).options(num_cpus=0, max_retries=0, scheduling_strategy=where)
        try:
            await answer(task.remote(place, KILL_GRACE_S), KILL_GRACE_S + EXIT_TIMEOUT_S, f"node {place.node_id[:8]}")
        except PagedrayError as error:
            log.warning("can't see to the end of a process role=%s place=%s reason=%s", self._role, place, error)
