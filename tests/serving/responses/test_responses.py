"""/v1/responses over fake workers: raw, with every event checked, and through the official client."""

from __future__ import annotations

from typing import Any, Literal

import openai
import pytest
from openai.types.responses import FunctionToolParam, ResponseFunctionToolCall, ResponseOutputMessage
from pydantic import BaseModel

from tests.fakes import EOS_ID, FakeWorker, greedy
from tests.serving.responses.events import Event, check_response, check_stream, read_events
from tests.serving.rig import Rig, text_of
from tests.serving.scripted import says

PATH = "/v1/responses"
ADD: FunctionToolParam = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    "strict": False,
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


async def create(rig: Rig, **body: Any) -> Event:
    response = await rig.post(PATH, {"model": "fake", "input": "hi", **body})
    assert response.status_code == 200, response.text
    got: Event = response.json()
    check_response(got)
    return got


async def stream(rig: Rig, **body: Any) -> list[Event]:
    response = await rig.post(PATH, {"model": "fake", "input": "hi", "stream": True, **body})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = read_events(response.text)
    check_stream(events)
    return events


def prompt_of(rig: Rig, index: int = -1) -> str:
    """What the model read."""
    return bytes(rig.links[0].submitted[index].prompt_ids).decode()


def without_ids(value: Any) -> Any:
    """A response without what differs between equal ones."""
    if isinstance(value, dict):
        changing = ("id", "created_at", "completed_at", "input_tokens_details", "call_id")
        return {name: without_ids(inner) for name, inner in value.items() if name not in changing}
    return [without_ids(inner) for inner in value] if isinstance(value, list) else value


async def test_a_whole_response() -> None:
    async with Rig(says("Hello!")) as rig:
        got = await create(rig)
        item = got["output"][0]
        assert got["id"].startswith("resp_") and isinstance(got["created_at"], int)
        assert got["completed_at"] >= got["created_at"]
        assert {**without_ids(got), "output": 0, "usage": 0} == {
            "object": "response",
            "status": "completed",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "max_output_tokens": None,
            "max_tool_calls": None,
            "model": "fake",
            "output": 0,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "prompt_cache_key": None,
            "prompt_cache_retention": None,
            "reasoning": {"effort": None, "summary": None},
            "safety_identifier": None,
            "service_tier": "default",
            "store": True,
            "temperature": 1.0,
            "text": {"format": {"type": "text"}, "verbosity": "medium"},
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": 0,
            "top_p": 1.0,
            "truncation": "disabled",
            "usage": 0,
            "user": None,
            "metadata": {},
        }
        assert without_ids(item) == {
            "type": "message",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Hello!", "annotations": [], "logprobs": []}],
        }
        assert got["usage"] == {
            "input_tokens": len("user:hi\nassistant:"),
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": len("Hello!") + 1,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": len("user:hi\nassistant:") + len("Hello!") + 1,
        }
        again = await create(rig)
        assert again["usage"]["input_tokens_details"]["cached_tokens"] == 16


async def test_what_applied_is_said() -> None:
    fields: dict[str, Any] = {
        "instructions": "be brief",
        "max_output_tokens": 7,
        "max_tool_calls": 3,
        "metadata": {"k": "v"},
        "parallel_tool_calls": False,
        "prompt_cache_key": "p",
        "prompt_cache_retention": "24h",
        "safety_identifier": "s",
        "temperature": 0.5,
        "top_p": 0.25,
        "top_logprobs": 2,
        "truncation": "auto",
        "user": "u",
        "tools": [ADD],
        "store": False,
    }
    async with Rig() as rig:
        asked = {
            "service_tier": "flex",
            "reasoning": {"effort": "low", "summary": "auto", "context": "auto", "mode": "standard"},
            "text": {"verbosity": "medium", "format": {"type": "text"}},
            "include": ["reasoning.encrypted_content"],
            "background": False,
            "image": {},
        }
        got = await create(rig, **fields, **asked)
        assert {name: got[name] for name in fields} == fields
        assert got["reasoning"] == {"effort": "low", "summary": None}
        assert got["service_tier"] == "default"
        params = rig.links[0].submitted[0].params
        assert (params.temperature, params.top_p, params.max_tokens, params.logprobs) == (0.5, 0.25, 7, None)


