"""The KV blocks: who holds each one, and which free one is given out next."""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Iterable

from pagedray.engine.prefix_cache import PrefixCache

NULL_BLOCK = 0  # the page that table entries point at where a window no longer needs a block


class BlockPool:
    """Blocks 1 … num_blocks, each free or held by as many block tables as its reference count says.

    Free blocks whose content the prefix cache can find are given out last, the one freed longest ago first. A block may
    be given out as soon as it is freed, while steps in flight still read it: steps run in the order of their plans.
    """

    def __init__(self, num_blocks: int, cache: PrefixCache):
        self.num_blocks = num_blocks
        self.refs = [0] * (num_blocks + 1)
        self._cache = cache
        self._blank = list(range(num_blocks, 0, -1))  # free, nothing to find in them; a stack
        self._findable: OrderedDict[int, None] = OrderedDict()  # free, oldest first

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._findable)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def take(self, count: int) -> tuple[int, ...]:
        """Give out free blocks; the caller has made sure that there are as many."""
        taken = []
        for _ in range(count):
            if self._blank:
                block = self._blank.pop()
            else:
                block, _ = self._findable.popitem(last=False)
                self._cache.forget(block)
            self.refs[block] = 1
            taken.append(block)
        return tuple(taken)

    def share(self, block: int) -> None:
        """One more table holds `block`, which is in use or findable."""
        if self.refs[block] == 0:
            del self._findable[block]
        self.refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One table less holds each block. They are given out in that order: pass those of the last tokens first."""
        for block in blocks:
            self.refs[block] -= 1
            if self.refs[block] == 0:
                if self._cache.knows(block):
                    self._findable[block] = None
                else:
                    self._blank.append(block)

    def check_invariants(self, holders: dict[int, int]) -> None:
        """`holders`: block → number of tables that hold it, counted from the tables."""
        free = [*self._blank, *self._findable]
        assert len(free) == len(set(free)), "a block is in a free list twice"
        assert len(free) + len(holders) == self.num_blocks, "free + used is not the total"
        assert NULL_BLOCK not in holders and NULL_BLOCK not in free, "the null block was given out"
        for block, refs in enumerate(self.refs):
            assert refs == holders.get(block, 0), f"block {block}: {refs} references, {holders.get(block, 0)} tables"
        assert all(self._cache.knows(b) for b in self._findable) and not any(self._cache.knows(b) for b in self._blank)


def peak_blocks(num_tokens: int, block_size: int, window: int | None, chunk: int) -> int:
    """Most blocks of one group that a sequence holds at once while it grows to K/V of `num_tokens` tokens.

    A step computes at most `chunk` of them. A window group holds what the first of these sees, up to the last of them,
    wherever that lies relative to block borders.
    """
    blocks = -(-num_tokens // block_size)
    if window is None:
        return blocks
    seen = window - 1 + min(chunk, num_tokens)
    return min(blocks, (seen + block_size - 2) // block_size + 1)


def capacity_tokens(num_blocks: int, block_size: int, windows: tuple[int | None, ...], chunk: int, limit: int) -> int:
    """Most tokens, up to `limit`, whose K/V one sequence alone can hold in the pool."""

    def peak(num_tokens: int) -> int:
        return sum(peak_blocks(num_tokens, block_size, window, chunk) for window in windows)

    return bisect.bisect_right(range(limit + 1), num_blocks, key=peak) - 1
