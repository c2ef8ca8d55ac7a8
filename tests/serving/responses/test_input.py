"""Input items: what is kept of them, the messages that they become, and what is refused where."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pagedray.engine.config import ApiConfig
from pagedray.engine.errors import Unsupported, UserError
from pagedray.serving.openai.responses.input import (
    check_results,
    read_input,
    to_messages,
    without_earlier_reasoning,
)
from pagedray.serving.openai.responses.store import MemoryStore, NotStored, Record

STORE = MemoryStore(ApiConfig())
CALL = {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": '{"x": 1}'}
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "42"}
REASONING = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}


def user(content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **fields}


async def messages_of(value: Any) -> list[dict[str, Any]]:
    return to_messages(await read_input(value, STORE))


async def test_a_string_is_a_users_message() -> None:
    items = await read_input("hi", STORE)
    assert [{**item, "id": ""} for item in items] == [
        {
            "id": "",
            "type": "message",
            "status": "completed",
            "role": "user",
            "content": [{"type": "input_text", "text": "hi"}],
        }
    ]
    assert items[0]["id"].startswith("msg_")
    assert to_messages(items) == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("role", ["user", "system", "developer"])
async def test_messages_in_every_form(role: str) -> None:
    part = {"type": "input_text", "text": "a"}
    for content in ("a", [part], [{**part, "prompt_cache_breakpoint": {"mode": "explicit"}}]):
        for kind in ({}, {"type": "message"}, {"type": "message", "id": "msg_9", "status": "completed"}):
            items = await read_input([{"role": role, "content": content, **kind}], STORE)
            assert to_messages(items) == [{"role": role, "content": "a"}]
            assert items[0]["content"] == [part]
            assert items[0]["id"] == "msg_9" or "id" not in kind
    two = [{"type": "input_text", "text": "b"}]
    assert await messages_of([{"role": role, "content": [part, *two]}]) == [
        {"role": role, "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    ]


async def test_a_turn_of_the_model_is_one_message() -> None:
    answer = {"role": "assistant", "content": [{"type": "output_text", "text": "ask", "annotations": []}]}
    second = {**CALL, "call_id": "call_2", "name": "g", "arguments": ""}
    got = await messages_of([user("q"), REASONING, answer, CALL, second, RESULT, answer, user("more")])
    calls = [
        {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}},
        {"id": "call_2", "type": "function", "function": {"name": "g", "arguments": ""}},
    ]
    assert got == [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "ask", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "content": "42"},
        {"role": "assistant", "content": "ask"},
        {"role": "user", "content": "more"},
    ]


async def test_turns_that_follow_each_other_stay_apart() -> None:
    answer = {"role": "assistant", "content": "a"}
    got = await messages_of([answer, answer, CALL, answer, REASONING, CALL])
    assert [(m.get("content"), "tool_calls" in m, "reasoning_content" in m) for m in got] == [
        ("a", False, False),
        ("a", True, False),
        ("a", False, False),
        (None, True, True),
    ]


async def test_what_other_servers_add_to_their_items_is_no_trouble() -> None:
    items = [
        {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "phase": "final_answer",
            "content": [
                {"type": "output_text", "text": "a", "annotations": [], "logprobs": [], "parsed": {"x": 1}},
                {"type": "refusal", "refusal": "no"},
            ],
        },
        {**CALL, "id": "fc_1", "status": "completed", "parsed_arguments": {"x": 1}, "namespace": None},
        {**REASONING, "encrypted_content": "gAAA", "status": None},
        {"id": "rs_2", "type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]},
    ]
    got = await read_input(items, STORE)
    assert [item["id"] for item in got] == ["msg_1", "fc_1", "rs_1", "rs_2"]
    assert to_messages(got)[0]["content"] == [{"type": "text", "text": "a"}, {"type": "text", "text": "no"}]


async def test_results_may_have_parts() -> None:
    part = {"type": "input_text", "text": "4"}
    got = await messages_of([CALL, {**RESULT, "output": [part, part]}])
    assert got[1]["content"] == [{"type": "text", "text": "4"}, {"type": "text", "text": "4"}]


async def test_arguments_that_are_no_json_reach_the_model_as_they_are() -> None:
    got = await messages_of([{**CALL, "arguments": '{"x": '}])
    assert msgspec.json.decode(got[0]["tool_calls"][0]["function"]["arguments"]) == '{"x": '


async def test_references_are_looked_up() -> None:
    store = MemoryStore(ApiConfig())
    item = (await read_input("hello", store))[0]
    await store.put(Record("resp_1", b'{"output": []}', msgspec.json.encode([item]), item_ids=(item["id"],)))
    for reference in ({"type": "item_reference", "id": item["id"]}, {"id": item["id"]}):
        assert await read_input([reference], store) == [item]
    with pytest.raises(NotStored) as caught:
        await read_input([user("x"), {"type": "item_reference", "id": "msg_none"}], store)
    assert caught.value.param == "input[1].id"


async def test_a_result_needs_its_call() -> None:
    check_results(await read_input([CALL, RESULT], STORE))
    with pytest.raises(UserError, match="call_1") as caught:
        check_results(await read_input([RESULT, CALL], STORE))
    assert caught.value.param == "input"


async def test_earlier_reasoning_can_be_left_out() -> None:
    answer = {"role": "assistant", "content": "a"}
    messages = await messages_of([user("1"), REASONING, answer, REASONING, user("2"), REASONING, CALL])
    assert without_earlier_reasoning(messages) == [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "2"},
        messages[-1],
    ]
    assert messages[-1]["reasoning_content"] == "hm"


@pytest.mark.parametrize(
    ("item", "param", "kind"),
    [
        ("hi", "input[0]", UserError),
        (None, "input[0]", UserError),
        ({}, "input[0].id", UserError),
        ({"type": 3}, "input[0].type", UserError),
        ({"type": "nonsense"}, "input[0].type", UserError),
        ({"type": "web_search_call"}, "input[0].type", Unsupported),
        ({"type": "custom_tool_call_output"}, "input[0].type", Unsupported),
        ({"type": "item_reference", "id": 3}, "input[0].id", UserError),
        ({"role": "tool", "content": "x"}, "input[0].role", UserError),
        ({"role": ["user"], "content": "x"}, "input[0].role", UserError),
        ({"role": "user"}, "input[0].content", UserError),
        ({"role": "user", "content": 3}, "input[0].content", UserError),
        ({"role": "user", "content": ["x"]}, "input[0].content[0]", UserError),
        ({"role": "user", "content": [{"text": "x"}]}, "input[0].content[0].type", UserError),
        ({"role": "user", "content": [{"type": "text", "text": "x"}]}, "input[0].content[0].type", UserError),
        ({"role": "user", "content": [{"type": "output_text", "text": "x"}]}, "input[0].content[0].type", UserError),
        ({"role": "user", "content": [{"type": "input_image"}]}, "input[0].content[0].type", Unsupported),
        ({"role": "user", "content": [{"type": "input_text"}]}, "input[0].content[0].text", UserError),
        ({"role": "user", "content": [{"type": "input_text", "text": 3}]}, "input[0].content[0].text", UserError),
        (
            {"role": "user", "content": [{"type": "input_text", "text": "x", "size": 1}]},
            "input[0].content[0].size",
            UserError,
        ),
        ({"role": "user", "content": "x", "name": "ann"}, "input[0].name", UserError),
        ({"role": "user", "content": "x", "status": "done"}, "input[0].status", UserError),
        ({"role": "user", "content": "x", "id": 3}, "input[0].id", UserError),
        ({**CALL, "call_id": None}, "input[0].call_id", UserError),
        ({**CALL, "call_id": ""}, "input[0].call_id", UserError),
        ({**CALL, "name": 3}, "input[0].name", UserError),
        ({**CALL, "arguments": {"x": 1}}, "input[0].arguments", UserError),
        ({**RESULT, "output": None}, "input[0].output", UserError),
        ({**RESULT, "output": {"x": 1}}, "input[0].output", UserError),
        ({**RESULT, "output": [{"type": "input_file"}]}, "input[0].output[0].type", Unsupported),
        ({**RESULT, "call_id": 3}, "input[0].call_id", UserError),
        ({"type": "reasoning", "summary": "s"}, "input[0].summary", UserError),
        ({"type": "reasoning", "content": [{"type": "text"}]}, "input[0].content[0].type", UserError),
        ({"type": "reasoning", "content": [{"type": "reasoning_text"}]}, "input[0].content[0].text", UserError),
    ],
)
async def test_what_is_refused_is_named(item: Any, param: str, kind: type[UserError]) -> None:
    with pytest.raises(kind) as caught:
        await read_input([item], STORE)
    assert caught.value.param == param
    assert type(caught.value) is kind
