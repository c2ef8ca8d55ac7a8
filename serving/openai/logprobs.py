"""Log-probabilities in the two forms that OpenAI's APIs have, and prompt log-probabilities as vLLM writes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from pagedray.engine.messages import TokenLogprobs
from pagedray.engine.text.tokenizer import Tokenizer

LOWEST = -9999.0  # stands for minus infinity, which JSON can't say


def finite(logprob: float) -> float:
    return logprob if logprob > LOWEST else LOWEST


class TokenNames:
    """What tokens are called in log-probabilities: by their text, special ones too; or by token_id:ID.

    A token that is part of a character is called like bytes:\\xe2\\x80.
    """

    def __init__(self, tokenizer: Tokenizer, by_id: bool = False):
        self._tokenizer, self._by_id = tokenizer, by_id

    def __call__(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._by_id else self._tokenizer.token_text(token_id)


def chat_logprobs(
    entries: Sequence[TokenLogprobs], tokenizer: Tokenizer, names: TokenNames | None = None
) -> dict[str, Any]:
    """`logprobs` of a chat choice: one entry for each token of the output, be it content, reasoning, a call, or the
    one that ended it. The `bytes` of tokens that make a character join to it.
    """
    names = names or TokenNames(tokenizer)

    def one(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": names(token_id),
            "logprob": finite(logprob),
            "bytes": list(tokenizer.token_bytes(token_id)),
        }

    return {
        "content": [
            {
                **one(entry.token_id, entry.logprob),
                "top_logprobs": [one(*top) for top in zip(entry.top_ids, entry.top_logprobs, strict=True)],
            }
            for entry in entries
        ],
        "refusal": None,
    }


class LegacyLogprobs(msgspec.Struct):
    """`logprobs` of a completion choice: four lists, one item per token."""

    text_offset: list[int] = []
    token_logprobs: list[float | None] = []
    tokens: list[str] = []
    top_logprobs: list[dict[str, float] | None] = []

    def extend(self, other: LegacyLogprobs) -> None:
        self.text_offset += other.text_offset
        self.token_logprobs += other.token_logprobs
        self.tokens += other.tokens
        self.top_logprobs += other.top_logprobs


class LegacyWriter:
    """Writes one choice's tokens; `text_offset` is where a token's text begins in the choice's text, in characters.

    All tokens that make one character have its offset.
    """

    def __init__(self, tokenizer: Tokenizer, names: TokenNames, skip_special_tokens: bool, offset: int = 0):
        self._name = names
        self._stream = tokenizer.text_stream(skip_special_tokens)
        self._offset = offset

    def first(self, token_id: int) -> LegacyLogprobs:
        """The prompt's first token, which follows nothing and so has no probability."""
        return self._add(LegacyLogprobs(), token_id, None, None)

    def write(self, entries: Sequence[TokenLogprobs], k: int) -> LegacyLogprobs:
        """The next tokens, each with the k most likely ones at its place beside it."""
        out = LegacyLogprobs()
        for entry in entries:
            top = {self._name(entry.token_id): finite(entry.logprob)}
            for token_id, logprob in zip(entry.top_ids[:k], entry.top_logprobs[:k], strict=True):
                top.setdefault(self._name(token_id), finite(logprob))
            self._add(out, entry.token_id, finite(entry.logprob), top)
        return out

    def _add(
        self, out: LegacyLogprobs, token_id: int, logprob: float | None, top: dict[str, float] | None
    ) -> LegacyLogprobs:
        out.tokens.append(self._name(token_id))
        out.token_logprobs.append(logprob)
        out.top_logprobs.append(top)
        out.text_offset.append(self._offset)
        self._offset += len(self._stream.feed(token_id))
        return out


def prompt_logprobs(entries: Sequence[TokenLogprobs], tokenizer: Tokenizer, k: int) -> list[dict[str, Any] | None]:
    """Per prompt token: null for the first, else the real one and the k most likely ones there, by id."""
    out: list[dict[str, Any] | None] = [None]
    for entry in entries:
        at: dict[str, Any] = {}
        ranked = [(entry.token_id, entry.logprob, entry.rank)]
        ranked += [
            (i, p, rank) for rank, (i, p) in enumerate(zip(entry.top_ids[:k], entry.top_logprobs[:k], strict=True), 1)
        ]
        for token_id, logprob, rank in ranked:
            decoded = tokenizer.token_text(token_id)
            at.setdefault(str(token_id), {"logprob": finite(logprob), "rank": rank, "decoded_token": decoded})
        out.append(at)
    return out
