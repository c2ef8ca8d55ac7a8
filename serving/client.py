"""The ingress's side of the engines: submits requests, hands out their updates, moves them when an engine dies.

One poll per engine is outstanding at any time; its answer carries the new tokens of all requests that this ingress has
there, and news of how the engine is doing. The client keeps each live request's tokens so far. When an engine dies,
those requests go to another one with their tokens, under a new id; whoever reads the updates sees a pause. Where
engines are started on demand, requests that find none wait for one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Protocol

import msgspec

from pagedray.engine.config import EngineFacts, FailureConfig
from pagedray.engine.errors import (
    DeadlineExceeded,
    EngineDead,
    EngineUnavailable,
    Overloaded,
    PagedrayError,
    RequestFailed,
    UserError,
)
from pagedray.engine.messages import PromptLogprobs, Request, RequestUpdate, UpdateBatch
from pagedray.engine.metrics import EngineStats
from pagedray.serving.demand import Demand
from pagedray.serving.router import RoutedEngine, Router

log = logging.getLogger(__name__)

POLL_RETRY_S = 0.2  # pause after a poll that found the engine unreachable
MOVE_RETRY_S = 0.5  # longest pause between attempts to place requests that have no engine


class EngineLink(Protocol):
    """One engine as an ingress reaches it. `poll` answers within half of `FailureConfig.client_timeout_s`."""

    @property
    def facts(self) -> EngineFacts: ...
    async def submit(self, requests: tuple[Request, ...]) -> None:
        """All or none. Raises UserError, Overloaded, EngineUnavailable; EngineDead when the engine is gone."""

    async def poll(self, client_id: str, ack: int) -> UpdateBatch:
        """Updates after batch `ack`, as soon as there are any. Raises EngineDead when the engine is gone."""

    async def abort(self, client_id: str, request_ids: tuple[str, ...]) -> None: ...
    async def health(self) -> None:
        """Return when healthy. Raises EngineUnavailable, EngineDead."""

    async def stats(self) -> EngineStats: ...


class Deadlines(msgspec.Struct, frozen=True):
    """Seconds that a call to an engine may take; a poll's is `FailureConfig.client_timeout_s`."""

    submit_s: float = 10.0
    abort_s: float = 5.0
    health_s: float = 2.0
    stats_s: float = 2.0


class _Connection:
    """A link, and what this client has going on over it."""

    def __init__(self, link: EngineLink, engine: RoutedEngine):
        self.link = link
        self.engine = engine
        self.num_live = 0
        self.is_draining = False
        self.is_dead = False
        self.is_silent = False  # a submit was not answered, and no poll since: others are tried first
        self.poll_task: asyncio.Task[None] | None = None


class _Live:
    """A request that has not ended: all that is needed to deliver its updates and to submit it again elsewhere."""

    def __init__(self, request: Request, generation: Generation, index: int):
        self.request = request  # as first submitted
        self.generation = generation
        self.index = index
        self.connection: _Connection | None = None
        self.attempt = request  # as last submitted
        self.id = request.id  # of that attempt
        self.num_attempts = 0
        self.is_accepted = False
        self.is_ended = False
        self.output_ids = list(request.output_ids)
        self.next_prompt_logprob = 1  # first prompt position whose log-probability was not delivered yet

    def next_attempt(self) -> Request:
        """The request to submit now: it continues after the tokens that were delivered."""
        self.num_attempts += 1
        if self.num_attempts == 1:
            return self.attempt
        self.id = f"{self.request.id}.{self.num_attempts}"
        params = self.request.params
        if params.prompt_logprobs is not None and self.next_prompt_logprob >= len(self.request.prompt_ids):
            params = msgspec.structs.replace(params, prompt_logprobs=None)
        ids = tuple(self.output_ids)
        self.attempt = msgspec.structs.replace(self.request, id=self.id, output_ids=ids, params=params)
        return self.attempt


