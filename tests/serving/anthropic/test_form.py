"""Answers as a message and as events: however the text is cut, both tell the same."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from pagedray.engine.errors import EngineDead
from pagedray.serving.answer import Delta
from pagedray.serving.anthropic.form import MessageForm, MessageShape
from pagedray.serving.openai.respond import Usage
from pagedray.serving.parsers.registry import ParserSetup, make_parser
from pagedray.serving.parsers.tools import Tool
from tests.serving.anthropic.events import message_of, read_events

USAGE = Usage(7, 5, 12, {"cached_tokens": 4}, {"reasoning_tokens": 2})
TEXT = (
    "<think>\nhm é</think>\n\nSo:\n"
    '<tool_call>\n{"name": "add", "arguments": {"a": "1é\\n"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
CONTENT = [
    {"type": "thinking", "thinking": "hm é", "signature": ""},
    {"type": "text", "text": "So:"},
    {"type": "tool_use", "name": "add", "input": {"a": "1é\n"}},
    {"type": "tool_use", "name": "now", "input": {}},
]


def make_form(**shape: Any) -> MessageForm:
    tools = (Tool("add"), Tool("now"))
    setup = ParserSetup("hermes", "deepseek_r1")
    parser = make_parser(setup, tools, choice="auto", reasoning_is_open=False, special_tokens=())
    return MessageForm(MessageShape(model="m", **shape), parser)


def deltas_of(pieces: list[str], finish: Any = "stop", stop_reason: Any = None) -> list[Delta]:
    deltas = [Delta(0, piece, ()) for piece in pieces]
    deltas.append(Delta(0, "", (), finish_reason=finish, stop_reason=stop_reason))
    return deltas


def whole(deltas: list[Delta], **shape: Any) -> dict[str, Any]:
    form = make_form(**shape)
    for delta in deltas:
        form.add([delta])
    return form.body(USAGE)


def streamed(deltas: list[Delta], **shape: Any) -> dict[str, Any]:
    form = make_form(**shape)
    data = form.begin(7) + b"".join(form.chunks([delta], None) for delta in deltas) + form.end(USAGE)
    return message_of(read_events(data.decode()))


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    content = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    return {**message, "id": "", "content": content}


def test_every_cut_tells_the_same() -> None:
    expected = without_ids(whole(deltas_of([TEXT])))
    assert expected["content"] == CONTENT
    assert expected["stop_reason"] == "tool_use"
    cuts = [[TEXT[:at], TEXT[at:]] for at in range(1, len(TEXT))]
    for pieces in (list(TEXT), *cuts):
        deltas = deltas_of(pieces)
        assert without_ids(whole(deltas)) == without_ids(streamed(deltas)) == expected


def test_every_end_tells_the_same() -> None:
    for at in range(len(TEXT)):
        deltas = deltas_of(list(TEXT[:at]), "length")
        form = make_form()
        events = form.begin(7) + b"".join(form.chunks([delta], None) for delta in deltas) + form.end(USAGE)
        pieces = [event["delta"] for event in read_events(events.decode()) if "delta" in event]
        told = whole(deltas)
        assert told["stop_reason"] == "max_tokens"
        shown = "".join(block.get("text", "") + block.get("thinking", "") for block in told["content"])
        assert shown == "".join(piece.get("text", "") + piece.get("thinking", "") for piece in pieces)


@pytest.mark.parametrize(
    ("finish", "stop_reason", "text", "expected"),
    [
        ("stop", None, "x", ("end_turn", None)),
        ("stop", 256, "x", ("end_turn", None)),
        ("stop", "END", "x", ("stop_sequence", "END")),
        ("length", None, "x", ("max_tokens", None)),
        ("stop", None, TEXT, ("tool_use", None)),
        ("stop", "END", TEXT, ("stop_sequence", "END")),
        ("length", None, TEXT, ("max_tokens", None)),
    ],
)
def test_stop_reasons(finish: str, stop_reason: Any, text: str, expected: tuple[str, str | None]) -> None:
    deltas = deltas_of([text], finish, stop_reason)
    for message in (whole(deltas), streamed(deltas)):
        assert (message["stop_reason"], message["stop_sequence"]) == expected


def test_a_full_context_window_has_its_own_reason() -> None:
    deltas = deltas_of(["x"], "length")
    assert (
        whole(deltas, length_reason="model_context_window_exceeded")["stop_reason"] == "model_context_window_exceeded"
    )


def test_thinking_may_be_left_out() -> None:
    deltas = deltas_of(list(TEXT))
    for message in (whole(deltas, shows_thinking=False), streamed(deltas, shows_thinking=False)):
        assert message["content"][0] == {"type": "thinking", "thinking": "", "signature": ""}
        assert message["content"][1] == CONTENT[1]


@pytest.mark.parametrize(("tells", "expected"), [(False, (7, 0)), (True, (3, 4))])
def test_usage(tells: bool, expected: tuple[int, int]) -> None:
    for message in (whole(deltas_of(["x"]), tells_cached=tells), streamed(deltas_of(["x"]), tells_cached=tells)):
        usage = message["usage"]
        assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == expected
        assert usage["cache_creation_input_tokens"] == 0
        assert usage["output_tokens"] == 5
        assert usage["output_tokens_details"] == {"thinking_tokens": 2}


def test_ids_are_the_clients_kind() -> None:
    messages = [whole(deltas_of([TEXT])) for _ in range(2)]
    ids = [block["id"] for message in messages for block in message["content"] if "id" in block]
    assert all(call_id.startswith("toolu_") and len(call_id) == 30 for call_id in ids)
    assert len({*ids, *(message["id"] for message in messages)}) == 6
    assert messages[0]["id"].startswith("msg_")


def test_a_failure_is_one_event() -> None:
    form = make_form()
    form.begin(7)
    assert form.failed(EngineDead("gone")) == (
        b'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"gone"}}\n\n'
    )
    assert b"internal error" in form.failed(None)


def test_deltas_of_one_delivery_come_together() -> None:
    deltas = deltas_of(["<think>a</think>b", "c"])
    form = make_form()
    data = form.begin(7) + form.chunks(deltas, None) + form.end(USAGE)
    kinds = [event["type"] for event in read_events(data.decode())]
    assert list(itertools.compress(kinds, [kind.endswith("start") for kind in kinds])) == [
        "message_start",
        "content_block_start",
        "content_block_start",
    ]
