"""Keeps an ingress's client connected to every engine of its application, while engines come and go."""

from __future__ import annotations

import asyncio
import logging

from pagedray.deployments.calls import Actor, answer
from pagedray.deployments.directory import Directory
from pagedray.deployments.link import RayLink
from pagedray.engine.config import EngineFacts
from pagedray.engine.errors import PagedrayError
from pagedray.engine.messages import decode
from pagedray.serving.client import EngineClient, EngineLink

log = logging.getLogger(__name__)

LOOK_S = 0.25  # between looks while engines are missing
LOOK_AGAIN_S = 3.0  # otherwise: replicas may have been added
ANSWER_S = 10.0  # for Ray's head to say which actors there are


class EngineFinder:
    """
    Args:
        directory: where schedulers are named.
        num_engines: how many there should be; fewer, and it looks more often.
    """

    def __init__(self, directory: Directory, num_engines: int):
        self._directory, self._num_engines = directory, num_engines
        self._known: dict[str, asyncio.Task[None]] = {}  # engine id → connecting to it, done once it is connected
        self._lost = asyncio.Event()

    def on_link_dead(self, link: EngineLink) -> None:
        """Look for the engine's successor at once."""
        self._known.pop(link.facts.engine_id, None)
        self._lost.set()

    def hurry(self) -> None:
        """Look at once: an engine may have come up."""
        self._lost.set()

    async def run(self, client: EngineClient) -> None:
        """Add a link for every engine that comes up, until cancelled."""
        while True:
            self._lost.clear()
            try:
                async with asyncio.timeout(ANSWER_S):
                    found = await asyncio.to_thread(self._directory.find, "scheduler")
                for engine_id in [name for name, task in self._known.items() if task.done() and name not in found]:
                    if not client.has_link(engine_id):
                        del self._known[engine_id]  # it was stopped
                for engine_id, scheduler in found.items():
                    if engine_id not in self._known:
                        self._known[engine_id] = asyncio.create_task(self._connect(client, engine_id, scheduler))
            except Exception as error:  # while Ray's head is down, engines that are connected go on
                log.warning("can't look for engines error=%r", error)
            missing = sum(task.done() for task in self._known.values()) < self._num_engines
            try:
                async with asyncio.timeout(LOOK_S if missing else LOOK_AGAIN_S):
                    await self._lost.wait()
            except TimeoutError:
                continue

    async def _connect(self, client: EngineClient, engine_id: str, scheduler: Actor) -> None:
        """Wait for the engine to be ready, however long it loads. Its death ends the wait; the next look retries."""
        try:
            facts = decode(EngineFacts, await answer(scheduler.facts.remote(), None, f"engine {engine_id}"))
        except PagedrayError:
            self._known.pop(engine_id, None)
            return
        log.info("connected engine_id=%s", engine_id)
        client.add_link(RayLink(scheduler, facts))
