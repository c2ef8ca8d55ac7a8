"""Fields of the Messages API: each is applied, ignored or refused by name; the SDK's own types are the list."""

from __future__ import annotations

import typing
from typing import Any

import pytest
from anthropic.types.beta.message_count_tokens_params import MessageCountTokensParams as BetaCountParams
from anthropic.types.beta.message_create_params import MessageCreateParamsBase as BetaParams
from anthropic.types.content_block_param import ContentBlockParam
from anthropic.types.message_count_tokens_params import MessageCountTokensParams as CountParams
from anthropic.types.message_create_params import MessageCreateParamsBase as Params
from anthropic.types.tool_param import ToolParam

from pagedray.engine.errors import Unsupported, UserError
from pagedray.serving.anthropic.history import FIELDS, NOT_OFFERED
from pagedray.serving.anthropic.schema import (
    IGNORED,
    REFUSED,
    CountTokensRequest,
    CustomTool,
    MessagesRequest,
    parse,
)

BODY: dict[str, Any] = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
THINKING = {"type": "enabled", "budget_tokens": 1024}


@pytest.mark.parametrize("params", [Params, BetaParams])
def test_every_field_of_the_client_has_its_place(params: Any) -> None:
    known = {*MessagesRequest.model_fields, *IGNORED, *REFUSED}
    assert set(typing.get_type_hints(params)) - known == set()
    assert set(REFUSED).isdisjoint(MessagesRequest.model_fields)
    assert set(REFUSED).isdisjoint(IGNORED)


@pytest.mark.parametrize("params", [CountParams, BetaCountParams])
def test_every_field_of_a_count_has_its_place(params: Any) -> None:
    known = {*CountTokensRequest.model_fields, *IGNORED, *REFUSED}
    assert set(typing.get_type_hints(params)) - known == set()


def test_every_field_of_a_tool_has_its_place() -> None:
    assert set(typing.get_type_hints(ToolParam)) <= set(CustomTool.model_fields)


