"""What the client's messages become, and what is said about those that are wrong."""

from __future__ import annotations

from typing import Any

import pytest

from pagedray.engine.errors import Unsupported, UserError
from pagedray.serving.anthropic.history import FIELDS, NOT_OFFERED, History, read_history

CALL = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "2"}
CHAT_CALL = {"id": "toolu_1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
EPHEMERAL = {"type": "ephemeral"}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def test_a_string_and_one_text_block_are_the_same() -> None:
    assert read_history(None, [user("hi")]) == read_history(None, [user([text("hi")])])
    assert read_history(None, [user("hi")]) == History([{"role": "user", "content": "hi"}], False, False)


def test_the_system_prompt_comes_first() -> None:
    assert read_history("be brief", [user("hi")]).messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
    ]
    assert read_history([text("a"), text("b")], [user("hi")]).messages[0] == {
        "role": "system",
        "content": [text("a"), text("b")],
    }
    assert len(read_history("", [user("hi")]).messages) == len(read_history([], [user("hi")]).messages) == 1


def test_messages_of_one_role_are_one_turn() -> None:
    got = read_history(None, [user("a"), user([text("b")]), assistant("c"), assistant("d"), user("e")])
    assert got.messages == [
        {"role": "user", "content": [text("a"), text("b")]},
        {"role": "assistant", "content": [text("c"), text("d")]},
        {"role": "user", "content": "e"},
    ]
    assert not got.is_prefilled


def test_a_system_message_may_stand_between_others() -> None:
    got = read_history("s", [{"role": "system", "content": "t"}, user("a"), {"role": "system", "content": [text("u")]}])
    assert [message["role"] for message in got.messages] == ["system", "user", "system"]
    assert got.messages[0]["content"] == [text("s"), text("t")]


def test_a_round_of_tools() -> None:
    got = read_history(
        None,
        [
            user("1 + 1?"),
            assistant([{"type": "thinking", "thinking": "hm", "signature": ""}, text("let me see"), CALL]),
            user([RESULT, text("so?")]),
        ],
    )
    assert got.messages == [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "let me see", "reasoning_content": "hm", "tool_calls": [CHAT_CALL]},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "2"},
        {"role": "user", "content": "so?"},
    ]


def test_a_call_without_text_has_null_content() -> None:
    got = read_history(None, [user("x"), assistant([CALL]), user([RESULT])])
    assert got.messages[1] == {"role": "assistant", "content": None, "tool_calls": [CHAT_CALL]}


@pytest.mark.parametrize(
    ("fields", "content"),
    [
        ({"content": "2"}, "2"),
        ({"content": [text("2"), text("3")]}, "2\n3"),
        ({"content": []}, ""),
        ({"content": None}, ""),
        ({}, ""),
        ({"content": "no such file", "is_error": True}, "Error: no such file"),
        ({"content": "2", "is_error": False}, "2"),
        ({"is_error": True}, "Error:"),
    ],
)
def test_forms_of_a_result(fields: dict[str, Any], content: str) -> None:
    result = {"type": "tool_result", "tool_use_id": "toolu_1", **fields}
    assert read_history(None, [user("x"), assistant([CALL]), user([result])]).messages[2]["content"] == content


def test_results_may_come_in_several_messages() -> None:
    other = {**CALL, "id": "toolu_2"}
    got = read_history(
        None, [user("x"), assistant([CALL, other]), user([{**RESULT, "tool_use_id": "toolu_2"}]), user([RESULT])]
    )
    assert [m.get("tool_call_id") for m in got.messages] == [None, None, "toolu_2", "toolu_1"]


def test_a_last_assistant_message_is_continued() -> None:
    got = read_history(None, [user("x"), assistant("The answer is")])
    assert got.is_prefilled
    assert got.messages[-1] == {"role": "assistant", "content": "The answer is"}


@pytest.mark.parametrize("content", ["", [], [text("")]])
def test_an_empty_beginning_is_none(content: Any) -> None:
    assert read_history(None, [user("x"), assistant(content)]) == read_history(None, [user("x")])


