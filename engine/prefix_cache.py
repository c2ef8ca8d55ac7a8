"""Which KV blocks already hold the beginning of a prompt.

A block's key is the chained hash of its tokens: it names everything from the first token on, so equal keys mean equal
K/V. Keys are the same in every process, so that an ingress can compute them and a router can compare them.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence as Seq

from pagedray.engine.cache_log import CacheChanges, CacheLog, snapshot

DIGEST_BYTES = 16


def root_hash(salt: str = "") -> bytes:
    """What the first block's hash is chained to; requests with different salts never share blocks."""
    return hashlib.blake2b(salt.encode(), digest_size=DIGEST_BYTES, person=b"pagedray").digest()


def hash_block(parent: bytes, token_ids: Seq[int]) -> bytes:
    packed = struct.pack(f"<{len(token_ids)}I", *token_ids)
    return hashlib.blake2b(parent + packed, digest_size=DIGEST_BYTES).digest()


def hash_blocks(token_ids: Seq[int], block_size: int, salt: str = "") -> tuple[bytes, ...]:
    """Chained hashes of the full blocks of `token_ids`; a last partial block has none."""
    parent, hashes = root_hash(salt), []
    for end in range(block_size, len(token_ids) + 1, block_size):
        parent = hash_block(parent, token_ids[end - block_size : end])
        hashes.append(parent)
    return tuple(hashes)


class PrefixCache:
    """Block hash → block id, one map per block group. Knows nothing of who holds a block: that is BlockPool's.

    A block stays findable while it is held and, once freed, until it is given out again.
    """

    def __init__(self, block_size: int, windows: tuple[int | None, ...]):
        self._block_size = block_size
        self._windows = windows
        self._blocks: tuple[dict[bytes, int], ...] = tuple({} for _ in windows)
        self._keys: dict[int, tuple[int, bytes]] = {}  # block → group, hash
        # One group stands for all where others are told: of full attention, since it needs every block of a prefix.
        self._told_group = windows.index(None) if None in windows else 0
        self.log = CacheLog()

    def changes_since(self, number: int | None) -> CacheChanges:
        """What others should know who were told up to `number` of the log, or nothing yet."""
        changes = None if number is None else self.log.since(number)
        return snapshot(self._blocks[self._told_group]) if changes is None else changes

    def knows(self, block: int) -> bool:
        return block in self._keys

    def insert(self, group: int, block_hash: bytes, block: int) -> None:
        """Make `block` findable, unless another block with the same content already is."""
        if block_hash not in self._blocks[group]:
            self._blocks[group][block_hash] = block
            self._keys[block] = group, block_hash
            if group == self._told_group:
                self.log.added(block_hash)

    def forget(self, block: int) -> None:
        group, block_hash = self._keys.pop(block)
        del self._blocks[group][block_hash]
        if group == self._told_group:
            self.log.evicted(block_hash)

    def first_seen(self, group: int, position: int) -> int:
        """Index of the first block that a token at `position` attends to."""
        window = self._windows[group]
        return 0 if window is None else max(0, position - window + 1) // self._block_size

    def hit_length(self, hashes: Seq[bytes], limit: int) -> int:
        """Most leading blocks, up to `limit`, that need not be computed.

        The next position must find all it attends to: a full-attention group needs every block, a window group only
        those in the window of that position.
        """
        length = min(limit, len(hashes))
        for group, window in enumerate(self._windows):
            if window is None:
                blocks = self._blocks[group]
                length = next((i for i in range(length) if hashes[i] not in blocks), length)
        while length:
            missing = self._missing_in_window(hashes, length)
            if missing is None:
                break
            length = missing  # every longer hit needs that block as well
        return length

    def _missing_in_window(self, hashes: Seq[bytes], length: int) -> int | None:
        for group, window in enumerate(self._windows):
            if window is not None:
                blocks = self._blocks[group]
                for i in range(length - 1, self.first_seen(group, length * self._block_size) - 1, -1):
                    if hashes[i] not in blocks:
                        return i
        return None

    def hit_blocks(self, group: int, hashes: Seq[bytes], length: int) -> list[int]:
        """Block table of a hit of `length` blocks, 0 where the group's window no longer reaches."""
        first = self.first_seen(group, length * self._block_size)
        blocks = self._blocks[group]
        return [0] * first + [blocks[h] for h in hashes[first:length]]

    def check_invariants(self) -> None:
        found = {block: (g, h) for g, blocks in enumerate(self._blocks) for h, block in blocks.items()}
        assert found == self._keys, "the two directions of the prefix cache differ"
        assert len(found) == sum(map(len, self._blocks)), "a block has two hashes"
