"""One start of an engine: a worker gang and its scheduler, in one placement group. They live and die as a unit."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time

import msgspec
import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pagedray.deployments.calls import Actor, answer
from pagedray.deployments.child import Child
from pagedray.deployments.directory import Directory
from pagedray.deployments.gang import Gang
from pagedray.deployments.placement import PlacementWatch
from pagedray.deployments.scheduler_actor import MAX_CALLS, Pulse, SchedulerActor
from pagedray.engine.config import Config, EngineFacts
from pagedray.engine.errors import EngineDead, PagedrayError
from pagedray.engine.messages import decode, encode
from pagedray.engine.metrics import EngineLoad

log = logging.getLogger(__name__)

PULSE_S = 1.0
LAST_WORDS_S = 1.0


class EngineUnit:
    """
    Args:
        config: the whole tree.
        placement: bundle 0 has room for the scheduler, bundle 1 + stage for the workers of a pipeline stage.
        directory: gives the actors their names.
        worker_class: see `WorkerActor`.
    """

    def __init__(self, config: Config, placement: PlacementGroup, directory: Directory, worker_class: str):
        self.engine_id = secrets.token_hex(4)
        self._config, self._failure = config, config.failure
        self._gang = Gang(config, placement, directory, self.engine_id, worker_class)
        handle: Actor = (
            ray.remote(SchedulerActor)
            .options(
                name=directory.name("scheduler", self.engine_id),
                namespace=directory.namespace,
                num_cpus=0,  # its share is part of bundle 0, which the replica takes whole
                max_concurrency=MAX_CALLS,
                scheduling_strategy=PlacementGroupSchedulingStrategy(placement, 0),
            )
            .remote(config, self._gang.ranks[0].handle)
        )
        self._scheduler = Child("the scheduler", handle)
        self.load: EngineLoad | None = None  # as last heard
        self._children = [*self._gang.ranks, self._scheduler]

    async def start(self) -> EngineFacts:
        """Load the model and start the step loop. A unit that can't start is killed before this raises.

        Raises:
            PagedrayError: what went wrong, in the words of the process where it did.
        """
        limit_s = self._failure.start_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await self._start()
        except TimeoutError:
            await self.kill()
            raise EngineDead(f"the engine has not started within start_timeout_s ({limit_s:g} s)") from None
        except BaseException:
            await self.kill()
            raise

    async def failed(self) -> str:
        """Wait until some part of the unit has died or hangs; says what happened."""
        parts = [
            *(answer(child.life, None, child.name) for child in self._children if child.life is not None),
            self._follow_pulse(),
        ]
        tasks = [asyncio.ensure_future(part) for part in parts]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
        with contextlib.suppress(PagedrayError):
            await self._hear(LAST_WORDS_S)  # a scheduler whose gang died has said why
        return "; ".join(dict.fromkeys(str(task.exception() or "a call ended that never should") for task in done))

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests and let the running ones end, for at most `timeout_s`."""
        try:
            await answer(self._scheduler.handle.drain.remote(), timeout_s, self._scheduler.name)
        except PagedrayError as error:
            log.warning("engine not drained engine_id=%s reason=%s", self.engine_id, error)

    async def kill(self) -> None:
        await asyncio.gather(*(child.kill() for child in self._children))

    async def _start(self) -> EngineFacts:
        begun = time.monotonic()
        node_id = ray.get_runtime_context().get_node_id()
        waiting = asyncio.create_task(PlacementWatch(self._config, has_place=True).log_troubles())
        try:
            await asyncio.gather(*(child.attach(node_id) for child in self._children))
        finally:
            waiting.cancel()
        attach_s = time.monotonic() - begun
        facts = await self._gang.load()
        phases = (("worker process", attach_s), *facts.start_phases)
        facts = msgspec.structs.replace(facts, engine_id=self.engine_id, start_phases=phases)
        self._scheduler.life = self._scheduler.handle.run.remote(encode(facts))
        await answer(self._scheduler.handle.facts.remote(), None, self._scheduler.name)
        return facts

    async def _follow_pulse(self) -> None:
        """Raises EngineDead when the scheduler's event loop hangs for over stall_threshold_s."""
        while True:
            await asyncio.sleep(PULSE_S)
            await self._hear(self._failure.stall_threshold_s)

    async def _hear(self, timeout_s: float) -> None:
        """Pass on what the scheduler has logged since the last time."""
        pulse = decode(Pulse, await answer(self._scheduler.handle.pulse.remote(), timeout_s, self._scheduler.name))
        self.load = pulse.load
        for line in pulse.log_lines:
            message, newline, traceback = line.text.partition("\n")
            log.log(line.level, "%s engine_id=%s%s%s", message, self.engine_id, newline, traceback)