def test_every_block_of_the_client_is_known() -> None:
    for block in typing.get_args(ContentBlockParam):
        hints = typing.get_type_hints(block)
        (kind,) = typing.get_args(
            typing.get_args(hints["type"])[0] if "Required" in str(hints["type"]) else hints["type"]
        )
        assert kind in NOT_OFFERED or set(hints) - {"type"} == set(FIELDS[kind])


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0},
        {"temperature": 1.0, "top_p": 0.5, "top_k": 0},
        {"max_tokens": 5.0, "top_k": 3.0},
        {"stop_sequences": ["a", "\n"]},
        {"stop_sequences": []},
        {"stream": False},
        {"metadata": {"user_id": "u"}, "service_tier": "auto", "speed": "fast"},
        {"thinking": {"type": "disabled"}},
        {"thinking": {"type": "adaptive", "display": "omitted"}},
        {"thinking": THINKING, "max_tokens": 1025},
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        {"cache_control": {"type": "ephemeral", "ttl": "5m"}},
        {"output_config": {"effort": "low"}},
        {"output_config": {"format": {"type": "json_schema", "schema": {}}, "task_budget": None}},
        {"output_format": {"type": "json_schema", "schema": {}}},
        {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
        {"context_management": {}},
        {"diagnostics": {"previous_message_id": None}},
        {"inference_geo": "global", "mcp_servers": [], "container": None, "fallbacks": []},
        {"max_tokens": 0},
        dict.fromkeys([*REFUSED, *IGNORED]),
    ],
)
def test_good_bodies(fields: dict[str, Any]) -> None:
    wire = parse(MessagesRequest, {**BODY, **fields})
    assert wire.max_tokens == fields.get("max_tokens", 5)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model: Input should be a valid string"),
    ({"model": 3}, "model: Input should be a valid string"),
    ({"max_tokens": None}, "max_tokens: Input should be a valid integer"),
    ({"max_tokens": -1}, "max_tokens: Input should be greater than or equal to 0"),
    ({"max_tokens": 1.5}, "max_tokens: Input should be a valid integer"),
    ({"max_tokens": "5"}, "max_tokens: Input should be a valid integer"),
    ({"max_tokens": True}, "max_tokens: Input should be a valid integer"),
    ({"max_tokens": 0, "stream": True}, "stream: max_tokens 0 generates nothing that could be streamed"),
    ({"messages": "x"}, "messages: Input should be a valid list"),
    ({"system": 3}, "system: must be a string or an array of text blocks, not an integer"),
    ({"stream": "yes"}, "stream: Input should be a valid boolean"),
    ({"temperature": 1.1}, "temperature: Input should be less than or equal to 1"),
    ({"temperature": -0.1}, "temperature: Input should be greater than or equal to 0"),
    ({"temperature": "hot"}, "temperature: Input should be a valid number"),
    ({"top_p": 0}, "top_p: Input should be greater than 0"),
    ({"top_p": 1.1}, "top_p: Input should be less than or equal to 1"),
    ({"top_k": -1}, "top_k: Input should be greater than or equal to 0"),
    ({"top_k": 2**31}, "top_k: Input should be less than 2147483648"),
    ({"stop_sequences": "x"}, "stop_sequences: Input should be a valid list"),
    ({"stop_sequences": [3]}, "stop_sequences.0: Input should be a valid string"),
    ({"stop_sequences": ["a", ""]}, "stop_sequences.1: must not be empty"),
    ({"stop_sequences": ["a"] * 65}, "stop_sequences: at most 64, got 65"),
    ({"metadata": "x"}, "metadata: must be an object"),
    ({"metadata": {"user_id": 3}}, "metadata.user_id: Input should be a valid string"),
    ({"metadata": {"user": "x"}}, "metadata.user: unknown field"),
    ({"service_tier": "best"}, "service_tier: Input should be 'auto' or 'standard_only'"),
    ({"thinking": "on"}, "thinking: must be an object, not a string"),
    ({"thinking": {}}, "thinking.type: is required"),
    ({"thinking": {"type": "deep"}}, "thinking.type: must be one of enabled, adaptive, disabled"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens: is required"),
    (
        {"thinking": {"type": "enabled", "budget_tokens": 1023}, "max_tokens": 2000},
        "thinking.budget_tokens: Input should be greater than or equal to 1024",
    ),
    (
        {"thinking": THINKING, "max_tokens": 1024},
        "thinking.budget_tokens: must be less than max_tokens, got 1024 and 1024",
    ),
    ({"thinking": {"type": "disabled", "budget_tokens": 1}}, "thinking.budget_tokens: unknown field"),
    ({"tool_choice": "auto"}, "tool_choice: must be an object, not a string"),
    ({"tool_choice": {"type": "required"}}, "tool_choice.type: must be one of auto, any, tool, none"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name: is required"),
    (
        {"output_config": {"effort": "huge"}},
        "output_config.effort: Input should be 'low', 'medium', 'high', 'xhigh' or 'max'",
    ),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema: is required"),
    (
        {
            "output_config": {"format": {"type": "json_schema", "schema": {}}},
            "output_format": {"type": "json_schema", "schema": {}},
        },
        "output_format: is the earlier name of output_config.format; give one of them",
    ),
    ({"context_management": {"edits": 3}}, "context_management.edits: must be an array of objects"),
    ({"cache_control": {"type": "ephemeral", "ttl": "9h"}}, "cache_control.ttl: Input should be '5m' or '1h'"),
    ({"max_token": 5}, "max_token: unknown field; did you mean max_tokens?"),
    ({"n": 2}, "n: unknown field"),
]


@pytest.mark.parametrize(("fields", "message"), BAD)
def test_bad_bodies(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(MessagesRequest, {**BODY, **fields})
    assert str(caught.value) == message
    assert caught.value.param == message.split(": ")[0]


@pytest.mark.parametrize("name", ["model", "max_tokens", "messages"])
def test_required_fields(name: str) -> None:
    with pytest.raises(UserError, match=f"^{name}: is required$"):
        parse(MessagesRequest, {key: value for key, value in BODY.items() if key != name})


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"inference_geo": "us"}, "inference_geo"),
        ({"thread": {"type": "create"}}, "thread"),
        ({"compaction": {}}, "compaction"),
        ({"fallbacks": ["m"]}, "fallbacks"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"output_config": {"task_budget": {"total": 1}}}, "output_config.task_budget"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management.edits.0"),
        ({"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}}, "context_management.edits.0"),
    ],
)
def test_fields_that_are_refused(fields: dict[str, Any], path: str) -> None:
    with pytest.raises(Unsupported) as caught:
        parse(MessagesRequest, {**BODY, **fields})
    assert str(caught.value).startswith(path)
    assert caught.value.param == path
