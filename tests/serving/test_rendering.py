"""Conversations with tools, for templates of every kind."""

from __future__ import annotations

from typing import Any

import pytest

from pagedray.engine.errors import UserError
from pagedray.serving.conversation import Conversation
from pagedray.serving.parsers.registry import ParserSetup
from pagedray.serving.parsers.tools import Tool
from pagedray.serving.rendering import render
from tests.serving.rig import TEMPLATE, TemplatedTokenizer
from tests.serving.templates import HERMES, TURNS

USER = {"role": "user", "content": "hi"}


def call(call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


def rendered(template: str, messages: list[dict[str, Any]], tool: str | None = "hermes", **fields: Any) -> str:
    conversation = Conversation(model="m", messages=messages, **fields)
    return render(TemplatedTokenizer(template), ParserSetup(tool, None), conversation)  # type: ignore[arg-type]


HISTORY = [
    USER,
    {"role": "assistant", "content": "See:", "tool_calls": [call("a"), call("b")]},
    {"role": "tool", "tool_call_id": "a", "content": "1"},
    {"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": "2"}]},
]
WRITTEN = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'


def test_a_template_that_knows_calls_gets_them() -> None:
    text = rendered(HERMES, HISTORY, tools=(Tool("f"),))
    assert text.count("<tool_call>") == 2 and text.endswith("tool:1@a\ntool:2@b\nassistant:")


def test_calls_and_results_as_text() -> None:
    assert rendered(TEMPLATE, HISTORY) == (f"user:hi\nassistant:See:\n{WRITTEN}\n{WRITTEN}\ntool:1\ntool:2\nassistant:")


def test_calls_as_a_list() -> None:
    text = rendered(TEMPLATE, HISTORY, tool="json")
    assert '\nassistant:See:\n[{"name": "f", "arguments": {"x": 1}}, {"name": "f", "arguments": {"x": 1}}]\n' in text


def test_results_as_a_users_turn() -> None:
    results = "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>"
    assert rendered(TURNS, HISTORY) == f"user:hi\nassistant:See:\n{WRITTEN}\n{WRITTEN}\nuser:{results}\nassistant:"
    text = rendered(TURNS, HISTORY, tools=(Tool("f"),))
    assert text.startswith("user:You can call functions.") and "\n\nhi\nassistant:" in text


def test_what_the_template_refuses_is_the_users_error() -> None:
    with pytest.raises(UserError, match="alternate"):
        rendered(TURNS, [USER, USER])


def test_a_model_without_a_way_to_call_gets_no_instructions() -> None:
    assert rendered(TEMPLATE, [USER], tool=None, tools=(Tool("f"),)) == "user:hi\nassistant:"


def test_mistrals_templates_get_ids_of_nine_characters() -> None:
    text = rendered(HERMES, HISTORY, tool="mistral", tools=(Tool("f"),))
    first, second = (part.split("<")[0].split("\n")[0] for part in text.split("#")[1:])
    assert len(first) == len(second) == 9 and first.isalnum() and second.isalnum() and first != second
    assert text.endswith(f"tool:1@{first}\ntool:2@{second}\nassistant:")
    assert rendered(HERMES, HISTORY, tool="mistral", tools=(Tool("f"),)) == text
    kept = [USER, {"role": "assistant", "content": "", "tool_calls": [call("abc123XYZ")]}]
    assert "#abc123XYZ" in rendered(HERMES, kept, tool="mistral", tools=(Tool("f"),))


def test_gpt_oss_knows_three_efforts() -> None:
    template = "{{ reasoning_effort }} {{ messages | length }} {{ enable_thinking }}"
    for effort, shown in [
        ("none", "low"),
        ("minimal", "low"),
        ("medium", "medium"),
        ("xhigh", "high"),
        ("max", "high"),
    ]:
        conversation = Conversation(model="m", messages=[USER], reasoning_effort=effort)
        tokenizer: Any = TemplatedTokenizer(template)
        assert render(tokenizer, ParserSetup("gpt_oss", "gpt_oss"), conversation).startswith(f"{shown} 1")
        assert render(tokenizer, ParserSetup("hermes", "qwen3"), conversation) == f"{effort} 1 {effort != 'none'}"


def test_reasoning_has_every_name_that_templates_know() -> None:
    names = ("content", "reasoning_content", "reasoning", "thinking")
    template = "{% for m in messages %}" + "|".join(f"{{{{ m.{name} }}}}" for name in names) + ";{% endfor %}"
    answer = {"role": "assistant", "content": "a", "reasoning_content": "r"}
    assert rendered(template, [answer]) == "a|r|r|r;"
    assert rendered(template + "{# tool_calls #}", [{**answer, "tool_calls": [call("a")]}]) == "a|r|r|;"
    assert (
        rendered(template + "{# tool_calls #}", [{**answer, "content": None, "tool_calls": [call("a")]}]) == "|r|r|r;"
    )
