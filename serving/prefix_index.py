"""Which engine is believed to hold which prompt blocks: what engines tell, and what was just sent to them.

An entry may be wrong: its block was evicted since, or its request never ran. That costs speed and nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from pagedray.engine.cache_log import HASH_BYTES, CacheChanges, short_hashes

MAX_ENTRIES = 2**18  # over all engines; about 50 MB


def shorten(block_hashes: Iterable[bytes]) -> list[bytes]:
    return [block_hash[:HASH_BYTES] for block_hash in block_hashes]


class PrefixIndex:
    """Short block hash → the engines that hold it, as bits of an integer: one walk serves all engines.

    Each engine has a slot (its bit) and at most its share of the entries; beyond it, those told longest ago go.
    """

    def __init__(self, max_entries: int = MAX_ENTRIES):
        self._max_entries = max_entries
        self._holders: dict[bytes, int] = {}
        self._entries: dict[int, OrderedDict[bytes, None]] = {}  # slot → its hashes, oldest first

    def __len__(self) -> int:
        return sum(map(len, self._entries.values()))

    def open(self) -> int:
        """A free slot, which holds nothing."""
        slot = next(slot for slot in range(len(self._entries) + 1) if slot not in self._entries)
        self._entries[slot] = OrderedDict()
        return slot

    def close(self, slot: int) -> None:
        self._clear(slot)
        del self._entries[slot]

    def add(self, slot: int, hashes: Sequence[bytes]) -> None:
        """The engine holds these blocks, or soon will. The first of them are forgotten last: others hang on them."""
        entries, holders, bit = self._entries[slot], self._holders, 1 << slot
        share = self._max_entries // len(self._entries)
        for short in reversed(hashes):
            if short in entries:
                entries.move_to_end(short)
                continue
            entries[short] = None
            holders[short] = holders.get(short, 0) | bit
            if len(entries) > share:
                self._forget_oldest(slot)
                if len(entries) > share:  # other engines came and the share shrank: make up for it bit by bit
                    self._forget_oldest(slot)

    def apply(self, slot: int, changes: CacheChanges) -> None:
        if changes.starts_over:
            self._clear(slot)
        self.add(slot, list(short_hashes(changes.added)))
        entries = self._entries[slot]
        for short in short_hashes(changes.evicted):
            if short in entries:
                del entries[short]
                self._drop(short, slot)

    def matches(self, hashes: Iterable[bytes]) -> dict[int, int]:
        """Slot → how many leading blocks of a prompt it holds, for those that hold any."""
        holders, found = self._holders, {}
        mask, count = -1, 0
        for short in hashes:
            stay = mask & holders.get(short, 0)
            if stay != mask and count:
                gone = mask ^ stay
                while gone:
                    lowest = gone & -gone
                    found[lowest.bit_length() - 1] = count
                    gone ^= lowest
            mask = stay
            if not mask:
                return found
            count += 1
        while count and mask:
            lowest = mask & -mask
            found[lowest.bit_length() - 1] = count
            mask ^= lowest
        return found

    def _clear(self, slot: int) -> None:
        for short in self._entries[slot]:
            self._drop(short, slot)
        self._entries[slot].clear()

    def _forget_oldest(self, slot: int) -> None:
        short, _ = self._entries[slot].popitem(last=False)
        self._drop(short, slot)

    def _drop(self, short: bytes, slot: int) -> None:
        rest = self._holders[short] & ~(1 << slot)
        if rest:
            self._holders[short] = rest
        else:
            del self._holders[short]
