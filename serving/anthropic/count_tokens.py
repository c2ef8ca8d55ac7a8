"""POST /v1/messages/count_tokens: how long the prompt of a request would be, tools and all."""

from __future__ import annotations

from typing import Any

from pagedray.serving.anthropic.conversation import read_conversation
from pagedray.serving.anthropic.names import client_names
from pagedray.serving.anthropic.schema import CountTokensRequest, parse
from pagedray.serving.conversation import render_prompt
from pagedray.serving.openai.respond import Context


async def count_tokens(context: Context, body: dict[str, Any]) -> dict[str, Any]:
    """The exact number: the ids that POST /v1/messages would hand to the engine. Raises UserError."""
    reading = read_conversation(parse(CountTokensRequest, body))
    with client_names():
        prompt_ids = await render_prompt(context, reading.conversation)
    return {"input_tokens": len(prompt_ids)}
