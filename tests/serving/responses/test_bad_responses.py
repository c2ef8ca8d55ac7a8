"""Requests that are refused: status, param and code of each, and nothing reaches the engine."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serving.rig import Rig

PATH = "/v1/responses"
TOOL: dict[str, Any] = {"type": "function", "name": "f", "parameters": {"type": "object"}}
FORMAT: dict[str, Any] = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}


def text(**fields: Any) -> dict[str, Any]:
    return {"text": {"format": {**FORMAT, **fields}}}


BAD: list[tuple[dict[str, Any], str | None]] = [
    ({"model": None}, "model"),
    ({"model": 3}, "model"),
    ({"input": None}, "input"),
    ({"input": 3}, "input"),
    ({"input": []}, "input"),
    ({"input": {"role": "user", "content": "x"}}, "input"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input"),
    ({"messages": [{"role": "user", "content": "x"}]}, "messages"),
    ({"max_tokens": 3}, "max_tokens"),
    ({"nonsense": 1}, "nonsense"),
    ({"instructions": ["x"]}, "instructions"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": -1}, "max_output_tokens"),
    ({"max_output_tokens": 1.5}, "max_output_tokens"),
    ({"max_output_tokens": "5"}, "max_output_tokens"),
    ({"max_output_tokens": 10**6}, "max_output_tokens"),
    ({"max_tool_calls": -1}, "max_tool_calls"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": -1}, "top_logprobs"),
    ({"include": ["everything"]}, "include[0]"),
    ({"include": "message.output_text.logprobs"}, "include"),
    ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
    ({"metadata": {"k" * 65: "v"}}, "metadata"),
    ({"metadata": {"k": "v" * 513}}, "metadata.k"),
    ({"metadata": {"k": 3}}, "metadata.k"),
    ({"metadata": "x"}, "metadata"),
    ({"stream": "yes"}, "stream"),
    ({"stream": False, "stream_options": {"include_obfuscation": False}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": True}}, "stream_options.include_usage"),
    ({"background": True, "store": False}, "background"),
    ({"store": "no"}, "store"),
    ({"service_tier": "gold"}, "service_tier"),
    ({"truncation": "middle"}, "truncation"),
    ({"prompt_cache_retention": "1y"}, "prompt_cache_retention"),
    ({"user": 3}, "user"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"previous_response_id": "resp_none"}, "previous_response_id"),
    ({"previous_response_id": 3}, "previous_response_id"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
    ({"reasoning": {"speed": 1}}, "reasoning.speed"),
    ({"reasoning": "low"}, "reasoning"),
    ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
    ({"text": {"format": {}}}, "text.format.type"),
    ({"text": {"format": "json"}}, "text.format"),
    ({"text": {"verbosity": "loud"}}, "text.verbosity"),
    ({"text": {"size": 3}}, "text.size"),
    (text(name=None), "text.format.name"),
    (text(name="a b"), "text.format.name"),
    (text(name="x" * 65), "text.format.name"),
    (text(schema=None), "text.format.schema"),
    (text(schema="{}"), "text.format.schema"),
    (text(strict="yes"), "text.format.strict"),
    (text(json_schema={"name": "n", "schema": {}}), "text.format.json_schema"),
    (text(schema={"type": "nonsense"}), "text.format.schema"),
    (text(schema={"$ref": "#/$defs/none"}), "text.format.schema"),
    ({"tools": {}}, "tools"),
    ({"tools": ["f"]}, "tools[0]"),
    ({"tools": [{"name": "f"}]}, "tools[0].type"),
    ({"tools": [TOOL, {**TOOL, "name": None}]}, "tools[1].name"),
    ({"tools": [TOOL, TOOL]}, "tools[1].name"),
    ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name"),
    ({"tools": [{**TOOL, "description": 3}]}, "tools[0].description"),
    ({"tools": [{**TOOL, "parameters": []}]}, "tools[0].parameters"),
    ({"tools": [{**TOOL, "strict": 1}]}, "tools[0].strict"),
    ({"tools": [{**TOOL, "speed": 1}]}, "tools[0].speed"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].function"),
    (
        {"tools": [{**TOOL, "parameters": {"properties": {"a": {"type": "x"}}}}]},
        "tools[0].parameters.properties.a.type",
    ),
    ({"tool_choice": "sometimes"}, "tool_choice"),
    ({"tool_choice": 3}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
    ({"tools": [{**TOOL, "name": f"f{i}"} for i in range(129)]}, "tools"),
    ({"tools": [{**TOOL, "parameters": {"type": "array"}}]}, "tools[0].parameters.type"),
    ({**text(), "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ({"bad_words": [""]}, "bad_words[0]"),
    ({"max_reasoning_tokens": -1}, "max_reasoning_tokens"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.name"),
    ({"tools": [TOOL], "tool_choice": {}}, "tool_choice.type"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice.tools"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "tools": [TOOL]}}, "tool_choice.mode"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"999": 1}}, "logit_bias"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"top_k": -2}, "top_k"),
    ({"min_tokens": 5, "max_output_tokens": 4}, "min_tokens"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
]

UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0].type"),
    ({"priority": 1}, "priority"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"conversation": {"id": "conv_1"}}, "conversation"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ({"context_management": [{"type": "compaction"}]}, "context_management"),
    ({"moderation": {"model": "m"}}, "moderation"),
    ({"access_programs": {"cyber": "standard"}}, "access_programs"),
    ({"background_options": {"completion_window": "8h"}}, "background_options"),
    ({"reasoning": {"context": "all_turns"}}, "reasoning.context"),
    ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "custom", "name": "c"}]}, "tools[0].type"),
    ({"tools": [TOOL], "tool_choice": {"type": "file_search"}}, "tool_choice.type"),
    ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, "input[0].type"),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_bad_requests(stream: bool) -> None:
    async with Rig() as rig:
        for body, param in [*BAD, *UNSUPPORTED]:
            asked = {"model": "fake", "input": "hi", "stream": stream, **body}
            response = await rig.post(PATH, {name: value for name, value in asked.items() if value is not None})
            assert response.status_code == 400, (body, response.text)
            error = response.json()["error"]
            assert error["type"] == "invalid_request_error" and error["message"], body
            assert error["param"] == param, (body, error)
            assert (error["code"] == "unsupported_parameter") == (
                (body, param) in UNSUPPORTED or body == {"priority": 1}
            )
        assert not rig.links[0].submitted


NEUTRAL: list[dict[str, Any]] = [
    {name: None}
    for name in (
        *("background", "conversation", "include", "instructions", "max_output_tokens", "max_tool_calls", "metadata"),
        *("moderation", "parallel_tool_calls", "previous_response_id", "prompt", "prompt_cache_key", "reasoning"),
        *("safety_identifier", "service_tier", "store", "stream", "stream_options", "temperature", "text", "tools"),
        *("tool_choice", "top_logprobs", "top_p", "truncation", "user", "context_management", "seed", "stop"),
    )
] + [
    {"tools": []},
    {"tools": [], "tool_choice": "auto"},
    {"tool_choice": "none"},
    {"context_management": []},
    {"background_options": {"completion_window": "soonest"}},
    {"reasoning": {}},
    {"text": {}},
    {"metadata": {}},
    {"include": []},
    {"prompt_cache_options": {"mode": "implicit"}},
    {"metadata": {str(i): "v" * 512 for i in range(16)}},
]


async def test_what_asks_for_nothing_is_accepted() -> None:
    async with Rig() as rig:
        for body in NEUTRAL:
            response = await rig.post(PATH, {"model": "fake", "input": "hi", "max_output_tokens": 1, **body})
            assert response.status_code == 200, (body, response.text)


@pytest.mark.parametrize(
    ("method", "path", "status", "param"),
    [
        ("GET", "/resp_none", 404, None),
        ("GET", "/resp_none?stream=true", 404, None),
        ("GET", "/resp_none/input_items", 404, None),
        ("DELETE", "/resp_none", 404, None),
        ("POST", "/resp_none/cancel", 404, None),
        ("GET", "/" + "x" * 3000, 404, None),
        ("POST", "/compact", 400, None),
        ("POST", "/resp_none", 405, None),
        ("GET", "", 405, None),
        ("PUT", "", 405, None),
        ("GET", "/resp_none/cancel", 405, None),
        ("GET", "/ID?stream=maybe", 400, "stream"),
        ("GET", "/ID?stream=true", 400, "stream"),
        ("GET", "/ID?starting_after=1", 400, "starting_after"),
        ("GET", "/ID?stream=true&starting_after=-1", 400, "starting_after"),
        ("GET", "/ID?include=everything", 400, "include"),
        ("GET", "/ID?include[]=everything", 400, "include"),
        ("GET", "/ID/input_items?limit=0", 400, "limit"),
        ("GET", "/ID/input_items?limit=101", 400, "limit"),
        ("GET", "/ID/input_items?limit=x", 400, "limit"),
        ("GET", "/ID/input_items?order=up", 400, "order"),
        ("GET", "/ID/input_items?after=msg_none", 400, "after"),
        ("GET", "/ID/output_items", 404, None),
    ],
)
async def test_bad_paths_and_queries(method: str, path: str, status: int, param: str | None) -> None:
    async with Rig() as rig:
        kept = await rig.post(PATH, {"model": "fake", "input": "hi", "max_output_tokens": 1})
        response = await rig.http.request(method, PATH + path.replace("ID", kept.json()["id"]))
        assert response.status_code == status, response.text
        error = response.json()["error"]
        assert error["param"] == param and error["message"] and error["type"] == "invalid_request_error"


async def test_bad_counts() -> None:
    async with Rig() as rig:
        for body, param in [({}, "input"), ({"input": "hi", "personality": "friendly"}, "personality")]:
            response = await rig.post(f"{PATH}/input_tokens", body)
            assert response.status_code == 400 and response.json()["error"]["param"] == param
        response = await rig.post(f"{PATH}/input_tokens", {"input": "hi", "model": "other"})
        assert response.status_code == 404
