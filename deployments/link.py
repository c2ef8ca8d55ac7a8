"""An engine as an ingress reaches it: `serving.client.EngineLink` over the handle of a scheduler actor.

Deadlines are the client's: it puts one around every call.
"""

from __future__ import annotations

import msgspec

from pagedray.deployments.calls import Actor, answer
from pagedray.engine.config import EngineFacts
from pagedray.engine.messages import Request, UpdateBatch, decode
from pagedray.engine.metrics import EngineStats


class RayLink:
    """
    Args:
        scheduler: handle of the scheduler actor.
        facts: its answer to `facts`.
    """

    def __init__(self, scheduler: Actor, facts: EngineFacts):
        self._scheduler = scheduler
        self._name = f"engine {facts.engine_id}"
        self.facts = facts

    async def submit(self, requests: tuple[Request, ...]) -> None:
        await answer(self._scheduler.submit.remote(msgspec.msgpack.encode(requests)), None, self._name)

    async def poll(self, client_id: str, ack: int) -> UpdateBatch:
        return decode(UpdateBatch, await answer(self._scheduler.poll.remote(client_id, ack), None, self._name))

    async def abort(self, client_id: str, request_ids: tuple[str, ...]) -> None:
        await answer(self._scheduler.abort.remote(request_ids), None, self._name)

    async def health(self) -> None:
        await answer(self._scheduler.health.remote(), None, self._name)

    async def stats(self) -> EngineStats:
        return decode(EngineStats, await answer(self._scheduler.stats.remote(), None, self._name))
