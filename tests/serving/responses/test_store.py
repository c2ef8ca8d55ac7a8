"""What is kept, for how long, and who is told when it goes."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest

from pagedray.engine.config import ApiConfig
from pagedray.engine.errors import UserError
from pagedray.serving.openai.responses.store import (
    OWNER_LOST_S,
    MemoryStore,
    NotStored,
    PreviousNotStored,
    Record,
    find,
    find_chain,
    new_id,
)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def store(clock: Clock | None = None, **bounds: float) -> MemoryStore:
    return MemoryStore(ApiConfig.model_validate(bounds), clock or Clock())


def record(name: str, status: str = "completed", previous: str | None = None, text: str = "") -> Record:
    output = [{"id": f"msg_{name}", "type": "message", "text": text}]
    return Record(
        id=name,
        body=msgspec.json.encode({"id": name, "status": status, "output": output}),
        items=msgspec.json.encode([{"id": f"in_{name}", "type": "message"}]),
        previous_id=previous,
        item_ids=(f"msg_{name}", f"in_{name}"),
        is_final=status not in ("queued", "in_progress"),
        is_background=status != "completed",
    )


def status_of(kept: Record | None) -> str:
    assert kept is not None
    status: str = kept.response()["status"]
    return status


async def test_what_is_put_is_found_until_it_is_deleted() -> None:
    kept = store()
    await kept.put(record("a"))
    assert await find(kept, "a") == record("a")
    assert msgspec.json.decode(await kept.item("msg_a") or b"null") == {"id": "msg_a", "type": "message", "text": ""}
    assert msgspec.json.decode(await kept.item("in_a") or b"null") == {"id": "in_a", "type": "message"}
    assert await kept.delete("a")
    assert not await kept.delete("a")
    assert await kept.item("msg_a") is None
    assert len(kept) == 0 and kept.size_bytes == 0
    with pytest.raises(NotStored, match="no response with id 'a'"):
        await find(kept, "a")


async def test_the_least_lately_used_makes_room() -> None:
    kept = store(max_stored_responses=2)
    await kept.put(record("a"))
    await kept.put(record("b"))
    assert await kept.get("a") is not None
    await kept.put(record("c"))
    assert [name for name in "abc" if await kept.get(name) is not None] == ["a", "c"]


async def test_bytes_are_bounded_and_counted() -> None:
    size = record("a", text="x" * 1000).size_bytes
    kept = store(max_stored_bytes=3 * size)
    for name in "abcdef":
        await kept.put(record(name, text="x" * 1000))
        assert kept.size_bytes <= 3 * size
    assert len(kept) == 3 and kept.size_bytes == 3 * size
    await kept.update(record("f", text=""))  # final already: what is kept stays
    assert kept.size_bytes == 3 * size
    await kept.put(record("g", text="x" * 4000))
    assert len(kept) == 0 and kept.size_bytes == 0, "what is larger than all room is not kept"


async def test_nothing_is_kept_where_none_may_be() -> None:
    kept = store(max_stored_responses=0)
    await kept.put(record("a"))
    assert len(kept) == 0


async def test_time_counts_since_the_last_use() -> None:
    clock = Clock()
    kept = store(clock, stored_response_ttl_s=60)
    await kept.put(record("a"))
    await kept.put(record("b"))
    clock.now += 50
    assert await kept.get("a") is not None
    clock.now += 50
    assert await kept.get("b") is None
    assert await kept.get("a") is not None
    clock.now += 61
    assert await kept.item("msg_a") is None
    assert len(kept) == 0


async def test_a_chain_is_given_oldest_first_and_kept_alive() -> None:
    clock = Clock()
    kept = store(clock, stored_response_ttl_s=60)
    await kept.put(record("a"))
    await kept.put(record("b", previous="a"))
    await kept.put(record("c", previous="b"))
    for _ in range(3):
        clock.now += 50
        assert [r.id for r in await find_chain(kept, "c")] == ["a", "b", "c"]
    await kept.delete("a")
    with pytest.raises(PreviousNotStored, match="'a', which 'c' goes on from,") as caught:
        await find_chain(kept, "c")
    assert caught.value.param == "previous_response_id"
    with pytest.raises(PreviousNotStored, match="'z' is stored"):
        await find_chain(kept, "z")
    await kept.put(record("d", "in_progress"))
    with pytest.raises(UserError, match="has not ended"):
        await find_chain(kept, "d")


async def test_cancelling_wakes_who_runs_it_and_wins_over_its_end() -> None:
    kept = store()
    await kept.put(record("a", "queued"))
    await kept.update(record("a", "in_progress"))
    waiting = asyncio.ensure_future(kept.is_wanted("a", 60))
    await asyncio.sleep(0)
    assert not waiting.done()
    assert status_of(await kept.cancel("a")) == "cancelled"
    assert await waiting is False
    await kept.update(record("a", "completed"))
    assert status_of(await kept.get("a")) == "cancelled"
    await kept.update(record("a", "cancelled", text="so far"))  # what came until then
    assert (await find(kept, "a")).response()["output"][0]["text"] == "so far"
    assert status_of(await kept.cancel("a")) == "cancelled"
    await kept.put(record("b"))
    assert status_of(await kept.cancel("b")) == "completed"
    assert await kept.cancel("c") is None


async def test_who_runs_what_was_deleted_or_dropped_is_told() -> None:
    kept = store(max_stored_responses=1)
    await kept.put(record("a", "in_progress"))
    assert await kept.is_wanted("a", 0.001) is True
    waiting = asyncio.ensure_future(kept.is_wanted("a", 60))
    await asyncio.sleep(0)
    await kept.put(record("b"))
    assert await waiting is False
    await kept.update(record("a"))
    assert await kept.get("a") is None, "its end doesn't bring it back"


async def test_a_response_whose_owner_is_gone_has_failed() -> None:
    clock = Clock()
    kept = store(clock)
    await kept.put(record("a", "in_progress"))
    clock.now += OWNER_LOST_S - 1
    assert await kept.is_wanted("a", 0.001)
    clock.now += OWNER_LOST_S - 1
    assert status_of(await kept.get("a")) == "in_progress"
    clock.now += 2
    gone = await find(kept, "a")
    assert gone.response()["status"] == "failed"
    assert gone.response()["error"]["code"] == "server_error"


async def test_events_come_as_they_are_appended_and_end_with_the_response() -> None:
    kept = store()
    assert await kept.events("a", 0, 1) is None
    await kept.put(record("a", "in_progress"))
    page = await kept.events("a", 0, 0.001)
    assert page is not None and page.events == () and not page.is_last
    waiting = asyncio.ensure_future(kept.events("a", 1, 60))
    await asyncio.sleep(0)
    await kept.append("a", (b"0",))
    await asyncio.sleep(0)
    assert not waiting.done()
    await kept.append("a", (b"1", b"2"))
    page = await waiting
    assert page is not None and page.events == (b"1", b"2") and not page.is_last
    await kept.update(record("a"))
    page = await kept.events("a", 2, 60)
    assert page is not None and page.events == (b"2",) and page.is_last


def test_ids_are_long_random_and_tell_their_kind() -> None:
    ids = {new_id("resp") for _ in range(1000)}
    assert len(ids) == 1000
    assert all(i.startswith("resp_") and len(i) == 5 + 48 for i in ids)


async def test_many_events_take_no_squared_time_and_their_bytes_are_given_back() -> None:
    kept = store()
    await kept.put(record("a", "in_progress"))
    before, begun_s = kept.size_bytes, time.monotonic()
    for _ in range(40_000):
        await kept.append("a", (b"ab", b"c"))
    assert time.monotonic() - begun_s < 5
    assert kept.size_bytes == before + 3 * 40_000
    assert await kept.delete("a")
    assert kept.size_bytes == 0
