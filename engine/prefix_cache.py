"""Which KV blocks already hold the beginning of a prompt.

A block's key is the chained hash of its tokens: it names everything from the first token on, so equal keys mean equal
K/V. Keys are the same in every process, so that an ingress can compute them and a router can compare them.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence as Seq

DIGEST_BYTES = 16


def root_hash(salt: str = "") -> bytes:
    """What the first block's hash is chained to; requests with different salts never share blocks."""
    return hashlib.blake2b(salt.encode(), digest_size=DIGEST_BYTES, person=b"pagedray").digest()


def hash_block(parent: bytes, token_ids: Seq[int]) -> bytes:
    packed = struct.pack(f"<{len(token_ids)}q", *token_ids)
    return hashlib.blake2b(parent + packed, digest_size=DIGEST_BYTES).digest()


def hash_blocks(token_ids: Seq[int], block_size: int, salt: str = "") -> tuple[bytes, ...]:
    """Chained hashes of the full blocks of `token_ids`; a last partial block has none."""
    parent, hashes = root_hash(salt), []
    for end in range(block_size, len(token_ids) + 1, block_size):
        parent = hash_block(parent, token_ids[end - block_size : end])
        hashes.append(parent)
    return tuple(hashes)
