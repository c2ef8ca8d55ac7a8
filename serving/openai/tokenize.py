"""POST /tokenize and /detokenize: a client's look at the tokenizer, by the same rules as generation."""

from __future__ import annotations

import asyncio
from typing import Any

from pagedray.engine.errors import UserError
from pagedray.engine.generation import check_ids
from pagedray.serving.conversation import Conversation, render_prompt
from pagedray.serving.openai.messages import check_messages
from pagedray.serving.openai.prompts import THREAD_CHARS
from pagedray.serving.openai.respond import Context
from pagedray.serving.openai.schema import DetokenizeRequest, TokenizeRequest, parse
from pagedray.serving.openai.tools import read_tools

MAX_DETOKENIZED = 2**18  # a second's work


async def tokenize(context: Context, body: dict[str, Any]) -> dict[str, Any]:
    """Ids of a prompt, or of messages as the chat template writes them."""
    wire = parse(TokenizeRequest, body)
    facts = context.facts_for(wire.model)
    if wire.prompt is None:
        ids = await render_prompt(context, _conversation(wire))
    else:
        special = wire.add_special_tokens is not False
        ids = (await context.encoder.encode([wire.prompt], facts, add_special_tokens=special))[0]
    out: dict[str, Any] = {"count": len(ids), "max_model_len": facts.max_model_len, "tokens": ids}
    if wire.return_token_strs:
        out["token_strs"] = [context.tokenizer.token_text(token_id) for token_id in ids]
    return out


def _conversation(wire: TokenizeRequest) -> Conversation:
    return Conversation(
        model=wire.model,
        messages=check_messages(wire.messages or []),
        tools=read_tools(wire.tools, None).tools,
        reasoning_effort=wire.reasoning_effort,
        add_generation_prompt=wire.add_generation_prompt,
        continue_final_message=bool(wire.continue_final_message),
        template_kwargs=wire.chat_template_kwargs or {},
        add_special_tokens=bool(wire.add_special_tokens),
    )


async def detokenize(context: Context, body: dict[str, Any]) -> dict[str, Any]:
    """Text of ids, special tokens included."""
    wire = parse(DetokenizeRequest, body)
    if len(wire.tokens) > MAX_DETOKENIZED:
        raise UserError(f"tokens has {len(wire.tokens)} ids, the limit is {MAX_DETOKENIZED}", "tokens")
    check_ids(wire.tokens, context.facts_for(wire.model).vocab_size, "tokens")
    if len(wire.tokens) < THREAD_CHARS:
        return {"prompt": context.tokenizer.decode(wire.tokens, False)}
    return {"prompt": await asyncio.to_thread(context.tokenizer.decode, wire.tokens, False)}
