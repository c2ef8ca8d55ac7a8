"""The response store that several ingresses share: `serving`'s `MemoryStore` in an actor that the first of them makes.

It lives as long as the ingress that made it. When it is lost, so are the responses: they are not found any more, and
whichever ingress asks next makes a new one.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from pagedray.deployments.calls import Actor
from pagedray.engine.config import ApiConfig
from pagedray.engine.errors import EngineUnavailable
from pagedray.serving.openai.responses.store import EventPage, MemoryStore, Record

log = logging.getLogger(__name__)

NAME = "response-store"
MAX_CALLS = 10_000  # open at once: each running background response has one that waits
TIMEOUT_S = 10.0


class SharedStore:
    """A `ResponseStore` whose calls go to the actor.

    Args:
        namespace: of the application's actors.
        config: the store's bounds.
        timeout_s: longest call, besides what it is told to wait.
    """

    def __init__(self, namespace: str, config: ApiConfig, timeout_s: float = TIMEOUT_S):
        self._namespace = namespace
        self._config = config
        self._timeout_s = timeout_s
        self._actor: Actor | None = None
        self._finding = asyncio.Lock()

    async def put(self, record: Record) -> None:
        await self._ask("put", record)

    async def update(self, record: Record) -> None:
        await self._ask("update", record)

    async def get(self, response_id: str) -> Record | None:
        record: Record | None = await self._ask("get", response_id)
        return record

    async def chain(self, response_id: str) -> list[Record]:
        records: list[Record] = await self._ask("chain", response_id)
        return records

    async def item(self, item_id: str) -> bytes | None:
        item: bytes | None = await self._ask("item", item_id)
        return item

    async def delete(self, response_id: str) -> bool:
        return bool(await self._ask("delete", response_id))

    async def cancel(self, response_id: str) -> Record | None:
        record: Record | None = await self._ask("cancel", response_id)
        return record

    async def is_wanted(self, response_id: str, timeout_s: float) -> bool:
        return bool(await self._ask("is_wanted", response_id, timeout_s, wait_s=timeout_s))

    async def append(self, response_id: str, events: tuple[bytes, ...]) -> None:
        await self._ask("append", response_id, events)

    async def events(self, response_id: str, first: int, timeout_s: float) -> EventPage | None:
        page: EventPage | None = await self._ask("events", response_id, first, timeout_s, wait_s=timeout_s)
        return page

    async def _ask(self, verb: str, *args: Any, wait_s: float = 0.0) -> Any:
        """Call the actor; once more, a new one, where it turns out to be dead.

        Raises:
            EngineUnavailable: it does not answer.
        """
        lost: RayActorError | None = None
        for _ in range(2):
            actor = await self._find()
            try:
                async with asyncio.timeout(self._timeout_s + wait_s):
                    return await getattr(actor, verb).remote(*args)
            except TimeoutError:
                raise EngineUnavailable(
                    f"the response store has not answered within {self._timeout_s + wait_s:g} s"
                ) from None
            except RayActorError as error:
                if verb == "append" and isinstance(error, ActorUnavailableError):  # it may have done it: not twice
                    raise EngineUnavailable(f"the response store can't be reached: {error}") from None
                log.warning("the response store is lost error=%s", type(error).__name__)
                lost = error
                if self._actor is actor:
                    self._actor = None
            except RayError as error:
                raise EngineUnavailable(f"the response store failed: {type(error).__name__}: {error}") from None
        raise EngineUnavailable("the response store is lost, and so is its successor") from lost

    async def _find(self) -> Actor:
        """The actor; whoever asks first makes it."""
        async with self._finding:
            if self._actor is None:
                try:
                    async with asyncio.timeout(self._timeout_s):
                        self._actor = await asyncio.to_thread(self._get_or_make)
                except TimeoutError:
                    raise EngineUnavailable(
                        f"Ray has not found the response store within {self._timeout_s:g} s"
                    ) from None
            return self._actor

    def _get_or_make(self) -> Actor:
        kind = ray.remote(MemoryStore).options(
            name=NAME, namespace=self._namespace, get_if_exists=True, num_cpus=0, max_concurrency=MAX_CALLS
        )
        return kind.remote(self._config)
