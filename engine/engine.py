"""The loop: inbox → schedule → submit → result → commit → outbox. One per scheduler actor, and one inside `LLM`.

Requests enter through `submit` and `abort`, which act between two steps since everything runs on one event loop;
updates leave through `poll`. Up to `run_ahead` steps are planned before the oldest one's tokens are known.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable

import msgspec

from pagedray.engine.config import Config, EngineFacts
from pagedray.engine.errors import EngineDead, EngineUnavailable, Overloaded
from pagedray.engine.executor import Executor
from pagedray.engine.load_watch import LoadWatch
from pagedray.engine.messages import EngineNews, Request, RequestUpdate, RunnerOutput, UpdateBatch
from pagedray.engine.metrics import EngineLoad, EngineStats
from pagedray.engine.outbox import Outbox
from pagedray.engine.scheduler import Scheduler, SchedulerLimits
from pagedray.engine.throughput import ThroughputLog

log = logging.getLogger(__name__)

FORGET_CLIENT_AFTER = 10  # client timeouts, after which an outbox that nobody polls is dropped
KEPT_ABORTS = 10_000  # ids aborted before they were submitted: calls to an actor may overtake each other


class Engine:
    """Owns the scheduler and drives one executor.

    Args:
        config: the whole tree, of which scheduler, cache and failure settings matter here.
        facts: what the workers learned while loading.
        executor: where steps run.
        clock: wall clock in seconds.
    """

    def __init__(self, config: Config, facts: EngineFacts, executor: Executor, clock: Callable[[], float] = time.time):
        self.facts = facts
        self._scheduler = make_scheduler(config, facts)
        self._executor = executor
        self._clock = clock
        self._run_ahead = config.scheduler.run_ahead
        self._failure = config.failure
        self._load_watch = LoadWatch(executor.expert_loads, clock)
        self._throughput = ThroughputLog(config.server.log_stats_interval_s)
        self._outboxes: dict[str, Outbox] = {}
        self._early_aborts: dict[str, None] = {}  # oldest first; ids are never used twice
        self._clients: dict[str, str] = {}  # request id → client id, unfinished requests only
        self._submitted: deque[float] = deque()  # when each step in flight was submitted
        self._wake = asyncio.Event()
        self._dead: EngineDead | None = None
        self._draining = False
        self._progress_s = clock()
        self._finished: Counter[str] = Counter()
        self._num_steps = self._prompt_tokens = self._generated_tokens = self._rejected = 0
        self._step_seconds = 0.0

    def submit(self, requests: tuple[Request, ...]) -> None:
        """Accept all of `requests` or none.

        Raises:
            Overloaded: the waiting queue is full.
            PromptTooLong: a request can never fit the KV cache.
            EngineUnavailable: the engine is draining.
            EngineDead: it died before.
        """
        self._check_alive()
        if self._draining:
            raise EngineUnavailable("the engine is draining")
        requests = tuple(request for request in requests if request.id not in self._early_aborts)
        now = self._clock()
        if not self._scheduler.has_work():
            self._progress_s = now
        try:
            self._scheduler.add(requests, now)
        except Overloaded:
            self._rejected += len(requests)
            raise
        for request in requests:
            self._clients[request.id] = request.client_id
            self._outbox(request.client_id).add(request)
            self._prompt_tokens += len(request.prompt_ids)
        self._wake.set()

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests whose client has left; no update is sent. One that was not submitted yet never starts."""
        for request_id in request_ids:
            update = self._scheduler.abort(request_id, "aborted by the client")
            if update is not None:
                self._forget(update)
            else:
                self._early_aborts[request_id] = None
                if len(self._early_aborts) > KEPT_ABORTS:
                    del self._early_aborts[next(iter(self._early_aborts))]
        self._wake.set()

    async def poll(self, client_id: str, ack: int, timeout_s: float) -> UpdateBatch:
        """Updates of this client's requests, see `Outbox.poll`. Raises EngineDead once the engine is dead."""
        self._check_alive()
        return await self._outbox(client_id).poll(ack, timeout_s, self._clock())

    def health(self) -> None:
        """Return when the loop makes progress or has nothing to do.

        Raises:
            EngineDead: the executor failed.
            EngineUnavailable: there is work, and no step has finished for longer than `stall_threshold_s`.
        """
        self._check_alive()
        stalled = self._stalled_s()
        if stalled > self._failure.stall_threshold_s:
            raise EngineUnavailable(f"no step has finished for {stalled:.0f} s though there is work")

    def stats(self) -> EngineStats:
        return EngineStats(
            engine_id=self.facts.engine_id,
            scheduler=self._scheduler.stats(),
            num_steps=self._num_steps,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            finished=dict(self._finished),
            rejected=self._rejected,
            step_seconds=self._step_seconds,
            stalled_s=self._stalled_s(),
        )

    async def stats_with_experts(self) -> EngineStats:
        """And what the experts got, which the workers are asked for now and then; waits a moment for them."""
        experts = await self._load_watch.read()
        return msgspec.structs.replace(self.stats(), experts=experts)

    def load(self) -> EngineLoad:
        """How full it is, by what runs and waits and by the KV cache."""
        stats = self._scheduler.stats()
        num_blocks = stats.num_used_blocks + stats.num_queued_tokens / self.facts.block_size
        num_seqs = stats.num_running + stats.num_waiting
        return EngineLoad(num_seqs / self._scheduler.limits.max_num_seqs, num_blocks / stats.num_blocks)

    async def drain(self) -> None:
        """Refuse new requests and return once the running ones have ended."""
        self._draining = True
        for outbox in self._outboxes.values():
            outbox.hurry()
        while self._clients and self._dead is None:
            await asyncio.sleep(0.05)

    async def run(self) -> None:
        """Work until cancelled or until the executor fails; then every poll and submit raises EngineDead."""
        try:
            while True:
                self._plan()
                if self._submitted:
                    self._commit(await self._next_result())
                else:
                    self._wake.clear()
                    if self._scheduler.has_work():
                        raise RuntimeError("the scheduler has work and nothing in flight, but plans no step")
                    await self._wake.wait()
        except Exception as error:
            self._dead = error if isinstance(error, EngineDead) else EngineDead(f"{type(error).__name__}: {error}")
            log.exception("engine died engine_id=%s", self.facts.engine_id)
            for outbox in self._outboxes.values():
                outbox.fail(self._dead)
            raise
        finally:
            self._load_watch.close()
            self._executor.close()

    def _plan(self) -> None:
        """Submit steps until run_ahead of them are in flight or there is nothing to compute."""
        now = self._clock()
        self._end_requests_of_silent_clients(now)
        while len(self._submitted) < self._run_ahead and (out := self._scheduler.schedule(now)) is not None:
            self._executor.submit(out)
            self._submitted.append(now)
        for update in self._scheduler.take_updates():
            self._publish(update)
        for outbox in self._outboxes.values():
            outbox.others_have(len(self._clients) - len(outbox.live))

    async def _next_result(self) -> RunnerOutput:
        """The oldest step's result; plans further steps for requests that arrive meanwhile."""
        if len(self._submitted) >= self._run_ahead:
            return await self._executor.result()
        result = asyncio.ensure_future(self._executor.result())
        try:
            while not result.done() and len(self._submitted) < self._run_ahead:
                self._wake.clear()
                woken = asyncio.ensure_future(self._wake.wait())
                await asyncio.wait((result, woken), return_when=asyncio.FIRST_COMPLETED)
                woken.cancel()
                if not result.done():
                    self._plan()
            return await result
        finally:
            result.cancel()

    def _commit(self, out: RunnerOutput) -> None:
        now = self._clock()
        self._progress_s = now
        self._num_steps += 1
        self._step_seconds += now - self._submitted.popleft()
        for update in self._scheduler.commit(out, now):
            self._generated_tokens += len(update.token_ids)
            self._publish(update)
        self._throughput.tick(now, self._prompt_tokens, self._generated_tokens, self._scheduler)

    def _publish(self, update: RequestUpdate) -> None:
        client_id = self._clients.get(update.request_id)
        if client_id is None:
            return
        self._outbox(client_id).put(update)
        if update.finish_reason is not None:
            self._forget(update)

    def _forget(self, update: RequestUpdate) -> None:
        self._finished[update.finish_reason or "abort"] += 1
        client_id = self._clients.pop(update.request_id, None)
        if client_id is not None:
            self._outbox(client_id).drop(update.request_id)

    def _end_requests_of_silent_clients(self, now_s: float) -> None:
        """Free what belongs to an ingress that is gone: one that has not polled for client_timeout_s."""
        limit = self._failure.client_timeout_s
        for client_id, outbox in [item for item in self._outboxes.items() if item[1].silent_s(now_s) > limit]:
            if outbox.live:
                log.warning("client is silent, ending its requests client=%s requests=%d", client_id, len(outbox.live))
            for request_id in tuple(outbox.live):
                update = self._scheduler.abort(request_id, f"its ingress has not polled for {limit:g} s")
                if update is not None:
                    self._publish(update)  # it may come back and must not wait for ever
            if outbox.silent_s(now_s) > FORGET_CLIENT_AFTER * limit:
                del self._outboxes[client_id]

    def _outbox(self, client_id: str) -> Outbox:
        outbox = self._outboxes.get(client_id)
        if outbox is None:
            outbox = self._outboxes[client_id] = Outbox(self._clock(), self._news_for(client_id))
            if self._scheduler.prefix_cache.log.end:
                outbox.hurry()  # a new client learns at once what the cache holds
        return outbox

    def _news_for(self, client_id: str) -> Callable[[], EngineNews]:
        """What to tell a client whenever it is answered; the cache's changes since the last time."""
        told: int | None = None

        def news() -> EngineNews:
            nonlocal told
            outbox, stats, cache = self._outboxes[client_id], self._scheduler.stats(), self._scheduler.prefix_cache
            changes, told = cache.changes_since(told), cache.log.end
            return EngineNews(
                is_draining=self._draining,
                other_requests=len(self._clients) - len(outbox.live),
                other_tokens=sum(box.live_tokens for box in self._outboxes.values()) - outbox.live_tokens,
                num_running=stats.num_running,
                num_waiting=stats.num_waiting,
                kv_usage=stats.kv_usage,
                cache=changes,
            )

        return news

    def _stalled_s(self) -> float:
        return max(0.0, self._clock() - self._progress_s) if self._scheduler.has_work() else 0.0

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise self._dead


def make_scheduler(config: Config, facts: EngineFacts) -> Scheduler:
    """The scheduler that these settings and these workers call for."""
    settings = config.scheduler
    limits = SchedulerLimits(
        max_num_seqs=settings.max_num_seqs,
        max_tokens_per_step=settings.max_num_batched_tokens,
        max_model_len=facts.max_model_len,
        prefill_chunk_tokens=settings.prefill_chunk_tokens,
        max_queued_requests=settings.max_queued_requests,
        max_queued_tokens=settings.max_queued_tokens,
        num_turns=min(config.worker.pipeline_parallel_size, settings.run_ahead),
    )
    return Scheduler(
        limits,
        block_size=facts.block_size,
        num_blocks=facts.num_blocks,
        windows=facts.block_groups,
        eos_ids=facts.eos_ids,
        policy=settings.scheduling_policy,
        enable_prefix_caching=facts.enable_prefix_caching,
    )
