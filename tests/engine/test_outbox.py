import asyncio

import pytest

from pagedray.engine.cache_log import CacheChanges
from pagedray.engine.errors import EngineDead
from pagedray.engine.messages import EngineNews, Request, RequestUpdate, SamplingParams
from pagedray.engine.outbox import Outbox


def update(first: int, *tokens: int) -> RequestUpdate:
    return RequestUpdate("r", first, tokens)


def test_a_poll_takes_all_that_has_gathered() -> None:
    async def go() -> None:
        box = Outbox(0.0)
        box.put(update(0, 5))
        box.put(update(1, 6))
        batch = await box.poll(0, 1.0, 0.0)
        assert batch.seq == 1
        assert [u.token_ids for u in batch.updates] == [(5,), (6,)]

    asyncio.run(go())


def test_an_open_poll_is_answered_by_the_next_update() -> None:
    async def go() -> None:
        box = Outbox(0.0)
        poll = asyncio.ensure_future(box.poll(0, 60.0, 0.0))
        await asyncio.sleep(0)
        assert box.silent_s(1e9) == 0.0
        box.put(update(0, 5))
        assert (await poll).updates == (update(0, 5),)

    asyncio.run(go())


def test_an_unacknowledged_batch_is_sent_again_unchanged() -> None:
    async def go() -> None:
        box = Outbox(0.0)
        box.put(update(0, 5))
        first = await box.poll(0, 1.0, 0.0)
        box.put(update(1, 6))
        assert await box.poll(0, 1.0, 0.0) == first
        second = await box.poll(first.seq, 1.0, 0.0)
        assert second.seq == first.seq + 1
        assert second.updates == (update(1, 6),)

    asyncio.run(go())


def test_an_empty_answer_needs_no_acknowledgement() -> None:
    async def go() -> None:
        box = Outbox(0.0)
        empty = await box.poll(0, 0.001, 0.0)
        assert empty.updates == ()
        box.put(update(0, 5))
        assert (await box.poll(empty.seq, 1.0, 0.0)).updates == (update(0, 5),)

    asyncio.run(go())


def test_failure_reaches_an_open_poll_and_later_ones() -> None:
    async def go() -> None:
        box = Outbox(0.0)
        poll = asyncio.ensure_future(box.poll(0, 60.0, 0.0))
        await asyncio.sleep(0)
        box.fail(EngineDead("gone"))
        with pytest.raises(EngineDead, match="gone"):
            await poll
        with pytest.raises(EngineDead, match="gone"):
            await box.poll(0, 60.0, 0.0)

    asyncio.run(go())


def news(others: int = 0, is_draining: bool = False) -> EngineNews:
    return EngineNews(
        is_draining=is_draining,
        other_requests=others,
        other_tokens=0,
        num_running=0,
        num_waiting=0,
        kv_usage=0.0,
        cache=CacheChanges(b"", b"", False),
    )


def test_every_answer_carries_news_and_a_repeated_one_the_same() -> None:
    async def go() -> None:
        told = iter([news(1), news(2)])
        box = Outbox(0.0, lambda: next(told))
        first = await box.poll(0, 0.001, 0.0)
        assert first.news == news(1)
        assert await box.poll(0, 0.001, 0.0) == first
        box.put(update(0, 5))
        assert (await box.poll(first.seq, 0.001, 0.0)).news == news(2)

    asyncio.run(go())


@pytest.mark.parametrize(
    ("told", "now", "is_news"),
    [(0, 1, True), (1, 0, True), (3, 3, False), (100, 110, False), (100, 130, True), (100, 70, True)],
)
def test_much_change_of_what_others_have_answers_an_open_poll(told: int, now: int, is_news: bool) -> None:
    async def go() -> None:
        box = Outbox(0.0, lambda: news(told))
        ack = (await box.poll(0, 0.001, 0.0)).seq
        poll = asyncio.ensure_future(box.poll(ack, 60.0, 0.0))
        await asyncio.sleep(0)
        box.others_have(now)
        for _ in range(5):
            await asyncio.sleep(0)
        assert poll.done() == is_news
        poll.cancel()

    asyncio.run(go())


def test_tokens_of_live_requests_are_counted() -> None:
    box = Outbox(0.0)
    params = SamplingParams(max_tokens=1, seed=1)
    for name, num in (("a", 3), ("b", 5)):
        box.add(Request(id=name, client_id="c", prompt_ids=(1,) * num, output_ids=(2,), params=params))
    assert box.live_tokens == 10
    box.add(Request(id="a", client_id="c", prompt_ids=(1,) * 99, params=params))  # a submission that was repeated
    assert box.live_tokens == 10
    box.put(RequestUpdate("a", 0, (1,), "stop"))
    box.drop("a")
    box.drop("stranger")
    assert box.live_tokens == 6 and set(box.live) == {"b"}
