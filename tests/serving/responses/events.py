"""Checks a stream of the Responses API against its specification, event by event."""

from __future__ import annotations

import json
from typing import Any

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
RESPONSE: TypeAdapter[Any] = TypeAdapter(Response)
LAST = {"completed", "incomplete", "failed"}

Event = dict[str, Any]


def read_events(text: str) -> list[Event]:
    """Events of a whole stream, each a pair of lines whose type agrees."""
    assert text.endswith("\n\n") and "[DONE]" not in text
    events = []
    for block in text[:-2].split("\n\n"):
        kind, data = block.split("\n")
        assert kind.startswith("event: ") and data.startswith("data: ")
        event = json.loads(data.removeprefix("data: "))
        assert kind.removeprefix("event: ") == event["type"]
        events.append(event)
    return events


def check_response(response: Event) -> None:
    """Every field that the client's type requires, of the type that it says."""
    parsed = RESPONSE.validate_python(response)
    assert parsed.object == "response" and parsed.status == response["status"]
    for item in response["output"]:
        assert item["id"].startswith({"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}[item["type"]])
    ids = [item["id"] for item in response["output"]]
    assert len(set(ids)) == len(ids)
    if response["usage"] is not None:
        usage = response["usage"]
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        assert usage["output_tokens_details"]["reasoning_tokens"] <= usage["output_tokens"]
        assert usage["input_tokens_details"]["cached_tokens"] <= usage["input_tokens"]


def check_stream(events: list[Event], *, background: bool = False) -> Event:
    """Order, numbering and contents; gives the last event's response."""
    for event in events:
        EVENT.validate_python(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    stages = ["queued", "in_progress"] if background else ["in_progress"]
    begin = [("response.created", stages[0])] + [(f"response.{stage}", stage) for stage in stages]
    for event, (kind, status) in zip(events, begin, strict=False):
        assert (event["type"], event["response"]["status"]) == (kind, status)
        assert event["response"]["output"] == [] and event["response"]["usage"] is None
        check_response(event["response"])
    rest = events[len(begin) :]
    last = rest.pop()
    response: Event = last["response"]
    assert last["type"] == f"response.{response['status']}" and response["status"] in LAST
    check_response(response)
    if rest and rest[-1]["type"] == "error":
        assert response["status"] == "failed"
        rest.pop()
    items = []
    while rest:
        item, rest = check_item(rest, len(items))
        items.append(item)
    assert response["output"] == items
    changing = {"status", "output", "usage", "completed_at", "incomplete_details", "error"}
    heads = [
        {name: value for name, value in event["response"].items() if name not in changing}
        for event in [*events[: len(begin)], last]
    ]
    assert all(head == heads[0] for head in heads)
    return response


def check_item(events: list[Event], index: int) -> tuple[Event, list[Event]]:
    """The first item's events are whole and in order; gives the item, and the events after it."""
    added = events[0]
    assert added["type"] == "response.output_item.added" and added["output_index"] == index
    item = added["item"]
    assert item["status"] == "in_progress"
    end = next(i for i, event in enumerate(events) if event["type"] == "response.output_item.done")
    inner, done = events[1:end], events[end]
    assert done["output_index"] == index and done["item"]["id"] == item["id"]
    assert all(event["item_id"] == item["id"] and event["output_index"] == index for event in inner)
    whole = done["item"]
    assert whole["status"] in ("completed", "incomplete")
    if item["type"] == "function_call":
        assert item["arguments"] == ""
        assert {**whole, "arguments": "", "status": "in_progress"} == item
        assert inner[-1]["type"] == "response.function_call_arguments.done"
        assert [e["type"] for e in inner[:-1]] == ["response.function_call_arguments.delta"] * (len(inner) - 1)
        assert "".join(e["delta"] for e in inner[:-1]) == inner[-1]["arguments"] == whole["arguments"]
        assert inner[-1]["name"] == whole["name"]
    else:
        assert item["content"] == []
        kind = {"message": "output_text", "reasoning": "reasoning_text"}[item["type"]]
        assert all(event["content_index"] == 0 for event in inner)
        assert [inner[0]["type"], inner[-2]["type"], inner[-1]["type"]] == [
            "response.content_part.added",
            f"response.{kind}.done",
            "response.content_part.done",
        ]
        deltas = inner[1:-2]
        assert [e["type"] for e in deltas] == [f"response.{kind}.delta"] * len(deltas)
        part = inner[-1]["part"]
        assert inner[0]["part"] == {**part, "text": "", **({"logprobs": []} if "logprobs" in part else {})}
        assert whole["content"] == [part] and part["type"] == kind
        assert "".join(e["delta"] for e in deltas) == inner[-2]["text"] == part["text"]
        if kind == "output_text":
            assert [entry for e in deltas for entry in e["logprobs"]] == inner[-2]["logprobs"] == part["logprobs"]
    return whole, events[end + 1 :]
