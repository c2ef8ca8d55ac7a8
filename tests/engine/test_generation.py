from __future__ import annotations

import pytest

from pagedray.engine.errors import UserError
from pagedray.engine.generation import GenerationParams, check_params
from pagedray.engine.messages import CompiledGrammar, Constraint, ReasoningSpan

VOCAB_SIZE = 100


def check(num_bytes: int = 9, end_ids: tuple[int, ...] = (), has_grammar: bool = True, **fields: int) -> None:
    grammar = CompiledGrammar(b"k", bytes(num_bytes)) if has_grammar else None
    span = ReasoningSpan(b"<t>", b"</t>", end_ids, is_open=True) if end_ids else None
    check_params(GenerationParams(constraint=Constraint(grammar, span), **fields), VOCAB_SIZE)


def test_a_grammar_says_where_an_output_ends() -> None:
    with pytest.raises(UserError, match="ignore_eos") as caught:
        check(ignore_eos=True)
    assert caught.value.param == "ignore_eos"
    check(ignore_eos=True, has_grammar=False)


def test_choices_carry_64_mib_of_grammar_at_most() -> None:
    check(num_bytes=2**20, n=64)
    with pytest.raises(UserError, match="65 choices with a compiled grammar of 1048576 bytes") as caught:
        check(num_bytes=2**20, n=65)
    assert caught.value.param == "n"


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE])
def test_forced_ids_are_of_the_vocabulary(token_id: int) -> None:
    check(end_ids=(0, VOCAB_SIZE - 1))
    with pytest.raises(UserError, match="outside the vocabulary"):
        check(end_ids=(5, token_id))


def test_bad_words_are_of_the_vocabulary_and_not_too_many() -> None:
    check_params(GenerationParams(constraint=Constraint(bad_sequences=((0, VOCAB_SIZE - 1),))), VOCAB_SIZE)
    for sequences, match in ((((0, VOCAB_SIZE),), "outside"), (((1,) * 9,) * 500, "4096 tokens")):
        with pytest.raises(UserError, match=match) as caught:
            check_params(GenerationParams(constraint=Constraint(bad_sequences=sequences)), VOCAB_SIZE)
        assert caught.value.param == "bad_words"
