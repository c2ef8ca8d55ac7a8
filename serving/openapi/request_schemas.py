"""Schemas of request bodies: made from the classes that check them, so that they tell what is really taken.

Fields that are accepted and ignored stand there with the reason; those that are refused, with the values that ask for
nothing. What one field allows another, and what depends on the model, is said in words by errors alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from pagedray.engine.generation import MAX_LOGPROBS
from pagedray.serving.openapi.shapes import (
    ANY,
    INTEGER,
    NULL,
    STRING,
    Schema,
    array,
    const,
    maybe,
    one_of,
    record,
    said,
)

Ignored = Mapping[str, str]
Refused = Mapping[str, tuple[str, tuple[Any, ...]]]

_PARTS = array({"type": "object", "required": ["type"], "properties": {"type": STRING}})
_TOKEN_IDS = array({"type": "integer"}, minItems=1)
_TOOLS = said(array({"type": "object"}), "Functions that the model may call.")
_TEXT_PARTS = array(record({"type": const("text"), "text": STRING}), minItems=1)
_TOOL_CALLS = array(
    record(
        {"id": STRING, "function": record({"name": STRING}, {"arguments": said(STRING, "JSON.")})},
        {"type": const("function"), "index": INTEGER},
    )
)


def _openai_message(roles: Schema, content: Schema, *needed: str, **more: Schema) -> Schema:
    return {
        "type": "object",
        "required": ["role", *needed],
        "properties": {"role": roles, "content": content, "name": maybe(STRING), **more},
        "additionalProperties": NULL,  # what else there is says nothing
    }


_OPENAI_MESSAGES = array(
    one_of(
        _openai_message(const("system", "developer", "user"), one_of(STRING, _TEXT_PARTS), "content"),
        _openai_message(
            const("assistant"),
            one_of(STRING, _PARTS, NULL),
            reasoning_content=maybe(STRING),
            reasoning=maybe(STRING),
            refusal=maybe(STRING),
            tool_calls=maybe(_TOOL_CALLS),
            function_call=maybe({"type": "object"}),
            annotations=maybe(array({}, maxItems=0)),
            parsed=ANY,
        ),
        _openai_message(const("tool"), one_of(STRING, _TEXT_PARTS), "content", "tool_call_id", tool_call_id=STRING),
        said(
            _openai_message(const("function"), one_of(STRING, _TEXT_PARTS, NULL), "name", name=STRING),
            "The earlier form of a tool message.",
        ),
    ),
    minItems=1,
)
_ANTHROPIC_MESSAGES = array(
    {
        "type": "object",
        "required": ["role", "content"],
        "properties": {"role": const("user", "assistant", "system"), "content": one_of(STRING, _PARTS)},
        "additionalProperties": NULL,
    },
    minItems=1,
)
_ONE_OR_SEVERAL = maybe(one_of(STRING, array(STRING)))

# Fields that a class leaves to other code: (class, field) → what that code takes.
BY_HAND: dict[tuple[str, str], Schema] = {
    ("ChatRequest", "messages"): _OPENAI_MESSAGES,
    ("ChatRequest", "stop"): _ONE_OR_SEVERAL,
    ("ChatRequest", "tools"): maybe(_TOOLS),
    ("CompletionRequest", "prompt"): one_of(
        STRING, array(STRING, minItems=1), _TOKEN_IDS, array(_TOKEN_IDS, minItems=1)
    ),
    ("CompletionRequest", "stop"): _ONE_OR_SEVERAL,
    ("TokenizeRequest", "messages"): maybe(_OPENAI_MESSAGES),
    ("ResponseRequest", "input"): maybe(one_of(STRING, array({"type": "object"}))),
    ("ResponseRequest", "tools"): maybe(_TOOLS),
    ("ResponseRequest", "tool_choice"): maybe(one_of(STRING, {"type": "object"})),
    ("ResponseRequest", "stop"): _ONE_OR_SEVERAL,
    ("CountRequest", "input"): maybe(one_of(STRING, array({"type": "object"}))),
    ("CountRequest", "tools"): maybe(_TOOLS),
    ("CountRequest", "tool_choice"): maybe(one_of(STRING, {"type": "object"})),
    ("MessagesRequest", "messages"): _ANTHROPIC_MESSAGES,
    ("MessagesRequest", "system"): maybe(one_of(STRING, _PARTS)),
    ("MessagesRequest", "tools"): maybe(_TOOLS),
    ("CountTokensRequest", "messages"): _ANTHROPIC_MESSAGES,
    ("CountTokensRequest", "system"): maybe(one_of(STRING, _PARTS)),
    ("CountTokensRequest", "tools"): maybe(_TOOLS),
}

# Ranges that the engine's check of parameters has (engine/generation.py), whatever class they come in.
RANGES: dict[str, Schema] = {
    "temperature": {"minimum": 0, "maximum": 100},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"minimum": -1},
    "min_p": {"minimum": 0, "maximum": 1},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "repetition_penalty": {"exclusiveMinimum": 0, "maximum": 100},
    "max_tokens": {"minimum": 0},
    "max_completion_tokens": {"minimum": 1},
    "max_output_tokens": {"minimum": 1},
    "min_tokens": {"minimum": 0},
    "seed": {"minimum": -(2**63), "maximum": 2**64 - 1},
    "logprobs": {"minimum": 0, "maximum": MAX_LOGPROBS},
    "prompt_logprobs": {"minimum": 0, "maximum": MAX_LOGPROBS},
}


def body_schema(kind: type[BaseModel], prefix: str, ignored: Ignored, refused: Refused) -> dict[str, Schema]:
    """Component name → schema: the body itself under the class's name, and what it is made of under `prefix`ed ones."""
    made = kind.model_json_schema(ref_template=f"#/components/schemas/{prefix}{{model}}")
    parts = made.pop("$defs", {})
    fields: dict[str, Schema] = made["properties"]
    for name in fields:
        if (by_hand := BY_HAND.get((kind.__name__, name))) is not None:
            fields[name] = by_hand
        elif name in RANGES:
            fields[name] = _within(fields[name], RANGES[name])
        if name in ignored:
            fields[name] = {**fields[name], "description": f"Checked, then ignored: {ignored[name]}."}
    for name, why in ignored.items():
        fields.setdefault(name, said(ANY, f"Accepted and ignored: {why}."))
    for name, (why, neutral) in refused.items():
        fields.setdefault(name, said(const(None, *neutral), f"Refused with other values: {name} {why}."))
    return {kind.__name__: _tidy(made), **{prefix + name: _tidy(part) for name, part in parts.items()}}


def _within(schema: Schema, bounds: Schema) -> Schema:
    """The number in a schema, within these bounds too."""
    if "anyOf" in schema:
        return {**schema, "anyOf": [_within(part, bounds) for part in schema["anyOf"]]}
    if schema.get("type") not in ("integer", "number"):
        return schema
    narrower = dict(schema)
    for key, bound in bounds.items():
        choose = min if "aximum" in key else max
        narrower[key] = choose(bound, schema.get(key, bound))
    return narrower


def _tidy(schema: Any) -> Any:
    """Without the titles that pydantic makes of names, and without defaults of null, which mean: not given."""
    if isinstance(schema, list):
        return [_tidy(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    out = {}
    for key, value in schema.items():
        if key == "properties":
            out[key] = {name: _tidy(field) for name, field in value.items()}
        elif key == "enum" or key == "const":
            out[key] = value
        elif not (key == "title" or (key == "default" and value is None)):
            out[key] = _tidy(value)
    return out