async def test_fields_of_chat_completions_reach_the_engine() -> None:
    fields: dict[str, Any] = {
        "seed": 5,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "top_k": 3,
        "min_p": 0.5,
        "repetition_penalty": 1.5,
        "min_tokens": 1,
        "ignore_eos": True,
    }
    ids = {"allowed_token_ids": [65, 66], "bad_token_ids": [66], "stop_token_ids": [67]}
    async with Rig() as rig:
        await create(rig, max_output_tokens=2, logit_bias={"65": 2}, cache_salt="s", **fields, **ids)
        request = rig.links[0].submitted[0]
        assert {name: getattr(request.params, name) for name in fields} == fields
        assert {name: list(getattr(request.params, name)) for name in ids} == ids
        assert request.params.logit_bias == ((65, 2.0),)
        assert request.cache_salt == "s"


@pytest.mark.parametrize("parts", [{"stop": "C"}, {"stop": ["x", "C"], "include_stop_str_in_output": True}])
async def test_stop_strings(parts: dict[str, Any]) -> None:
    async with Rig(says("ABCDE")) as rig:
        got = await create(rig, **parts)
        assert got["status"] == "completed"
        assert got["output"][0]["content"][0]["text"] == ("ABC" if "include_stop_str_in_output" in parts else "AB")


@pytest.mark.parametrize(
    "body",
    [
        {"max_output_tokens": 5},
        {"allowed_token_ids": [*"é!".encode(), EOS_ID], "include": ["message.output_text.logprobs"], "top_logprobs": 2},
        {"allowed_token_ids": [EOS_ID]},
        {"allowed_token_ids": [*CALL.encode(), EOS_ID], "tools": [ADD]},
        {"allowed_token_ids": [*(f"First.\n{CALL}\n{CALL}").encode(), EOS_ID], "tools": [ADD]},
        {"allowed_token_ids": [*CALL.encode()], "tools": [ADD], "max_output_tokens": 49},
        {"allowed_token_ids": [*b"hm</think>\n\nso", EOS_ID]},
        {"allowed_token_ids": [*b"hm", EOS_ID]},
        {"allowed_token_ids": [*(f"hm</think>\n{CALL}").encode(), EOS_ID], "tools": [ADD]},
    ],
    ids=["cut", "logprobs", "empty", "call", "text and calls", "cut call", "reasoning", "reasoning alone", "all"],
)
async def test_a_stream_ends_with_the_whole_response(body: dict[str, Any]) -> None:
    async with Rig(reasoning_parser="deepseek_r1") as rig:
        events = await stream(rig, **body)
        whole = await create(rig, **body)
        assert without_ids(events[-1]["response"]) == without_ids(whole)


async def test_text_comes_as_it_is_written() -> None:
    async with Rig() as rig:
        events = await stream(rig, max_output_tokens=5)
        deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
        assert len(deltas) > 1 and all(deltas)
        assert "".join(deltas) == text_of(greedy(b"user:hi\nassistant:", 5))
        last = events[-1]["response"]
        assert last["status"] == "incomplete"
        assert last["incomplete_details"] == {"reason": "max_output_tokens"}
        assert last["output"][0]["status"] == "incomplete" and last["completed_at"] is None


@pytest.mark.parametrize("k", [None, 0, 2])
async def test_logprobs_stand_with_their_text(k: int | None) -> None:
    data = "é!".encode()
    body = {"allowed_token_ids": [*data, EOS_ID], "include": ["message.output_text.logprobs"], "top_logprobs": k}
    async with Rig() as rig:
        got = await create(rig, **body)
        entries = got["output"][0]["content"][0]["logprobs"]
        assert [entry["logprob"] for entry in entries] == [-i / 1000 for i in [*data, EOS_ID]]
        assert bytes(b for entry in entries[:3] for b in entry["bytes"]) == data
        assert [len(entry["top_logprobs"]) for entry in entries] == [k or 0] * 4
        del body["include"]
        got = await create(rig, **body)
        assert got["output"][0]["content"][0]["logprobs"] == [] and got["top_logprobs"] == (k or 0)


async def test_instructions_go_before_the_input() -> None:
    async with Rig() as rig:
        messages = [{"role": "developer", "content": "d"}, {"role": "user", "content": "q"}]
        await create(rig, input=messages, instructions="be brief", max_output_tokens=1)
        assert prompt_of(rig) == "system:be brief\nsystem:d\nuser:q\nassistant:"
        await create(rig, chat_template_kwargs={"note": [1]}, max_output_tokens=1)
        assert prompt_of(rig) == "user:hi\n[1]assistant:"


