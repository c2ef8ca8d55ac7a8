"""Parser events to items and API events, whatever comes in whatever pieces."""

from __future__ import annotations

from typing import Any

import pytest

from pagedray.serving.openai.responses.output import ItemStatus, OutputWriter
from pagedray.serving.parsers.events import ContentText, Event, ReasoningText, ToolArguments, ToolStart
from tests.serving.responses.events import check_item

A, B = ToolStart(0, "call_a", "f"), ToolStart(1, "call_b", "g")


def write(*pieces: list[Event], status: ItemStatus = "completed") -> list[dict[str, Any]]:
    """Items of a whole output, after every event was checked."""
    writer = OutputWriter()
    told = [event for piece in pieces for event in writer.feed(piece, [])] + writer.close(status)
    events = [{"type": f"response.{kind}", **fields} for kind, fields in told]
    items: list[dict[str, Any]] = []
    while events:
        item, events = check_item(events, len(items))
        items.append(item)
    assert items == writer.items
    return items


def brief(items: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    return [(i["type"], i["arguments"] if "arguments" in i else i["content"][0]["text"], i["status"]) for i in items]


def test_reasoning_text_and_two_calls() -> None:
    items = write(
        [ReasoningText("hm")],
        [ReasoningText(" so"), ContentText("I ")],
        [ContentText("ask")],
        [A],
        [ToolArguments(0, '{"x"')],
        [ToolArguments(0, ":1}"), B],
        [ToolArguments(1, "{}")],
    )
    assert brief(items) == [
        ("reasoning", "hm so", "completed"),
        ("message", "I ask", "completed"),
        ("function_call", '{"x":1}', "completed"),
        ("function_call", "{}", "completed"),
    ]
    assert [(i["call_id"], i["name"]) for i in items[2:]] == [("call_a", "f"), ("call_b", "g")]


@pytest.mark.parametrize("status", ["completed", "incomplete"])
def test_only_the_last_item_can_be_incomplete(status: ItemStatus) -> None:
    items = write([ContentText("a"), A, ToolArguments(0, "{")], status=status)
    assert [i["status"] for i in items] == ["completed", status]


def test_white_space_between_items_is_no_message() -> None:
    pieces: list[list[Event]] = [
        [ContentText("\n")],
        [ReasoningText("r")],
        [ContentText("\n\n"), A, ToolArguments(0, "{}")],
        [ContentText("\n"), B, ToolArguments(1, "{}")],
        [ContentText("\n")],
    ]
    assert [i["type"] for i in write(*pieces)] == ["reasoning", "function_call", "function_call"]


def test_white_space_before_text_belongs_to_it() -> None:
    assert brief(write([ContentText("\n")], [ContentText("\n")], [ContentText("x ")])) == [
        ("message", "\n\nx ", "completed")
    ]


@pytest.mark.parametrize("text", ["", " \n"])
def test_an_empty_answer_has_an_empty_message(text: str) -> None:
    assert brief(write([ContentText(text)] if text else [], status="incomplete")) == [("message", text, "incomplete")]


def test_nothing_is_made_up_for_what_failed() -> None:
    writer = OutputWriter()
    assert writer.close("incomplete", needs_item=False) == [] and writer.items == []


def test_text_after_a_call_is_a_new_message() -> None:
    items = write([ContentText("a")], [A, ToolArguments(0, "{}")], [ContentText("b")])
    assert [i["type"] for i in items] == ["message", "function_call", "message"]


def test_logprobs_go_with_the_text_of_their_tokens() -> None:
    one, two, three, four = ({"token": token} for token in "1234")
    writer = OutputWriter()
    writer.feed([ReasoningText("r")], [one])
    assert writer.feed([], [two]) == []  # its text is held back
    told = writer.feed([ContentText("ab")], [three])
    assert [fields["logprobs"] for kind, fields in told if kind == "output_text.delta"] == [[two, three]]
    told = writer.feed([], [four]) + writer.close("completed")
    assert told[0] == ("output_text.delta", {**told[0][1], "delta": "", "logprobs": [four]})
    assert writer.items[1]["content"][0]["logprobs"] == [two, three, four]