def test_redacted_thinking_is_left_out() -> None:
    got = read_history(None, [user("x"), assistant([{"type": "redacted_thinking", "data": "?"}, text("y")]), user("z")])
    assert got.messages[1] == {"role": "assistant", "content": "y"}


@pytest.mark.parametrize(
    ("system", "messages"),
    [
        ([{**text("s"), "cache_control": EPHEMERAL}], [user("x")]),
        (None, [user([{**text("x"), "cache_control": {"type": "ephemeral", "ttl": "1h"}}])]),
        (None, [user("x"), assistant([{**CALL, "cache_control": EPHEMERAL}]), user([RESULT])]),
        (None, [user("x"), assistant([CALL]), user([{**RESULT, "cache_control": EPHEMERAL}])]),
        (
            None,
            [user("x"), assistant([CALL]), user([{**RESULT, "content": [{**text("x"), "cache_control": EPHEMERAL}]}])],
        ),
    ],
)
def test_marks_of_the_cache_are_seen(system: Any, messages: Any) -> None:
    assert read_history(system, messages).marks_cache


def test_null_fields_say_nothing() -> None:
    block = {**text("x"), "cache_control": None, "citations": None, "parsed_output": None}
    assert read_history(None, [{**user([block]), "name": None}]) == read_history(None, [user("x")])


