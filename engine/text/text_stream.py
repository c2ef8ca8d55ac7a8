"""Token ids to text, one at a time. Each stream gives text only once no later token can change it."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Container, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
MAX_HELD_TOKENS = 4  # a UTF-8 character has at most four bytes, and a token at least one
ONE_PER_BYTE = "pagedray-one-per-byte"


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error(ONE_PER_BYTE, _replace_each_byte)


class TextStream(Protocol):
    def feed(self, token_id: int) -> str:
        """Text that this token completes; empty while a character is incomplete."""

    def flush(self) -> str:
        """Text of bytes that wait for more, now that no more will come."""


class Utf8Stream:
    """For tokenizers whose tokens are bytes: byte-level BPE, and sentencepiece with byte fallback.

    Args:
        token_bytes: id → its bytes.
        skipped_ids: ids that give no text.
        errors: codec error handler. "replace" puts one U+FFFD for each invalid sequence, as byte-level decoders do;
            ONE_PER_BYTE puts one for each byte, as byte fallback does.
        strips_space: one space at the start of the text is the tokenizer's own.
    """

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        skipped_ids: Container[int] = (),
        errors: str = "replace",
        strips_space: bool = False,
    ):
        self._token_bytes = token_bytes
        self._skipped_ids = skipped_ids
        self._errors = errors
        self._strips_space = strips_space
        self._pending = b""

    def feed(self, token_id: int) -> str:
        if token_id in self._skipped_ids:
            return ""
        return self._decode(self._pending + self._token_bytes(token_id), False)

    def flush(self) -> str:
        return self._decode(self._pending, True)

    def _decode(self, data: bytes, final: bool) -> str:
        text, used = codecs.utf_8_decode(data, self._errors, final)
        self._pending = data[used:]
        if self._strips_space and text:
            self._strips_space = False
            return text.removeprefix(" ")
        return text


class WindowStream:
    """For any other decoder, such as WordPiece: decodes a few tokens with and without the new ones, gives what is more.

    Right as long as what a token adds depends on its neighbours alone.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], skipped_ids: Container[int] = ()):
        self._decode = decode
        self._skipped_ids = skipped_ids
        self._shown: list[int] = []  # tokens before the new ones whose text is out; the context they are decoded in
        self._new: list[int] = []

    def feed(self, token_id: int) -> str:
        if token_id in self._skipped_ids:
            return ""
        self._new.append(token_id)
        text = self._added_text()
        if not text or (text.endswith(REPLACEMENT) and len(self._new) < MAX_HELD_TOKENS):
            return ""
        self._shown, self._new = self._new, []
        return text

    def flush(self) -> str:
        text = self._added_text()
        self._shown, self._new = self._new, []
        return text

    def _added_text(self) -> str:
        return self._decode(self._shown + self._new)[len(self._decode(self._shown)) :]
