import asyncio

import pytest

from pagedray.engine.errors import EngineDead
from pagedray.engine.messages import RequestUpdate
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
