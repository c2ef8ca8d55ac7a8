"""POST /v1/responses: from a body to a job, whose form is a `ResponseForm`."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from pagedray.engine.errors import Unsupported, UserError
from pagedray.engine.generation import GenerationParams
from pagedray.serving.conversation import Conversation, Turn, prepare_turn, render_prompt
from pagedray.serving.openai.bad_words import with_bad_words
from pagedray.serving.openai.formats import read_grammar
from pagedray.serving.openai.prompts import TextTooLong
from pagedray.serving.openai.respond import Context, Job
from pagedray.serving.openai.responses.form import ResponseForm
from pagedray.serving.openai.responses.input import (
    Item,
    check_results,
    read_input,
    to_messages,
    without_earlier_reasoning,
)
from pagedray.serving.openai.responses.schema import (
    CountRequest,
    InputFields,
    ResponseRequest,
    TextConfig,
    parse_request,
)
from pagedray.serving.openai.responses.store import ResponseStore, find_chain, new_id, read_items
from pagedray.serving.openai.responses.tools import Tools, read_format, read_tools

# The engine's names of fields, and those of chat completions, as this API has them.
NAMES = {
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "reasoning_effort": "reasoning.effort",
}
TOOL_PATH = re.compile(r"(tools\[\d+\])\.function\b")


class Asked(msgspec.Struct, frozen=True):
    """What a request says, and what it goes on from."""

    conversation: Conversation
    items: list[Item]  # of its own input
    tools: Tools
    format: dict[str, Any]  # `text.format` of the response


async def read_request(
    context: Context, store: ResponseStore, wire: InputFields, model: str | None, params: GenerationParams
) -> Asked:
    """
    Raises:
        UserError: something is malformed.
        PreviousNotStored, NotStored: it refers to what isn't kept.
    """
    context.facts_for(model)
    tools = read_tools(wire.tools, wire.tool_choice)
    text = wire.text or TextConfig()
    grammar, shown_format = read_format(text.format)
    items = await read_input(wire.input, store)
    earlier: list[Item] = []
    if wire.previous_response_id is not None:
        earlier = await read_items(await find_chain(store, wire.previous_response_id))
    check_results([*earlier, *items])
    messages = to_messages([*earlier, *items])
    if wire.reasoning is not None and wire.reasoning.context == "current_turn":
        messages = without_earlier_reasoning(messages)
    if wire.instructions:
        messages.insert(0, {"role": "system", "content": wire.instructions})
    if not messages:
        raise UserError("input must have at least one item", "input")
    conversation = Conversation(
        model=model,
        messages=messages,
        params=params,
        tools=tools.offered,
        tool_choice=tools.choice,
        parallel_tool_calls=wire.parallel_tool_calls is not False,
        grammar=grammar,
        reasoning_effort=wire.reasoning.effort if wire.reasoning is not None else None,
        template_kwargs={
            **({} if text.verbosity is None else {"verbosity": text.verbosity}),
            **(wire.chat_template_kwargs or {}),
        },
    )
    return Asked(conversation, items, tools, shown_format)


async def prepare(context: Context, store: ResponseStore, body: dict[str, Any]) -> Job:
    """Check a body, look up what it goes on from, render, tokenize, compile. Raises UserError."""
    wire = parse_request(ResponseRequest, body)
    keeps = wire.store is not False and context.config.api.max_stored_responses > 0
    if wire.background and not keeps:
        raise Unsupported(
            "background needs a store of responses, and this server has none (max_stored_responses 0)", "background"
        )
    params = with_bad_words(wire.params(), wire.bad_words, context.tokenizer)
    asked = await read_request(context, store, wire, wire.model, params)
    conversation = msgspec.structs.replace(asked.conversation, max_reasoning_tokens=wire.max_reasoning_tokens)
    if wire.structured_outputs is not None:
        if conversation.grammar is not None:
            raise UserError("text.format and structured_outputs are both given; choose one", "structured_outputs")
        grammar = read_grammar(None, wire.structured_outputs, {})
        conversation = msgspec.structs.replace(conversation, grammar=grammar)
    try:
        turn = await _turn(context, conversation, drops=wire.truncation == "auto")
    except UserError as error:
        raise renamed(error) from None
    form = ResponseForm(
        _head(wire, asked, turn.params, keeps),
        turn.new_parser(),
        context.tokenizer,
        wire.wants_logprobs,
        items=asked.items,
        streams=bool(wire.stream),
    )
    return Job(
        prompts=[turn.prompt_ids],
        params=turn.params,
        form=form,
        facts=turn.facts,
        stream=bool(wire.stream),
        reasoning=turn.reasoning,
        priority=wire.priority or 0,
        cache_salt=wire.cache_salt or "",
        names=NAMES,
    )


async def count(context: Context, store: ResponseStore, body: dict[str, Any]) -> dict[str, Any]:
    """POST /v1/responses/input_tokens. Raises UserError."""
    wire = parse_request(CountRequest, body)
    asked = await read_request(context, store, wire, wire.model, GenerationParams())
    try:
        ids = await render_prompt(context, asked.conversation)
    except UserError as error:
        raise renamed(error) from None
    return {"object": "response.input_tokens", "input_tokens": len(ids)}


def renamed(error: UserError) -> UserError:
    """The same error with `param` as this API has it."""
    if isinstance(error, TextTooLong):
        return TextTooLong(error.num_chars, error.limit, error.max_model_len, "input")
    if error.param is not None:
        param = TOOL_PATH.sub(r"\1", error.param)
        error.param = "input" if param.startswith("messages") else NAMES.get(param, param)
        error.message = TOOL_PATH.sub(r"\1", error.message)
    return error


async def _turn(context: Context, conversation: Conversation, *, drops: bool) -> Turn:
    """Prepare a conversation; with `drops`, without as many of its first messages as it takes to fit."""
    facts = context.facts_for(conversation.model)
    room = min(facts.max_model_len, facts.kv_capacity_tokens) - (conversation.params.max_tokens or 1)

    async def fitting(messages: list[dict[str, Any]]) -> Turn | None:
        try:
            turn = await prepare_turn(context, msgspec.structs.replace(conversation, messages=messages))
        except TextTooLong:
            return None
        return turn if len(turn.prompt_ids) <= room else None

    if not drops:
        return await prepare_turn(context, conversation)
    best = await fitting(conversation.messages)
    cuts = _cuts(conversation.messages) if best is None else []
    low, high = 0, len(cuts)  # what is cut at `high` and beyond fits, below `low` it doesn't
    while low < high:
        middle = (low + high) // 2
        turn = await fitting(_cut(conversation.messages, cuts[middle]))
        if turn is not None:
            best, high = turn, middle
        else:
            low = middle + 1
    return best or await prepare_turn(context, conversation)


def _cuts(messages: Sequence[dict[str, Any]]) -> list[int]:
    """Where a conversation may begin instead: at a user's message, else at what isn't the result of a call."""
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    last = users[-1] if users else -1
    rest = [i for i, message in enumerate(messages) if i > last and message["role"] == "assistant"]
    return [i for i in [*users, *rest] if i > 0]


def _cut(messages: Sequence[dict[str, Any]], at: int) -> list[dict[str, Any]]:
    """Messages from `at` on, and those of the system before it."""
    return [m for i, m in enumerate(messages) if i >= at or m["role"] in ("system", "developer")]


def _head(wire: ResponseRequest, asked: Asked, params: GenerationParams, keeps: bool) -> dict[str, Any]:
    """The response object as it is before anything has come."""
    effort = wire.reasoning.effort if wire.reasoning is not None else None
    verbosity = wire.text.verbosity if wire.text is not None else None
    return {
        "id": new_id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": bool(wire.background),
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": wire.instructions,
        "max_output_tokens": wire.max_output_tokens,
        "max_tool_calls": wire.max_tool_calls,
        "model": wire.model,
        "output": [],
        "parallel_tool_calls": asked.conversation.parallel_tool_calls,
        "previous_response_id": wire.previous_response_id,
        "prompt_cache_key": wire.prompt_cache_key,
        "prompt_cache_retention": wire.prompt_cache_retention,
        "reasoning": {"effort": effort, "summary": None},
        "safety_identifier": wire.safety_identifier,
        "service_tier": "default",
        "store": keeps,
        "temperature": params.temperature,
        "text": {"format": asked.format, "verbosity": verbosity or "medium"},
        "tool_choice": asked.tools.shown_choice,
        "tools": asked.tools.shown,
        "top_logprobs": wire.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": wire.truncation or "disabled",
        "usage": None,
        "user": wire.user,
        "metadata": wire.metadata or {},
    }
