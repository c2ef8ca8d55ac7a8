"""A checked request of the Messages API as a `Conversation`, which every protocol's requests become."""

from __future__ import annotations

from typing import Any

import msgspec

from pagedray.engine.generation import GenerationParams
from pagedray.engine.grammar.source import GrammarSource
from pagedray.serving.anthropic.history import read_history
from pagedray.serving.anthropic.schema import (
    CountTokensRequest,
    CustomTool,
    MessagesRequest,
    ThinkingDisabled,
    ThinkingEnabled,
)
from pagedray.serving.anthropic.tools import neutral_tool, read_choice, read_tools
from pagedray.serving.conversation import Conversation
from pagedray.serving.rendering import THINKING_SWITCHES


class Reading(msgspec.Struct, frozen=True):
    """A request read to its end."""

    conversation: Conversation
    marks_cache: bool  # the request has cache_control somewhere


def read_conversation(wire: CountTokensRequest) -> Reading:
    """Raises UserError with the path of whatever is wrong."""
    history = read_history(wire.system, wire.messages)
    tools = read_tools(wire.tools or [])
    choice, parallel = read_choice(wire.tool_choice, tools)
    thinking = wire.thinking
    effort = wire.output_config.effort if wire.output_config is not None else None
    conversation = Conversation(
        model=wire.model,
        messages=history.messages,
        params=_params(wire) if isinstance(wire, MessagesRequest) else GenerationParams(),
        tools=tuple(map(neutral_tool, tools)),
        tool_choice=choice,
        parallel_tool_calls=parallel,
        grammar=_grammar(wire),
        reasoning_effort="none" if isinstance(thinking, ThinkingDisabled) else effort,
        max_reasoning_tokens=thinking.budget_tokens if isinstance(thinking, ThinkingEnabled) else None,
        continue_final_message=history.is_prefilled,
        template_kwargs=_template_kwargs(wire),
    )
    return Reading(conversation, history.marks_cache or _marks_cache(wire, tools))


def _params(wire: MessagesRequest) -> GenerationParams:
    params: dict[str, Any] = {
        name: value for name in ("temperature", "top_p", "top_k") if (value := getattr(wire, name)) is not None
    }
    # of max_tokens 0, which fills the cache, one token is generated and left out of the answer
    return GenerationParams(max_tokens=wire.max_tokens or 1, stop=tuple(wire.stop_sequences or ()), **params)


def _template_kwargs(wire: CountTokensRequest) -> dict[str, Any]:
    """Templates that think only when told so are told."""
    if wire.thinking is None or isinstance(wire.thinking, ThinkingDisabled):
        return {}
    return dict.fromkeys(THINKING_SWITCHES, True)


def _grammar(wire: CountTokensRequest) -> GrammarSource | None:
    name, form = "output_format", wire.output_format
    if wire.output_config is not None and wire.output_config.format is not None:
        name, form = "output_config.format", wire.output_config.format
    if form is None:
        return None
    return GrammarSource("json_schema", msgspec.json.encode(form.json_schema).decode(), f"{name}.schema")


def _marks_cache(wire: CountTokensRequest, tools: tuple[CustomTool, ...]) -> bool:
    return wire.cache_control is not None or any(tool.cache_control is not None for tool in tools)
