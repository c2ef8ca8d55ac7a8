"""Block tables of running sequences: which blocks hold their K/V, one table per block group, all of equal length.

A sequence's tables grow together, one entry per group for block_size tokens. A window group gives back what fell out of
its window and keeps the null block there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from pagedray.engine.block_pool import NULL_BLOCK, BlockPool, capacity_tokens, peak_blocks
from pagedray.engine.prefix_cache import PrefixCache
from pagedray.engine.sequence import Sequence

NewBlocks = tuple[tuple[int, ...], ...]  # per block group


class BlockTables:
    """Fills and clears the tables in `Sequence`, out of one pool.

    Args:
        windows: per block group its sliding window in tokens, None for full attention.
        chunk: most tokens of one sequence in one step.
    """

    def __init__(
        self,
        *,
        block_size: int,
        num_blocks: int,
        windows: tuple[int | None, ...],
        chunk: int,
        enable_prefix_caching: bool,
    ):
        self.windows = windows
        self.cache = PrefixCache(block_size, windows)
        self.pool = BlockPool(num_blocks, self.cache)
        self.no_blocks: NewBlocks = ((),) * len(windows)
        self._window_groups = [group for group, window in enumerate(windows) if window is not None]
        self._block_size = block_size
        self._chunk = chunk
        self._caching = enable_prefix_caching

    def capacity_tokens(self, limit: int) -> int:
        return capacity_tokens(self.pool.num_blocks, self._block_size, self.windows, self._chunk, limit)

    # Before admission

    def may_hit(self, seq: Sequence) -> bool:
        return self._caching and not seq.wants_prompt_logprobs()

    def find_hits(self, seq: Sequence) -> list[list[int]]:
        """Tables of the leading blocks that need not be computed; one token at least always is, for its logits."""
        hit = 0
        if self.may_hit(seq):
            limit = (len(seq.token_ids) - 1) // self._block_size
            hit = self.cache.hit_length(seq.hashes(limit, self._block_size), limit)
        return [self.cache.hit_blocks(group, seq.block_hashes, hit) for group in range(len(self.windows))]

    def blocks_to_admit(self, seq: Sequence, hits: list[list[int]]) -> int:
        """Free blocks that go to a waiting sequence until all its known tokens are computed."""
        need = 0
        for window, table in zip(self.windows, hits, strict=True):
            held = [block for block in table if block != NULL_BLOCK]
            need += max(0, self._peak(seq, window) - len(held)) + sum(self.pool.refs[block] == 0 for block in held)
        return need

    # While it runs

    def admit(self, seq: Sequence, hits: list[list[int]]) -> None:
        seq.tables = hits
        seq.num_dropped = [table.count(NULL_BLOCK) for table in hits]
        seq.num_registered = len(hits[0])
        seq.num_computed = seq.num_registered * self._block_size
        for block in seq.held_blocks():
            self.pool.share(block)

    def extend(self, seq: Sequence, end: int) -> NewBlocks | None:
        """Append the blocks that the tables lack up to position `end`; None, without a change, if too few are free."""
        if self._window_groups:
            self._drop_out_of_window(seq)
        count = -(-end // self._block_size) - len(seq.tables[0])
        if count <= 0:
            return self.no_blocks
        if count * len(self.windows) > self.pool.num_free:
            return None
        new = []
        for table in seq.tables:
            blocks = self.pool.take(count)
            table += blocks
            new.append(blocks)
        return tuple(new)

    def _drop_out_of_window(self, seq: Sequence) -> None:
        """Release blocks that no position still to be computed attends to."""
        for group in self._window_groups:
            first, dropped = self.cache.first_seen(group, seq.num_computed), seq.num_dropped[group]
            if first > dropped:
                table = seq.tables[group]
                self.pool.release(table[dropped:first])
                table[dropped:first] = [NULL_BLOCK] * (first - dropped)
                seq.num_dropped[group] = first

    def register(self, seq: Sequence) -> None:
        """Let the prefix cache find each full block whose positions are planned and whose tokens are known.

        Whoever finds one is planned in the same step at the earliest, and a step writes the K/V of a layer before it
        reads any of it.
        """
        full = min(seq.num_computed, len(seq.token_ids)) // self._block_size
        if full > seq.num_registered:
            if self._caching:
                hashes = seq.hashes(full, self._block_size)
                for group, table in enumerate(seq.tables):
                    for i in range(max(seq.num_registered, seq.num_dropped[group]), full):
                        self.cache.insert(group, hashes[i], table[i])
            seq.num_registered = full

    def demand(self, seq: Sequence) -> int:
        """Blocks that a running sequence still takes at most until the tokens it has are computed."""
        groups = zip(self.windows, seq.tables, seq.num_dropped, strict=True)
        return sum(max(0, self._peak(seq, window) - len(table) + dropped) for window, table, dropped in groups)

    def release(self, seq: Sequence) -> None:
        self.pool.release(seq.held_blocks())

    def _peak(self, seq: Sequence, window: int | None) -> int:
        return peak_blocks(len(seq.token_ids), self._block_size, window, self._chunk)

    def check_invariants(self, running: Iterable[Sequence]) -> None:
        holders: Counter[int] = Counter()
        for seq in running:
            assert len(seq.tables) == len(self.windows) and len({len(table) for table in seq.tables}) == 1, seq.id
            assert seq.num_computed <= len(seq.tables[0]) * self._block_size, f"{seq.id} has K/V without a block"
            for group, (table, dropped) in enumerate(zip(seq.tables, seq.num_dropped, strict=True)):
                assert dropped <= self.cache.first_seen(group, seq.num_computed), f"{seq.id} lost a block in its window"
                assert NULL_BLOCK not in table[dropped:] and not any(table[:dropped]), f"{seq.id} has a hole in a table"
                holders.update(table[dropped:])
        self.pool.check_invariants(holders)
        self.cache.check_invariants()
