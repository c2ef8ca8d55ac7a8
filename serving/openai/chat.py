"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

import msgspec

from pagedray.engine.config import EngineFacts
from pagedray.engine.errors import Unsupported, UserError
from pagedray.engine.generation import GenerationParams
from pagedray.engine.text.tokenizer import Tokenizer
from pagedray.serving.conversation import Conversation, prepare_turn
from pagedray.serving.openai.bad_words import with_bad_words
from pagedray.serving.openai.chat_form import ChatForm, ChatShape
from pagedray.serving.openai.messages import check_messages
from pagedray.serving.openai.prompts import truncated
from pagedray.serving.openai.respond import Context, Head, Job
from pagedray.serving.openai.schema import ChatRequest, parse
from pagedray.serving.openai.tools import Offer


async def prepare(context: Context, body: dict[str, Any]) -> Job:
    """Check a body, render the template, tokenize. Raises UserError."""
    wire = parse(ChatRequest, body)
    facts = context.facts_for(wire.model)
    offer = wire.offer
    params = _params(wire, facts, context.tokenizer)
    try:
        conversation = _conversation(wire, offer, params, context.tokenizer)
        turn = await prepare_turn(context, conversation)
    except UserError as error:
        if offer.is_legacy and error.param is not None:
            error.param = error.param.replace("tools[", "functions[").replace("].function.", "].")
        raise
    prompt_ids = truncated(turn.prompt_ids, wire.truncate_prompt_tokens, facts, params, wire.truncation_side)
    names = {"prompt": "messages"}
    if wire.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    shape = ChatShape(
        head=Head.new("chatcmpl", "chat.completion.chunk" if wire.stream else "chat.completion", wire.model, facts),
        prompt_ids=prompt_ids,
        wire=wire,
        may_call=bool(offer.tools) and offer.choice != "none",
        is_legacy=offer.is_legacy,
        can_reason=context.parsers.reasoning is not None,
        echoed=_text_of(conversation.messages[-1]) if wire.echo else "",
    )
    return Job(
        prompts=[prompt_ids],
        params=turn.params,
        form=ChatForm(shape, [turn.new_parser() for _ in range(params.n)], context.tokenizer),
        facts=facts,
        stream=bool(wire.stream),
        reasoning=turn.reasoning,
        usage_with_each=wire.wants_usage_with_each,
        priority=wire.priority or 0,
        cache_salt=wire.cache_salt or "",
        names=names,
    )


def _params(wire: ChatRequest, facts: EngineFacts, tokenizer: Tokenizer) -> GenerationParams:
    params = wire.params(logprobs=(wire.top_logprobs or 0) if wire.logprobs else None)
    if wire.max_completion_tokens is not None:  # the newer name of max_tokens; it wins
        if wire.max_completion_tokens < 1:
            raise UserError(
                f"max_completion_tokens must be at least 1, got {wire.max_completion_tokens}", "max_completion_tokens"
            )
        params = msgspec.structs.replace(params, max_tokens=wire.max_completion_tokens)
    return with_bad_words(params, wire.bad_words, tokenizer)


def _conversation(wire: ChatRequest, offer: Offer, params: GenerationParams, tokenizer: Tokenizer) -> Conversation:
    return Conversation(
        model=wire.model,
        messages=check_messages(wire.messages),
        params=params,
        tools=offer.tools,
        tool_choice=offer.choice,
        parallel_tool_calls=wire.parallel_tool_calls is not False and not offer.is_legacy,
        grammar=wire.grammar,
        reasoning_effort=wire.reasoning_effort,
        max_reasoning_tokens=wire.reasoning_budget,
        add_generation_prompt=wire.add_generation_prompt,
        continue_final_message=bool(wire.continue_final_message),
        template_kwargs=_template_kwargs(wire, tokenizer),
        add_special_tokens=bool(wire.add_special_tokens),
    )


def _text_of(message: dict[str, Any]) -> str:
    """Content of an answer; of other messages nothing."""
    content = message["content"] or ""
    if message["role"] != "assistant":
        return ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _template_kwargs(wire: ChatRequest, tokenizer: Tokenizer) -> dict[str, Any]:
    kwargs: dict[str, Any] = {}
    if wire.verbosity is not None:
        kwargs["verbosity"] = wire.verbosity
    if wire.documents:
        if not tokenizer.template_uses("documents"):
            raise Unsupported(
                "documents: the model's chat template has no place for them; put their text into a message", "documents"
            )
        kwargs["documents"] = wire.documents
    return {**kwargs, **(wire.chat_template_kwargs or {})}
