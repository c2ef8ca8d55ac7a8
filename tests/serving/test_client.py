"""EngineClient over scripted links: delivery, routing, refusals, deadlines."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import msgspec
import pytest

from pagedray.engine.config import EngineFacts, FailureConfig, load_config
from pagedray.engine.errors import (
    DeadlineExceeded,
    EngineDead,
    EngineUnavailable,
    Overloaded,
    PagedrayError,
    RequestFailed,
    UserError,
)
from pagedray.engine.messages import PromptLogprobs, Request, RequestUpdate, SamplingParams, UpdateBatch
from pagedray.engine.metrics import EngineStats
from pagedray.serving.client import Deadlines, EngineClient
from tests.fakes import FakeWorker, SlowFakeWorker, fake_logprobs
from tests.serving.rig import Rig, read_sse, texts

QUICK = Deadlines(submit_s=0.1, abort_s=0.1, health_s=0.1, stats_s=0.1)


def request(name: str = "r", num_prompt: int = 3, **params: Any) -> Request:
    sampling = SamplingParams(**{"max_tokens": 100, "seed": 1, **params})
    return Request(id=name, client_id="c", prompt_ids=tuple(range(num_prompt)), params=sampling)


class ScriptedLink:
    """Answers as told: `refuse` is raised by submit, batches put into `batches` come out of poll."""

    def __init__(self, facts: EngineFacts | None = None):
        self.facts: EngineFacts = facts or FACTS
        self.refuse: PagedrayError | None = None
        self.hangs = False
        self.empty_answer_after_s: float | None = None
        self.batches: asyncio.Queue[UpdateBatch | Exception] = asyncio.Queue()
        self.submitted: list[Request] = []
        self.aborted: list[str] = []
        self.acks: list[int] = []
        self.during_submit: deque[UpdateBatch | Exception] = deque()

    async def submit(self, requests: tuple[Request, ...]) -> None:
        if self.hangs:
            await asyncio.Event().wait()
        self.submitted += requests
        while self.during_submit:
            self.batches.put_nowait(self.during_submit.popleft())
            await asyncio.sleep(0.01)
        if self.refuse is not None:
            raise self.refuse

    async def poll(self, client_id: str, ack: int) -> UpdateBatch:
        self.acks.append(ack)
        try:
            async with asyncio.timeout(self.empty_answer_after_s):
                batch = await self.batches.get()
        except TimeoutError:
            return UpdateBatch(ack, ())
        if isinstance(batch, Exception):
            raise batch
        return batch

    async def abort(self, client_id: str, request_ids: tuple[str, ...]) -> None:
        self.aborted += request_ids

    async def health(self) -> None:
        if self.refuse is not None:
            raise self.refuse

    async def stats(self) -> EngineStats:
        raise EngineUnavailable("none")

    def send(self, *updates: RequestUpdate, seq: int = 1) -> None:
        self.batches.put_nowait(UpdateBatch(seq, updates))


FACTS = FakeWorker(load_config()).load()


def update(first: int, *ids: int, name: str = "r", **fields: Any) -> RequestUpdate:
    return RequestUpdate(name, first, ids, **fields)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture
async def client() -> Any:
    client = EngineClient(FailureConfig(client_timeout_s=5, resubmit_timeout_s=1), deadlines=QUICK)
    yield client
    await client.close()
    assert client.num_live == 0


async def test_updates_arrive_in_order_and_batches_are_acknowledged(client: EngineClient) -> None:
    link = ScriptedLink()
    client.add_link(link)
    async with await client.submit([request("a"), request("b")]) as generation:
        link.send(update(0, 5, name="a"), update(0, 6, name="b"), update(1, 7, name="a"), seq=1)
        got = await generation.next()
        assert [(index, u.token_ids) for index, u in got] == [(0, (5,)), (1, (6,)), (0, (7,))]
        link.send(update(2, 8, name="a", finish_reason="length"), update(1, 9, name="b", finish_reason="stop"), seq=2)
        assert [index for index, _ in await generation.next()] == [0, 1]
        assert await generation.next() == []
        await settle()
        assert link.acks == [0, 1, 2]
    await settle()
    assert link.aborted == []


async def test_what_gathers_while_the_reader_is_slow_comes_at_once_and_holds_up_nobody(client: EngineClient) -> None:
    link = ScriptedLink()
    client.add_link(link)
    slow, fast = await client.submit([request("slow")]), await client.submit([request("fast")])
    for i in range(3):
        link.send(update(i, i, name="slow"), update(i, i, name="fast"), seq=i + 1)
        assert [u.token_ids for _, u in await fast.next()] == [(i,)]
    assert [u.token_ids for _, u in await slow.next()] == [(0,), (1,), (2,)]
    slow.close()
    fast.close()


@pytest.mark.parametrize(
    ("repeat", "news"),
    [
        (update(0, 10, 11), None),
        (update(1, 11), None),
        (update(1, 11, 12, 13), (2, (12, 13))),
        (update(0, 10, 11, 12, finish_reason="stop"), (2, (12,))),
        (update(0, 10, 11, finish_reason="stop"), (2, ())),
        (update(2, finish_reason="length"), (2, ())),
        (update(2, 12), (2, (12,))),
    ],
)
async def test_repeats_are_dropped(client: EngineClient, repeat: RequestUpdate, news: Any) -> None:
    link = ScriptedLink()
    client.add_link(link)
    async with await client.submit([request(logprobs=0)]) as generation:
        lp = tuple(fake_logprobs(i, 0) for i in (10, 11))
        link.send(update(0, 10, 11, logprobs=lp))
        await generation.next()
        link.send(
            update(
                repeat.first,
                *repeat.token_ids,
                finish_reason=repeat.finish_reason,
                logprobs=tuple(fake_logprobs(i, 0) for i in repeat.token_ids),
            ),
            seq=2,
        )
        link.send(update(2 if news is None else news[0] + len(news[1]), 99, logprobs=(fake_logprobs(99, 0),)), seq=3)
        await settle()
        got = [(u.first, u.token_ids, tuple(e.token_id for e in u.logprobs)) for _, u in await generation.next()]
        expected = [] if news is None else [(*news, news[1])]
        if repeat.finish_reason is None:
            first = 2 if news is None else news[0] + len(news[1])
            expected.append((first, (99,), (99,)))
        assert got == expected


async def test_prompt_logprobs_are_delivered_once(client: EngineClient) -> None:
    link = ScriptedLink()
    client.add_link(link)

    def part(start: int, end: int) -> tuple[PromptLogprobs, ...]:
        return (PromptLogprobs(start, tuple(fake_logprobs(i, 0) for i in range(start, end))),)

    async with await client.submit([request(num_prompt=8, prompt_logprobs=0)]) as generation:
        link.send(update(0, prompt_logprobs=part(1, 4)), seq=1)
        link.send(update(0, prompt_logprobs=part(1, 3)), seq=2)
        link.send(update(0, prompt_logprobs=part(1, 6)), seq=3)
        link.send(update(0, 50, prompt_logprobs=part(6, 8), finish_reason="length"), seq=4)
        await settle()
        got = [
            (p.start, [e.token_id for e in p.entries]) for _, u in await generation.next() for p in u.prompt_logprobs
        ]
        assert got == [(1, [1, 2, 3]), (4, [4, 5]), (6, [6, 7])]


async def test_a_gap_ends_the_request_with_an_error(client: EngineClient) -> None:
    link = ScriptedLink()
    client.add_link(link)
    async with await client.submit([request()]) as generation:
        link.send(update(0, 1), update(5, 6))
        await generation.next()
        with pytest.raises(EngineDead, match="lost"):
            await generation.next()
    await settle()
    assert link.aborted == ["r"]


@pytest.mark.parametrize(("reason", "error"), [("error", RequestFailed), ("abort", DeadlineExceeded)])
async def test_an_engines_error_is_raised_after_the_tokens(
    client: EngineClient, reason: Any, error: type[Exception]
) -> None:
    link = ScriptedLink()
    client.add_link(link)
    requests = [msgspec.structs.replace(request(name), deadline_s=5.0) for name in "ab"]
    async with await client.submit(requests) as generation:
        link.send(update(0, 1, name="a"), update(1, finish_reason=reason, error="because", name="a"))
        assert [u.token_ids for _, u in await generation.next()] == [(1,)]
        with pytest.raises(error, match="because"):
            await generation.next()
    await settle()
    assert link.aborted == ["b"]


async def test_a_request_that_an_engine_gave_up_is_submitted_again(client: EngineClient) -> None:
    link = ScriptedLink()
    client.add_link(link)
    async with await client.submit([request()]) as generation:
        link.send(update(0, 1, 2), update(2, finish_reason="abort", error="its ingress has not polled"))
        assert [u.token_ids for _, u in await generation.next()] == [(1, 2)]
        await settle()
        again = link.submitted[1]
        assert again.output_ids == (1, 2)
        link.send(update(2, 3, name=again.id, finish_reason="stop"), seq=2)
        assert [u.token_ids for _, u in await generation.next()] == [(3,)]


async def test_leaving_aborts_what_has_not_ended(client: EngineClient) -> None:
    link = ScriptedLink()
    client.add_link(link)
    async with await client.submit([request(name) for name in "abc"]) as generation:
        link.send(update(0, 1, name="a", finish_reason="stop"))
        await generation.next()
        link.send(update(0, 1, name="b"), update(0, 1, name="c"), seq=2)
        await settle()
        generation.finish(1)
        assert [index for index, _ in await generation.next()] == [2]
        await settle()
        assert link.aborted == ["b"]
        assert client.num_live == 1
    await settle()
    assert link.aborted == ["b", "c"]


async def test_a_cancelled_submit_is_aborted(client: EngineClient) -> None:
    link = ScriptedLink()
    link.hangs = True
    client.add_link(link)
    submitting = asyncio.ensure_future(client.submit([request()]))
    await settle()
    submitting.cancel()
    await asyncio.gather(submitting, return_exceptions=True)
    await settle()
    assert link.aborted == ["r"]


async def test_what_an_engine_still_computes_for_nobody_is_aborted_again(client: EngineClient) -> None:
    """Its abort got lost, or came before its submit."""
    link = ScriptedLink()
    client.add_link(link)
    link.send(update(3, 1, name="ghost"), update(9, 1, name="ended", finish_reason="stop"))
    await settle()
    assert link.aborted == ["ghost"]


async def test_requests_go_to_the_least_loaded_engine(client: EngineClient) -> None:
    links = [ScriptedLink() for _ in range(3)]
    for link in links:
        client.add_link(link)
    generations = [await client.submit([request(f"r{i}")]) for i in range(9)]
    assert [len(link.submitted) for link in links] == [3, 3, 3]
    for generation, i in zip(generations, range(9), strict=True):
        if any(r.id == f"r{i}" for r in links[1].submitted):
            generation.close()
    generations += [await client.submit([request(f"s{i}")]) for i in range(3)]
    assert len(links[1].submitted) == 6
    for generation in generations:
        generation.close()


async def test_a_full_engine_is_passed_over_and_all_full_is_overloaded(client: EngineClient) -> None:
    links = [ScriptedLink(), ScriptedLink()]
    for link in links:
        client.add_link(link)
    links[0].refuse = Overloaded("full", 7.0)
    for i in range(3):
        (await client.submit([request(f"r{i}")])).close()
    assert len(links[1].submitted) == 3
    links[1].refuse = EngineUnavailable("draining")
    with pytest.raises(Overloaded) as caught:
        await client.submit([request("x")])
    assert caught.value.retry_after_s == 7.0
    links[0].refuse = EngineUnavailable("rebuilding")
    with pytest.raises(EngineUnavailable):
        await client.submit([request("y")])


async def test_a_wrong_request_is_not_tried_elsewhere(client: EngineClient) -> None:
    links = [ScriptedLink(), ScriptedLink()]
    for link in links:
        link.refuse = UserError("no", "prompt")
        client.add_link(link)
    with pytest.raises(UserError):
        await client.submit([request()])
    assert sum(len(link.submitted) for link in links) == 1


async def test_a_submit_without_answer_moves_on_and_is_aborted(client: EngineClient) -> None:
    silent, good = ScriptedLink(), ScriptedLink()
    silent.hangs = True
    client.add_link(silent)
    with pytest.raises(EngineUnavailable, match="did not answer"):
        await client.submit([request("a")])
    client.add_link(good)
    first, second = await client.submit([request("b")]), await client.submit([request("c")])
    assert len(good.submitted) == 2
    await settle()
    assert "a" in silent.aborted
    first.close()
    second.close()


async def test_no_engine(client: EngineClient) -> None:
    with pytest.raises(EngineUnavailable):
        await client.submit([request()])
    with pytest.raises(EngineUnavailable):
        await client.health()
    with pytest.raises(EngineUnavailable):
        _ = client.facts
    assert await client.stats() == []


async def test_health_is_that_of_the_best_engine(client: EngineClient) -> None:
    bad, good = ScriptedLink(), ScriptedLink()
    bad.refuse = EngineUnavailable("stalled")
    client.add_link(bad)
    with pytest.raises(EngineUnavailable, match="stalled"):
        await client.health()
    client.add_link(good)
    await client.health()


async def test_a_removed_engine_finishes_what_it_has(client: EngineClient) -> None:
    old, new = ScriptedLink(), ScriptedLink()
    client.add_link(old)
    async with await client.submit([request("a")]) as generation:
        client.add_link(new)
        client.remove_link(old)
        others = [await client.submit([request(f"b{i}")]) for i in range(3)]
        assert len(new.submitted) == 3
        old.send(update(0, 1, name="a", finish_reason="stop"))
        assert [u.token_ids for _, u in await generation.next()] == [(1,)]
        await settle()
        polls = len(old.acks)
        old.send(seq=2)
        await settle()
        assert len(old.acks) == polls, "still polled"
        for other in others:
            other.close()


async def test_an_unreachable_engine_is_polled_again(client: EngineClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagedray.serving.client.POLL_RETRY_S", 0.01)
    link = ScriptedLink()
    client.add_link(link)
    async with await client.submit([request()]) as generation:
        link.batches.put_nowait(EngineUnavailable("network"))
        link.send(update(0, 1, finish_reason="stop"))
        assert [u.token_ids for _, u in await generation.next()] == [(1,)]


@pytest.mark.parametrize("death", [EngineDead("gone"), RuntimeError("surprise"), None], ids=["dead", "bug", "silent"])
async def test_requests_of_a_dead_engine_continue_on_another(
    death: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagedray.serving.client.MOVE_RETRY_S", 60.0)  # a new link is used at once
    dead: list[Any] = []
    failure = FailureConfig(client_timeout_s=0.3, resubmit_timeout_s=5)
    client = EngineClient(failure, dead.append, QUICK)
    one, two = ScriptedLink(), ScriptedLink()
    client.add_link(one)
    async with await client.submit([request("a"), request("b", prompt_logprobs=0, num_prompt=3)]) as generation:
        part = (PromptLogprobs(1, (fake_logprobs(1, 0), fake_logprobs(2, 0))),)
        one.send(update(0, 5, 6, name="a"), update(0, 7, name="b", prompt_logprobs=part))
        await generation.next()
        if death is not None:
            one.batches.put_nowait(death)
            await settle()
            assert dead == [one]
        two.empty_answer_after_s = 0.05
        client.add_link(two)
        async with asyncio.timeout(5):
            while len(two.submitted) < 2:
                await asyncio.sleep(0.01)
        assert dead == [one]
        moved = {r.id.split(".")[0]: r for r in two.submitted}
        assert moved["a"].output_ids == (5, 6)
        assert moved["b"].output_ids == (7,)
        assert moved["b"].params.prompt_logprobs is None, "they were delivered"
        assert {r.id for r in two.submitted}.isdisjoint({"a", "b"})
        assert all(r.client_id == "c" and r.prompt_ids == (0, 1, 2) for r in two.submitted)
        one.send(update(2, 99, name="a"))  # a dead engine says nothing any more
        two.send(
            update(2, 8, name=moved["a"].id, finish_reason="stop"),
            update(1, 9, name=moved["b"].id, finish_reason="stop"),
        )
        got = [(i, u.first, u.token_ids) for i, u in await generation.next()]
        assert sorted(got) == [(0, 2, (8,)), (1, 1, (9,))]
        assert await generation.next() == []
    await client.close()


async def test_half_delivered_prompt_logprobs_are_asked_for_again() -> None:
    client = EngineClient(FailureConfig(resubmit_timeout_s=5), deadlines=QUICK)
    one, two = ScriptedLink(), ScriptedLink()
    client.add_link(one)
    async with await client.submit([request(num_prompt=4, prompt_logprobs=2)]) as generation:
        one.send(update(0, prompt_logprobs=(PromptLogprobs(1, (fake_logprobs(1, 0),)),)))
        await generation.next()
        client.add_link(two)
        one.batches.put_nowait(EngineDead("gone"))
        await settle()
        assert two.submitted[0].params.prompt_logprobs == 2
        entries = tuple(fake_logprobs(i, 0) for i in (1, 2, 3))
        two.send(
            update(0, 9, name=two.submitted[0].id, prompt_logprobs=(PromptLogprobs(1, entries),), finish_reason="stop")
        )
        ((_, got),) = await generation.next()
        assert got.prompt_logprobs == (PromptLogprobs(2, entries[1:]),)
    await client.close()


async def test_without_another_engine_requests_fail_after_the_timeout() -> None:
    client = EngineClient(FailureConfig(resubmit_timeout_s=0.2), deadlines=QUICK)
    link = ScriptedLink()
    client.add_link(link)
    async with await client.submit([request()]) as generation:
        link.batches.put_nowait(EngineDead("gone"))
        with pytest.raises(EngineDead, match=r"gone.*0\.2 s"):
            await generation.next()
    assert client.num_live == 0
    await client.close()


async def test_a_full_engine_is_asked_again_while_moving(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagedray.serving.client.MOVE_RETRY_S", 0.01)
    client = EngineClient(FailureConfig(resubmit_timeout_s=5), deadlines=QUICK)
    one, two = ScriptedLink(), ScriptedLink()
    client.add_link(one)
    async with await client.submit([request()]) as generation:
        client.add_link(two)
        two.refuse = Overloaded("full")
        one.batches.put_nowait(EngineDead("gone"))
        await asyncio.sleep(0.05)
        assert len(two.submitted) > 1
        two.refuse = None
        await asyncio.sleep(0.05)
        ids = [r.id for r in two.submitted]
        assert len(set(ids)) == len(ids), "each attempt has an id of its own"
        two.send(update(0, 3, name=ids[-1], finish_reason="stop"))
        assert [u.token_ids for _, u in await generation.next()] == [(3,)]
    await client.close()


async def test_leaving_while_homeless_moves_nothing() -> None:
    client = EngineClient(FailureConfig(resubmit_timeout_s=5), deadlines=QUICK)
    one, two = ScriptedLink(), ScriptedLink()
    client.add_link(one)
    async with await client.submit([request()]):
        one.batches.put_nowait(EngineDead("gone"))
        await settle()
    client.add_link(two)
    await settle()
    assert two.submitted == []
    assert client.num_live == 0
    await client.close()


async def test_a_death_seen_by_poll_while_submit_is_under_way_submits_once_elsewhere() -> None:
    client = EngineClient(FailureConfig(resubmit_timeout_s=5), deadlines=QUICK)
    one, two = ScriptedLink(), ScriptedLink()
    client.add_link(one)
    one.during_submit.append(UpdateBatch(1, (update(0, 4),)))  # the first token overtakes submit's answer
    one.during_submit.append(EngineDead("gone"))
    two_later = asyncio.get_running_loop().call_later(0.015, client.add_link, two)
    async with await client.submit([request()]) as generation:
        assert [r.output_ids for r in two.submitted] == [(4,)]
        two.send(update(1, 5, name=two.submitted[0].id, finish_reason="stop"))
        await settle()
        assert [u.token_ids for _, u in await generation.next()] == [(4,), (5,)]
    two_later.cancel()
    await client.close()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_is_the_same_when_its_engine_dies(path: str, stream: bool) -> None:
    body: dict[str, Any] = {"model": "fake", "max_tokens": 30, "n": 2, "stream": stream, "temperature": 0}
    body |= {"logprobs": 1} if path == "/v1/completions" else {"logprobs": True, "top_logprobs": 1}
    body |= {"prompt": "hello"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hello"}]}
    if stream:
        body["stream_options"] = {"include_usage": True}
    if path == "/v1/completions":
        body["echo"] = True

    async with Rig() as rig:
        calm = await answer(rig, path, body)
    rebuilt: list[Any] = []
    async with Rig(SlowFakeWorker, num_engines=1, on_link_dead=lambda link: rebuilt.append(rig.start_engine())) as rig:
        asking = asyncio.ensure_future(answer(rig, path, body))
        for death in range(2):
            while sum(len(r.output_ids) for r in rig.links[-1].submitted) // 2 + rig.links[
                -1
            ].engine.stats().generated_tokens < 14 * (death + 1):
                await asyncio.sleep(0.005)
            rig.links[-1].kill()
            await asyncio.sleep(0.05)
        assert await asking == calm
        assert len(rebuilt) == 2
        assert all(r.output_ids for link in rebuilt for r in link.submitted)
        await rig.idle()


async def answer(rig: Rig, path: str, body: dict[str, Any]) -> Any:
    """What a client gets, without what differs from run to run."""
    response = await rig.post(path, body)
    assert response.status_code == 200, response.text
    if not body["stream"]:
        got = response.json()
        return got["choices"], got["usage"]
    chunks = read_sse(response.text)
    logprobs: dict[int, list[Any]] = {0: [], 1: []}
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["logprobs"]:
                key = "content" if "content" in choice["logprobs"] else "token_logprobs"
                logprobs[choice["index"]] += choice["logprobs"][key]
    return texts(chunks), logprobs, chunks[-1]["usage"]


async def test_an_engine_that_dies_for_good_gives_an_error_event_and_done() -> None:
    async with Rig(SlowFakeWorker, resubmit_timeout_s=0.1) as rig:
        asking = asyncio.ensure_future(
            rig.post("/v1/completions", {"model": "fake", "prompt": "x", "max_tokens": 50, "stream": True})
        )
        whole = asyncio.ensure_future(rig.post("/v1/completions", {"model": "fake", "prompt": "x", "max_tokens": 50}))
        await asyncio.sleep(0.2)
        rig.links[0].kill()
        events = (await asking).text.split("\n\n")
        assert '"error":{' in events[-3] and '"code":"engine_error"' in events[-3]
        assert events[-2:] == ["data: [DONE]", ""]
        response = await whole
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "engine_error"