async def test_a_tool_round_trip_with_the_client() -> None:
    async with Rig(says(f"I'll add.\n{CALL}", "It is 2."), tool_call_parser="hermes") as rig, rig.openai() as client:
        first = await client.responses.create(model="fake", input="1 + 1?", tools=[ADD])
        said, call = first.output
        assert isinstance(said, ResponseOutputMessage) and isinstance(call, ResponseFunctionToolCall)
        assert first.output_text.strip() == "I'll add."
        assert (call.name, call.arguments, call.status) == ("add", '{"a": 1}', "completed")
        assert call.call_id.startswith("call_") and (call.id or "").startswith("fc_")
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "2"}
        by_hand: Any = [{"role": "user", "content": "1 + 1?"}, *first.output, result]
        second = await client.responses.create(model="fake", input=by_hand, tools=[ADD])
        assert second.output_text == "It is 2."
        third = await client.responses.create(model="fake", input=[result], tools=[ADD], previous_response_id=first.id)
        assert third.output_text == "It is 2."
        assert prompt_of(rig, 1) == prompt_of(rig, 2)
        references: Any = [{"role": "user", "content": "1 + 1?"}]
        references += [{"type": "item_reference", "id": item.id} for item in first.output]
        await client.responses.create(model="fake", input=[*references, result], tools=[ADD])
        assert prompt_of(rig, 3) == prompt_of(rig, 1)


async def test_the_clients_stream_helper_gathers_items() -> None:
    text = f"hm</think>Sum:\n{CALL}"
    async with (
        Rig(says(text), reasoning_parser="deepseek_r1", tool_call_parser="hermes") as rig,
        rig.openai() as client,
    ):
        async with client.responses.stream(model="fake", input="hi", tools=[ADD]) as events:
            kinds = [event.type async for event in events]
            final = await events.get_final_response()
        assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
        assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
        assert final.output_text.strip() == "Sum:"
        assert final.usage is not None
        assert final.usage.output_tokens_details.reasoning_tokens == len("hm</think>")
        async with client.responses.stream(model="fake", input="hi", max_output_tokens=2) as events:
            kinds = [event.type async for event in events]
        assert kinds[-1] == "response.incomplete"


async def test_reasoning_is_an_item_of_its_own_and_goes_back() -> None:
    async with Rig(says("hm</think>\n\nso"), reasoning_parser="deepseek_r1") as rig, rig.openai() as client:
        got = await client.responses.create(model="fake", input="hi", reasoning={"effort": "low", "summary": "auto"})
        thought = got.output[0]
        assert thought.type == "reasoning" and thought.summary == [] and thought.status == "completed"
        assert thought.content is not None and thought.content[0].text == "hm"
        assert got.output_text.strip() == "so"
        history: Any = [{"role": "user", "content": "hi"}, *got.output, {"role": "user", "content": "more"}]
        again = await client.responses.create(model="fake", input=history)
        assert again.status == "completed"
        for context in ("auto", "current_turn"):
            await client.responses.create(model="fake", input=history, reasoning={"context": context})  # type: ignore[typeddict-item]


class Colour(BaseModel):
    name: Literal["red", "blue"]


async def test_a_schema_reaches_the_worker_and_the_client_parses() -> None:
    async with Rig(says('{"name": "red"}')) as rig, rig.openai() as client:
        got = await client.responses.parse(model="fake", input="hi", text_format=Colour)
        assert got.output_parsed == Colour(name="red")
        assert got.text is not None and got.text.format is not None and got.text.format.type == "json_schema"
        async with client.responses.stream(model="fake", input="hi", text_format=Colour) as events:
            final = await events.get_final_response()
        assert final.output_parsed == Colour(name="red")
        plain = await client.responses.create(model="fake", input="hi", text={"format": {"type": "json_object"}})
        assert plain.output_text == '{"name": "red"}'
        constraints = rig.links[0].worker.constraints
        assert all(constraint is not None and constraint.grammar is not None for constraint in constraints)
        grammars = [constraint.grammar.key for constraint in constraints if constraint and constraint.grammar]
        assert grammars[0] == grammars[1] != grammars[2]


@pytest.mark.parametrize(
    ("choice", "is_constrained", "offered"),
    [
        ("auto", False, True),
        ("none", False, False),
        ("required", True, True),
        ({"type": "function", "name": "add"}, True, True),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]}, False, True),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "add"}]}, True, True),
    ],
)
async def test_tool_choices(choice: Any, is_constrained: bool, offered: bool) -> None:
    other = {**ADD, "name": "other", "parameters": None, "description": None}
    async with Rig(says(CALL), tool_call_parser="hermes") as rig:
        got = await create(rig, tools=[ADD, other], tool_choice=choice)
        assert got["tool_choice"] == choice
        assert got["tools"] == [ADD, other]
        assert [item["type"] for item in got["output"]] == ["function_call" if offered else "message"]
        constraint = rig.links[0].worker.constraints[0]
        assert (constraint is not None and constraint.grammar is not None) == is_constrained
        is_allowed_alone = isinstance(choice, dict) and choice["type"] == "allowed_tools"
        assert ('"other"' in prompt_of(rig)) == (offered and not is_allowed_alone)


