"""Parsers are chosen by name or by the chat template, and what depends on the choice follows it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pagedray.engine.config import ApiConfig
from pagedray.engine.errors import ConfigError
from pagedray.serving.parsers.events import ContentText
from pagedray.serving.parsers.registry import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    ParserSetup,
    choose_parsers,
    find_family,
    make_parser,
    needs_special_tokens,
    reasoning_is_open,
    reasoning_span,
    tool_grammar,
    tool_instructions,
)
from pagedray.serving.parsers.tools import NamedTool, Tool
from tests.fakes import ByteTokenizer
from tests.serving.parsers.transcripts import TOOLS, TRANSCRIPTS, parse

# What tells families apart in their templates, in templates of our own.
QWEN = """{%- for m in messages %}{{ '<|im_start|>' + m.role }}{% for c in m.tool_calls or [] %}
{{- '<tool_call>\\n{"name": "' + c.function.name + '", "arguments": ' }}
{{- c.function.arguments|tojson + '}\\n</tool_call>' }}
{%- endfor %}{% endfor %}"""
QWEN3 = QWEN + "{% if enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
CODER = "{% if tools %}<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>{% endif %}"
LLAMA = """{{ '<|start_header_id|>' + m.role }}{{ 'Answer with {"name": function name, "parameters": dictionary}' }}"""
LLAMA_TAG = "{% if builtin_tools %}{{ '<|python_tag|>' + call }}{% endif %}"
LLAMA4 = "{{ '<|header_start|>' }}{{ '<|python_start|>' }}{{ tool_call.name }}"
TOOLACE = "Put it in the form of [func_name1(params_name1=value), func_name2(params)]"
MISTRAL = """{{ "[TOOL_CALLS][" }}{{ '{"name": "' + c.name + '", "arguments": ' }}{{ "]" + eos_token }}"""
MISTRAL_NEW = """{{ "[TOOL_CALLS]" + c.name + "[ARGS]" + c.arguments }}"""
DEEPSEEK = """{{ '<｜Assistant｜><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + c.type + '<｜tool▁sep｜>' }}
{{- c.name + '\\n```json' }}"""
DEEPSEEK_R1 = DEEPSEEK + "{% set content = content.split('</think>')[-1] %}"
DEEPSEEK_31 = (
    "{{ '<｜Assistant｜></think>' }}{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + c.name + '<｜tool▁sep｜>' }}"
)
GPT_OSS = "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}"


@pytest.mark.parametrize(
    ("template", "tool", "reasoning"),
    [
        (None, "json", None),
        ("{{ messages[0].content }}", "json", None),
        (QWEN, "hermes", None),
        (QWEN3, "hermes", "qwen3"),
        (CODER, "qwen3_coder", None),
        (LLAMA, "llama3_json", None),
        (LLAMA_TAG, "llama3_json", None),
        (LLAMA4, "pythonic", None),
        (TOOLACE, "pythonic", None),
        (MISTRAL, "mistral", None),
        (MISTRAL_NEW, "mistral_args", None),
        (DEEPSEEK, "deepseek_v3", None),
        (DEEPSEEK_R1, "deepseek_v3", "deepseek_r1"),
        (DEEPSEEK_31, "deepseek_v31", "deepseek_r1"),
        (GPT_OSS, "gpt_oss", "gpt_oss"),
    ],
)
def test_a_template_shows_its_family(template: str | None, tool: str, reasoning: str | None) -> None:
    assert choose_parsers(ApiConfig(), template) == ParserSetup(tool, reasoning)
    off = ApiConfig(tool_call_parser="none", reasoning_parser="none")
    assert choose_parsers(off, template) == ParserSetup(None, None)


def test_a_name_weighs_more_than_the_template() -> None:
    for name in TOOL_PARSERS:
        if name != "gpt_oss":
            config = ApiConfig(tool_call_parser=name, reasoning_parser="deepseek_r1")
            assert choose_parsers(config, QWEN3) == ParserSetup(name, "deepseek_r1")


@pytest.mark.parametrize("setting", ["tool_call_parser", "reasoning_parser"])
def test_an_unknown_name_is_told_all_names(setting: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choose_parsers(ApiConfig.model_validate({setting: "hermess"}), None)
    known = TOOL_PARSERS if setting == "tool_call_parser" else REASONING_PARSERS
    for word in (setting, "'hermess'", "auto", "none", *known):
        assert word in str(caught.value)


@pytest.mark.parametrize(("tool", "reasoning"), [("gpt_oss", "qwen3"), ("hermes", "gpt_oss")])
def test_channels_go_with_nothing_else(tool: str, reasoning: str) -> None:
    with pytest.raises(ConfigError, match="gpt_oss"):
        choose_parsers(ApiConfig(tool_call_parser=tool, reasoning_parser=reasoning), None)


def test_special_tokens_are_needed_where_they_are_markup() -> None:
    assert not any(needs_special_tokens(ParserSetup(name, "qwen3")) for name in ("hermes", "qwen3_coder", "json", None))
    for name in ("gpt_oss", "deepseek_v3", "deepseek_v31", "mistral", "mistral_args", "pythonic", "llama3_json"):
        assert needs_special_tokens(ParserSetup(name, None))
    assert needs_special_tokens(ParserSetup(None, "gpt_oss"))


@pytest.mark.parametrize("tool", TOOL_PARSERS)
def test_without_tools_text_is_content(tool: str) -> None:
    for transcript in TRANSCRIPTS:
        if transcript.tool != tool or transcript.reasoning_parser is not None:
            continue
        for tools, choice in (((), "auto"), (TOOLS, "none")):
            parser = make_parser(
                ParserSetup(tool, None), tools, choice=choice, reasoning_is_open=False, special_tokens=()
            )
            assert all(parser.feed(char) == [ContentText(char)] for char in transcript.text)
            assert parser.finish() == []


def test_without_tools_markup_is_dropped_with_the_other_special_tokens() -> None:
    special = ("<|python_tag|>", "<|eom_id|>")
    parser = make_parser(
        ParserSetup("llama3_json", None), (), choice="auto", reasoning_is_open=False, special_tokens=special
    )
    assert parse(parser, "<|python_tag|>print(1 <| 2)<|eom_id|><|eo").content == "print(1 <| 2)<|eo"


def test_a_named_choice_reads_calls() -> None:
    parser = make_parser(
        ParserSetup("hermes", None), TOOLS, choice=NamedTool("now"), reasoning_is_open=False, special_tokens=()
    )
    assert parse(parser, '<tool_call>{"name": "now"}</tool_call>').calls == (("now", "{}"),)


@pytest.mark.parametrize(
    ("reasoning", "prompt", "continues", "is_open"),
    [
        ("qwen3", "<|im_start|>assistant\n", False, False),
        ("qwen3", "<|im_start|>assistant\n<think>\n", False, True),
        ("qwen3", "What does <think> do?<|im_end|>\n<|im_start|>assistant\n", False, False),
        ("qwen3", "assistant\n<think>\n\n</think>\n\n", False, False),
        ("qwen3", "assistant\n<think>\nFirst I", True, True),
        ("qwen3", "assistant\n<think>\nFirst I</think> So", True, False),
        ("qwen3", "assistant\nSo", True, False),
        ("deepseek_r1", "<｜Assistant｜><think>\n", False, True),
        ("deepseek_r1", "<｜Assistant｜>", False, True),
        ("deepseek_r1", "<｜Assistant｜></think>", False, False),
        ("deepseek_r1", "<｜Assistant｜>So", True, False),
        ("gpt_oss", "<|start|>assistant", False, False),
        (None, "<think>\n", False, False),
    ],
)
def test_whether_reasoning_is_open_shows_in_the_prompt(
    reasoning: str | None, prompt: str, continues: bool, is_open: bool
) -> None:
    setup = ParserSetup("gpt_oss" if reasoning == "gpt_oss" else "hermes", reasoning)
    assert reasoning_is_open(setup, prompt, continues=continues) is is_open
    span = reasoning_span(setup, prompt, ByteTokenizer(), 7, continues=continues)
    if reasoning is None or (not is_open and reasoning != "gpt_oss" and (continues or "</think>" in prompt)):
        assert span is None
    else:
        assert span is not None and span.is_open is is_open and span.max_tokens == 7
        assert bytes(ByteTokenizer().decode(span.end_ids).encode()) == span.end


@pytest.mark.parametrize("tool", TOOL_PARSERS)
def test_instructions_name_the_tools_and_show_a_call_that_is_read(tool: str) -> None:
    text = tool_instructions(ParserSetup(tool, None), TOOLS)
    shown = [json.loads(line) for line in text.splitlines() if line.startswith('{"name": ') and '"description"' in line]
    assert [given["name"] for given in shown] == [each.name for each in TOOLS]
    assert shown[0]["parameters"] == TOOLS[0].parameters
    example = find_family(tool).how_to_call.split("\n", 1)[1]
    for word in ("function name", "function_name", "NAME", "<function=name"):
        example = example.replace(word, "<function=now" if word.startswith("<") else "now")
    parser = make_parser(ParserSetup(tool, None), TOOLS, choice="auto", reasoning_is_open=False, special_tokens=())
    meaning = parse(parser, example)
    assert meaning.content == ""
    assert [(name, json.loads(given)["argument"]) for name, given in meaning.calls] == [("now", "value")]


def test_without_tools_there_are_no_instructions() -> None:
    assert tool_instructions(ParserSetup("hermes", None), ()) == ""
    assert tool_instructions(ParserSetup(None, None), TOOLS) == ""


@pytest.mark.parametrize("parameters", [{"properties": ["a"]}, {"properties": None, "required": 5}, {"type": "string"}])
@pytest.mark.parametrize("tool", TOOL_PARSERS)
def test_a_schema_that_is_none_breaks_no_parser(tool: str, parameters: dict[str, Any]) -> None:
    tools = (Tool("now", "", parameters),)
    assert tool_grammar(ParserSetup(tool, None), tools, "required", True) is not None  # its compiler says what is wrong
    for transcript in TRANSCRIPTS:
        if transcript.tool == tool:
            setup = ParserSetup(tool, transcript.reasoning_parser)
            parse(make_parser(setup, tools, choice="auto", reasoning_is_open=False, special_tokens=()), transcript.text)
