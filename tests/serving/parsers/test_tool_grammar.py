"""What a tool grammar allows, its family's parser reads: random walks through each."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from typing import Any

import jsonschema
import pytest
import xgrammar

from pagedray.engine.grammar.source import GrammarSource
from pagedray.engine.grammar.structural_tag import structural_tag_json
from pagedray.engine.grammar.table import token_table
from pagedray.engine.grammar.vocabulary import Vocabulary
from pagedray.serving.parsers.registry import (
    TOOL_PARSERS,
    ParserSetup,
    answer_grammar,
    answer_or_calls,
    find_family,
    make_parser,
    tool_grammar,
)
from pagedray.serving.parsers.tools import NamedTool, Tool, ToolChoice
from tests.serving.parsers.transcripts import Meaning, parse

TOOLS = [
    Tool(
        "search",
        "",
        {
            "type": "object",
            "properties": {
                "query": {"type": "string"},
                "limit": {"type": "integer", "minimum": 1, "maximum": 50},
                "kind": {"enum": ["web", "news", 'odd "one"']},
                "where": {"$ref": "#/$defs/place"},
                "exact": {"type": "boolean"},
            },
            "required": ["query", "where"],
            "additionalProperties": False,
            "$defs": {
                "place": {
                    "type": "object",
                    "properties": {"name": {"type": "string"}, "at": {"type": "array", "items": {"type": "number"}}},
                    "required": ["name"],
                    "additionalProperties": False,
                }
            },
        },
        strict=True,
    ),
    Tool(
        "set_options",
        "",
        {
            "type": "object",
            "properties": {"a": {"type": "string"}, "b": {"anyOf": [{"type": "integer"}, {"type": "null"}]}},
            "additionalProperties": False,
        },
        strict=True,
    ),
    Tool("now", strict=True),
    Tool("nothing", "", {"type": "object", "properties": {}, "additionalProperties": False}, strict=True),
    Tool("many", "", {"properties": {f"p{i}": {"type": "boolean"} for i in range(9)}}, strict=True),
]
BY_NAME = {tool.name: tool for tool in TOOLS}
EOS = 256
SPECIAL = {
    text: EOS + 1 + i
    for i, text in enumerate(
        ["<other>", *dict.fromkeys(text for name in TOOL_PARSERS for text in find_family(name).markup)]
    )
}
VOCABULARY = Vocabulary(
    tokens=(*(bytes([i]) for i in range(256)), b"<eos>", *(text.encode() for text in SPECIAL)),
    special_ids=(EOS, *SPECIAL.values()),
    eos_ids=(EOS,),
)
NUM_TOKENS = len(VOCABULARY.tokens)
# What ends strings, lists and objects is likely, so that walks end.
WEIGHTS = [12 if chr(i) in '"}])<' else 4 if chr(i).isalnum() or chr(i) in ">\\'" else 1 for i in range(256)] + [12]
WEIGHTS += [1] * len(SPECIAL)
# Of what free text may hold, these begin a call.
TRIGGERS = {
    "hermes": "Well <tool_call>",
    "qwen3_coder": "Well <tool_call>",
    "llama3_json": '{"name"',
    "json": '{"name"',
    "mistral": "Well [TOOL_CALLS]",
    "mistral_args": "Well [TOOL_CALLS]",
    "pythonic": "[search(",
    "deepseek_v3": "Well <｜tool▁calls▁begin｜>",
    "deepseek_v31": "Well <｜tool▁calls▁begin｜>",
    "gpt_oss": "<|channel|>commentary to=",
}

CALL_OF_NOW = {
    "hermes": '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=now>\n\n</function>\n</tool_call>",
}


@pytest.fixture(scope="module")
def compiler() -> xgrammar.GrammarCompiler:
    return xgrammar.GrammarCompiler(token_table(VOCABULARY), max_threads=1)


def compile_source(compiler: xgrammar.GrammarCompiler, source: GrammarSource | None) -> xgrammar.CompiledGrammar:
    assert source is not None and source.kind == "structural_tag"
    return compiler.compile_structural_tag(source.text)


END_OF_VALUE = b"</parameter>\n"  # what ends a text that is quoted by nothing else


def compile_marked(compiler: xgrammar.GrammarCompiler, source: GrammarSource | None) -> xgrammar.CompiledGrammar:
    """As the server does: markup that is special tokens comes as those."""
    assert source is not None and source.kind == "structural_tag"
    return compiler.compile_structural_tag(structural_tag_json(source.text, VOCABULARY))


def walk(
    grammar: xgrammar.CompiledGrammar, random_: random.Random, begin: str = "", longest: int = 3000
) -> list[int] | None:
    """A random output that the grammar allows; None if it didn't end.

    Args:
        begin: what the output begins with, byte by byte.
    """
    matcher = xgrammar.GrammarMatcher(grammar)
    mask = xgrammar.allocate_token_bitmask(1, NUM_TOKENS)
    ids = list(begin.encode())
    assert all(map(matcher.accept_token, ids)), begin
    for _ in range(longest):
        matcher.fill_next_token_bitmask(mask)
        words = mask[0].tolist()
        allowed = [i for i in range(NUM_TOKENS) if words[i // 32] >> (i % 32) & 1]
        token = random_.choices(allowed, [WEIGHTS[i] for i in allowed])[0]
        tail = bytes(i if i < 256 else 0 for i in ids[-len(END_OF_VALUE) :])
        tail = tail[max(tail.rfind(b"<"), 0) :]
        if 0 < len(tail) < len(END_OF_VALUE) and END_OF_VALUE.startswith(tail) and END_OF_VALUE[len(tail)] in allowed:
            token = END_OF_VALUE[len(tail)]
        assert matcher.accept_token(token)
        if token == EOS:
            return ids
        ids.append(token)
    return None


def walks(grammar: xgrammar.CompiledGrammar, count: int, begin: str = "") -> list[str]:
    """Texts of random outputs, as a detokenizer writes them."""
    found = [walk(grammar, random.Random(seed), begin) for seed in range(count)]
    return [text_of(ids) for ids in found if ids is not None]


def text_of(ids: Sequence[int]) -> str:
    return b"".join(VOCABULARY.tokens[i] for i in ids).decode(errors="replace")


def read(tool: str, text: str, choice: ToolChoice) -> Meaning:
    def parser() -> Any:
        return make_parser(ParserSetup(tool, None), TOOLS, choice=choice, reasoning_is_open=False, special_tokens=())

    meaning = parse(parser(), [text])
    assert parse(parser(), text) == meaning
    return meaning


def check(meaning: Meaning, text: str) -> None:
    for name, given in meaning.calls:
        schema = BY_NAME[name].parameters
        arguments = json.loads(given)
        assert isinstance(arguments, dict), text
        jsonschema.validate(arguments, schema)


@pytest.mark.parametrize("tool", TOOL_PARSERS)
@pytest.mark.parametrize("parallel", [False, True])
def test_required_means_calls_and_nothing_else(compiler: xgrammar.GrammarCompiler, tool: str, parallel: bool) -> None:
    grammar = compile_source(compiler, tool_grammar(ParserSetup(tool, None), TOOLS, "required", parallel))
    counts = set()
    names = set()
    for text in walks(grammar, 40):
        meaning = read(tool, text, "required")
        assert meaning.content == "" and meaning.reasoning == "" and meaning.calls, text
        check(meaning, text)
        counts.add(min(len(meaning.calls), 2))
        names |= {name for name, _ in meaning.calls}
    if parallel and tool in CALL_OF_NOW:  # random walks rarely begin a line behind a call with another
        for text in walks(grammar, 10, CALL_OF_NOW[tool] + "\n<"):
            meaning = read(tool, text, "required")
            assert meaning.content == "" and len(meaning.calls) > 1, text
            check(meaning, text)
            counts.add(2)
    assert counts == ({1, 2} if parallel and tool != "gpt_oss" else {1})
    assert len(names) >= 4


@pytest.mark.parametrize("tool", CALL_OF_NOW)
def test_a_model_that_goes_on_with_words_needs_not_call_again(compiler: xgrammar.GrammarCompiler, tool: str) -> None:
    call = CALL_OF_NOW[tool]
    for parallel in (True, False):
        grammar = compile_source(compiler, tool_grammar(ParserSetup(tool, None), TOOLS, "required", parallel))
        for text, may_end in (("", True), ("\n", parallel), ("\nIt is noon", parallel), (f"\n{call}", parallel)):
            matcher = xgrammar.GrammarMatcher(grammar)
            ends = matcher.accept_string(call + text) and matcher.accept_token(EOS)
            assert ends == may_end, text
    matcher = xgrammar.GrammarMatcher(
        compile_source(compiler, tool_grammar(ParserSetup(tool, None), TOOLS, "required", True))
    )
    assert not matcher.accept_string(call + "\nIt is noon, and all is well in Paris")
    assert read(tool, call + "\nIt is noon", "required") == Meaning(calls=(("now", "{}"),))


@pytest.mark.parametrize("choice", ["required", NamedTool("now")])
def test_a_call_that_must_come_and_is_cut_off_is_no_content(choice: ToolChoice) -> None:
    call = CALL_OF_NOW["hermes"]
    for end in range(len(call)):
        meaning = read("hermes", call[:end], choice)
        assert meaning.content == "", call[:end]


@pytest.mark.parametrize("tool", TOOL_PARSERS)
@pytest.mark.parametrize("name", BY_NAME)
def test_a_named_tool_is_called_once(compiler: xgrammar.GrammarCompiler, tool: str, name: str) -> None:
    choice = NamedTool(name)
    grammar = compile_source(compiler, tool_grammar(ParserSetup(tool, None), TOOLS, choice, True))
    texts = walks(grammar, 10)
    assert len(texts) > 5
    for text in texts:
        meaning = read(tool, text, choice)
        assert [called for called, _ in meaning.calls] == [name] and meaning.content == "", text
        check(meaning, text)


@pytest.mark.parametrize("tool", TOOL_PARSERS)
@pytest.mark.parametrize("parallel", [False, True])
def test_strict_tools_hold_within_free_text(compiler: xgrammar.GrammarCompiler, tool: str, parallel: bool) -> None:
    source = tool_grammar(ParserSetup(tool, None), TOOLS, "auto", parallel)
    grammar = compile_source(compiler, source)
    free = "<|channel|>final<|message|>" if tool == "gpt_oss" else ""
    for text in ("", "Nothing to call: a < b, [1, 2], {x} and é.", " \n"):
        matcher = xgrammar.GrammarMatcher(grammar)
        assert matcher.accept_string(free + text) and matcher.accept_token(EOS)
    num_calls = 0
    for text in walks(grammar, 25, TRIGGERS[tool]):
        meaning = read(tool, text, "auto")
        assert meaning.calls
        assert parallel or len(meaning.calls) == 1
        check(meaning, text)
        num_calls += len(meaning.calls)
    assert num_calls > 12


MARKED = [name for name in TOOL_PARSERS if find_family(name).markup and name not in ("llama3_json", "pythonic")]


@pytest.mark.parametrize("tool", MARKED)
@pytest.mark.parametrize("choice", ["required", NamedTool("search")])
def test_markup_comes_as_special_tokens(compiler: xgrammar.GrammarCompiler, tool: str, choice: ToolChoice) -> None:
    source = tool_grammar(ParserSetup(tool, None), TOOLS, choice, True)
    grammar = compile_marked(compiler, source)
    found = [ids for seed in range(15) if (ids := walk(grammar, random.Random(seed))) is not None]
    assert len(found) > 8
    for ids in found:
        assert ids[0] == SPECIAL[find_family(tool).markup[1 if tool == "gpt_oss" else 0]]
        text = text_of(ids)
        spelled = bytes(i for i in ids if i < 256).decode(errors="replace")
        assert not any(token in spelled for token in find_family(tool).markup)
        meaning = read(tool, text, choice)
        assert meaning.content == "" and meaning.calls, text
        check(meaning, text)


@pytest.mark.parametrize("tool", MARKED)
def test_a_special_token_begins_a_call_in_free_text(compiler: xgrammar.GrammarCompiler, tool: str) -> None:
    source = tool_grammar(ParserSetup(tool, None), TOOLS, "auto", True)
    matcher = xgrammar.GrammarMatcher(compile_marked(compiler, source))
    free = b"" if tool == "gpt_oss" else b"Well "
    begin = SPECIAL[find_family(tool).markup[1 if tool == "gpt_oss" else 0]]
    for token_id in (*free, begin):
        assert matcher.accept_token(token_id)
    assert not matcher.accept_token(ord("?"))


@pytest.mark.parametrize("tool", TOOL_PARSERS)
@pytest.mark.parametrize("parallel", [False, True])
def test_the_grammar_compiler_takes_every_form(compiler: xgrammar.GrammarCompiler, tool: str, parallel: bool) -> None:
    plain = Vocabulary(VOCABULARY.tokens[: EOS + 1], (EOS,), (EOS,))
    for choice in ("required", "auto", NamedTool("search")):
        source = tool_grammar(ParserSetup(tool, None), TOOLS, choice, parallel)
        assert source is not None and structural_tag_json(source.text, plain)
        assert compile_marked(compiler, source)


def test_without_strict_tools_or_choice_nothing_is_constrained() -> None:
    loose = [Tool("now"), Tool("then")]
    for tool in TOOL_PARSERS:
        assert tool_grammar(ParserSetup(tool, None), loose, "auto", True) is None
        assert tool_grammar(ParserSetup(tool, None), TOOLS, "none", True) is None
        assert tool_grammar(ParserSetup(tool, None), [], "required", True) is None
    assert tool_grammar(ParserSetup(None, None), TOOLS, "required", True) is None


def test_only_strict_tools_bind_free_text(compiler: xgrammar.GrammarCompiler) -> None:
    tools = [
        TOOLS[0],
        Tool("loose", "", {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}),
    ]
    grammar = compile_source(compiler, tool_grammar(ParserSetup("hermes", None), tools, "auto", True))
    begin = '<tool_call>\n{"name": "'
    assert xgrammar.GrammarMatcher(grammar).accept_string(begin + 'loose", "arguments": {"b": 1}}\n</tool_call>')
    assert not xgrammar.GrammarMatcher(grammar).accept_string(begin + 'search", "arguments": {"b')


@pytest.mark.parametrize(
    ("kind", "text", "good", "bad"),
    [
        ("json_object", "", '{"a": [1]}', "[1]"),
        ("json_schema", '{"type": "integer"}', "12", '"12"'),
        ("regex", "[ab]+", "abba", "abc"),
        ("choice", '["yes", "no"]', "no", "nope"),
        ("ebnf", 'root ::= "x" | "y" root', "yyx", "yy"),
        ("structural_tag", '{"type": "const_string", "value": "k"}', "k", "l"),
        ("structural_tag", '{"type": "structural_tag", "format": {"type": "const_string", "value": "k"}}', "k", "l"),
    ],
)
def test_an_answer_of_gpt_oss_stands_in_its_channel(
    compiler: xgrammar.GrammarCompiler, kind: Any, text: str, good: str, bad: str
) -> None:
    source = GrammarSource(kind, text, "response_format")
    assert answer_grammar(ParserSetup("hermes", "qwen3"), source) is source
    wrapped = answer_grammar(ParserSetup("gpt_oss", "gpt_oss"), source)
    assert wrapped.param == "response_format"
    grammar = compile_source(compiler, wrapped)
    for content, fits in ((good, True), (bad, False)):
        matcher = xgrammar.GrammarMatcher(grammar)
        assert (matcher.accept_string("<|channel|>final<|message|>" + content) and matcher.accept_token(EOS)) is fits


@pytest.mark.parametrize("tool", TOOL_PARSERS)
def test_an_answer_of_a_form_or_calls(compiler: xgrammar.GrammarCompiler, tool: str) -> None:
    setup = ParserSetup(tool, "gpt_oss" if tool == "gpt_oss" else None)
    schema = {"type": "object", "properties": {"total": {"type": "integer"}}, "required": ["total"]}
    source = GrammarSource("json_schema", json.dumps(schema), "response_format")
    made = answer_or_calls(setup, TOOLS, False, source)
    assert made.param == "response_format"
    grammar = compile_source(compiler, made)
    answers = 0
    for text in walks(grammar, 25):
        meaning = read(tool, text, "auto")
        check(meaning, text)
        if not meaning.calls:
            jsonschema.validate(json.loads(meaning.content), schema)
        answers += not meaning.calls
        assert len(meaning.calls) <= 1
        assert bool(meaning.calls) is (meaning.content == "")
    assert 0 < answers < 25
    begin = "<|channel|>final<|message|>" if tool == "gpt_oss" else ""
    assert xgrammar.GrammarMatcher(grammar).accept_string(begin + '{"total": 3}')
    assert not xgrammar.GrammarMatcher(grammar).accept_string(begin + "Three")
    assert answer_or_calls(setup, (), True, source) == answer_grammar(setup, source)


def test_the_grammar_of_a_tool_with_many_arguments_takes_no_squared_time() -> None:
    names = [f"name{i}" for i in range(20_000)]
    schema = {"type": "object", "properties": {name: {"type": "string"} for name in names}, "required": names}
    begun_s = time.monotonic()
    assert tool_grammar(ParserSetup("pythonic", None), [Tool("f", "", schema)], "required", True) is not None
    assert time.monotonic() - begun_s < 5
