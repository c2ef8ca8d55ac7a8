"""The scheduler actor: `engine.Engine` behind four verbs. Requests and updates travel as msgpack."""

from __future__ import annotations

import asyncio
import gc
import logging

import msgspec

from pagedray.deployments.calls import Actor
from pagedray.deployments.gang import RayExecutor, answer_timeout_s
from pagedray.deployments.logs import LineBuffer, LogLine
from pagedray.deployments.place import place_of_this_process
from pagedray.engine.config import Config, EngineFacts
from pagedray.engine.engine import Engine
from pagedray.engine.messages import Request, decode, encode
from pagedray.engine.metrics import EngineLoad

MAX_CALLS = 10_000  # open at once: polls of ingresses, and submits in a burst

_requests = msgspec.msgpack.Decoder(tuple[Request, ...])


class Pulse(msgspec.Struct, frozen=True):
    """What the replica hears once a second."""

    log_lines: tuple[LogLine, ...]  # since the last pulse
    load: EngineLoad | None  # None: the engine has not started


class SchedulerActor:
    """
    Args:
        config: the whole tree.
        rank0: the worker that steps are sent to.
    """

    def __init__(self, config: Config, rank0: Actor):
        self._lines = LineBuffer()
        logging.getLogger("pagedray").addHandler(self._lines)
        logging.getLogger("pagedray").setLevel(logging.INFO)
        self._config, self._rank0 = config, rank0
        self._engine: asyncio.Future[Engine] = asyncio.get_running_loop().create_future()

    async def run(self, facts: bytes) -> None:
        """Work until the gang fails. Its object ref tells the replica of this engine's end, whichever way it comes."""
        executor = RayExecutor(self._rank0, answer_timeout_s(self._config))
        engine = Engine(self._config, decode(EngineFacts, facts), executor)
        self._engine.set_result(engine)
        gc.collect()
        gc.freeze()  # a full collection over all that was imported would stop the step loop for a hundred milliseconds
        await engine.run()

    async def facts(self) -> bytes:
        """What an ingress needs to know; answers once the engine runs and only while it works."""
        engine = await self._engine
        engine.health()
        return encode(engine.facts)

    async def submit(self, requests: bytes) -> None:
        (await self._engine).submit(_requests.decode(requests))

    async def poll(self, client_id: str, ack: int) -> bytes:
        # An empty answer now and then shows both sides that the other lives.
        return encode(await (await self._engine).poll(client_id, ack, self._config.failure.client_timeout_s / 2))

    async def abort(self, request_ids: tuple[str, ...]) -> None:
        (await self._engine).abort(request_ids)

    async def health(self) -> None:
        (await self._engine).health()

    async def stats(self) -> bytes:
        return encode(await (await self._engine).stats_with_experts())

    async def drain(self) -> None:
        await (await self._engine).drain()

    async def pulse(self) -> bytes:
        return encode(Pulse(self._lines.take(), self._engine.result().load() if self._engine.done() else None))

    async def place(self) -> bytes:
        return encode(place_of_this_process())
