"""Tools in chat completions: what the model is told, what its calls become, streamed and not."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.serving.chat_chunks import join_choices
from tests.serving.rig import Rig, ScriptedGrammars
from tests.serving.scripted import says, says_by_choice
from tests.serving.templates import HERMES
from tests.serving.test_bad_requests import check

PATH = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'


async def both(rig: Rig, **body: Any) -> list[dict[str, Any]]:
    """The choices of an answer, after checking that its stream joins to the same."""
    whole = await rig.chat(messages=USER, **body)
    joined = join_choices(await rig.stream(PATH, messages=USER, **body))
    assert len(whole["choices"]) == len(joined)
    for choice in whole["choices"]:
        message, streamed = choice["message"], joined[choice["index"]]["message"]
        for mine, theirs in zip(message.get("tool_calls", []), streamed.get("tool_calls", []), strict=True):
            assert mine.pop("id").startswith("call_") and theirs.pop("id").startswith("call_")
        assert {name: value for name, value in message.items() if value is not None} == {
            name: value for name, value in streamed.items() if value is not None
        }
        assert choice["finish_reason"] == joined[choice["index"]]["finish_reason"]
    return whole["choices"]


async def test_a_call() -> None:
    async with Rig(says(CALL), template=HERMES) as rig:
        (choice,) = await both(rig, tools=[WEATHER])
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"] == {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": '{"city": "Zürich"}'}}],
        }


async def test_content_and_several_calls() -> None:
    async with Rig(says(f"Let me see.\n{CALL}\n{SECOND}"), template=HERMES) as rig:
        (choice,) = await both(rig, tools=[WEATHER, CLOCK])
        assert choice["message"]["content"].strip() == "Let me see."
        names = [call["function"]["name"] for call in choice["message"]["tool_calls"]]
        assert names == ["weather", "clock"]
        assert choice["finish_reason"] == "tool_calls"


async def test_without_parallel_calls_the_first_counts() -> None:
    async with Rig(says(f"{CALL}\n{SECOND}"), template=HERMES) as rig:
        (choice,) = await both(rig, tools=[WEATHER, CLOCK], parallel_tool_calls=False)
        assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["weather"]


async def test_an_answer_without_calls() -> None:
    async with Rig(says("Sunny."), template=HERMES) as rig:
        (choice,) = await both(rig, tools=[WEATHER])
        assert choice["message"] == {"role": "assistant", "content": "Sunny.", "refusal": None}
        assert choice["finish_reason"] == "stop"


async def test_an_empty_answer_has_empty_content() -> None:
    async with Rig(says(""), template=HERMES) as rig:
        (choice,) = await both(rig, tools=[WEATHER])
        assert choice["message"]["content"] == ""


async def test_a_call_that_is_cut_off() -> None:
    async with Rig(says(CALL), template=HERMES) as rig:
        (choice,) = await both(rig, tools=[WEATHER], max_tokens=len(CALL) - 22)
        assert choice["finish_reason"] == "length"
        arguments = choice["message"]["tool_calls"][0]["function"]["arguments"]
        assert '{"city": "Zürich"}'.startswith(arguments)


async def test_choices_have_calls_of_their_own() -> None:
    async with Rig(says_by_choice(CALL, "No.", SECOND), template=HERMES) as rig:
        choices = await both(rig, tools=[WEATHER, CLOCK], n=3)
        assert [choice["finish_reason"] for choice in choices] == ["tool_calls", "stop", "tool_calls"]
        assert choices[1]["message"]["content"] == "No."


@pytest.mark.parametrize("choice", ["none", "auto", "required", {"type": "function", "function": {"name": "weather"}}])
async def test_the_template_gets_the_tools_unless_there_is_no_choice(choice: Any) -> None:
    async with Rig(says("x"), template=HERMES, grammars=ScriptedGrammars(CALL)) as rig:
        got = await rig.chat(messages=USER, tools=[WEATHER], tool_choice=choice, return_token_ids=True)
        prompt = bytes(got["prompt_token_ids"]).decode()
        if choice == "none":
            assert prompt == "user:hi\nassistant:"
        else:
            first, rest = prompt.split("\n", 1)
            assert json.loads(first.removeprefix("tool ")) == WEATHER
            assert rest == "user:hi\nassistant:"


async def test_what_looks_like_a_call_is_content_where_there_are_no_tools() -> None:
    async with Rig(says(CALL), template=HERMES) as rig:
        for body in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
            (choice,) = await both(rig, **body)
            assert choice["message"]["content"] == CALL
            assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("fields", "calls"),
    [
        ({"tool_choice": "required"}, ["weather", "clock"]),
        ({"tool_choice": "required", "parallel_tool_calls": False}, ["weather", "clock"]),
        ({"tool_choice": {"type": "function", "function": {"name": "clock"}}}, ["clock"]),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {
                        "mode": "required",
                        "tools": [{"type": "function", "function": {"name": "weather"}}],
                    },
                }
            },
            ["weather"],
        ),
    ],
)
async def test_a_call_that_must_come_has_a_grammar(fields: dict[str, Any], calls: list[str]) -> None:
    grammars = ScriptedGrammars(CALL)
    async with Rig(says("never"), template=HERMES, grammars=grammars) as rig:
        (choice,) = await both(rig, tools=[WEATHER, CLOCK], **fields)
        assert choice["finish_reason"] == "tool_calls"
        assert grammars.sources[0].kind == "structural_tag"
        for name in ("weather", "clock"):
            assert (f'\\"{name}\\"' in grammars.sources[0].text) == (name in calls)


async def test_strict_tools_have_a_grammar_where_the_model_may_choose() -> None:
    grammars = ScriptedGrammars(CALL)
    async with Rig(says("no grammar"), template=HERMES, grammars=grammars) as rig:
        strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
        assert (await rig.chat(messages=USER, tools=[strict]))["choices"][0]["finish_reason"] == "tool_calls"
        assert len(grammars.sources) == 1
        got = await rig.chat(messages=USER, tools=[WEATHER])
        assert got["choices"][0]["message"]["content"] == "no grammar"


async def test_a_format_holds_for_the_answer_that_is_given_instead_of_a_call() -> None:
    grammars = ScriptedGrammars('{"a": 1}')
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    async with Rig(template=HERMES, grammars=grammars) as rig:
        (choice,) = await both(rig, tools=[WEATHER], response_format=form)
        assert choice["message"]["content"] == '{"a": 1}'
        made = json.loads(grammars.sources[0].text)["format"]
        assert made["type"] == "or"
        assert made["elements"][0] == {"type": "json_schema", "json_schema": schema}
        grammars.output = CALL
        (choice,) = await both(rig, tools=[WEATHER], response_format=form, tool_choice="required")
        assert choice["finish_reason"] == "tool_calls"
        assert json.loads(grammars.sources[-1].text)["format"]["type"] != "or"


async def test_a_server_that_reads_no_calls() -> None:
    async with Rig(says(CALL), template=HERMES, tool_call_parser="none") as rig:
        (choice,) = await both(rig, tools=[WEATHER])
        assert choice["message"]["content"] == CALL
        body = {"model": "fake", "messages": USER, "tools": [WEATHER], "tool_choice": "required"}
        check(await rig.post(PATH, body), 400, "tool_choice", "unsupported_parameter")


async def test_a_turn_with_results() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
    history = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "rain"}]},
    ]
    async with Rig(says("Rain."), template=HERMES) as rig:
        got = await rig.chat(messages=history, return_token_ids=True)
        assert bytes(got["prompt_token_ids"]).decode() == (
            'user:hi\nassistant:<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>#call_1\n'
            "tool:rain@call_1\nassistant:"
        )


async def test_a_template_that_knows_no_tools_gets_instructions() -> None:
    async with Rig(says('[{"name": "weather", "arguments": {"city": "Bern"}}]')) as rig:
        for messages, begin in [
            (USER, "system:You can call functions."),
            ([{"role": "system", "content": "Be brief."}, *USER], "system:Be brief.\n\nYou can call functions."),
            (
                [{"role": "developer", "content": [{"type": "text", "text": "Be brief."}]}, *USER],
                "system:Be brief.\nYou can call functions.",
            ),
        ]:
            got = await rig.chat(messages=messages, tools=[WEATHER], return_token_ids=True)
            prompt = bytes(got["prompt_token_ids"]).decode()
            assert prompt.startswith(begin)
            assert '"city"' in prompt and '[{"name": "function name"' in prompt
            assert got["choices"][0]["finish_reason"] == "tool_calls"


async def test_log_probabilities_cover_calls_too() -> None:
    async with Rig(says(f"Hm. {CALL}"), template=HERMES) as rig:
        body: dict[str, Any] = {"messages": USER, "tools": [WEATHER], "logprobs": True, "top_logprobs": 1}
        whole = (await rig.chat(**body))["choices"][0]["logprobs"]["content"]
        assert bytes(byte for entry in whole[:-1] for byte in entry["bytes"]).decode() == f"Hm. {CALL}"
        assert whole[-1]["token"] == "<eos>"
        assert join_choices(await rig.stream(PATH, **body))[0]["logprobs"] == whole


async def test_functions_as_they_were_before_tools() -> None:
    function = WEATHER["function"]
    async with Rig(says(f"{CALL}{SECOND}"), template=HERMES, grammars=ScriptedGrammars(CALL)) as rig:
        for choice in (None, "auto", {"name": "weather"}):
            (got,) = await both(rig, functions=[function], function_call=choice)
            assert got["message"] == {
                "role": "assistant",
                "content": None,
                "refusal": None,
                "function_call": {"name": "weather", "arguments": '{"city": "Zürich"}'},
            }
            assert got["finish_reason"] == "function_call"
        history = [
            *USER,
            {"role": "assistant", "content": None, "function_call": got["message"]["function_call"]},
            {"role": "function", "name": "weather", "content": "rain"},
        ]
        body = await rig.chat(messages=history, functions=[function], function_call="none", return_token_ids=True)
        assert bytes(body["prompt_token_ids"]).decode() == (
            'user:hi\nassistant:<tool_call>{"name": "weather", "arguments": {"city": "Zürich"}}</tool_call>'
            "#call_weather\ntool:rain@call_weather\nassistant:"
        )


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **function}}


TWO = [tool(), tool()]
BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": {}}, "tools"),
    ({"tools": ["f"]}, "tools[0]"),
    ({"tools": [{}]}, "tools[0].type"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "name": "f"}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ({"tools": [tool(name="")]}, "tools[0].function.name"),
    ({"tools": [tool(name="a b")]}, "tools[0].function.name"),
    ({"tools": [tool(name="f\n")]}, "tools[0].function.name"),
    ({"tools": [tool(name="a" * 65)]}, "tools[0].function.name"),
    ({"tools": [tool(name="é")]}, "tools[0].function.name"),
    ({"tools": [tool(description=5)]}, "tools[0].function.description"),
    ({"tools": [tool(strict="yes")]}, "tools[0].function.strict"),
    ({"tools": [tool(colour="red")]}, "tools[0].function.colour"),
    ({"tools": [tool(parameters="x")]}, "tools[0].function.parameters"),
    ({"tools": [tool(parameters={"type": "array"})]}, "tools[0].function.parameters.type"),
    ({"tools": [CLOCK, tool(parameters={"properties": []})]}, "tools[1].function.parameters.properties"),
    (
        {"tools": [tool(parameters={"properties": {"x": {"type": "int"}}})]},
        "tools[0].function.parameters.properties.x.type",
    ),
    ({"tools": [tool(parameters={"required": "x"})]}, "tools[0].function.parameters.required"),
    ({"tools": [tool(parameters={"anyOf": []})]}, "tools[0].function.parameters.anyOf"),
    ({"tools": TWO}, "tools[1].function.name"),
    ({"tools": [tool(name=f"f{i}") for i in range(129)]}, "tools"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"tools": [], "tool_choice": "auto"}, "tools"),
    ({"tools": [CLOCK], "tool_choice": "maybe"}, "tool_choice"),
    ({"tools": [CLOCK], "tool_choice": 5}, "tool_choice"),
    ({"tools": [CLOCK], "tool_choice": []}, "tool_choice"),
    ({"tools": [CLOCK], "tool_choice": {}}, "tool_choice.type"),
    ({"tools": [CLOCK], "tool_choice": {"type": "custom", "custom": {"name": "f"}}}, "tool_choice.type"),
    ({"tools": [CLOCK], "tool_choice": {"type": "function"}}, "tool_choice.function"),
    ({"tools": [CLOCK], "tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name"),
    ({"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice.function.name"),
    ({"tools": [CLOCK], "tool_choice": {"type": "function", "name": "clock"}}, "tool_choice.name"),
    ({"tools": [CLOCK], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
    (
        {"tools": [CLOCK], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "all"}}},
        "tool_choice.allowed_tools.mode",
    ),
    (
        {"tools": [CLOCK], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
        "tool_choice.allowed_tools.tools",
    ),
    (
        {
            "tools": [CLOCK],
            "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [WEATHER]}},
        },
        "tool_choice.allowed_tools.tools[0].function.description",
    ),
    ({"tools": [CLOCK], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"functions": {}}, "functions"),
    ({"functions": [{}]}, "functions[0].name"),
    ({"functions": [{"name": "f", "parameters": {"required": 5}}]}, "functions[0].parameters.required"),
    ({"functions": [{"name": "f"}, {"name": "f"}]}, "functions[1].name"),
    ({"functions": [{"name": "f"}], "function_call": "required"}, "function_call"),
    ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call.name"),
    ({"function_call": "auto"}, "function_call"),
    ({"functions": [{"name": "f"}], "tools": [CLOCK]}, "functions"),
    ({"tools": [CLOCK], "function_call": "auto"}, "function_call"),
]


@pytest.mark.parametrize(("fields", "param"), BAD)
async def test_bad_tools(fields: dict[str, Any], param: str) -> None:
    async with Rig(says("x"), template=HERMES, grammars=ScriptedGrammars("x")) as rig:
        check(await rig.post(PATH, {"model": "fake", "messages": USER, **fields}), 400, param)
        await rig.idle()


async def test_tokenizing_a_conversation_with_tools() -> None:
    async with Rig(template=HERMES) as rig:
        got = await rig.chat(messages=USER, tools=[WEATHER], max_tokens=1, return_token_ids=True)
        tokenized = (await rig.post("/tokenize", {"messages": USER, "tools": [WEATHER]})).json()
        assert tokenized["tokens"] == got["prompt_token_ids"]


class GetWeather(BaseModel):
    city: str


async def test_the_official_clients_helpers() -> None:
    output = f"Hm. {CALL.replace('weather', 'GetWeather')}"
    async with Rig(says("x"), template=HERMES, grammars=ScriptedGrammars(output)) as rig, rig.openai() as client:
        tools = [openai.pydantic_function_tool(GetWeather)]
        parsed = await client.chat.completions.parse(model="fake", messages=USER, tools=tools)  # type: ignore[arg-type]
        (call,) = parsed.choices[0].message.tool_calls or ()
        assert call.function.parsed_arguments == GetWeather(city="Zürich")
        kinds = set()
        async with client.chat.completions.stream(model="fake", messages=USER, tools=tools) as stream:  # type: ignore[arg-type]
            async for event in stream:
                kinds.add(event.type)
        assert {"content.delta", "tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
        final = (await stream.get_final_completion()).choices[0]
        assert final.finish_reason == "tool_calls"
        assert final.message.content is not None and final.message.content.strip() == "Hm."
        (call,) = final.message.tool_calls or ()
        assert call.function.parsed_arguments == GetWeather(city="Zürich")
        again = await client.chat.completions.create(
            model="fake",
            messages=[*USER, final.message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "rain"}],  # type: ignore[list-item]
        )
        assert again.choices[0].message.content == "x"
