"""`Conversation`: what a request of any chat API asks for; `Turn`: the same, ready for the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from pagedray.engine.config import EngineFacts
from pagedray.engine.errors import Unsupported, UserError
from pagedray.engine.generation import GenerationParams
from pagedray.engine.grammar.source import GrammarSource
from pagedray.engine.messages import CompiledGrammar, Constraint, ReasoningSpan
from pagedray.serving.parsers.events import OutputParser
from pagedray.serving.parsers.registry import (
    ParserSetup,
    answer_grammar,
    answer_or_calls,
    make_parser,
    needs_special_tokens,
    reasoning_is_open,
    reasoning_span,
    tool_grammar,
)
from pagedray.serving.parsers.tools import NamedTool, Tool, ToolChoice
from pagedray.serving.rendering import render
from pagedray.serving.schema_check import check_schemas
from pagedray.serving.simple_parsers import OneCall, PlainText

if TYPE_CHECKING:
    from pagedray.serving.openai.respond import Context


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """Messages, what the model may do, and what its answer must look like. Already checked, but for what only the
    template or the grammar compiler can tell."""

    model: str | None
    messages: list[dict[str, Any]]  # in the form of chat completions, see serving/openai/messages.py
    params: GenerationParams = GenerationParams()  # without constraint
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    grammar: GrammarSource | None = None  # of the answer's content
    reasoning_effort: str | None = None  # for the template; "none" switches reasoning off where it can
    max_reasoning_tokens: int | None = None
    add_generation_prompt: bool | None = None  # None: unless the final message is continued
    continue_final_message: bool = False
    template_kwargs: dict[str, Any] = {}
    add_special_tokens: bool = False

    @property
    def may_call(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation's prompt and what its output means."""

    prompt_ids: list[int]
    params: GenerationParams
    facts: EngineFacts
    reasoning: ReasoningSpan | None  # where the model reasons, for the count of those tokens
    setup: ParserSetup
    tools: tuple[Tool, ...]
    tool_choice: ToolChoice
    parallel_tool_calls: bool
    reasoning_is_open: bool
    dropped_tokens: tuple[str, ...]

    def new_parser(self) -> OutputParser:
        """One for each choice."""
        if self.setup.reasoning is None and self.tool_choice == "none" and not self.dropped_tokens:
            return PlainText()
        parser = make_parser(
            self.setup,
            self.tools,
            choice=self.tool_choice,
            reasoning_is_open=self.reasoning_is_open,
            special_tokens=self.dropped_tokens,
        )
        return parser if self.parallel_tool_calls else OneCall(parser)


async def render_prompt(context: Context, conversation: Conversation) -> list[int]:
    """Token ids of the prompt. Raises UserError."""
    facts = context.facts_for(conversation.model)
    return await _encode(context, conversation, facts, render(context.tokenizer, context.parsers, conversation))


async def prepare_turn(context: Context, conversation: Conversation) -> Turn:
    """Render, tokenize, compile.

    Raises:
        UserError: the template refuses the conversation, it is too long, or a grammar can't be made of a schema.
        Unsupported: a call must come, and the server reads none.
        Overloaded, EngineUnavailable: of the grammar compiler.
    """
    facts, setup = context.facts_for(conversation.model), context.parsers
    await check_schemas(
        {f"tools[{i}].function.parameters": tool.parameters for i, tool in enumerate(conversation.tools)}
    )
    if setup.tool is None and conversation.may_call and conversation.tool_choice != "auto":
        raise Unsupported("a call can't be asked for: the server's tool_call_parser is none", "tool_choice")
    text = render(context.tokenizer, setup, conversation)
    prompt_ids = await _encode(context, conversation, facts, text)
    continues = conversation.continue_final_message
    span = reasoning_span(setup, text, context.tokenizer, conversation.max_reasoning_tokens, continues=continues)
    grammar = await _compile(context, conversation, facts)
    params = conversation.params
    dropped: tuple[str, ...] = ()
    if grammar is not None or (span is not None and span.max_tokens is not None):
        constraint = msgspec.structs.replace(params.constraint or Constraint(), grammar=grammar, reasoning=span)
        params = msgspec.structs.replace(params, constraint=constraint)
    if needs_special_tokens(ParserSetup(setup.tool if conversation.may_call else None, setup.reasoning)):
        if params.skip_special_tokens:
            dropped = _special_tokens(context)
        params = msgspec.structs.replace(params, skip_special_tokens=False)
    return Turn(
        prompt_ids=prompt_ids,
        params=params,
        facts=facts,
        reasoning=span,
        setup=setup,
        tools=conversation.tools,
        tool_choice=conversation.tool_choice if conversation.may_call else "none",
        parallel_tool_calls=conversation.parallel_tool_calls,
        reasoning_is_open=reasoning_is_open(setup, text, continues=continues),
        dropped_tokens=dropped,
    )


async def _encode(context: Context, conversation: Conversation, facts: EngineFacts, text: str) -> list[int]:
    special = conversation.add_special_tokens  # a template writes the special tokens itself
    return (await context.encoder.encode([text], facts, add_special_tokens=special, param="messages"))[0]


async def _compile(context: Context, conversation: Conversation, facts: EngineFacts) -> CompiledGrammar | None:
    """What was asked of the answer holds for its content: not for calls, which follow their tools' schemas."""
    setup, answer, calls = context.parsers, conversation.grammar, None
    if answer is None and not conversation.may_call:
        return None
    if conversation.may_call:
        tools, choice, parallel = conversation.tools, conversation.tool_choice, conversation.parallel_tool_calls
        if choice == "auto" and answer is not None:
            calls = answer_or_calls(setup, tools, parallel, answer)
        else:
            calls = tool_grammar(setup, tools, choice, parallel)
    if calls is None:
        if answer is None:
            return None
        return await context.grammars.compile(answer_grammar(setup, answer), facts)
    try:
        return await context.grammars.compile(calls, facts)
    except UserError:
        if answer is not None:
            await context.grammars.compile(answer, facts)
        await _name_the_tool(context, conversation, facts)
        raise


async def _name_the_tool(context: Context, conversation: Conversation, facts: EngineFacts) -> None:
    """Raise the UserError of the first tool whose schema alone can't be compiled either."""
    choice = conversation.tool_choice
    for i, tool in enumerate(conversation.tools):
        if tool.strict or choice == "required" or (isinstance(choice, NamedTool) and choice.name == tool.name):
            text = msgspec.json.encode(tool.parameters or {"type": "object"}).decode()
            source = GrammarSource("json_schema", text, f"tools[{i}].function.parameters")
            await context.grammars.compile(source, facts)


def _special_tokens(context: Context) -> tuple[str, ...]:
    tokenizer = context.tokenizer
    return tuple(tokenizer.token_text(token_id) for token_id in sorted(tokenizer.special_ids))
