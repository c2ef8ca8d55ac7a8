"""EngineClient and its router: what engines tell decides, and requests wait where engines come on demand."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import msgspec
import pytest

from pagedray.engine.cache_log import CacheChanges
from pagedray.engine.config import FailureConfig
from pagedray.engine.errors import EngineDead, EngineUnavailable, Overloaded
from pagedray.engine.messages import EngineNews, UpdateBatch
from pagedray.serving.client import EngineClient
from pagedray.serving.demand import Demand
from pagedray.serving.router import Router
from tests.fakes import SlowFakeWorker
from tests.serving.rig import Rig
from tests.serving.test_client import FACTS, QUICK, ScriptedLink, request, settle, update

LIMIT_S = 30.0


def tell(link: ScriptedLink, seq: int = 1, *, is_draining: bool = False, others: int = 0) -> None:
    link.batches.put_nowait(told(seq, is_draining=is_draining, others=others))


def told(seq: int = 1, *, is_draining: bool = False, others: int = 0) -> UpdateBatch:
    news = EngineNews(
        is_draining=is_draining,
        other_requests=others,
        other_tokens=0,
        num_running=0,
        num_waiting=0,
        kv_usage=0.0,
        cache=CacheChanges(b"", b"", False),
    )
    return UpdateBatch(seq, (), news)


async def test_an_engine_that_others_load_gets_less() -> None:
    client = EngineClient(FailureConfig(), deadlines=QUICK)
    busy, idle = ScriptedLink(), ScriptedLink()
    client.add_link(busy)
    client.add_link(idle)
    tell(busy, others=4)
    await settle()
    generations = [await client.submit([request(f"r{i}")]) for i in range(4)]
    assert (len(busy.submitted), len(idle.submitted)) == (0, 4)
    for generation in generations:
        generation.close()
    await client.close()


async def test_a_draining_engine_gets_nothing_more_and_goes_when_it_is_done() -> None:
    client = EngineClient(FailureConfig(), deadlines=QUICK)
    old, new = ScriptedLink(), ScriptedLink()
    client.add_link(old)
    async with await client.submit([request("a")]) as generation:
        client.add_link(new)
        tell(old, is_draining=True)
        await settle()
        others = [await client.submit([request(f"b{i}")]) for i in range(3)]
        assert len(new.submitted) == 3
        old.send(update(0, 1, name="a", finish_reason="stop"), seq=2)
        assert [u.token_ids for _, u in await generation.next()] == [(1,)]
        await settle()
        assert len(client.router.engines) == 1
        for other in others:
            other.close()
    await client.close()


async def test_a_silent_engine_is_tried_last_until_it_speaks() -> None:
    client = EngineClient(FailureConfig(), deadlines=QUICK)
    silent, good = ScriptedLink(), ScriptedLink()
    silent.hangs = True
    client.add_link(silent)
    with pytest.raises(EngineUnavailable, match="did not answer"):
        await client.submit([request("a")])
    client.add_link(good)
    generations = [await client.submit([request(f"b{i}")]) for i in range(4)]
    assert len(good.submitted) == 4, "nobody waited for the silent one"
    silent.hangs = False
    tell(silent)
    await settle()
    generations += [await client.submit([request(f"c{i}")]) for i in range(4)]
    assert len(silent.submitted) == 4
    for generation in generations:
        generation.close()
    await client.close()


async def test_loads_are_back_to_zero_whatever_happened() -> None:
    client = EngineClient(FailureConfig(resubmit_timeout_s=1), deadlines=QUICK)
    links = [ScriptedLink() for _ in range(3)]
    for link in links:
        client.add_link(link)
    links[0].refuse = Overloaded("full")
    generations = [await client.submit([request(f"r{i}"), request(f"s{i}")]) for i in range(6)]
    links[1].batches.put_nowait(EngineDead("gone"))
    await settle()
    for link in links[2:]:
        link.send(*(update(len(r.output_ids), 1, name=r.id, finish_reason="stop") for r in link.submitted[:3]))
    await settle()
    generations[0].finish(0)
    for generation in generations:
        generation.close()
    await settle()
    assert [engine.load for engine in client.router.engines] == [0.0, 0.0]
    await client.close()


class Starter:
    """Starts an engine some time after it was asked for one."""

    def __init__(self) -> None:
        self.num_asked = self.num_left = 0
        self.fails = False
        self.asked = asyncio.Event()

    async def __call__(self) -> None:
        self.num_asked += 1
        self.asked.set()
        if self.fails:
            raise RuntimeError("no replica")
        try:
            await asyncio.Event().wait()
        finally:
            self.num_left += 1


def on_demand(starter: Starter, **settings: Any) -> EngineClient:
    failure = FailureConfig(start_timeout_s=settings.pop("start_timeout_s", 30.0), resubmit_timeout_s=0.2)
    return EngineClient(failure, deadlines=QUICK, demand=Demand(starter, settings.pop("limit", 100)))


async def test_requests_wait_for_an_engine_that_is_started_for_them() -> None:
    starter = Starter()
    client = on_demand(starter)
    submitting = [asyncio.ensure_future(client.submit([request(name)])) for name in "abc"]
    await asyncio.wait_for(starter.asked.wait(), 5)
    await settle()
    assert starter.num_asked == 1, "one call stands for all of them"
    assert not any(task.done() for task in submitting)
    assert client.num_homeless == 3
    link = ScriptedLink()
    client.add_link(link)
    generations = await asyncio.wait_for(asyncio.gather(*submitting), 5)
    assert sorted(r.id for r in link.submitted) == ["a", "b", "c"]
    await settle()
    assert (starter.num_left, client.num_homeless) == (1, 0), "nobody is waiting any more"
    for generation in generations:
        generation.close()
    await client.close()


async def test_one_demand_after_another_is_heard() -> None:
    starter = Starter()
    client = on_demand(starter)
    for _ in range(3):
        submitting = asyncio.ensure_future(client.submit([request()]))
        await settle()
        submitting.cancel()
        again = asyncio.ensure_future(client.submit([request()]))
        await asyncio.gather(submitting, return_exceptions=True)
        await settle()
        assert starter.num_asked - starter.num_left == 1
        again.cancel()
        await asyncio.gather(again, return_exceptions=True)
        await settle()
        assert starter.num_asked == starter.num_left
    await client.close()


async def test_an_ingress_that_starts_without_engines_asks_for_one() -> None:
    starter = Starter()
    client = on_demand(starter)
    waiting = asyncio.ensure_future(client.await_engine(5.0))
    await asyncio.wait_for(starter.asked.wait(), 5)
    client.add_link(ScriptedLink())
    await asyncio.wait_for(waiting, 5)
    await client.await_engine(0.0)
    await settle()
    assert starter.num_left == 1
    await client.close()
    with pytest.raises(EngineUnavailable, match=r"start_timeout_s \(0\.01 s\)"):
        await EngineClient(FailureConfig(), deadlines=QUICK).await_engine(0.01)


async def test_asking_goes_on_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagedray.serving.demand.AGAIN_S", 0.001)
    starter = Starter()
    starter.fails = True
    client = on_demand(starter)
    submitting = asyncio.ensure_future(client.submit([request()]))
    while starter.num_asked < 3:
        await asyncio.sleep(0.001)
    client.add_link(ScriptedLink())
    (await submitting).close()
    await client.close()


async def test_a_client_that_leaves_while_waiting_wants_no_engine() -> None:
    starter = Starter()
    client = on_demand(starter)
    submitting = asyncio.ensure_future(client.submit([request()]))
    await starter.asked.wait()
    submitting.cancel()
    await asyncio.gather(submitting, return_exceptions=True)
    await settle()
    assert starter.num_left == 1
    link = ScriptedLink()
    client.add_link(link)
    await settle()
    assert link.submitted == []
    await client.close()


async def test_waiting_is_bounded_in_number_and_time() -> None:
    client = on_demand(Starter(), limit=2, start_timeout_s=0.2)
    submitting = [asyncio.ensure_future(client.submit([request(name)])) for name in "ab"]
    await settle()
    with pytest.raises(Overloaded, match=r"2 requests wait.*limit of 2 \(max_queued_requests\)"):
        await client.submit([request("c")])
    results = await asyncio.wait_for(asyncio.gather(*submitting, return_exceptions=True), 5)
    assert all(isinstance(r, EngineUnavailable) and "start_timeout_s" in str(r) for r in results)
    await client.close()


async def test_held_requests_wait_for_room_too() -> None:
    """The one engine that was started may be filled by what other ingresses held."""
    client = on_demand(Starter(), start_timeout_s=LIMIT_S)
    held = asyncio.ensure_future(client.submit([request("a")]))
    await settle()
    full = ScriptedLink()
    full.refuse = Overloaded("the queue is full")
    client.add_link(full)
    await settle()
    assert not held.done()
    full.refuse = None
    (await asyncio.wait_for(held, LIMIT_S)).close()
    await client.close()


async def test_a_held_request_that_finds_no_room_is_told_so() -> None:
    client = on_demand(Starter(), start_timeout_s=0.2)
    held = asyncio.ensure_future(client.submit([request("a")]))
    await settle()
    full = ScriptedLink()
    full.refuse = Overloaded("the queue is full")
    client.add_link(full)
    with pytest.raises(Overloaded, match="the queue is full"):
        await held
    await client.close()


async def test_an_engine_that_drains_while_it_refuses_is_let_go() -> None:
    client = EngineClient(FailureConfig(), deadlines=QUICK)
    link = ScriptedLink()
    client.add_link(link)
    link.refuse = EngineUnavailable("the engine is draining")
    link.during_submit.append(told(is_draining=True))
    with pytest.raises(EngineUnavailable):
        await client.submit([request("a")])
    await settle()
    assert not client._connections
    await client.close()


async def test_requests_of_the_last_engine_wait_for_the_next_one() -> None:
    """Longer than resubmit_timeout_s: it has to be started first."""
    starter = Starter()
    client = on_demand(starter)
    link = ScriptedLink()
    client.add_link(link)
    async with await client.submit([request()]) as generation:
        link.batches.put_nowait(EngineDead("scaled down in the middle"))
        await asyncio.wait_for(starter.asked.wait(), 5)
        await asyncio.sleep(0.3)
        successor = ScriptedLink()
        client.add_link(successor)
        await settle()
        successor.send(update(0, 7, name=successor.submitted[0].id, finish_reason="stop"))
        assert [u.token_ids for _, u in await generation.next()] == [(7,)]
    await client.close()


async def test_an_engine_that_drains_while_it_is_the_last_makes_requests_wait() -> None:
    starter = Starter()
    client = on_demand(starter)
    link = ScriptedLink()
    link.refuse = EngineUnavailable("the engine is draining")
    client.add_link(link)
    submitting = asyncio.ensure_future(client.submit([request()]))
    await asyncio.wait_for(starter.asked.wait(), 5)
    client.add_link(ScriptedLink())
    (await asyncio.wait_for(submitting, 5)).close()
    await client.close()


async def test_no_engine_is_healthy_where_one_comes_on_demand() -> None:
    client = on_demand(Starter())
    with pytest.raises(EngineUnavailable):
        await client.health()  # none was ever up: whether the model loads is not known
    link = ScriptedLink()
    client.add_link(link)
    client.remove_link(link)
    await client.health()
    assert client.facts == FACTS
    await client.close()


async def test_a_server_that_stops_lets_go_of_waiting_requests() -> None:
    client = on_demand(Starter())
    submitting = asyncio.ensure_future(client.submit([request()]))
    await settle()
    await asyncio.wait_for(client.close(), 5)
    with pytest.raises(EngineUnavailable, match="shutting down"):
        await asyncio.wait_for(submitting, 5)


async def test_a_server_that_stops_lets_go_of_moving_requests() -> None:
    client = EngineClient(FailureConfig(resubmit_timeout_s=60), deadlines=QUICK)
    link = ScriptedLink()
    client.add_link(link)
    async with await client.submit([request()]) as generation:
        link.batches.put_nowait(EngineDead("gone"))
        await settle()
        await asyncio.wait_for(client.close(), 5)
        with pytest.raises(EngineUnavailable, match="shutting down"):
            await generation.next()


def counters(text: str, name: str) -> dict[str, float]:
    return {
        labels: float(value) for labels, value in re.findall(rf"^pagedray:{name}\{{(.*)\}} (\S+)$", text, re.MULTILINE)
    }


async def test_equal_beginnings_meet_at_one_engine_and_metrics_tell() -> None:
    async with Rig(num_engines=3) as rig:
        for number in range(9):
            prompt = f"{number % 3} is where this prompt begins, and it goes on"
            await rig.complete(prompt=prompt, max_tokens=3)
        homes = [{r.prompt_ids for r in link.submitted} for link in rig.links]
        assert [len(home) for home in homes] == [1, 1, 1], "each prompt has one engine"
        text = (await rig.http.get("/metrics")).text
        decisions = counters(text, "routing_decisions_total")
        assert decisions['outcome="affinity",policy="prefix"'] == 6
        assert decisions['outcome="balance",policy="prefix"'] == 3
        assert list(counters(text, "routing_load").values()) == [0.0, 0.0, 0.0]
        assert "\npagedray:num_requests_without_engine 0.0\n" in text


async def test_a_session_header_keeps_requests_together() -> None:
    async with Rig(num_engines=3, router=Router("round_robin")) as rig:
        for number in range(6):
            body = {"model": "fake", "prompt": f"{number} is new", "max_tokens": 2}
            await rig.post("/v1/completions", body, headers={"X-Session-Id": "mine"})
        assert sorted(len(link.submitted) for link in rig.links) == [0, 0, 6]


async def test_what_one_ingress_learned_another_is_told() -> None:
    """Two clients over the same engines, as two ingresses are: no word passes between them."""
    async with Rig(SlowFakeWorker, num_engines=2) as rig:
        other = EngineClient(rig.config.failure, router=Router(turn=1))
        for link in rig.links:
            other.add_link(link)
        await rig.complete(prompt="a beginning that both know " * 2, max_tokens=2)
        (home,) = [link for link in rig.links if link.submitted]
        await asyncio.sleep(0.1)
        wanted = msgspec.structs.replace(home.submitted[0], id="other-1", client_id=other.client_id)
        async with await other.submit([wanted]) as generation:
            while await generation.next():
                pass
        assert other.router.decisions["prefix", "affinity"] == 1
        assert len(home.submitted) == 2
        await other.close()


async def test_two_ingresses_spread_a_burst_over_both_engines() -> None:
    async with Rig(SlowFakeWorker, num_engines=2) as rig:
        other = EngineClient(rig.config.failure, router=Router())
        for link in rig.links:
            other.add_link(link)
        await asyncio.sleep(0.05)
        asking = [asyncio.ensure_future(rig.complete(prompt=f"{n} new", max_tokens=30)) for n in range(10)]
        await asyncio.sleep(0.1)
        engines = sorted(engine.load for engine in other.router.engines)
        assert engines[0] > 4 and engines[1] < 6, "the other one was told while it had nothing there"
        await asyncio.gather(*asking)
        await asyncio.sleep(0.1)
        assert [engine.load for engine in other.router.engines] == [0.0, 0.0]
        await other.close()
