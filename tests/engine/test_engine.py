"""The engine's loop over a fake worker: tokens, abort, silent clients, health, failure."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from pagedray.engine.cache_log import short_hashes
from pagedray.engine.config import Config, load_config
from pagedray.engine.engine import Engine
from pagedray.engine.errors import EngineDead, EngineUnavailable, Overloaded, UserError
from pagedray.engine.executor import LocalExecutor
from pagedray.engine.generation import GenerationParams, make_requests
from pagedray.engine.messages import Constraint, Request, RequestUpdate
from pagedray.engine.metrics import EngineLoad
from pagedray.engine.prefix_cache import hash_blocks
from tests.fakes import BROKEN, EOS_ID, FakeWorker, SlowFakeWorker, fake_grammar, greedy


class Rig:
    """An engine on a clock that the test moves."""

    def __init__(self, worker_class: type[FakeWorker] = FakeWorker, **settings: object):
        self.now_s = 1000.0
        self.config: Config = load_config(overrides={"num_kv_blocks": 64, "block_size": 4, **settings})
        self.worker = worker_class(self.config)
        self.facts = self.worker.load()
        self.engine = Engine(self.config, self.facts, LocalExecutor(self.worker), clock=lambda: self.now_s)
        self.ack = 0

    def requests(self, name: str, prompt: list[int], client: str = "c", **params: object) -> tuple[Request, ...]:
        return make_requests(prompt, GenerationParams(**params), self.facts, request_id=name, client_id=client)  # type: ignore[arg-type]

    async def collect(self, *ids: str, client: str = "c") -> dict[str, list[RequestUpdate]]:
        """Poll until each of `ids` has ended."""
        got: dict[str, list[RequestUpdate]] = {i: [] for i in ids}
        while not all(updates and updates[-1].finish_reason for updates in got.values()):
            batch = await self.engine.poll(client, self.ack, 5.0)
            self.ack = batch.seq
            for update in batch.updates:
                got[update.request_id].append(update)
        return got


def with_engine(rig: Rig, body: Callable[[], Awaitable[None]]) -> None:
    async def go() -> None:
        running = asyncio.ensure_future(rig.engine.run())
        try:
            await asyncio.wait_for(body(), 30)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    asyncio.run(go())


def tokens(updates: list[RequestUpdate]) -> list[int]:
    out: list[int] = []
    for update in updates:
        assert update.first == len(out)
        out += update.token_ids
    return out


@pytest.mark.parametrize("run_ahead", [1, 2, 3, 4])
def test_tokens_are_those_of_the_plain_loop(run_ahead: int) -> None:
    rig = Rig(run_ahead=run_ahead)

    async def body() -> None:
        rig.engine.submit(rig.requests("a", [1, 2, 3], max_tokens=9) + rig.requests("b", [7] * 10, max_tokens=5))
        got = await rig.collect("a-0", "b-0")
        assert tokens(got["a-0"]) == greedy([1, 2, 3], 9)
        assert tokens(got["b-0"]) == greedy([7] * 10, 5)
        assert got["a-0"][-1].finish_reason == "length"
        stats = rig.engine.stats()
        assert stats.generated_tokens == 14
        assert stats.prompt_tokens == 13
        assert stats.finished == {"length": 2}
        assert stats.scheduler.num_used_blocks == 0

    with_engine(rig, body)


def test_a_request_that_arrives_while_steps_are_in_flight_is_served() -> None:
    rig = Rig(SlowFakeWorker, run_ahead=2)

    async def body() -> None:
        rig.engine.submit(rig.requests("a", [1], max_tokens=20))
        first = await rig.engine.poll("c", 0, 5.0)
        rig.engine.submit(rig.requests("b", [2], max_tokens=2))
        rig.ack = first.seq
        got = await rig.collect("a-0", "b-0")
        assert tokens(got["b-0"]) == greedy([2], 2)

    with_engine(rig, body)


def test_abort_frees_the_blocks_and_sends_nothing_more() -> None:
    rig = Rig(SlowFakeWorker)

    async def body() -> None:
        rig.engine.submit(rig.requests("a", [1] * 8, max_tokens=100))
        batch = await rig.engine.poll("c", 0, 5.0)
        rig.engine.abort(["a-0", "unknown"])
        assert rig.engine.stats().scheduler.num_used_blocks == 0
        rest = await rig.engine.poll("c", batch.seq, 0.2)
        assert not any(update.finish_reason for update in rest.updates)
        assert rig.engine.stats().finished == {"abort": 1}

    with_engine(rig, body)


def test_an_abort_that_overtakes_its_submit_still_counts() -> None:
    rig = Rig(SlowFakeWorker)

    async def body() -> None:
        rig.engine.abort(["a-1"])
        rig.engine.submit(rig.requests("a", [1], n=2, max_tokens=3, seed=0))
        assert tokens((await rig.collect("a-0"))["a-0"]) == greedy([1], 3)
        stats = rig.engine.stats()
        assert (stats.finished, stats.scheduler.num_running, stats.scheduler.num_waiting) == ({"length": 1}, 0, 0)

    with_engine(rig, body)


def test_requests_of_a_client_that_stopped_polling_are_ended_and_it_is_told() -> None:
    rig = Rig(SlowFakeWorker, client_timeout_s=5)

    async def body() -> None:
        rig.engine.submit(rig.requests("a", [1], client="gone", max_tokens=100))
        rig.engine.submit(rig.requests("b", [2], client="c", max_tokens=3))
        await rig.engine.poll("gone", 0, 5.0)
        rig.now_s += 6
        poll = asyncio.ensure_future(rig.collect("b-0"))
        got = await poll
        assert tokens(got["b-0"]) == greedy([2], 3)
        assert rig.engine.stats().finished == {"abort": 1, "length": 1}
        last = (await rig.engine.poll("gone", 1, 1.0)).updates[-1]
        assert last.finish_reason == "abort"
        assert "polled" in (last.error or "")

    with_engine(rig, body)


def test_a_full_queue_refuses_all_choices_of_a_request() -> None:
    rig = Rig(SlowFakeWorker, max_queued_requests=3, max_num_seqs=1)

    async def body() -> None:
        rig.engine.submit(rig.requests("a", [1], n=3, max_tokens=2))
        with pytest.raises(Overloaded):
            rig.engine.submit(rig.requests("b", [1], n=2, max_tokens=2))
        assert rig.engine.stats().rejected == 2
        await rig.collect("a-0", "a-1", "a-2")

    with_engine(rig, body)


def test_more_choices_than_the_queue_ever_takes_are_no_matter_of_waiting() -> None:
    rig = Rig(max_queued_requests=3)
    with pytest.raises(UserError, match=r"n is 4.*takes 3"):
        rig.engine.submit(rig.requests("a", [1], n=4))


def test_health_fails_when_there_is_work_and_no_progress() -> None:
    rig = Rig(SlowFakeWorker, stall_threshold_s=10)

    async def body() -> None:
        rig.now_s += 100
        rig.engine.health()  # idle for long is healthy
        rig.engine.submit(rig.requests("a", [1], max_tokens=50))
        rig.engine.health()
        rig.now_s += 11
        with pytest.raises(EngineUnavailable, match="no step has finished"):
            rig.engine.health()
        await rig.engine.poll("c", 0, 5.0)
        rig.engine.health()

    with_engine(rig, body)


def test_a_failed_step_kills_the_engine_and_everybody_is_told() -> None:
    rig = Rig(SlowFakeWorker)
    rig.worker.fail_at_step = 5

    async def body() -> None:
        rig.engine.submit(rig.requests("a", [1], max_tokens=100))
        with pytest.raises(EngineDead, match="injected"):
            await rig.collect("a-0")
        with pytest.raises(EngineDead):
            rig.engine.submit(rig.requests("b", [1], max_tokens=1))
        with pytest.raises(EngineDead):
            rig.engine.health()

    with_engine(rig, body)


def test_draining_refuses_new_requests_and_ends_after_the_last() -> None:
    rig = Rig(SlowFakeWorker)

    async def body() -> None:
        rig.engine.submit(rig.requests("a", [1], max_tokens=3))
        drained = asyncio.ensure_future(rig.engine.drain())
        await asyncio.sleep(0)
        with pytest.raises(EngineUnavailable):
            rig.engine.submit(rig.requests("b", [1], max_tokens=3))
        assert tokens((await rig.collect("a-0"))["a-0"]) == greedy([1], 3)
        await drained

    with_engine(rig, body)


def test_each_client_is_told_of_the_others_requests_and_of_the_cache() -> None:
    rig = Rig(SlowFakeWorker, block_size=4)

    async def body() -> None:
        idle = await rig.engine.poll("idle", 0, 0.001)
        assert idle.news is not None and idle.news.cache.starts_over
        waiting = asyncio.ensure_future(rig.engine.poll("idle", idle.seq, 60.0))
        (request,) = rig.requests("a", list(range(9)), max_tokens=30)
        rig.engine.submit((request,))
        told = await asyncio.wait_for(waiting, 5.0)  # at once, though nothing is for it
        assert told.news is not None
        assert (told.news.other_requests, told.news.other_tokens, told.updates) == (1, 9, ())
        own = await rig.engine.poll("c", 0, 5.0)
        assert own.news is not None
        assert (own.news.other_requests, own.news.other_tokens, own.news.num_running) == (0, 0, 1)
        assert own.news.kv_usage > 0
        assert list(short_hashes(own.news.cache.added)) == [h[:8] for h in hash_blocks(range(9), 4)]
        rig.engine.abort(["a-0"])
        ended = await asyncio.wait_for(rig.engine.poll("idle", told.seq, 60.0), 5.0)
        assert ended.news is not None and ended.news.other_requests == 0
        assert not ended.news.cache.starts_over
        both = told.news.cache.added + ended.news.cache.added
        assert set(short_hashes(both)) >= {h[:8] for h in hash_blocks(range(9), 4)}

    with_engine(rig, body)


def test_every_client_hears_at_once_that_an_engine_drains() -> None:
    rig = Rig(SlowFakeWorker)

    async def body() -> None:
        first = await rig.engine.poll("idle", 0, 0.001)
        waiting = asyncio.ensure_future(rig.engine.poll("idle", first.seq, 60.0))
        await asyncio.sleep(0)
        await rig.engine.drain()
        told = await asyncio.wait_for(waiting, 5.0)
        assert first.news is not None and told.news is not None
        assert (first.news.is_draining, told.news.is_draining) == (False, True)

    with_engine(rig, body)


def test_load_counts_what_waits_and_what_the_cache_holds() -> None:
    rig = Rig(SlowFakeWorker, max_num_seqs=2)
    assert rig.engine.load() == EngineLoad(0.0, 0.0)
    rig.engine.submit(rig.requests("a", [1] * 8, n=5, max_tokens=4, seed=1))
    assert rig.engine.load() == EngineLoad(5 / 2, 5 * 8 / 4 / 64)

    async def body() -> None:
        await rig.collect(*(f"a-{i}" for i in range(5)))
        assert rig.engine.load() == EngineLoad(0.0, 0.0)

    with_engine(rig, body)


def test_a_new_client_hears_at_once_what_the_cache_holds() -> None:
    rig = Rig()

    async def body() -> None:
        rig.engine.submit(rig.requests("a", list(range(9)), max_tokens=2))
        await rig.collect("a-0")
        batch = await asyncio.wait_for(rig.engine.poll("late", 0, 60.0), 5)
        assert batch.news is not None and batch.news.cache.added

    with_engine(rig, body)


@pytest.mark.parametrize("run_ahead", [1, 3])
def test_a_request_whose_constraint_fails_ends_alone(run_ahead: int) -> None:
    rig = Rig(run_ahead=run_ahead)

    async def body() -> None:
        rig.engine.submit(
            rig.requests("a", [1, 2, 3], max_tokens=9)
            + rig.requests("bad", [4] * 9, constraint=Constraint(BROKEN))
            + rig.requests("json", [5], constraint=Constraint(fake_grammar(b"{}")))
        )
        got = await rig.collect("a-0", "bad-0", "json-0")
        assert tokens(got["a-0"]) == greedy([1, 2, 3], 9)
        assert tokens(got["json-0"]) == [*b"{}", EOS_ID]
        [end] = got["bad-0"]
        assert (end.finish_reason, end.error, end.token_ids) == ("error", "its constraint failed: broken", ())
        assert rig.worker.constraints == [None, Constraint(BROKEN), Constraint(fake_grammar(b"{}"))]
        stats = rig.engine.stats()
        assert stats.finished == {"length": 1, "error": 1, "stop": 1} and stats.scheduler.num_used_blocks == 0
        rig.engine.health()

    with_engine(rig, body)
