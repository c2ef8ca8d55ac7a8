"""Parser events as content blocks."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from pagedray.serving.anthropic.content import BlockList, BlockSequence, BlockStart, BlockStop, BlockText, parse_input
from pagedray.serving.parsers.events import ContentText, Event, ReasoningText, ToolArguments, ToolStart


def content(events: list[Event], **how: Any) -> list[dict[str, Any]]:
    sequence, blocks = BlockSequence(**how), BlockList()
    for event in events:
        blocks.add(sequence.add([event]))
    blocks.add(sequence.finish())
    return blocks.content()


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def call(hex_id: str, name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{hex_id}", "name": name, "input": arguments}


ALL: list[Event] = [
    ReasoningText("why "),
    ReasoningText("not"),
    ContentText("\n"),
    ContentText("\nSo: "),
    ContentText("look"),
    ToolStart(0, "call_a", "add"),
    ToolArguments(0, '{"a": '),
    ToolArguments(0, "1}"),
    ContentText("\n"),
    ToolStart(1, "call_b", "now"),
    ToolArguments(1, "{}"),
    ContentText(" "),
]


def test_kinds_follow_each_other_and_blank_text_is_no_block() -> None:
    assert content(ALL) == [
        {"type": "thinking", "thinking": "why not", "signature": ""},
        text("\n\nSo: look"),
        call("a", "add", a=1),
        call("b", "now"),
    ]


def test_starts_and_stops_alternate_and_text_lies_between() -> None:
    sequence = BlockSequence()
    changes = [*sequence.add(ALL), *sequence.finish()]
    is_open = False
    for change in changes:
        assert isinstance(change, BlockStart) == (not is_open)
        is_open = not isinstance(change, BlockStop)
        assert not isinstance(change, BlockText) or change.text
    assert not is_open
    assert [change.index for change in changes if isinstance(change, BlockStart)] == [0, 1, 2, 3]


def test_how_events_are_delivered_changes_nothing() -> None:
    whole = content(ALL)
    for at in range(len(ALL) + 1):
        sequence, blocks = BlockSequence(), BlockList()
        for part in (ALL[:at], ALL[at:]):
            blocks.add(sequence.add(part))
        blocks.add(sequence.finish())
        assert blocks.content() == whole


def test_the_text_may_be_cut_anywhere() -> None:
    for cuts in itertools.combinations(range(5), 2):
        pieces = [" \nab "[a:b] for a, b in itertools.pairwise([0, *cuts, 5])]
        assert content([ContentText(piece) for piece in pieces if piece]) == [text(" \nab ")]


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([], [text("")]),
        ([ContentText(" ")], [text(" ")]),
        ([ContentText("  "), ToolStart(0, "call_a", "x")], [call("a", "x")]),
        ([ReasoningText("hm"), ContentText("\n")], [{"type": "thinking", "thinking": "hm", "signature": ""}]),
    ],
)
def test_there_is_always_a_block(events: list[Event], expected: list[dict[str, Any]]) -> None:
    assert content(events) == expected


def test_thinking_that_is_not_shown_is_an_empty_block() -> None:
    assert content(ALL, shows_thinking=False)[0] == {"type": "thinking", "thinking": "", "signature": ""}


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("", {}),
        ('{"a": [1, 2]}', {"a": [1, 2]}),
        ('{"a": 1, "b": [2, 3', {"a": 1, "b": [2, 3]}),
        ('{"a": 1, "b": "not', {"a": 1}),
    ],
)
def test_input_of_calls(written: str, expected: dict[str, Any]) -> None:
    assert parse_input(written) == expected


def test_input_that_is_no_json_ends_where_it_stops_being_it() -> None:
    events: list[Event] = [ToolStart(0, "call_a", "x"), ToolArguments(0, '{"a": 1, "b'), ToolArguments(0, '": oops}')]
    assert content(events) == [call("a", "x", a=1)]
    assert content([ToolStart(0, "call_a", "x"), ToolArguments(0, "[1]")]) == [call("a", "x")]
