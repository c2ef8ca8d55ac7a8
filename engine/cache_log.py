"""What the prefix cache gained and lost, for those who route requests by it.

Changes are numbered; whoever was told up to a number is given what came after it. The log keeps the latest ones only:
a reader that fell behind is given what the cache holds instead. Hashes are cut to 8 bytes: readers take them for hints,
so a rare confusion costs time and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

HASH_BYTES = 8
KEPT_CHANGES = 8192  # 64 kB on the wire at most
SNAPSHOT_HASHES = 16_384  # 128 kB on the wire at most


class CacheChanges(msgspec.Struct, frozen=True):
    """Prompt blocks that an engine's prefix cache gained and lost, as short hashes joined."""

    added: bytes
    evicted: bytes
    starts_over: bool  # the cache holds `added` and nothing else that was told before: changes were missed


class CacheLog:
    """
    Args:
        capacity: changes that are kept.
    """

    def __init__(self, capacity: int = KEPT_CHANGES):
        self._capacity = capacity
        self._changes: list[tuple[bytes, bool]] = []  # short hash, whether the cache has it since
        self._first = 0  # number of _changes[0]

    @property
    def end(self) -> int:
        """Number of the next change."""
        return self._first + len(self._changes)

    def added(self, block_hash: bytes) -> None:
        self._append(block_hash[:HASH_BYTES], True)

    def evicted(self, block_hash: bytes) -> None:
        self._append(block_hash[:HASH_BYTES], False)

    def _append(self, short: bytes, is_held: bool) -> None:
        self._changes.append((short, is_held))
        if len(self._changes) > 2 * self._capacity:
            self._first += self._capacity
            del self._changes[: self._capacity]

    def since(self, number: int) -> CacheChanges | None:
        """The net effect of change `number` and all after it; None if they are no longer all known."""
        if number < self.end - self._capacity or number < self._first:
            return None
        last = dict(self._changes[number - self._first :])
        added = b"".join([short for short, is_held in last.items() if is_held])
        evicted = b"".join([short for short, is_held in last.items() if not is_held])
        return CacheChanges(added, evicted, False)


def snapshot(block_hashes: Iterable[bytes], limit: int = SNAPSHOT_HASHES) -> CacheChanges:
    """What a cache holds, or the first `limit` of it: give the oldest first, so that no block lacks its parents."""
    shorts = [block_hash[:HASH_BYTES] for _, block_hash in zip(range(limit), block_hashes, strict=False)]
    return CacheChanges(b"".join(shorts), b"", True)


def short_hashes(joined: bytes) -> Iterator[bytes]:
    return (joined[at : at + HASH_BYTES] for at in range(0, len(joined), HASH_BYTES))
