"""Streams of the Messages API: read with every rule of their order checked, and put together again."""

from __future__ import annotations

import json
from typing import Any

DELTAS = {
    "text": {"text_delta"},
    "thinking": {"thinking_delta", "signature_delta"},
    "tool_use": {"input_json_delta"},
}


def read_events(text: str) -> list[dict[str, Any]]:
    """Events of a stream that ended well. Checks framing and order."""
    assert text.endswith("\n\n")
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    check_order(events)
    return events


def check_order(events: list[dict[str, Any]]) -> None:
    kinds = [event["type"] for event in events if event["type"] != "ping"]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("message_start") == kinds.count("message_delta") == kinds.count("message_stop") == 1
    message = events[0]["message"]
    assert message["content"] == [] and message["stop_reason"] is None and message["stop_sequence"] is None
    open_block: dict[str, Any] | None = None
    signatures = num_blocks = 0
    for event in events:
        if event["type"] == "content_block_start":
            assert open_block is None and event["index"] == num_blocks
            open_block, num_blocks, signatures = event["content_block"], num_blocks + 1, 0
            assert open_block["type"] != "tool_use" or open_block["input"] == {}
        elif event["type"] == "content_block_delta":
            assert open_block is not None and event["index"] == num_blocks - 1
            assert event["delta"]["type"] in DELTAS[open_block["type"]]
            assert not signatures, "something came after the signature"
            signatures += event["delta"]["type"] == "signature_delta"
        elif event["type"] == "content_block_stop":
            assert open_block is not None and event["index"] == num_blocks - 1
            assert signatures == (open_block["type"] == "thinking")
            open_block = None
    assert open_block is None and num_blocks
    assert events[-2]["delta"]["stop_reason"] is not None


def message_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the events build."""
    message = dict(events[0]["message"])
    texts: list[str] = []
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(dict(event["content_block"]))
            texts.append("")
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            texts[-1] += delta.get("text", "") + delta.get("thinking", "") + delta.get("partial_json", "")
        elif event["type"] == "message_delta":
            message |= event["delta"]
            message["usage"] = message["usage"] | event["usage"]
    for block, text in zip(blocks, texts, strict=True):
        if block["type"] == "tool_use":
            block["input"] = json.loads(text or "{}")
        else:
            block[block["type"]] = text
    return {**message, "content": blocks}
