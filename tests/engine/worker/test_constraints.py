"""Constraints beside the sampler: outputs match whatever the logits are, and a row's tokens are its own affair."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable
from math import inf
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch

from pagedray.engine.checkpoint import open_checkpoint
from pagedray.engine.errors import ConfigError
from pagedray.engine.grammar.vocabulary import Vocabulary, make_vocabulary
from pagedray.engine.messages import CompiledGrammar, Constraint, ReasoningSpan, SamplingParams
from pagedray.engine.text.tokenizer import load_tokenizer
from pagedray.engine.worker import constraints as constraints_module
from pagedray.engine.worker import gpu_sampler
from pagedray.engine.worker.constraints import MOST_PENDING, Constraints
from pagedray.engine.worker.sampling_state import TokenMasks
from pagedray.kernels.logprobs import token_logprobs_triton
from pagedray.kernels.sample_rows import sample_rows_triton
from tests.engine.worker.grammars import PERSON, Compiler, Rows, noise, of_bytes, text

EOS = 256
SMALL = of_bytes(b"true", b'":', b"</t>", b"<t>")
BAD = ((97, 98), (98,), (100, 101, 102), (259, 259))
SPAN = ReasoningSpan(begin=b"<t>", end=b"</t>", end_ids=(259,), is_open=True)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def smollm2() -> Vocabulary:
    tokenizer = load_tokenizer(open_checkpoint("smollm2-135m-instruct"))
    return make_vocabulary(tokenizer, 49152, tokenizer.eos_ids)


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(SMALL)


def params(grammar: CompiledGrammar | None = None, **settings: Any) -> SamplingParams:
    reasoning = settings.pop("reasoning", None)
    bad = settings.pop("bad_sequences", ())
    constraint = Constraint(grammar, reasoning, bad) if grammar or reasoning or bad else None
    return SamplingParams(**{"max_tokens": 500, "seed": 1, "constraint": constraint, **settings})


def is_person(answer: bytes) -> bool:
    jsonschema.validate(json.loads(answer), PERSON)
    return True


METHODS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "hot": {"temperature": 5.0},
    "top_k": {"top_k": 40},
    "top_p": {"top_p": 0.9, "temperature": 2.0},
    "min_p": {"min_p": 0.1},
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    "bias": {"logit_bias": ((10, 50.0), (300, 100.0), (301, -100.0))},
}


@pytest.mark.parametrize("method", METHODS)
def test_random_logits_give_outputs_that_match(smollm2: Vocabulary, method: str) -> None:
    """A model with nothing to say, its 49,152 tokens, and whatever way to choose among them."""
    compiler = Compiler(smollm2)
    grammars = [
        (compiler.schema(PERSON), is_person),
        (compiler.regex("(yes|no|maybe)( not)?"), re.compile(b"(yes|no|maybe)( not)?").fullmatch),
        (compiler.regex("[0-9]{3,9}é"), re.compile("[0-9]{3,9}é".encode()).fullmatch),
    ]
    rows = Rows(6, smollm2, noise)
    for row in range(6):
        rows.add(row, f"{method} {row}", params(grammars[row % 3][0], seed=row, **METHODS[method]))
    running = list(rows.seqs)
    while running:
        rows.step(*running)
        running = [row for row in running if rows.ids[row][-1] not in smollm2.eos_ids and len(rows.ids[row]) < 150]
    assert rows.constraints.take_failed() == ()
    outputs = [rows.output(row) for row in range(6)]
    assert sum(output[-1] in smollm2.eos_ids for output in outputs) >= 5
    for row, output in enumerate(outputs):
        if output[-1] in smollm2.eos_ids:
            assert grammars[row % 3][1](text(smollm2, output)), text(smollm2, output)


def settings_table(compiler: Compiler) -> dict[str, SamplingParams]:
    person, word = compiler.schema(PERSON), compiler.regex("[a-z]{2,30}")
    return {
        "free": params(max_tokens=60),
        "person": params(person),
        "greedy word": params(word, temperature=0.0),
        "early stop": params(word, min_tokens=9),
        "ids": params(word, bad_token_ids=tuple(range(97, 110)), logit_bias=((120, 3.0),)),
        "thinks": params(person, reasoning=SPAN),
        "thinks little": params(word, reasoning=ReasoningSpan(b"<t>", b"</t>", (259,), is_open=True, max_tokens=5)),
        "may think": params(word, reasoning=ReasoningSpan(b"<t>", b"</t>", (259,), is_open=False, max_tokens=7)),
        "budget": params(reasoning=ReasoningSpan(b"<t>", b"</t>", (259,), is_open=True, max_tokens=12)),
        "penalties": params(person, frequency_penalty=1.0, repetition_penalty=1.1, top_k=30),
        "logprobs": params(word, logprobs=3, top_p=0.9),
        "bad": params(max_tokens=60, temperature=0.0, bad_sequences=BAD),
        "word without": params(word, bad_sequences=BAD),
        "thinks without": params(reasoning=SPAN, bad_sequences=BAD),
    }


@pytest.fixture(params=["cpu", "interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device | None:
    if request.param == "cpu":
        return None
    if request.param == "interpreter":
        pytest.importorskip("triton", reason="triton is not installed")
        if os.environ.get("TRITON_INTERPRET") != "1":
            pytest.skip("Triton compiles here; the same test marked gpu runs on the GPU")
        monkeypatch.setattr(gpu_sampler, "sample_rows", sample_rows_triton)
        monkeypatch.setattr(gpu_sampler, "token_logprobs", token_logprobs_triton)
        return torch.device("cpu")
    return torch.device("cuda")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of lanes that a GPU masks without a word
def test_a_rows_tokens_are_those_it_has_alone(
    compiler: Compiler, device: torch.device | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random batches, in parts; sequences are preempted and come back on other rows with their output so far."""
    monkeypatch.setattr(gpu_sampler, "max_rows", lambda vocab, device: 3)
    table, draw, num_steps = settings_table(compiler), random.Random(4), 40 if device is None else 12
    alone = {}
    for name, settings in table.items():
        rows = Rows(1, SMALL, noise)
        rows.add(0, name, settings)
        alone[name] = rows.finish(0, most=num_steps + 1)
    rows = Rows(12, SMALL, noise, device)
    waiting: list[tuple[str, list[int]]] = [(name, []) for name in table]
    done: dict[str, list[int]] = {}
    for _ in range(3 * num_steps):
        for row in draw.sample(list(rows.seqs), len(rows.seqs) // 4):
            waiting.append((rows.seqs[row].seq_id, rows.output(row)))
            rows.free(row)
        free = [row for row in range(12) if row not in rows.seqs]
        draw.shuffle(free)
        while free and waiting:
            name, output = waiting.pop(0)
            rows.add(free.pop(), name, table[name], output)
        batch = draw.sample(list(rows.seqs), draw.randint(1, len(rows.seqs)))
        rows.step(*batch)
        for row in batch:
            output = rows.output(row)
            name = rows.seqs[row].seq_id
            assert output == alone[name][: len(output)], name
            if output[-1] == EOS or len(output) == num_steps:
                done[name] = output
                rows.free(row)
        if not rows.seqs and not waiting:
            break
    assert rows.constraints.take_failed() == ()
    assert len(done) >= (len(table) if device is None else 5)


def test_logprobs_are_the_models_own(compiler: Compiler) -> None:
    rows = Rows(1, SMALL, noise)
    rows.add(0, "a", params(compiler.regex("[ab]{9}"), logprobs=2, temperature=0.7))
    for _ in range(4):
        position = len(rows.ids[0])
        [entry] = rows.step(0).logprobs.values()
        expected = noise("a", position, len(SMALL.tokens)).log_softmax(-1)
        assert entry.token_id in (97, 98)
        assert entry.logprob == pytest.approx(expected[entry.token_id].item(), abs=1e-5)
        assert entry.top_ids == tuple(expected.topk(2).indices.tolist())
        assert not set(entry.top_ids) & {97, 98}  # which of all tokens were likelier


def test_ids_count_beside_a_grammar_as_long_as_they_leave_a_token(compiler: Compiler) -> None:
    def allowed(at: int = 0, output: bytes = b"", **settings: Any) -> set[int]:
        def only(name: str, position: int, vocab: int) -> torch.Tensor:
            return torch.zeros(vocab)

        found = set()
        for seed in range(60):  # every allowed token is as likely as any other
            rows = Rows(1, SMALL, only)
            rows.add(0, "a", params(compiler.regex("[abc]{2,3}"), seed=seed, **settings), list(output))
            found.update(rows.step(0).token_ids)
        return found

    assert allowed() == {97, 98, 99}
    assert allowed(allowed_token_ids=(97, 99, 120)) == {97, 99}
    assert allowed(bad_token_ids=(97, 120)) == {98, 99}
    assert allowed(allowed_token_ids=(97, 98), bad_token_ids=(97,)) == {98}
    assert allowed(allowed_token_ids=(120,)) == {97, 98, 99}  # that leaves nothing: the grammar alone counts
    assert allowed(bad_token_ids=(97, 98, 99)) == {97, 98, 99}
    assert allowed(output=b"aa") == {97, 98, 99, EOS}
    assert allowed(output=b"aa", min_tokens=3) == {97, 98, 99}
    assert allowed(output=b"aa", min_tokens=3, bad_token_ids=(97,)) == {98, 99}
    assert allowed(output=b"aaa", min_tokens=9) == {EOS}  # nothing else is possible
    # min_tokens yields before bad ids do
    assert allowed(output=b"aa", min_tokens=9, bad_token_ids=(97, 98, 99)) == {EOS}
    assert allowed(stop_token_ids=(97,), min_tokens=1) == {98, 99}


@pytest.mark.parametrize("values", [inf, -inf, torch.nan])
def test_broken_logits_do_not_break_the_grammar(compiler: Compiler, values: float) -> None:
    rows = Rows(1, SMALL, lambda name, position, vocab: torch.full((vocab,), values))
    rows.add(0, "a", params(compiler.regex("[x-z]{3}"), temperature=1.0))
    assert re.fullmatch(b"[x-z]{3}", text(SMALL, rows.finish(0)))


# Waiting


def test_only_the_tokens_that_a_constrained_row_needs_are_waited_for(compiler: Compiler) -> None:
    rows = Rows(3, SMALL, noise)
    rows.add(0, "free", params())
    rows.add(1, "a", params(compiler.regex("[a-z]+")))
    rows.add(2, "b", params(compiler.regex("[a-z]+")))
    both, other, free, first = rows.step(1, 2), rows.step(2, 0), rows.step(0), rows.step(1)
    assert [both.num_reads, other.num_reads, free.num_reads, first.num_reads] == [1, 0, 0, 0]
    assert rows.step(0).num_reads == other.num_reads == 0
    rows.step(2, 0)
    assert [both.num_reads, other.num_reads, free.num_reads, first.num_reads] == [1, 1, 0, 0]
    for _ in range(3 * MOST_PENDING):
        rows.step(0)
    assert first.num_reads == 0 and free.num_reads == 0
    rows.step(1)
    assert first.num_reads == 1


def test_a_budget_costs_nothing_until_it_may_be_spent() -> None:
    rows = Rows(1, SMALL, lambda name, position, vocab: torch.zeros(vocab).index_fill(0, torch.tensor([120]), 9.0))
    span = ReasoningSpan(b"", b"</t>", (259,), is_open=True, max_tokens=MOST_PENDING + 4)
    rows.add(0, "a", params(reasoning=span, temperature=0.0))
    steps = [rows.step(0) for _ in range(MOST_PENDING)]
    assert not any(step.num_reads for step in steps)
    steps += [rows.step(0) for _ in range(4)]
    assert [step.num_reads for step in steps] == [1] * 4 + [0] * MOST_PENDING  # those that nobody waits for any more
    rows.step(0)
    assert all(step.num_reads == 1 for step in steps)
    assert rows.output(0) == [120] * (MOST_PENDING + 4) + [259]
    after = [rows.step(0) for _ in range(3)]
    assert rows.output(0)[-3:] == [120] * 3
    assert [step.num_reads for step in after] == [0, 0, 0]


def test_tokens_of_a_row_that_was_freed_are_not_its_successors(compiler: Compiler) -> None:
    rows = Rows(1, SMALL, noise)
    rows.add(0, "old", params(compiler.regex("[a-z]+")))
    left = rows.step(0)
    rows.free(0)
    rows.add(0, "new", params(compiler.regex("[0-9]{4}")))
    assert re.fullmatch(b"[0-9]{4}", text(SMALL, rows.finish(0)))
    assert left.num_reads == 0


def test_the_end_of_an_output_whose_row_was_freed_is_not_its_successors(compiler: Compiler) -> None:
    rows = Rows(2, SMALL, noise)
    rows.add(0, "old", params(compiler.regex("a")))
    rows.add(1, "other", params(compiler.regex("[a-z]+")))
    assert [rows.step(0).token_ids for _ in range(2)] == [[ord("a")], [EOS]]
    rows.free(0)  # its EOS is pending
    rows.add(0, "new", params(compiler.regex("[0-9]{4}")))
    rows.step(1, 0)
    for _ in range(3):
        rows.step(0, 1)
    assert re.fullmatch(b"[0-9]{4}", text(SMALL, rows.output(0)))


@pytest.mark.parametrize("bad", [(), ((120, 121),)])
def test_an_output_that_ended_takes_whatever_comes_until_its_row_is_freed(compiler: Compiler, bad: Any) -> None:
    """Steps that were planned before its end was known."""
    rows = Rows(1, SMALL, noise)
    rows.add(0, "a", params(compiler.regex("ab"), bad_sequences=bad))
    rows.finish(0)
    for _ in range(3):
        rows.step(0)
    assert rows.constraints.take_failed() == ()


# Failures


def neighbours(rows: Rows, compiler: Compiler) -> None:
    rows.add(1, "free", params())
    rows.add(2, "person", params(compiler.schema(PERSON)))


def expected_neighbours(compiler: Compiler, num_steps: int) -> list[list[int]]:
    rows = Rows(3, SMALL, noise)
    neighbours(rows, compiler)
    for _ in range(num_steps):
        rows.step(1, 2)
    return [rows.output(1), rows.output(2)]


BROKEN: dict[str, tuple[Callable[[Compiler], CompiledGrammar], str]] = {
    "no bytes": (lambda compiler: CompiledGrammar(b"k", b""), "cut off"),
    "garbage": (lambda compiler: CompiledGrammar(b"k", b"garbage"), "incorrect header"),
    "cut off": (lambda compiler: CompiledGrammar(b"k", compiler.regex("ab").data[:-7]), "cut off"),
    "of another model": (lambda compiler: Compiler(of_bytes()).regex("ab"), "(?i)tokenizer|vocab"),
    "a dead end": (lambda compiler: compiler.regex("ab"), "no token of the model's vocabulary"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_grammar_fails_its_row_alone(compiler: Compiler, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, reason = BROKEN[name]
    rows = Rows(3, SMALL, noise)
    neighbours(rows, compiler)
    if name == "a dead end":  # of xgrammar's making: no grammar of a vocabulary with all bytes has one
        fill = rows.constraints._fill

        def fill_nothing_for_row_0(words: np.ndarray, found: list[Any]) -> np.ndarray:
            is_masked = fill(words, found)
            words[[row.row == 0 for row in found]] = [0] * 8 + [-1 << len(SMALL.tokens) % 32]  # bits past the end
            return is_masked

        monkeypatch.setattr(rows.constraints, "_fill", fill_nothing_for_row_0)
    rows.add(0, "broken", params(make(compiler)))
    for _ in range(2):
        rows.step(0, 1, 2)
    [(seq_id, error)] = rows.constraints.take_failed()
    assert seq_id == "broken" and error.startswith("its constraint failed: ") and re.search(reason, error)
    for _ in range(10):
        rows.step(0, 1, 2)  # until the scheduler knows
    free = Rows(1, SMALL, noise)
    free.add(0, "broken", params())
    for _ in range(12):
        free.step(0)
    assert rows.output(0) == free.output(0)  # some token is chosen, which nobody will see
    rows.free(0)
    assert rows.constraints.take_failed() == ()
    assert [rows.output(1), rows.output(2)] == expected_neighbours(compiler, 12)


def test_a_matcher_that_fails_while_it_is_filled_fails_alone(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = Rows(3, SMALL, noise)
    neighbours(rows, compiler)
    rows.add(0, "broken", params(compiler.regex("[a-z]+")))
    rows.step(0, 1, 2)
    rules = rows.constraints._rows[0].made.result()
    matcher = rules._matcher
    for token_id in (97, EOS):  # behind its back: xgrammar fills nothing any more
        matcher.accept_token(token_id)
    monkeypatch.setattr(type(rules), "is_over", False)
    monkeypatch.setattr(
        constraints_module.OutputRules, "feed", lambda self, token_id: self._matcher.accept_token(token_id)
    )
    rows.step(0, 1, 2)
    [(seq_id, error)] = rows.constraints.take_failed()
    assert seq_id == "broken" and "terminated" in error
    rows.step(1, 2)
    assert [rows.output(1), rows.output(2)] == expected_neighbours(compiler, 3)


def test_without_a_tokenizer_constrained_requests_fail_and_others_do_not(compiler: Compiler) -> None:
    def load() -> Vocabulary:
        raise ConfigError("tiny has no tokenizer.json")

    rows = Rows(4, SMALL, noise)
    rows.constraints = Constraints(4, len(SMALL.tokens), load)
    neighbours(rows, compiler)
    rows.add(0, "thinks", params(reasoning=ReasoningSpan(b"", b"</t>", (259,), is_open=True, max_tokens=0)))
    rows.add(3, "ids alone", params(reasoning=ReasoningSpan(b"", b"", (259, 260), is_open=True, max_tokens=0)))
    for _ in range(2):
        rows.step(0, 1, 2, 3)
    failed = dict(rows.constraints.take_failed())
    reason = "its constraint failed: this model's outputs can't be constrained: tiny has no tokenizer.json"
    assert failed == {"person": reason, "thinks": reason}
    assert rows.output(1) == expected_neighbours(compiler, 2)[0]
    assert rows.output(3) == [259, 260]


def test_a_reasoning_span_without_a_budget_restricts_nothing() -> None:
    rows = Rows(1, SMALL, noise)
    rows.add(0, "a", params(reasoning=SPAN))
    assert [rows.step(0).num_reads for _ in range(3 * MOST_PENDING)] == [0] * (3 * MOST_PENDING)
    rows.constraints.close()


def test_masks_of_some_rows_by_their_places() -> None:
    masks = TokenMasks(np.array([1, 4, 6]), np.array([[1], [4], [6]], dtype=np.int32))
    at, words = masks.of([6, 2, 1])
    assert {(int(i), int(word)) for i, word in zip(at, words[:, 0], strict=True)} == {(0, 6), (2, 1)}
    assert masks.of([0, 5])[1].shape == (0, 1)