class Generation:
    """Requests submitted together. Leaving its context aborts those that have not ended."""

    def __init__(self, client: EngineClient, requests: Sequence[Request], session: bytes | None):
        self._client = client
        self.session = session
        self._live = {index: _Live(request, self, index) for index, request in enumerate(requests)}
        self._arrived: list[tuple[int, RequestUpdate]] = []
        self._error: PagedrayError | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def next(self) -> list[tuple[int, RequestUpdate]]:
        """What arrived since the last call, as (index of the request, update); waits if nothing has.

        Empty once every request has ended. A slow caller finds more per call and holds up nobody else.

        Raises:
            PagedrayError: a request ended with an error; the others should be given up.
        """
        while True:
            if self._arrived:
                arrived, self._arrived = self._arrived, []
                return arrived
            if self._error is not None:
                raise self._error
            if not self._live:
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def finish(self, index: int) -> None:
        """Abort one request that needs no more tokens. It gets no further update."""
        live = self._live.get(index)
        if live is not None:
            self._client._abort([live])
        self._arrived = [item for item in self._arrived if item[0] != index]

    def give_up(self, error: PagedrayError) -> None:
        """Abort what has not ended. What arrived can still be read; then `next` raises `error`."""
        if self._live:
            self._client._abort(list(self._live.values()))
            self._fail(error)

    def close(self) -> None:
        self._client._abort(list(self._live.values()))
        self._arrived = []

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.close()

    def _deliver(self, index: int, update: RequestUpdate) -> None:
        self._arrived.append((index, update))
        self._wake()

    def _fail(self, error: PagedrayError) -> None:
        self._error = self._error or error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EngineClient:
    """Requests in, updates out, over a set of engines that changes while it runs.

    Args:
        failure: how long to wait for an engine to move requests to, and how long a poll may take.
        on_link_dead: called once for each link whose engine died, after the link was dropped. It finds the rebuilt
            engine and adds a link to it; requests of the dead one wait for that.
        router: chooses among the engines.
        demand: where engines come on demand, requests that find none wait for one; else they are refused.
    """

    def __init__(
        self,
        failure: FailureConfig,
        on_link_dead: Callable[[EngineLink], None] | None = None,
        deadlines: Deadlines = Deadlines(),  # noqa: B008 (frozen)
        router: Router | None = None,
        demand: Demand | None = None,
    ):
        self.client_id = f"ingress-{uuid.uuid4().hex}"
        self.router = router or Router()
        self._failure = failure
        self._on_link_dead = on_link_dead
        self._deadlines = deadlines
        self._demand = demand or Demand(None, 0)
        self._is_closing = False
        self._connections: list[_Connection] = []
        self._connected = asyncio.Event()  # set, and replaced, when a link is added
        self._live: dict[str, _Live] = {}
        self._aborting: set[str] = set()  # ids whose abort is on its way
        self._tasks: set[asyncio.Task[None]] = set()
        self._facts: EngineFacts | None = None

    @property
    def facts(self) -> EngineFacts:
        """Of the engine added last, also while it is being rebuilt. Raises EngineUnavailable before the first."""
        if self._facts is None:
            raise EngineUnavailable("the engine is starting")
        return self._facts

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    @property
    def num_homeless(self) -> int:
        """Requests that wait for an engine to start, or to move from a dead one."""
        return self._demand.num

    def has_link(self, engine_id: str) -> bool:
        return any(connection.link.facts.engine_id == engine_id for connection in self._connections)

    def add_link(self, link: EngineLink) -> None:
        """Route requests to this engine from now on. Call it on the event loop."""
        connection = _Connection(link, self.router.add(link.facts.engine_id))
        self._facts = link.facts
        self._connections.append(connection)
        connection.poll_task = self._spawn(self._poll(connection))
        self._connected.set()
        self._connected = asyncio.Event()

    def remove_link(self, link: EngineLink) -> None:
        """Give the engine no more requests; those it has go on to their end."""
        for connection in self._connections:
            if connection.link is link:
                self._drain(connection)
                return

    async def submit(self, requests: Sequence[Request], session: bytes | None = None) -> Generation:
        """Have one engine accept all of `requests`, or none.

        Args:
            session: requests of one session go to one engine, as far as load allows.

        Raises:
            UserError: a request can never be served.
            Overloaded: every engine's queue is full, or too many requests wait for an engine to start.
            EngineUnavailable: no engine is up, or none has started in time.
        """
        generation = Generation(self, requests, session)
        lives = list(generation._live.values())
        try:
            try:
                await self._place(lives)
            except EngineUnavailable:
                if not self._demand.is_heard:
                    raise
                await self._hold(lives)
        except BaseException:
            generation.close()
            raise
        return generation

    async def await_engine(self, timeout_s: float) -> None:
        """Return once there has been an engine. Asks for one, as requests do. Raises EngineUnavailable."""
        if self._facts is not None:
            return
        try:
            async with asyncio.timeout(timeout_s):
                with self._demand.of(1):
                    await self._connected.wait()
        except TimeoutError:
            raise EngineUnavailable(f"no engine has started within start_timeout_s ({timeout_s:g} s)") from None

    async def health(self) -> None:
        """Return when some engine is healthy, or would be started on demand.

        Raises:
            EngineUnavailable: with each one's trouble.
        """
        connections = list(self._connections)
        if not connections:
            if self._demand.is_heard and self._facts is not None:
                return
            raise EngineUnavailable("no engine is up")
        checks = [asyncio.ensure_future(self._trouble(connection)) for connection in connections]
        try:
            troubles = []
            for check in asyncio.as_completed(checks):
                trouble = await check
                if trouble is None:
                    return
                troubles.append(trouble)
            raise EngineUnavailable("; ".join(troubles))
        finally:
            for task in checks:
                task.cancel()

    async def stats(self) -> list[EngineStats]:
        """Of every engine that answers."""

        async def ask(link: EngineLink) -> EngineStats:
            async with asyncio.timeout(self._deadlines.stats_s):
                return await link.stats()

        answers = await asyncio.gather(*(ask(c.link) for c in self._connections), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, Exception):
                log.warning("an engine gave no stats error=%r", answer)
        return [answer for answer in answers if isinstance(answer, EngineStats)]

    async def close(self) -> None:
        """Abort everything and let go of the engines."""
        self._is_closing = True
        self._demand.close()
        lives = list(self._live.values())
        for generation in {live.generation for live in lives}:
            generation._fail(EngineUnavailable("the server is shutting down"))
        self._abort(lives)
        polls = [c.poll_task for c in self._connections if c.poll_task is not None]
        for task in polls:
            task.cancel()
        self._connections = []
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _poll(self, connection: _Connection) -> None:
        """Fetch updates until the link is dropped."""
        ack = 0
        try:
            while True:
                # An engine gives up the requests of a client that it hasn't heard from for client_timeout_s: one that
                # doesn't answer a poll for as long is gone, whatever it says later.
                async with asyncio.timeout(self._failure.client_timeout_s):
                    batch = await self._poll_once(connection.link, ack)
                connection.is_silent = False
                if batch.news is not None:
                    self.router.hear(connection.engine, batch.news)
                strangers = [update.request_id for update in batch.updates if not self._dispatch(update)]
                if strangers:
                    self._send_abort(connection, strangers)
                if batch.news is not None and batch.news.is_draining and not connection.is_draining:
                    self._drain(connection)
                ack = batch.seq
        except TimeoutError:
            self._bury(connection, EngineDead(f"no answer to a poll for {self._failure.client_timeout_s:g} s"))
        except EngineDead as error:
            self._bury(connection, error)
        except Exception as error:  # whatever it is, requests must not wait for a poll that nobody repeats
            log.exception("polling an engine failed")
            self._bury(connection, EngineDead(f"{type(error).__name__}: {error}"))

    async def _poll_once(self, link: EngineLink, ack: int) -> UpdateBatch:
        while True:
            try:
                return await link.poll(self.client_id, ack)
            except EngineUnavailable:
                await asyncio.sleep(POLL_RETRY_S)

    def _dispatch(self, update: RequestUpdate) -> bool:
        """Hand an update on; False if the engine should be told, again, that nobody wants this request."""
        live = self._live.get(update.request_id)
        if live is None:
            return update.finish_reason is not None or update.request_id in self._aborting
        self._take(live, update)
        return True

    def _take(self, live: _Live, update: RequestUpdate) -> None:
        if update.first != len(live.output_ids) or update.prompt_logprobs:
            fresh = _without_repeats(update, len(live.output_ids), live.next_prompt_logprob)
            if fresh is None:
                return
            update = fresh
            if update.first != len(live.output_ids) and update.token_ids:
                live.generation._fail(EngineDead(f"tokens {len(live.output_ids)} to {update.first} were lost"))
                self._abort([live])
                return
            for part in update.prompt_logprobs:
                live.next_prompt_logprob = part.start + len(part.entries)
        live.output_ids += update.token_ids
        if update.finish_reason == "abort" and live.request.deadline_s is None:
            # The engine gave it up because it heard nothing from here for long. Someone still waits for it.
            self._unassign([live])
            self._spawn(self._move([live], EngineDead(update.error or "the engine gave up this request")))
            return
        if update.finish_reason is not None:
            self._end(live)
        if update.finish_reason == "error":
            live.generation._fail(RequestFailed(update.error or "the engine failed this request"))
        elif update.finish_reason == "abort":
            live.generation._fail(DeadlineExceeded(update.error or "the request's deadline passed"))
        else:
            live.generation._deliver(live.index, update)

    async def _place(self, lives: list[_Live]) -> None:
        """Submit requests together to the best engine that takes them. Raises the best reason when none does."""
        refusal: PagedrayError = EngineUnavailable("no engine is up")
        overloaded: Overloaded | None = None
        tried: list[_Connection] = []
        while True:
            lives = [live for live in lives if not live.is_ended]
            connection = self._pick(lives, tried)
            if connection is None:
                break
            tried.append(connection)
            requests = tuple(self._assign(live, connection) for live in lives)
            try:
                async with asyncio.timeout(self._deadlines.submit_s):
                    await connection.link.submit(requests)
                if not connection.is_dead:
                    for live in lives:
                        live.is_accepted = True
                    return
                refusal = EngineUnavailable("the engine died")
            except UserError:
                self._unassign(lives)
                raise
            except Overloaded as error:
                overloaded = error
            except EngineUnavailable as error:
                refusal = error
            except EngineDead as error:
                refusal = EngineUnavailable(f"the engine died: {error.reason}")
                self._bury(connection, error)
            except TimeoutError:
                refusal = EngineUnavailable(f"the engine did not answer within {self._deadlines.submit_s:g} s")
                connection.is_silent = True
                self._send_abort(connection, [live.id for live in lives])
            self._unassign(lives)
        if lives:
            raise overloaded or refusal

    def _pick(self, lives: list[_Live], tried: list[_Connection]) -> _Connection | None:
        usable = [c for c in self._connections if not c.is_draining and c not in tried]
        usable = [c for c in usable if not c.is_silent] or usable
        if not usable or not lives:
            return None
        engines = [c.engine for c in usable]
        chosen = self.router.choose(engines, [live.request for live in lives], lives[0].generation.session)
        return usable[engines.index(chosen)]

    async def _hold(self, lives: list[_Live]) -> None:
        """Place requests once an engine was started for them."""
        self._demand.check_room(len(lives))
        limit_s = self._failure.start_timeout_s
        overloaded: Overloaded | None = None
        with self._demand.of(len(lives)):
            try:
                async with asyncio.timeout(limit_s):
                    while not self._is_closing:
                        connected = self._connected
                        with contextlib.suppress(EngineUnavailable):
                            try:
                                await self._place(lives)
                                return
                            except Overloaded as error:  # by what else was held, here and by other ingresses
                                overloaded = error
                        await self._await_link(connected, MOVE_RETRY_S)
                    raise EngineUnavailable("the server is shutting down")
            except TimeoutError:
                reason = EngineUnavailable(f"no engine has started within start_timeout_s ({limit_s:g} s)")
                raise overloaded or reason from None

    async def _await_link(self, connected: asyncio.Event, timeout_s: float) -> None:
        """Wait until a link has been added since `connected` was current, but no longer than that."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await connected.wait()

    def _assign(self, live: _Live, connection: _Connection) -> Request:
        """Expect updates of a new attempt over this connection: they may come before submit returns."""
        request = live.next_attempt()
        live.connection = connection
        connection.num_live += 1
        self.router.sent(connection.engine, request)
        self._live[live.id] = live
        return request

    def _unassign(self, lives: Iterable[_Live]) -> None:
        for live in lives:
            self._live.pop(live.id, None)
            if live.connection is not None:
                connection, live.connection = live.connection, None
                connection.num_live -= 1
                self.router.ended(connection.engine, live.attempt)
                self._drop_if_drained(connection)

    def _end(self, live: _Live) -> None:
        live.is_ended = True
        live.generation._live.pop(live.index, None)
        self._unassign([live])

    def _abort(self, lives: list[_Live]) -> None:
        """End requests here at once, and on their engines in the background."""
        by_connection: dict[_Connection, list[str]] = {}
        for live in lives:
            if live.connection is not None and not live.connection.is_dead:
                by_connection.setdefault(live.connection, []).append(live.id)
            self._end(live)
        for connection, ids in by_connection.items():
            self._send_abort(connection, ids)

    def _send_abort(self, connection: _Connection, ids: Sequence[str]) -> None:
        async def send() -> None:
            try:
                async with asyncio.timeout(self._deadlines.abort_s):
                    await connection.link.abort(self.client_id, tuple(ids))
            except (PagedrayError, TimeoutError) as error:
                # A dead engine needs no abort; for one that is only slow, the next update sends another.
                log.warning("abort did not reach the engine requests=%d error=%r", len(ids), error)
            finally:
                self._aborting.difference_update(ids)

        self._aborting.update(ids)

        self._spawn(send())

    def _bury(self, connection: _Connection, error: EngineDead) -> None:
        """Drop a dead engine and move its requests."""
        if connection.is_dead:
            return
        connection.is_dead = True
        self._connections = [c for c in self._connections if c is not connection]
        self.router.remove(connection.engine)
        orphans: dict[Generation, list[_Live]] = {}
        for live in list(self._live.values()):
            if live.connection is connection and live.is_accepted:
                orphans.setdefault(live.generation, []).append(live)
                self._unassign([live])
        log.warning("engine is dead requests=%d reason=%s", sum(map(len, orphans.values())), error.reason)
        if connection.poll_task is not None and connection.poll_task is not asyncio.current_task():
            connection.poll_task.cancel()
        if self._on_link_dead is not None:
            self._on_link_dead(connection.link)
        for lives in orphans.values():
            self._spawn(self._move(lives, error))

    async def _move(self, lives: list[_Live], cause: EngineDead) -> None:
        """Find a new engine for requests of a dead one, or fail them once resubmit_timeout_s has passed.

        Where engines come on demand, the new one may have to be started first: then start_timeout_s counts if longer.
        """
        generation = lives[0].generation
        timeout_s = self._failure.resubmit_timeout_s
        if self._demand.is_heard:
            timeout_s = max(timeout_s, self._failure.start_timeout_s)
        deadline = asyncio.get_running_loop().time() + timeout_s
        for live in lives:
            live.is_accepted = False
        with self._demand.of(len(lives)):
            while True:
                connected = self._connected
                try:
                    await self._place(lives)
                    return
                except UserError as error:
                    generation._fail(error)
                    break
                except PagedrayError as error:
                    remaining = deadline - asyncio.get_running_loop().time()
                    if self._is_closing:
                        generation._fail(EngineUnavailable("the server is shutting down"))
                        break
                    if remaining <= 0:
                        reason = (
                            f"the engine died ({cause.reason}) and no other took the request for {timeout_s:g} s: "
                            f"{error}"
                        )
                        generation._fail(EngineDead(reason))
                        break
                await self._await_link(connected, min(MOVE_RETRY_S, remaining))
        self._abort([live for live in lives if not live.is_ended])

    async def _trouble(self, connection: _Connection) -> str | None:
        """What is wrong with an engine; None if nothing."""
        try:
            async with asyncio.timeout(self._deadlines.health_s):
                await connection.link.health()
        except TimeoutError:
            return f"the engine did not answer within {self._deadlines.health_s:g} s"
        except Exception as error:  # unreachable is unhealthy, whatever the link says about it
            return str(error)
        return None

    def _drain(self, connection: _Connection) -> None:
        connection.is_draining = True
        self._drop_if_drained(connection)

    def _drop_if_drained(self, connection: _Connection) -> None:
        if connection.is_draining and connection.num_live == 0 and connection in self._connections:
            self._connections.remove(connection)
            self.router.remove(connection.engine)
            if connection.poll_task is not None:
                connection.poll_task.cancel()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)  # the loop itself holds tasks weakly
        task.add_done_callback(self._tasks.discard)
        return task


def _without_repeats(update: RequestUpdate, num_tokens: int, next_prompt_logprob: int) -> RequestUpdate | None:
    """What of an update is new to a receiver that has `num_tokens` tokens; None if nothing is."""
    skip = max(0, num_tokens - update.first)
    parts = []
    for part in update.prompt_logprobs:
        entries = part.entries[max(0, next_prompt_logprob - part.start) :]
        if entries:
            parts.append(PromptLogprobs(part.start + len(part.entries) - len(entries), entries))
            next_prompt_logprob = part.start + len(part.entries)
    if not (update.token_ids[skip:] or parts or update.finish_reason is not None):
        return None
    return msgspec.structs.replace(
        update,
        first=update.first + min(skip, len(update.token_ids)),
        token_ids=update.token_ids[skip:],
        logprobs=update.logprobs[skip:],
        prompt_logprobs=tuple(parts),
    )
