"""However an output is cut into deltas, chunks join to the message that a whole answer has."""

from __future__ import annotations

import json
from itertools import combinations, pairwise
from typing import Any

import msgspec
import pytest

from pagedray.serving.answer import Delta
from pagedray.serving.openai.chat_form import ChatForm, ChatShape
from pagedray.serving.openai.respond import Head, Usage
from pagedray.serving.openai.schema import ChatRequest, parse
from pagedray.serving.parsers.registry import ParserSetup, make_parser
from pagedray.serving.parsers.tools import Tool
from pagedray.serving.simple_parsers import OneCall
from tests.fakes import ByteTokenizer
from tests.serving.chat_chunks import join_choices

TOOLS = (Tool("weather"), Tool("clock"))
HEAD = Head("chatcmpl-1", "chat.completion", 1, "m", "fp")
USAGE = Usage(1, 2, 3, {})
OUTPUTS = [
    "",
    "Just text.",
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich", "days": [1, 2]}}\n</tool_call>',
    (
        '<think>Hm.</think>So:\n<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "weather", "arguments": {"city": "{\\"x\\"}"}}\n</tool_call>'
    ),
    "<think>Never closed",
    'Half a <tool_call>\n{"name": "wea',
]


def make_form(is_legacy: bool = False, **fields: Any) -> ChatForm:
    wire = parse(ChatRequest, {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields})
    shape = ChatShape(head=HEAD, prompt_ids=[1], wire=wire, may_call=True, is_legacy=is_legacy, can_reason=True)
    setup = ParserSetup("hermes", "qwen3")
    parser = make_parser(setup, TOOLS, choice="auto", reasoning_is_open=False, special_tokens=())
    return ChatForm(shape, [OneCall(parser) if is_legacy else parser], ByteTokenizer())  # type: ignore[arg-type]


def deltas(pieces: list[str]) -> list[Delta]:
    made = [Delta(0, piece, (1,)) for piece in pieces]
    made[-1].finish_reason = "stop"
    return made


def whole(pieces: list[str], **how: Any) -> dict[str, Any]:
    form = make_form(**how)
    for delta in deltas(pieces):
        form.add([delta])
    choice = json.loads(msgspec.json.encode(form.body(USAGE)))["choices"][0]
    return comparable(choice)


def streamed(pieces: list[str], **how: Any) -> dict[str, Any]:
    form = make_form(**how)
    data = b"".join(form.chunks([delta], None) for delta in deltas(pieces)) + form.end(USAGE)
    events = data.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return comparable(join_choices([json.loads(event.removeprefix("data: ")) for event in events[:-2]])[0])


def comparable(choice: dict[str, Any]) -> dict[str, Any]:
    message = {name: value for name, value in choice["message"].items() if value is not None}
    ids = [call.pop("id") for call in message.get("tool_calls", ())]
    assert len(set(ids)) == len(ids)
    return {"message": message, "finish_reason": choice["finish_reason"]}


@pytest.mark.parametrize("is_legacy", [False, True])
@pytest.mark.parametrize("output", OUTPUTS)
def test_every_cut(output: str, is_legacy: bool) -> None:
    expected = whole([output], is_legacy=is_legacy)
    cuts = [[], *([i] for i in range(len(output) + 1)), *combinations(range(0, len(output), 7), 2), range(len(output))]
    for cut in cuts:
        ends = [0, *cut, len(output)]
        pieces = [output[a:b] for a, b in pairwise(ends)]
        assert streamed(pieces, is_legacy=is_legacy) == expected
        assert whole(pieces, is_legacy=is_legacy) == expected
    calls = expected["message"].get("tool_calls", [])
    for call in calls:
        json.loads(call["function"]["arguments"])
    assert len(calls) == (0 if is_legacy else output.count("</tool_call>"))
    reason = "function_call" if is_legacy else "tool_calls"
    assert expected["finish_reason"] == (reason if "</tool_call>" in output else "stop")


def test_token_ids_stand_beside_their_deltas() -> None:
    form = make_form(return_token_ids=True)
    chunks = [form.chunks([delta], None) for delta in deltas(["<thi", "nk>Hm.</think>", "<tool", "_call>", "text"])]
    events = [json.loads(event.removeprefix("data: ")) for event in b"".join(chunks).decode().split("\n\n")[:-1]]
    ids = [i for event in events for i in event["choices"][0].get("token_ids", ())]
    assert ids == [1] * 5
    assert [event["prompt_token_ids"] for event in events if "prompt_token_ids" in event] == [[1]]