TURN = [user("x"), assistant([CALL])]
BAD: list[tuple[Any, str]] = [
    ([], "messages: at least one message is required"),
    (["x"], "messages.0: must be an object, not a string"),
    ([{"content": "x"}], "messages.0.role: is required"),
    ([{"role": "tool", "content": "x"}], "messages.0.role: must be one of user, assistant, system"),
    ([{"role": 3, "content": "x"}], "messages.0.role: must be one of user, assistant, system"),
    ([{"role": "user"}], "messages.0.content: is required"),
    ([user(None)], "messages.0.content: is required"),
    ([user(3)], "messages.0.content: must be a string or an array of blocks, not an integer"),
    ([user("")], "messages.0.content: a user message must have content"),
    ([user("x"), user([])], "messages.1.content: a user message must have content"),
    ([{**user("x"), "name": "ann"}], "messages.0.name: unknown field"),
    ([user(["x"])], "messages.0.content.0: must be an object, not a string"),
    ([user([{"text": "x"}])], "messages.0.content.0.type: is required"),
    ([user([{"type": 3}])], "messages.0.content.0.type: must be a string"),
    ([user([{"type": "text"}])], "messages.0.content.0.text: is required"),
    ([user([text("x"), {"type": "text", "text": 3}])], "messages.0.content.1.text: must be a string, not an integer"),
    ([user([{**text("x"), "font": "big"}])], "messages.0.content.0.font: unknown field of a text block"),
    (
        [user([{**text("x"), "cache_control": 3}])],
        "messages.0.content.0.cache_control: must be an object, not an integer",
    ),
    (
        [user([{**text("x"), "cache_control": {"type": "eternal"}}])],
        "messages.0.content.0.cache_control.type: Input should be 'ephemeral'",
    ),
    (
        [user([CALL])],
        (
            "messages.0.content.0.type: 'tool_use' can't stand in user content, only text, tool_result, document, "
            "search_result"
        ),
    ),
    (
        [user("x"), assistant([RESULT])],
        (
            "messages.1.content.0.type: 'tool_result' can't stand in assistant content, only text, tool_use, thinking, "
            "redacted_thinking"
        ),
    ),
    (
        [user([{"type": "poem"}])],
        (
            "messages.0.content.0.type: 'poem' can't stand in user content, only text, tool_result, document, "
            "search_result"
        ),
    ),
    ([user("x"), assistant([{"type": "thinking"}])], "messages.1.content.0.thinking: is required"),
    ([user("x"), assistant([{**CALL, "id": 3}])], "messages.1.content.0.id: must be a string, not an integer"),
    ([user("x"), assistant([{**CALL, "id": ""}])], "messages.1.content.0.id: must not be empty"),
    ([user("x"), assistant([{**CALL, "name": ""}])], "messages.1.content.0.name: must not be empty"),
    ([user("x"), assistant([{**CALL, "input": "{}"}])], "messages.1.content.0.input: must be an object, not a string"),
    ([user("x"), assistant([{"type": "tool_use", "id": "a", "name": "b"}])], "messages.1.content.0.input: is required"),
    (
        [user("x"), assistant([CALL, CALL])],
        "messages.1.content.1.id: tool_use ids must be unique, 'toolu_1' came before",
    ),
    (
        [user([RESULT])],
        "messages.0.content.0.tool_use_id: there is no tool_use block with the id 'toolu_1' in the previous message",
    ),
    (
        [*TURN, user([{**RESULT, "tool_use_id": "toolu_2"}])],
        "messages.2.content.0.tool_use_id: there is no tool_use block with the id 'toolu_2' in the previous message",
    ),
    ([*TURN, user([{"type": "tool_result"}])], "messages.2.content.0.tool_use_id: is required"),
    ([*TURN, user([RESULT, RESULT])], "messages.2.content.1.tool_use_id: 'toolu_1' has a result already"),
    ([*TURN, user([text("x"), RESULT])], "messages.2.content.1: tool_result blocks must come before text"),
    ([*TURN, user([{**RESULT, "is_error": 1}])], "messages.2.content.0.is_error: must be a boolean, not an integer"),
    (
        [*TURN, user([{**RESULT, "content": 3}])],
        "messages.2.content.0.content: must be a string or an array of blocks, not an integer",
    ),
    (
        [*TURN, user([{**RESULT, "content": [RESULT]}])],
        (
            "messages.2.content.0.content.0.type: 'tool_result' can't stand in a tool_result block, only text, "
            "document, search_result"
        ),
    ),
    ([*TURN, user("x")], "messages.2: tool_use blocks without tool_result blocks right after them: toolu_1"),
    (
        [*TURN, user("x"), assistant("y"), user("z")],
        "messages.2: tool_use blocks without tool_result blocks right after them: toolu_1",
    ),
    (
        [*TURN, {"role": "system", "content": "x"}, user([RESULT])],
        "messages.2: tool_use blocks without tool_result blocks right after them: toolu_1",
    ),
    (TURN, "messages.1: the last message has tool_use blocks; their tool_result blocks must follow in a user message"),
    ([assistant("")], "messages: there is nothing to answer; end with a user message or a prefill"),
    (
        [user("x"), assistant([{"type": "thinking", "thinking": "y"}])],
        "messages: there is nothing to answer; end with a user message or a prefill",
    ),
]


@pytest.mark.parametrize(("messages", "message"), BAD)
def test_what_is_wrong_is_named_with_its_path(messages: Any, message: str) -> None:
    with pytest.raises(UserError) as caught:
        read_history(None, messages)
    assert str(caught.value) == message
    assert caught.value.param == message.split(": ")[0]


@pytest.mark.parametrize("kind", NOT_OFFERED)
def test_blocks_that_are_not_offered_are_refused_by_name(kind: str) -> None:
    assert kind not in FIELDS
    for messages, path in (
        ([user([{"type": kind}])], "messages.0.content.0.type"),
        ([*TURN, user([{**RESULT, "content": [{"type": kind}]}])], "messages.2.content.0.content.0.type"),
    ):
        with pytest.raises(Unsupported) as caught:
            read_history(None, messages)
        assert str(caught.value) == f"{path}: blocks of type {kind!r} are not implemented"


def test_a_bad_system_block() -> None:
    with pytest.raises(UserError, match=r"^system\.1\.text: is required$"):
        read_history([text("a"), {"type": "text"}], [user("x")])
    with pytest.raises(Unsupported, match=r"^system\.0\.type: blocks of type 'image' are not implemented$"):
        read_history([{"type": "image"}], [user("x")])
