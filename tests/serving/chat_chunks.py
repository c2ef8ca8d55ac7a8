"""What the chunks of a chat completion join to."""

from __future__ import annotations

from typing import Any


def join_choices(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Choice index → the choice that a whole answer would have, but for fields of chunks only.

    Fails where deltas aren't as clients take them: the role once and first, a call's id and name once and with its
    first fragment, the finish reason apart.
    """
    out: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for item in chunk["choices"]:
            delta = item["delta"]
            choice = out.get(item["index"])
            if choice is None:
                assert set(delta) == {"role", "content"} and item["finish_reason"] is None
                choice = out[item["index"]] = {
                    "message": {**delta, "refusal": None},
                    "finish_reason": None,
                    "logprobs": [],
                }
                continue
            assert choice["finish_reason"] is None and "role" not in delta
            if item["finish_reason"] is not None:
                assert delta == {}
                choice["finish_reason"], choice["stop_reason"] = item["finish_reason"], item["stop_reason"]
            choice["logprobs"] += (item["logprobs"] or {"content": []})["content"]
            _join(choice["message"], delta)
    return out


def _join(message: dict[str, Any], delta: dict[str, Any]) -> None:
    assert set(delta) <= {"content", "reasoning_content", "reasoning", "tool_calls", "function_call"}
    assert delta.get("reasoning") == delta.get("reasoning_content")
    for name in ("content", "reasoning_content", "reasoning"):
        if name in delta:
            message[name] = (message.get(name) or "") + delta[name]
    if (call := delta.get("function_call")) is not None:
        known = message.setdefault("function_call", {"arguments": ""})
        assert ("name" in call) == ("name" not in known)
        known["arguments"] += call.pop("arguments")
        known.update(call)
    for piece in delta.get("tool_calls", ()):
        calls = message.setdefault("tool_calls", [])
        if piece["index"] == len(calls):
            assert set(piece) == {"index", "id", "type", "function"} and piece["function"]["arguments"] == ""
            calls.append({key: value for key, value in piece.items() if key != "index"})
        else:
            assert piece["index"] == len(calls) - 1, "arguments of a call came after the next call"
            assert set(piece) == {"index", "function"} and set(piece["function"]) == {"arguments"}
            calls[-1]["function"]["arguments"] += piece["function"]["arguments"]
