"""Whatever a model writes, in whatever pieces it comes: nothing raises, nothing that is no call is lost."""

from __future__ import annotations

import random

import pytest

from pagedray.serving.parsers.events import OutputParser
from pagedray.serving.parsers.registry import TOOL_PARSERS, ParserSetup, find_family, make_parser
from tests.serving.parsers.transcripts import TOOLS, TRANSCRIPTS, parse

FRAGMENTS = [
    *"{}[]():;,=\\\"'< >é😀a1",
    *("\n", "  ", "\\u", "d83d", "\\ude00", "**", '"""', "null", "now", "assistant", "final", "analysis", "commentary"),
    *('"name": ', '"arguments": ', '"parameters": {', '"now"', '{"name": "now", "arguments": {', "[now(", "[now(a="),
    *(
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        "<function=",
        "now>",
        "<parameter=",
        "city>",
        "</function>",
    ),
    *("</parameter>", "```json\n", "\n```", " to=functions.now", "<|other|>"),
    *(token for name in TOOL_PARSERS for token in find_family(name).markup),
]
SPECIAL = ("<|other|>", "<|channel|>", "<｜tool▁sep｜>", "[ARGS]")


def random_text(choose: random.Random, tool: str) -> str:
    """Fragments of all families, or an output of one with something cut out and put in."""
    some = choose.sample(FRAGMENTS, choose.randint(3, 14))
    if choose.random() < 0.5:
        return "".join(choose.choices(some, k=choose.randint(1, 25)))
    text = choose.choice([transcript.text for transcript in TRANSCRIPTS if transcript.tool == tool])
    begin = choose.randint(0, len(text))
    return text[:begin] + choose.choice(["", *some]) + text[begin + choose.randint(0, 6) :]


@pytest.mark.parametrize("tool", TOOL_PARSERS)
def test_any_text_in_any_pieces(tool: str) -> None:
    for seed in range(300):
        choose = random.Random(seed)
        text = random_text(choose, tool)
        reasoning = choose.choice([None, "gpt_oss" if tool == "gpt_oss" else "qwen3"])
        is_open, special = choose.random() < 0.5, choose.choice([(), SPECIAL])

        def parser(
            reasoning: str | None = reasoning, is_open: bool = is_open, special: tuple[str, ...] = special
        ) -> OutputParser:
            setup = ParserSetup(tool, reasoning)
            return make_parser(setup, TOOLS, choice="auto", reasoning_is_open=is_open, special_tokens=special)

        whole = parse(parser(), [text])
        assert parse(parser(), text) == whole, text
        cuts = sorted(choose.choices(range(len(text) + 1), k=5))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert parse(parser(), pieces) == whole, pieces
        for words in (whole.content, whole.reasoning, *(word for call in whole.calls for word in call)):
            words.encode()  # half a surrogate pair would raise
        is_all_content = not (special or whole.calls or whole.reasoning or (reasoning and is_open) or "think>" in text)
        if tool != "gpt_oss" and is_all_content:
            assert whole.content == text
