"""Structured output and tools with a real model and real grammars, through the whole app in one process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import jsonschema
import openai
import pytest
import pytest_asyncio

from pagedray.deployments.commands.local_link import LocalServer
from pagedray.engine.config import load_config
from pagedray.engine.local_worker import local_tokenizer, local_worker
from tests.serving.chat_chunks import join_choices
from tests.serving.rig import read_sse

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL = "smollm2-135m-instruct"
USER = [{"role": "user", "content": "What is the weather in Paris?"}]
NEIGHBOURS = ["Count to ten.", "Who wrote Hamlet?"]
SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "degrees": {"type": "integer", "minimum": -50, "maximum": 60},
            "sky": {"enum": ["clear", "cloudy", None]},
        },
        "required": ["city", "degrees", "sky"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/point"}], "$defs": {"point": {"const": {"x": 1}}}},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["c", "f"]}},
                "required": ["city", "unit"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "get_time"}},
]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def server() -> AsyncIterator[LocalServer]:
    config = load_config(overrides={"num_kv_blocks": 512, "max_model_len": 1024, "grammar_timeout_s": 60})
    worker = local_worker(config)
    async with LocalServer(config, local_tokenizer(config), worker, worker.load()) as server:
        yield server


async def chat(server: LocalServer, **body: Any) -> dict[str, Any]:
    """The one choice of an answer."""
    sent = {"model": MODEL, "messages": USER, "max_tokens": 80, "temperature": 0, **body}
    response = await server.http.post("/chat/completions", json=sent)
    assert response.status_code == 200, response.text
    if body.get("stream"):
        return join_choices(read_sse(response.text))[0]
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


async def test_schemas_are_kept_beside_neighbours_that_have_none(server: LocalServer) -> None:
    def free(text: str) -> Any:
        return chat(server, messages=[{"role": "user", "content": text}], max_tokens=8)

    alone = [(await free(text))["message"]["content"] for text in NEIGHBOURS]
    asked = [
        (schema, chat(server, response_format=schema_format(schema), stream=stream, temperature=heat, seed=seed))
        for schema in SCHEMAS
        for stream, heat, seed in ((False, 0, 1), (True, 1, 2))
    ]
    answers, neighbours = await asyncio.gather(
        asyncio.gather(*(answer for _, answer in asked)), asyncio.gather(*map(free, NEIGHBOURS))
    )
    assert [choice["message"]["content"] for choice in neighbours] == alone
    for (schema, _), choice in zip(asked, answers, strict=True):
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(choice["message"]["content"]), schema)


@pytest.mark.parametrize("stream", [False, True])
async def test_other_grammars(server: LocalServer, stream: bool) -> None:
    for outputs, allowed in [
        ({"choice": ["sunny", "rainy"]}, {"sunny", "rainy"}),
        ({"regex": "(un)?likely, [0-9]%"}, {f"{word}, {i}%" for word in ("likely", "unlikely") for i in range(10)}),
        ({"grammar": 'root ::= "a" ("b" | "c")'}, {"ab", "ac"}),
    ]:
        choice = await chat(server, structured_outputs=outputs, stream=stream, logprobs=True)
        assert choice["message"]["content"] in allowed
        assert choice["finish_reason"] == "stop"


def check_weather(call: dict[str, Any]) -> None:
    assert call["type"] == "function" and call["id"].startswith("call_")
    assert call["function"]["name"] == "get_weather"
    jsonschema.validate(json.loads(call["function"]["arguments"]), TOOLS[0]["function"]["parameters"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("heat", [0, 1])
async def test_a_call_that_must_come(server: LocalServer, stream: bool, heat: float) -> None:
    how: dict[str, Any] = {"tools": TOOLS, "temperature": heat, "seed": 3, "stream": stream}
    named = await chat(server, tool_choice={"type": "function", "function": {"name": "get_weather"}}, **how)
    (call,) = named["message"]["tool_calls"]
    check_weather(call)
    assert named["message"]["content"] is None and named["finish_reason"] == "tool_calls"
    one = await chat(server, tool_choice="required", parallel_tool_calls=False, **how)
    assert len(one["message"]["tool_calls"]) == 1 and one["finish_reason"] == "tool_calls"


async def test_streams_and_whole_answers_agree(server: LocalServer) -> None:
    for choice in ("auto", "required"):
        answers = [
            await chat(
                server, tools=TOOLS, tool_choice=choice, stream=stream, response_format=schema_format(SCHEMAS[0])
            )
            for stream in (False, True)
        ]
        for answer in answers:
            for call in answer["message"].get("tool_calls", ()):
                del call["id"]
        assert answers[0]["message"] == answers[1]["message"]


async def test_a_turn_with_the_result(server: LocalServer) -> None:
    first = await chat(server, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "get_weather"}})
    call = first["message"]["tool_calls"][0]
    history = [*USER, first["message"], {"role": "tool", "tool_call_id": call["id"], "content": "21 degrees, sunny"}]
    again = await chat(server, messages=history, tools=TOOLS, max_tokens=4, logprobs=True)
    assert len(again["logprobs"]["content"]) == 4


async def test_several_choices(server: LocalServer) -> None:
    body = {"model": MODEL, "messages": USER, "n": 3, "seed": 5, "max_tokens": 80}
    response = await server.http.post("/chat/completions", json={**body, "response_format": schema_format(SCHEMAS[0])})
    for choice in response.json()["choices"]:
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMAS[0])


async def test_bad_schemas_harm_nobody(server: LocalServer) -> None:
    bad = [{"type": "objekt"}, {"$ref": "#/nowhere"}, {"type": "string", "pattern": "("}]
    refused, good = await asyncio.gather(
        asyncio.gather(
            *(
                server.http.post(
                    "/chat/completions",
                    json={"model": MODEL, "messages": USER, "response_format": schema_format(schema)},
                )
                for schema in bad
            )
        ),
        chat(server, response_format=schema_format(SCHEMAS[0])),
    )
    for response in refused:
        assert response.status_code == 400
        assert response.json()["error"]["param"].startswith("response_format.json_schema.schema")
    jsonschema.validate(json.loads(good["message"]["content"]), SCHEMAS[0])


async def test_the_official_client(server: LocalServer) -> None:
    client = openai.AsyncOpenAI(base_url=str(server.http.base_url), api_key="none", http_client=server.http)
    parameters: Any = {"model": MODEL, "messages": USER, "temperature": 0, "max_tokens": 80}
    async with client.chat.completions.stream(
        **parameters, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "get_weather"}}
    ) as stream:
        final = await stream.get_final_completion()
    (call,) = final.choices[0].message.tool_calls or ()
    check_weather(call.model_dump(exclude={"function": {"parsed_arguments"}}))
    assert final.choices[0].finish_reason == "tool_calls"
