"""The rules of one output, token by token: reasoning, its budget, and the grammar behind it."""

from __future__ import annotations

import json
import random
import re

import jsonschema
import numpy as np
import pytest

from pagedray.engine.grammar.vocabulary import Vocabulary
from pagedray.engine.messages import CompiledGrammar, Constraint, ReasoningSpan
from pagedray.engine.worker.grammar_tables import GrammarTables
from pagedray.engine.worker.output_rules import BrokenRules, OutputRules
from tests.engine.worker.grammars import PERSON, Compiler, allowed, of_bytes, text

EOS = 256
PIECES = (b"</", b"think", b"</think>", b">\n", b"x</think>y", b"<think>", b"<th", b"<think>\n", b"ab", b"k>")
VOCABULARY = of_bytes(*PIECES)
OF = {piece: 257 + i for i, piece in enumerate(PIECES)}
SPAN = {"begin": b"<think>", "end": b"</think>", "end_ids": (OF[b"</"], OF[b"think"], ord(">"))}


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(VOCABULARY)


@pytest.fixture(scope="module")
def tables() -> GrammarTables:
    return GrammarTables(VOCABULARY)


def span(is_open: bool = True, max_tokens: int | None = None, **fields: object) -> ReasoningSpan:
    return ReasoningSpan(**{**SPAN, **fields}, is_open=is_open, max_tokens=max_tokens)


def spell(*parts: bytes) -> list[int]:
    """Ids of whole pieces, or of a part's bytes."""
    return [i for part in parts for i in ([OF[part]] if part in OF else list(part))]


