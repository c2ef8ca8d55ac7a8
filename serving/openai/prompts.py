"""Prompts to token ids: what the wire may say, and bounds that are checked before the tokenizer works."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from pagedray.engine.config import EngineFacts
from pagedray.engine.errors import UserError
from pagedray.engine.generation import GenerationParams
from pagedray.engine.text.tokenizer import Tokenizer
from pagedray.serving.limits import json_type

THREAD_CHARS = 4096  # longer texts are tokenized off the event loop, which serves all streams meanwhile


def parse_prompts(value: Any) -> list[str | list[int]]:
    """A completion's prompts: a string, strings, token ids, or lists of token ids."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise UserError(f"prompt must be a string or an array, not {json_type(value)}", "prompt")
    if not value:
        raise UserError("prompt must not be an empty array", "prompt")
    kinds = set(map(type, value))
    if kinds == {int}:
        return [value]
    if kinds == {str}:
        return list(value)
    if kinds != {list}:
        raise UserError(
            "prompt must be a string, or an array of strings, of token ids, or of arrays of token ids", "prompt"
        )
    for i, ids in enumerate(value):
        if set(map(type, ids)) - {int}:
            raise UserError(f"prompt[{i}] must hold token ids only", f"prompt[{i}]")
    return list(value)


class TextTooLong(UserError):
    """A text that has too many tokens, however they are counted."""

    def __init__(self, num_chars: int, limit: int, max_model_len: int, param: str):
        super().__init__(
            f"{param} has {num_chars} characters; max_model_len {max_model_len} holds at most {limit}", param
        )
        self.args = (num_chars, limit, max_model_len, param)
        self.num_chars, self.limit, self.max_model_len = num_chars, limit, max_model_len


def truncated(
    ids: list[int], size: int | None, facts: EngineFacts, params: GenerationParams, side: str | None = None
) -> list[int]:
    """Some tokens of a prompt.

    Args:
        side: what is cut off: left, so that the last ones stay, or right. None: left.
        size: `truncate_prompt_tokens`: how many; -1: as many as leave room for the answer; None: all.
    """
    if size is None:
        return ids
    limit = min(facts.max_model_len, facts.kv_capacity_tokens)
    if size > limit:
        raise UserError(f"truncate_prompt_tokens is {size}, the model takes {limit}", "truncate_prompt_tokens")
    if size == 0:
        raise UserError("truncate_prompt_tokens must be at least 1, or -1 for all that fit", "truncate_prompt_tokens")
    if size < 0:
        size = max(1, limit - (params.max_tokens or 1))
    return ids[:size] if side == "right" else ids[-size:]


class PromptEncoder:
    """Texts to ids."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._longest_token_bytes = 0  # unknown until a long text asks

    async def encode(
        self, prompts: Sequence[str | list[int]], facts: EngineFacts, *, add_special_tokens: bool, param: str = "prompt"
    ) -> list[list[int]]:
        """Ids of each prompt. Raises TextTooLong, without tokenizing, for a text that no tokens can make fit."""
        longest = max((len(text) for text in prompts if isinstance(text, str)), default=0)
        if longest < THREAD_CHARS:
            in_thread = sum(len(text) for text in prompts if isinstance(text, str)) >= THREAD_CHARS
        else:
            in_thread = True
            limit = facts.max_model_len * await self._longest_token()
            if longest > limit:
                raise TextTooLong(longest, limit, facts.max_model_len, param)

        def work() -> list[list[int]]:
            return [self._tokenizer.encode(p, add_special_tokens) if isinstance(p, str) else p for p in prompts]

        return await asyncio.to_thread(work) if in_thread else work()

    async def _longest_token(self) -> int:
        if not self._longest_token_bytes:
            self._longest_token_bytes = await asyncio.to_thread(self._measure)
        return self._longest_token_bytes

    def _measure(self) -> int:
        return max(len(self._tokenizer.token_bytes(token_id)) for token_id in range(self._tokenizer.vocab_size))
