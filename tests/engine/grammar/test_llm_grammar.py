"""Grammars through `LLM`: compiled before anything is generated, and handed to the worker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pagedray.engine.errors import UserError
from pagedray.engine.generation import GenerationParams
from pagedray.engine.grammar.source import GrammarSource
from pagedray.engine.llm import LLM
from tests.fakes import ByteTokenizer, FakeWorker

PARAMS = GenerationParams(max_tokens=8)
AB, CD = GrammarSource("choice", '["a", "b"]', "grammar"), GrammarSource("regex", "c|d", "grammar")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(worker_class=FakeWorker, tokenizer=ByteTokenizer()) as llm:  # type: ignore[arg-type]
        yield llm


def outputs(llm: LLM, grammar: object) -> list[tuple[int, ...]]:
    """The fake worker plays a compiled grammar's bytes back, so equal outputs tell of equal grammars."""
    results = llm.generate(["x", "x", "x"], PARAMS, grammar=grammar, progress=False)  # type: ignore[arg-type]
    return [result.choices[0].token_ids for result in results]


def test_one_grammar_for_all_and_one_for_each(llm: LLM) -> None:
    free, ab, cd = outputs(llm, None)[0], outputs(llm, AB), outputs(llm, CD)
    assert len({free, ab[0], cd[0]}) == 3
    assert ab == [ab[0]] * 3
    assert outputs(llm, [AB, None, CD]) == [ab[0], free, cd[0]]
    assert (
        llm.chat([{"role": "user", "content": "x"}], PARAMS, grammar=AB, progress=False)[0].choices[0].token_ids
        == ab[0]
    )


def test_a_broken_grammar_is_told(llm: LLM) -> None:
    with pytest.raises(UserError, match="unmatched") as raised:
        outputs(llm, GrammarSource("regex", ")", "my_field"))
    assert raised.value.param == "my_field"


def test_as_many_grammars_as_prompts(llm: LLM) -> None:
    with pytest.raises(UserError, match="2 grammars for 3 prompts"):
        outputs(llm, [AB, CD])


def test_what_is_no_grammar_is_refused_before_anything_is_started(llm: LLM) -> None:
    with pytest.raises(UserError, match=r"one of json_object.*'regexp'"):
        GrammarSource("regexp", "a")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="not dict"):
        outputs(llm, {"regex": "a"})
    with pytest.raises(UserError, match="GrammarSource or None, not 'a'"):
        outputs(llm, ["a", None, None])
