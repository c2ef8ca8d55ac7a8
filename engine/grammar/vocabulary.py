"""`Vocabulary`: what each token id of a model stands for. Compiler and workers make the same one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import msgspec

from pagedray.engine.text.tokenizer import Tokenizer


class Vocabulary(msgspec.Struct, frozen=True):
    """The bytes of every token of a model. Frozen and of plain types, so that processes can hand it on."""

    tokens: tuple[bytes, ...]  # [vocab_size]; b"" for ids without a token
    special_ids: tuple[int, ...]  # ascending; a grammar never takes these for their text
    eos_ids: tuple[int, ...]  # ascending

    @property
    def digest(self) -> bytes:
        """16 bytes that differ between different vocabularies."""
        return hashlib.blake2b(msgspec.msgpack.encode(self), digest_size=16).digest()


def make_vocabulary(tokenizer: Tokenizer, vocab_size: int, eos_ids: Iterable[int]) -> Vocabulary:
    """The vocabulary of a tokenizer's model.

    Args:
        vocab_size: of the model (`EngineFacts.vocab_size`), which may have more or fewer ids than the tokenizer.
        eos_ids: of the model (`EngineFacts.eos_ids`).
    """
    return Vocabulary(
        tokens=tuple(map(tokenizer.token_bytes, range(vocab_size))),
        special_ids=tuple(sorted(i for i in tokenizer.special_ids if i < vocab_size)),
        eos_ids=tuple(sorted({i for i in eos_ids if 0 <= i < vocab_size})),
    )