async def test_truncation_drops_the_oldest_turns() -> None:
    turns: list[Any] = [{"role": "developer", "content": "stay"}]
    for i in range(20):
        turns += [{"role": "user", "content": f"question {i}"}, {"role": "assistant", "content": f"answer {i}"}]
    turns.append({"role": "user", "content": "last"})
    async with Rig(max_model_len=120) as rig:
        await create(rig, input=turns, truncation="auto", max_output_tokens=10, instructions="i")
        assert prompt_of(rig) == ("system:i\nsystem:stay\nuser:question 19\nassistant:answer 19\nuser:last\nassistant:")
        response = await rig.post(PATH, {"model": "fake", "input": turns, "max_output_tokens": 10})
        assert response.status_code == 400
        assert response.json()["error"]["param"] in ("input", "max_output_tokens")
        response = await rig.post(PATH, {"model": "fake", "input": "x" * 200, "truncation": "auto"})
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"
        assert response.json()["error"]["param"] == "input"


async def test_truncation_of_a_text_that_is_too_long_to_tokenize() -> None:
    turns = [{"role": "user", "content": "x" * 5000}, {"role": "user", "content": "last"}]
    async with Rig(max_model_len=120) as rig:
        await create(rig, input=turns, truncation="auto", max_output_tokens=10)
        assert prompt_of(rig) == "user:last\nassistant:"
        response = await rig.post(PATH, {"model": "fake", "input": turns})
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["param"], error["code"]) == ("input", "context_length_exceeded")
        assert error["message"].startswith("input has ")


async def test_truncation_never_parts_a_result_from_its_call() -> None:
    items: list[Any] = [{"role": "user", "content": "go"}]
    for i in range(9):
        items.append({"type": "function_call", "call_id": f"c{i}", "name": "add", "arguments": "{}"})
        items.append({"type": "function_call_output", "call_id": f"c{i}", "output": f"result {i}"})
    async with Rig(max_model_len=220) as rig:
        await create(rig, input=items, truncation="auto", max_output_tokens=10)
        prompt = prompt_of(rig)
        assert prompt.startswith("assistant:") and prompt.endswith("tool:result 8\nassistant:")
        assert 0 < prompt.count("tool:") < 9 and prompt.count("tool:") == prompt.count("assistant:") - 1


async def test_tokens_are_counted() -> None:
    async with Rig() as rig, rig.openai() as client:
        counted = await client.responses.input_tokens.count(model="fake", input="hi", instructions="i")
        got = await client.responses.create(model="fake", input="hi", instructions="i", max_output_tokens=1)
        assert got.usage is not None and counted.input_tokens == got.usage.input_tokens == 27
        assert counted.object == "response.input_tokens"
        longer = await client.responses.input_tokens.count(input="more", previous_response_id=got.id, tools=[ADD])
        assert longer.input_tokens > counted.input_tokens


class FailingWorker(FakeWorker):
    """Its engine dies in the third step, and nobody starts another."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.fail_at_step = 3


async def test_a_failure_in_a_stream_is_told_and_kept() -> None:
    async with Rig(FailingWorker, resubmit_timeout_s=0.2) as rig:
        response = await rig.post(PATH, {"model": "fake", "input": "hi", "stream": True})
        events = read_events(response.text)
        last = check_stream(events)
        assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
        assert last["error"]["code"] == "server_error" and last["error"]["message"] == events[-2]["message"]
        kept = await rig.http.get(f"{PATH}/{last['id']}")
        assert kept.json() == last


async def test_a_client_that_leaves_is_not_answered_on() -> None:
    async with Rig() as rig, rig.openai() as client:
        events = await client.responses.create(model="fake", input="hi", max_output_tokens=900, stream=True)
        async for event in events:
            if event.type == "response.output_text.delta":
                break
        await events.close()
        await rig.idle()
        assert rig.engine.stats().scheduler.num_waiting == 0


async def test_errors_are_the_clients_classes() -> None:
    async with Rig() as rig, rig.openai() as client:
        with pytest.raises(openai.NotFoundError) as missing:
            await client.responses.create(model="other", input="hi")
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as bad:
            await client.responses.create(model="fake", input="hi", temperature=-1)
        assert bad.value.param == "temperature"
