"""POST /v1/messages."""

from __future__ import annotations

from typing import Any

import msgspec

from pagedray.engine.config import EngineFacts
from pagedray.engine.errors import UserError
from pagedray.serving.anthropic.conversation import read_conversation
from pagedray.serving.anthropic.form import MessageForm, MessageShape
from pagedray.serving.anthropic.names import client_names
from pagedray.serving.anthropic.schema import MessagesRequest, parse
from pagedray.serving.conversation import prepare_turn
from pagedray.serving.openai.respond import Context, Job

NAMES = {"prompt": "messages", "stop": "stop_sequences"}


async def prepare(context: Context, body: dict[str, Any]) -> Job:
    """Check a body, render the template, tokenize. Raises UserError."""
    wire = parse(MessagesRequest, body)
    limit = context_window(context.facts_for(wire.model))
    if wire.max_tokens > limit:
        raise UserError(f"max_tokens: {wire.max_tokens} > {limit}, the most that this model takes", "max_tokens")
    reading = read_conversation(wire)
    with client_names():
        turn = await prepare_turn(context, reading.conversation)
    params, length_reason = turn.params, "max_tokens"
    room = limit - len(turn.prompt_ids)
    if 1 <= room < wire.max_tokens:  # without room the engine's own check speaks
        params, length_reason = msgspec.structs.replace(params, max_tokens=room), "model_context_window_exceeded"
    shape = MessageShape(
        model=wire.model,
        shows_thinking=getattr(wire.thinking, "display", None) != "omitted",
        tells_cached=reading.marks_cache,
        length_reason=length_reason,
        keeps_output=wire.max_tokens > 0,
        asks_diagnostics=wire.diagnostics is not None,
        previous_message_id=wire.diagnostics.previous_message_id if wire.diagnostics is not None else None,
    )
    return Job(
        prompts=[turn.prompt_ids],
        params=params,
        form=MessageForm(shape, turn.new_parser()),
        facts=turn.facts,
        stream=bool(wire.stream),
        reasoning=turn.reasoning,
        names=NAMES,
        keeps_output=shape.keeps_output,
    )


def context_window(facts: EngineFacts) -> int:
    """Tokens that a prompt and its answer may have together."""
    return min(facts.max_model_len, facts.kv_capacity_tokens)
