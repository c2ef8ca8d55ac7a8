"""Prompts to token ids: what the wire may say, and bounds that are checked before the tokenizer works."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from pagedray.engine.config import EngineFacts
from pagedray.engine.errors import UserError
from pagedray.engine.text.tokenizer import Tokenizer
from pagedray.serving.limits import json_type
from pagedray.serving.openai.messages import check_messages
from pagedray.serving.openai.schema import ChatRequest, TokenizeRequest

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


class PromptEncoder:
    """Text and messages to ids."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._longest_token_bytes = 0  # unknown until a long text asks

    async def encode(
        self, prompts: Sequence[str | list[int]], facts: EngineFacts, *, add_special_tokens: bool, param: str = "prompt"
    ) -> list[list[int]]:
        """Ids of each prompt. Raises UserError, without tokenizing, for a text that no tokens can make fit."""
        longest = max((len(text) for text in prompts if isinstance(text, str)), default=0)
        if longest < THREAD_CHARS:
            in_thread = sum(len(text) for text in prompts if isinstance(text, str)) >= THREAD_CHARS
        else:
            in_thread = True
            limit = facts.max_model_len * await self._longest_token()
            if longest > limit:
                raise UserError(
                    f"{param} has {longest} characters; max_model_len {facts.max_model_len} holds at most {limit}",
                    param,
                )

        def work() -> list[list[int]]:
            return [self._tokenizer.encode(p, add_special_tokens) if isinstance(p, str) else p for p in prompts]

        return await asyncio.to_thread(work) if in_thread else work()

    async def encode_chat(self, request: ChatRequest | TokenizeRequest, facts: EngineFacts) -> list[int]:
        """Ids of a conversation. Raises UserError for malformed messages, and for what the template refuses."""
        messages = check_messages(request.messages or [])
        continues = bool(request.continue_final_message)
        begins = not continues if request.add_generation_prompt is None else request.add_generation_prompt
        text = self._tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=begins,
            continue_final_message=continues,
            kwargs=request.chat_template_kwargs or {},
        )
        special = bool(request.add_special_tokens)  # a template writes the special tokens itself
        return (await self.encode([text], facts, add_special_tokens=special, param="messages"))[0]

    async def _longest_token(self) -> int:
        if not self._longest_token_bytes:
            self._longest_token_bytes = await asyncio.to_thread(self._measure)
        return self._longest_token_bytes

    def _measure(self) -> int:
        return max(len(self._tokenizer.token_bytes(token_id)) for token_id in range(self._tokenizer.vocab_size))