def choices(rules: OutputRules, vocabulary: Vocabulary = VOCABULARY) -> list[int] | None:
    """None: all."""
    vocab = len(vocabulary.tokens)
    words = np.full(-(-vocab // 32), 0x55555555, dtype=np.int32)  # what was there before doesn't matter
    return allowed(words, vocab) if rules.fill(words) else None


def after(rules: OutputRules, ids: list[int]) -> OutputRules:
    for token_id in ids:
        may = choices(rules)
        assert may is None or token_id in may, (token_id, may)
        rules.feed(token_id)
    return rules


def test_a_grammar_alone(tables, compiler):
    rules = tables.rules(Constraint(grammar=compiler.regex("ab|ax+")), ())
    assert choices(rules) == [ord("a"), OF[b"ab"]]
    after(rules, spell(b"a"))
    assert choices(rules) == [ord("b"), ord("x")]
    after(rules, spell(b"x"))
    assert choices(rules) == [ord("x"), EOS]  # complete, and may go on
    after(rules, [EOS])
    assert choices(rules) is None and rules.is_over
    rules = after(tables.rules(Constraint(grammar=compiler.regex("ab|ax+")), ()), spell(b"ab"))
    assert choices(rules) == [EOS]  # nothing else is possible


def test_what_the_grammar_does_not_take_breaks_the_rules(tables, compiler):
    rules = tables.rules(Constraint(grammar=compiler.regex("ab")), ())
    rules.feed(ord("a"))
    with pytest.raises(BrokenRules, match="token 99, number 2 of the output"):
        rules.feed(ord("c"))


def test_an_open_span_takes_all_but_the_end_of_the_output(tables, compiler):
    rules = tables.rules(Constraint(grammar=compiler.regex("ab"), reasoning=span()), ())
    everything = set(range(len(VOCABULARY.tokens)))
    assert set(choices(rules)) == everything - {EOS, OF[b"x</think>y"]}
    after(rules, spell(b"I think", b"<think>", b"</", b"thin"))
    # what would end the span and go on, the grammar would have to take
    assert set(choices(rules)) == everything - {EOS, OF[b"x</think>y"]}
    after(rules, spell(b"k"))
    assert set(choices(rules)) == everything - {EOS, OF[b"x</think>y"], OF[b">\n"]}
    assert choices(after(rules, spell(b">"))) == [ord("a"), OF[b"ab"]]


@pytest.mark.parametrize(
    "parts", [(b"</think>",), (b"</", b"think", b">"), (b"<", b"/", b"th", b"ink>"), (b"</", b"thin", b"k>")]
)
@pytest.mark.parametrize("before", [b"", b"hm", b"<", b"</", b"</thin", b"</thinx<<"])
def test_the_end_is_found_however_tokens_split_it(tables, compiler, before, parts):
    rules = tables.rules(Constraint(grammar=compiler.regex("ab"), reasoning=span()), ())
    after(rules, spell(before, *parts))
    assert choices(rules) == [ord("a"), OF[b"ab"]]


@pytest.mark.parametrize("budget", [0, 1, 4])
@pytest.mark.parametrize("has_grammar", [True, False])
def test_a_spent_budget_forces_the_end(tables, compiler, budget, has_grammar):
    grammar = compiler.regex("ab") if has_grammar else None
    rules = after(tables.rules(Constraint(grammar=grammar, reasoning=span(max_tokens=budget)), ()), [ord("x")] * budget)
    for token_id in SPAN["end_ids"]:
        assert not rules.is_over
        assert choices(rules) == [token_id]
        rules.feed(token_id)
    assert choices(rules) == ([ord("a"), OF[b"ab"]] if has_grammar else None)
    assert rules.is_over is not has_grammar


def test_a_span_that_ends_in_time_is_not_forced(tables, compiler):
    rules = tables.rules(Constraint(grammar=compiler.regex("a{9}"), reasoning=span(max_tokens=4)), ())
    after(rules, spell(b"xyz", b"</think>", b"aaaaaa"))
    assert ord("a") in choices(rules)
    free = after(tables.rules(Constraint(reasoning=span(max_tokens=4)), ()), spell(b"xyz", b"</think>"))
    assert free.is_over and choices(free) is None


def test_half_an_end_counts_for_the_budget_and_the_whole_end_is_forced(tables):
    rules = after(tables.rules(Constraint(reasoning=span(max_tokens=2)), ()), spell(b"x", b"</"))
    assert text(VOCABULARY, spell(b"x", b"</") + forced(rules)) == b"x</</think>"


def forced(rules: OutputRules) -> list[int]:
    found = []
    while (may := choices(rules)) is not None:
        assert len(may) == 1
        found += may
        rules.feed(may[0])
    return found


def test_end_ids_close_a_span_whatever_their_text(tables):
    rules = tables.rules(Constraint(reasoning=span(max_tokens=1, end_ids=(65, 66))), ())
    rules.feed(ord("x"))
    assert forced(rules) == [65, 66]


def test_an_output_may_open_its_reasoning_or_begin_with_the_grammar(tables, compiler):
    constraint = Constraint(grammar=compiler.regex("<a|b"), reasoning=span(is_open=False, max_tokens=3))
    rules = tables.rules(constraint, ())
    opening = [ord("<"), OF[b"<th"], OF[b"<think>"], OF[b"<think>\n"]]
    assert choices(rules) == sorted([*opening, ord("b")])
    after(rules, spell(b"<"))  # may still become either
    assert choices(rules) == [ord("a"), ord("t"), OF[b"think"]]
    assert choices(after(rules, spell(b"a"))) == [EOS]
    assert choices(after(tables.rules(constraint, ()), spell(b"b"))) == [EOS]


@pytest.mark.parametrize("parts", [(b"<think>",), (b"<", b"think", b">"), (b"<th", b"ink>")])
def test_reasoning_that_the_output_opens_is_followed(tables, compiler, parts):
    constraint = Constraint(grammar=compiler.regex("<a|b"), reasoning=span(is_open=False, max_tokens=3))
    rules = after(tables.rules(constraint, ()), spell(*parts))
    assert EOS not in choices(rules) and len(choices(rules)) > 200
    after(rules, spell(b"b<a"))  # three tokens of it, which the grammar knows nothing of
    for token_id in SPAN["end_ids"]:
        assert choices(rules) == [token_id]
        rules.feed(token_id)
    assert choices(rules) == [ord("<"), ord("b")]
    assert choices(after(rules, spell(b"<a"))) == [EOS]


def test_a_token_that_opens_the_span_may_go_on_within_it(tables, compiler):
    constraint = Constraint(grammar=compiler.regex("b"), reasoning=span(is_open=False))
    rules = after(tables.rules(constraint, ()), spell(b"<think>\n", b"x", b"</think>"))
    assert choices(rules) == [ord("b")]


def test_reasoning_without_a_grammar_may_be_left_out(tables):
    rules = tables.rules(Constraint(reasoning=span(is_open=False, max_tokens=0)), ())
    assert choices(rules) is None and not rules.is_over
    rules.feed(ord("x"))
    assert rules.is_over
    rules = after(tables.rules(Constraint(reasoning=span(is_open=False, max_tokens=0)), ()), spell(b"<think>"))
    assert forced(rules) == list(SPAN["end_ids"])


def test_a_budget_needs_something_to_end_the_span_with(tables):
    with pytest.raises(ValueError, match="end_ids"):
        tables.rules(Constraint(reasoning=span(max_tokens=1, end_ids=())), ())


SHORT = {*b'{}[]",:0', OF[b"<think>"]}  # tokens that bring an output to its end
CONSTRAINTS = {
    "schema": {"schema": PERSON},
    "open": {"schema": PERSON, "reasoning": span()},
    "budget": {"schema": PERSON, "reasoning": span(max_tokens=5)},
    "maybe": {"schema": PERSON, "reasoning": span(is_open=False, max_tokens=4)},
    "only a budget": {"reasoning": span(is_open=False, max_tokens=4)},
    "bad": {"bad": ((34, 58), (ord("n"), ord("a"), ord("m")))},
    "open and bad": {"schema": PERSON, "reasoning": span(), "bad": ((ord("t"), ord("r")), (EOS,))},
}


@pytest.mark.parametrize("name", CONSTRAINTS)
@pytest.mark.parametrize("seed", range(6))
def test_rules_resume_at_every_token(tables, compiler, name, seed):
    """An output of random allowed tokens; rules that are fed with its first ones allow the same from there on."""
    settings, draw = CONSTRAINTS[name], random.Random(seed)
    grammar = compiler.schema(settings["schema"]) if "schema" in settings else None
    constraint = Constraint(grammar, settings.get("reasoning"), settings.get("bad", ()))
    rules, output, seen = tables.rules(constraint, ()), [], []
    opening = [draw.choice(range(32, 127)) for _ in range(8)] if "open" in name else []
    for number in range(150):
        seen.append(choices(rules))
        may = seen[-1] if seen[-1] is not None else [*range(32, 127), OF[b"<think>"]]
        if number < len(opening):
            token_id = opening[number]
        elif number == len(opening) and "open" in name:
            token_id = OF[b"</think>"]
        elif draw.random() < 0.8:  # a long string ends some time
            token_id = draw.choice([i for i in may if i in SHORT] or may)
        else:
            token_id = draw.choice(may)
        output.append(token_id)
        rules.feed(token_id)
        if rules.is_over or token_id == EOS:
            break
    for cut in range(len(output) + 1):
        again = tables.rules(constraint, ())
        for token_id in output[:cut]:
            again.feed(token_id)
        for number in range(cut, min(cut + 4, len(output))):
            assert choices(again) == seen[number], (cut, number)
            again.feed(output[number])
    if grammar is not None and output[-1] == EOS:
        answer = text(VOCABULARY, output)
        jsonschema.validate(json.loads(re.sub(rb"^.*</think>", b"", answer, flags=re.DOTALL)), PERSON)


def test_bad_sequences_beside_a_grammar(tables, compiler):
    rules = tables.rules(Constraint(grammar=compiler.regex("a[bc]|abd"), bad_sequences=(tuple(b"ab"),)), ())
    assert ord("a") in choices(rules)
    assert ord("b") not in choices(after(rules, [ord("a")])) and ord("c") in choices(rules)
    forced = tables.rules(Constraint(grammar=compiler.regex("xyz"), bad_sequences=((ord("x"), ord("y")),)), ())
    assert choices(after(forced, [ord("x")])) == [ord("y")]  # the grammar leaves nothing else


def test_bytes_that_are_no_grammar(tables, compiler):
    good = compiler.regex("ab")
    for data in (b"", b"garbage", good.data[:-9], good.data[:40]):
        with pytest.raises(Exception, match=r"Error|header|incorrect|cut off|JSON"):
            tables.rules(Constraint(grammar=CompiledGrammar(b"bad", data)), ())
    tables.rules(Constraint(grammar=CompiledGrammar(b"bad", good.data)), ())  # what failed was not kept


def test_a_grammar_for_another_vocabulary_is_refused(tables):
    other = Compiler(of_bytes(b"more", b"tokens"))
    with pytest.raises(Exception, match=r"(?i)tokenizer|vocab"):
        tables.rules(Constraint(grammar=other.regex("ab")), ())


def test_grammars_are_kept_within_bounds(compiler, monkeypatch):
    grammars = [compiler.regex(f"{letter}+") for letter in "abcdefgh"]
    tables = GrammarTables(VOCABULARY, kept_bytes=0)
    read: list[bytes] = []
    whole = tables._read
    monkeypatch.setattr(tables, "_read", lambda data: read.append(data) or whole(data))
    size = whole(grammars[0].data).memory_size_bytes
    tables._kept_bytes = 3 * size + size // 2
    for index in (0, 1, 2, 0, 3, 0, 1):  # 3 drives out 1, which was not used for longest
        tables.rules(Constraint(grammar=grammars[index]), ())
    assert [grammars.index(next(g for g in grammars if g.data == data)) for data in read] == [0, 1, 2, 3, 1]


def test_stop_ids_end_the_output_of_a_model_without_eos():
    vocabulary = Vocabulary(tuple(bytes([i]) for i in range(256)), (), ())
    rules = GrammarTables(vocabulary).rules(Constraint(grammar=Compiler(vocabulary).regex("ab")), (7,))
    for token_id in b"ab":
        rules.feed(token_id)
    assert choices(rules, vocabulary) == [7]
