"""Responses that are kept: for later turns, for reading again, and while they run in the background.

One interface, `ResponseStore`. `MemoryStore` keeps them in the memory of its process; where several ingresses share
one, it lives in an actor (deployments/response_store.py). Who knows a response's id may read it: ids can't be guessed.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import msgspec

from pagedray.engine.config import ApiConfig
from pagedray.engine.errors import UserError

OWNER_POLL_S = 10.0  # how long `is_wanted` waits; a running response whose owner has not asked for longer is lost
OWNER_LOST_S = 30.0
THREAD_BYTES = 2**18  # more is decoded off the event loop, which serves all streams meanwhile


class NotStored(UserError):
    """No such response or item is kept: it never was, was deleted, or had to make room."""


class PreviousNotStored(UserError):
    """The response that a request goes on from, or one before it, is not kept."""


def new_id(prefix: str) -> str:
    """An id that nobody guesses: it is all that protects what is kept under it."""
    return f"{prefix}_{secrets.token_hex(24)}"


class Record(msgspec.Struct, frozen=True):
    """A response as it is kept."""

    id: str
    body: bytes  # JSON of the response object
    items: bytes = b"[]"  # JSON array of its input items, without those of the responses before it
    previous_id: str | None = None
    item_ids: tuple[str, ...] = ()  # of the input and output items that later requests may refer to
    is_final: bool = True
    is_background: bool = False
    has_events: bool = False  # its events are kept too, for whoever streams it again

    @property
    def size_bytes(self) -> int:
        return len(self.body) + len(self.items) + sum(100 + len(item_id) for item_id in self.item_ids)

    def response(self) -> dict[str, Any]:
        """The response object."""
        value: dict[str, Any] = msgspec.json.decode(self.body)
        return value

    def input_items(self) -> list[dict[str, Any]]:
        value: list[dict[str, Any]] = msgspec.json.decode(self.items)
        return value

    def ended(self, status: str, error: dict[str, Any] | None = None) -> Record:
        """The same, ended from outside."""
        body = {**self.response(), "status": status, "error": error}
        return msgspec.structs.replace(self, body=msgspec.json.encode(body), is_final=True)


class EventPage(msgspec.Struct, frozen=True):
    """Events of a running or ended response, encoded for the wire, numbered from `first`."""

    first: int
    events: tuple[bytes, ...]
    is_last: bool  # no others will come


class ResponseStore(Protocol):
    """Every call may raise EngineUnavailable where the store is in another process."""

    async def put(self, record: Record) -> None:
        """Keep a new response."""

    async def update(self, record: Record) -> None:
        """A running response has got further, or ended. One that was cancelled or deleted meanwhile stays so."""

    async def get(self, response_id: str) -> Record | None: ...
    async def chain(self, response_id: str) -> list[Record]:
        """A response and those that it goes on from, the oldest first, as far as they are kept."""

    async def item(self, item_id: str) -> bytes | None:
        """JSON of an input or output item of a kept response."""

    async def delete(self, response_id: str) -> bool:
        """False: there was none. What still runs is given up."""

    async def cancel(self, response_id: str) -> Record | None:
        """End what runs; what has ended stays as it is. Gives the response as it is then."""

    async def is_wanted(self, response_id: str, timeout_s: float) -> bool:
        """For who runs it: waits until nobody wants the response any more, at most `timeout_s`."""

    async def append(self, response_id: str, events: tuple[bytes, ...]) -> None:
        """The next events of a running response."""

    async def events(self, response_id: str, first: int, timeout_s: float) -> EventPage | None:
        """Events from number `first` on; waits for some, at most `timeout_s`. None: there is no such response."""


class _Entry:
    record: Record

    def __init__(self) -> None:
        self.events: list[bytes] = []
        self.events_bytes = 0
        self.size_bytes = 0
        self.used_s = 0.0
        self.heard_s = 0.0
        self.num_watching = 0  # calls of is_wanted that are waiting
        self.is_gone = False
        self._changed = asyncio.Event()

    def change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self) -> None:
        """Until the next change."""
        await self._changed.wait()


class MemoryStore:
    """Bounded by number, bytes and time since the last use; what was used least lately makes room.

    Args:
        config: the bounds.
        clock: seconds, monotonic.
    """

    def __init__(self, config: ApiConfig, clock: Callable[[], float] = time.monotonic):
        self._config = config
        self._clock = clock
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # least lately used first
        self._owner_of: dict[str, str] = {}  # item id → id of the response that has it
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    async def put(self, record: Record) -> None:
        self._use("")  # what has been kept long enough goes first
        entry = self._entries[record.id] = _Entry()
        self._set(entry, record)

    async def update(self, record: Record) -> None:
        entry = self._use(record.id)
        if entry is not None and (not entry.record.is_final or self._is_outcome(entry.record, record)):
            self._set(entry, record)

    async def get(self, response_id: str) -> Record | None:
        entry = self._use(response_id)
        return None if entry is None else entry.record

    async def chain(self, response_id: str) -> list[Record]:
        records: list[Record] = []
        at: str | None = response_id
        while at is not None and (entry := self._use(at)) is not None:
            records.append(entry.record)
            at = entry.record.previous_id
        return records[::-1]

    async def item(self, item_id: str) -> bytes | None:
        entry = self._use(self._owner_of.get(item_id, ""))
        if entry is None:
            return None
        for item in [*entry.record.input_items(), *entry.record.response()["output"]]:
            if item.get("id") == item_id:
                return msgspec.json.encode(item)
        return None

    async def delete(self, response_id: str) -> bool:
        entry = self._use(response_id)
        if entry is None:
            return False
        self._drop(response_id)
        return True

    async def cancel(self, response_id: str) -> Record | None:
        entry = self._use(response_id)
        if entry is None:
            return None
        if not entry.record.is_final:
            entry.record = entry.record.ended("cancelled")
            self._resize(entry)
            entry.change()
        return entry.record

    async def is_wanted(self, response_id: str, timeout_s: float) -> bool:
        entry = self._use(response_id)
        if entry is None:
            return False
        with contextlib.suppress(TimeoutError), self._watching(entry):
            async with asyncio.timeout(timeout_s):
                while not (entry.is_gone or entry.record.is_final):
                    await entry.wait()
        return not (entry.is_gone or entry.record.is_final)

    async def append(self, response_id: str, events: tuple[bytes, ...]) -> None:
        entry = self._use(response_id)
        if entry is not None:
            entry.events += events
            entry.events_bytes += sum(map(len, events))
            self._resize(entry)
            entry.change()

    async def events(self, response_id: str, first: int, timeout_s: float) -> EventPage | None:
        entry = self._use(response_id)
        if entry is None:
            return None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while len(entry.events) <= first and not (entry.is_gone or entry.record.is_final):
                    await entry.wait()
        if entry.is_gone:
            return None
        return EventPage(first, tuple(entry.events[first:]), entry.record.is_final)

    @contextlib.contextmanager
    def _watching(self, entry: _Entry) -> Iterator[None]:
        entry.num_watching += 1
        try:
            yield
        finally:
            entry.num_watching -= 1
            entry.heard_s = self._clock()

    def _set(self, entry: _Entry, record: Record) -> None:
        entry.record = record
        entry.used_s = entry.heard_s = self._clock()
        for item_id in record.item_ids:
            self._owner_of.setdefault(item_id, record.id)
        self._resize(entry)
        entry.change()

    def _use(self, response_id: str) -> _Entry | None:
        """A kept response, from now on the one used most lately."""
        now = self._clock()
        while self._entries:
            oldest_id, oldest = next(iter(self._entries.items()))
            if now - oldest.used_s < self._config.stored_response_ttl_s:
                break
            self._drop(oldest_id)
        entry = self._entries.get(response_id)
        if entry is None:
            return None
        entry.used_s = now
        self._entries.move_to_end(response_id)
        if not entry.record.is_final and not entry.num_watching and now - entry.heard_s > OWNER_LOST_S:
            reason = {"code": "server_error", "message": "the server that ran this response has stopped"}
            entry.record = entry.record.ended("failed", reason)
            entry.change()
        return entry

    @staticmethod
    def _is_outcome(ended: Record, record: Record) -> bool:
        """Whether `record` says how a response ended that was cancelled, by what came until then."""
        return {ended.response()["status"], record.response()["status"]} == {"cancelled"}

    def _resize(self, entry: _Entry) -> None:
        """Count an entry again; then let others, and at last itself, make room."""
        size = entry.record.size_bytes + entry.events_bytes
        self.size_bytes += size - entry.size_bytes
        entry.size_bytes = size
        limits = self._config
        while self._entries and (
            len(self._entries) > limits.max_stored_responses or self.size_bytes > limits.max_stored_bytes
        ):
            self._drop(next(iter(self._entries)))

    def _drop(self, response_id: str) -> None:
        entry = self._entries.pop(response_id)
        self.size_bytes -= entry.size_bytes
        for item_id in entry.record.item_ids:
            if self._owner_of.get(item_id) == response_id:
                del self._owner_of[item_id]
        entry.is_gone = True
        entry.change()


async def find(store: ResponseStore, response_id: str) -> Record:
    """Raises: NotStored."""
    record = await store.get(response_id)
    if record is None:
        raise not_stored(response_id)
    return record


def not_stored(response_id: str) -> NotStored:
    return NotStored(f"no response with id {response_id[:80]!r} is stored here")


async def find_chain(store: ResponseStore, response_id: str) -> list[Record]:
    """The responses that a request goes on from, the oldest first.

    Raises:
        PreviousNotStored: one of them is not kept.
        UserError: the last one still runs.
    """
    records = await store.chain(response_id)
    missing = records[0].previous_id if records else response_id
    if missing is not None:
        before = "" if missing == response_id else f", which {response_id[:80]!r} goes on from,"
        raise PreviousNotStored(
            f"no response with id {missing[:80]!r}{before} is stored here; responses are kept for a time and make room "
            "for newer ones, and those with store: false are not kept",
            "previous_response_id",
        )
    if not records[-1].is_final:
        raise UserError(
            f"response {response_id[:80]!r} has not ended; wait for it, or cancel it", "previous_response_id"
        )
    return records


async def read_items(records: Sequence[Record]) -> list[dict[str, Any]]:
    """What was said in responses that go on from each other: input and output of each."""
    if sum(record.size_bytes for record in records) < THREAD_BYTES:
        return _items_of(records)
    return await asyncio.to_thread(_items_of, records)


def _items_of(records: Sequence[Record]) -> list[dict[str, Any]]:
    return [item for record in records for item in [*record.input_items(), *record.response()["output"]]]


def ids_of(items: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    return tuple(item["id"] for item in items)
