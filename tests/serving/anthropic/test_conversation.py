"""Requests of the Messages API as what every protocol's requests become."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pagedray.engine.grammar.source import GrammarSource
from pagedray.serving.anthropic.conversation import Reading, read_conversation
from pagedray.serving.anthropic.schema import CountTokensRequest, MessagesRequest, parse
from pagedray.serving.conversation import Conversation
from pagedray.serving.parsers.tools import NamedTool, Tool

BODY: dict[str, Any] = {"model": "m", "max_tokens": 2000, "messages": [{"role": "user", "content": "x"}]}
ADD: dict[str, Any] = {"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def read(**fields: Any) -> Reading:
    return read_conversation(parse(MessagesRequest, {**BODY, **fields}))


def conversation(**fields: Any) -> Conversation:
    return read(**fields).conversation


def test_what_is_not_given_has_the_defaults() -> None:
    got = conversation()
    assert got.messages == BODY["messages"]
    assert (got.tools, got.tool_choice, got.parallel_tool_calls) == ((), "auto", True)
    assert (got.grammar, got.reasoning_effort, got.max_reasoning_tokens) == (None, None, None)
    assert (got.continue_final_message, got.template_kwargs) == (False, {})
    assert got.params.max_tokens == 2000


def test_sampling() -> None:
    params = conversation(temperature=0, top_p=0.5, top_k=3, stop_sequences=["a", "b"]).params
    assert (params.temperature, params.top_p, params.top_k, params.stop) == (0, 0.5, 3, ("a", "b"))
    assert conversation(max_tokens=0).params.max_tokens == 1


def test_tools() -> None:
    loose = {"name": "now", "input_schema": {}, "strict": True, "input_examples": [{"zone": "UTC"}]}
    got = conversation(tools=[ADD, loose])
    assert got.tools == (
        Tool("add", "Adds.", {"type": "object", "properties": {}}),
        Tool("now", "", {"type": "object", "examples": [{"zone": "UTC"}]}, True),
    )


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ("auto", True)),
        ({"type": "auto"}, ("auto", True)),
        ({"type": "auto", "disable_parallel_tool_use": True}, ("auto", False)),
        ({"type": "any"}, ("required", True)),
        ({"type": "any", "disable_parallel_tool_use": False}, ("required", True)),
        ({"type": "tool", "name": "add"}, (NamedTool("add"), True)),
        ({"type": "tool", "name": "add", "disable_parallel_tool_use": True}, (NamedTool("add"), False)),
        ({"type": "none"}, ("none", True)),
    ],
)
def test_choices(choice: Any, expected: Any) -> None:
    got = conversation(tools=[ADD], tool_choice=choice)
    assert (got.tool_choice, got.parallel_tool_calls) == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"thinking": {"type": "disabled"}}, ("none", None, {})),
        ({"thinking": {"type": "adaptive"}}, (None, None, {"enable_thinking": True, "thinking": True})),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 1500}},
            (None, 1500, {"enable_thinking": True, "thinking": True}),
        ),
        ({"output_config": {"effort": "low"}}, ("low", None, {})),
        ({"output_config": {"effort": "max"}, "thinking": {"type": "disabled"}}, ("none", None, {})),
    ],
)
def test_thinking_and_effort(fields: dict[str, Any], expected: Any) -> None:
    got = conversation(**fields)
    assert (got.reasoning_effort, got.max_reasoning_tokens, got.template_kwargs) == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, "output_config.format.schema"),
        ({"output_format": {"type": "json_schema", "schema": SCHEMA}}, "output_format.schema"),
    ],
)
def test_a_format_is_a_grammar(fields: dict[str, Any], param: str) -> None:
    grammar = conversation(**fields).grammar
    assert grammar == GrammarSource("json_schema", grammar.text if grammar else "", param)
    assert json.loads(grammar.text) == SCHEMA


def test_marks_of_the_cache() -> None:
    mark = {"type": "ephemeral"}
    assert not read().marks_cache
    assert read(cache_control=mark).marks_cache
    assert read(tools=[{**ADD, "cache_control": mark}]).marks_cache
    assert read(system=[{"type": "text", "text": "s", "cache_control": mark}]).marks_cache


def test_a_count_reads_the_same_prompt() -> None:
    fields = {"system": "s", "tools": [ADD], "tool_choice": {"type": "any"}, "thinking": {"type": "adaptive"}}
    body = {**BODY, **fields}
    del body["max_tokens"]
    counted = read_conversation(parse(CountTokensRequest, body)).conversation
    asked = conversation(**fields)
    for name in ("messages", "tools", "tool_choice", "template_kwargs", "reasoning_effort", "continue_final_message"):
        assert getattr(counted, name) == getattr(asked, name)
