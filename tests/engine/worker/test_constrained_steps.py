"""Constrained requests through scheduler and worker: their tokens don't depend on how the work is cut into steps."""

from __future__ import annotations

import functools
import json
import re
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from pagedray.engine.checkpoint import open_checkpoint
from pagedray.engine.grammar.vocabulary import Vocabulary, make_vocabulary
from pagedray.engine.messages import (
    CompiledGrammar,
    Constraint,
    ReasoningSpan,
    Request,
    RequestUpdate,
    SamplingParams,
    decode,
    encode,
)
from pagedray.engine.text.tokenizer import load_tokenizer
from tests.engine.models.cases import EOS_ID, VOCAB_SIZE
from tests.engine.worker.gangs import GangWorker, Ranks, running
from tests.engine.worker.grammars import PERSON, Compiler, text
from tests.step_loop import StepLoop
from tests.tiny_models import tiny_model

MODEL = str(tiny_model("llama"))
SETTINGS: dict[str, Any] = {"block_size": 4, "num_kv_blocks": 1000, "max_num_seqs": 16, "max_num_batched_tokens": 64}
MAX_TOKENS = 40


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def vocabulary() -> Vocabulary:
    return make_vocabulary(load_tokenizer(open_checkpoint(MODEL)), VOCAB_SIZE, (EOS_ID,))


@functools.cache
def requests() -> tuple[Request, ...]:
    """Unconstrained ones among them; prompts of several blocks begin alike."""
    compiler = Compiler(vocabulary())
    person, word = compiler.schema(PERSON), compiler.regex("[a-z]{2,60}")
    end = tuple(b"</t>")
    end_ids = tuple(vocabulary().tokens.index(bytes([byte])) for byte in end)
    open_span = ReasoningSpan(b"<t>", bytes(end), end_ids, is_open=True, max_tokens=6)
    table: dict[str, dict[str, Any]] = {
        "free": {},
        "free and greedy": {"temperature": 0.0},
        "person": {"grammar": person},
        "greedy person": {"grammar": person, "temperature": 0.0},
        "word": {"grammar": word, "logprobs": 2},
        "word of some length": {"grammar": word, "min_tokens": 12},
        "word up to an e": {"grammar": word, "stop_token_ids": (vocabulary().tokens.index(b"e"),)},
        "thinks": {"grammar": person, "reasoning": open_span},
        "thinks only": {"reasoning": open_span},
        "penalties": {"grammar": word, "frequency_penalty": 1.0, "repetition_penalty": 1.2, "top_k": 50},
    }
    draw = torch.Generator().manual_seed(5)
    shared = torch.randint(3, VOCAB_SIZE, (16,), generator=draw).tolist()
    made = []
    for i, (name, fields) in enumerate(table.items()):
        grammar, reasoning = fields.pop("grammar", None), fields.pop("reasoning", None)
        constraint = Constraint(grammar, reasoning) if grammar or reasoning else None
        prompt = (*shared, *torch.randint(3, VOCAB_SIZE, (3 + 5 * i,), generator=draw).tolist())
        params = SamplingParams(**{"max_tokens": MAX_TOKENS, "seed": i, **fields}, constraint=constraint)
        made.append(Request(id=name, client_id="test", prompt_ids=prompt, params=params))
    return tuple(made)


class Answer:
    def __init__(self) -> None:
        self.ids: list[int] = []
        self.logprobs: list[Any] = []
        self.last: RequestUpdate | None = None

    @property
    def said(self) -> tuple[object, ...]:
        return self.ids, self.last and self.last.finish_reason, self.last and self.last.error


def complete(loop: StepLoop, asked: Sequence[Request], per_step: int = 1000) -> dict[str, Answer]:
    """`per_step` of them arrive before each step."""
    answers = {request.id: Answer() for request in asked}
    waiting, in_flight = deque(asked), deque[int]()
    while waiting or loop.scheduler.has_work():
        loop.scheduler.add(tuple(waiting.popleft() for _ in range(min(per_step, len(waiting)))), now_s=0.0)
        while len(in_flight) < loop.config.scheduler.run_ahead and (plan := loop.scheduler.schedule(now_s=0.0)):
            loop.worker.submit(plan)
            loop.worker.submit(plan)  # as an executor may that heard no answer
            in_flight.append(plan.step)
        for update in loop.scheduler.commit(loop.worker.result(in_flight.popleft()), now_s=0.0):
            answer = answers[update.request_id]
            assert update.first == len(answer.ids) and (answer.last is None or answer.last.finish_reason is None)
            answer.ids += update.token_ids
            answer.logprobs += update.logprobs
            answer.last = update
        loop.scheduler.check_invariants()
    assert loop.scheduler.stats().num_used_blocks == 0
    return answers


def made_loop(**settings: Any) -> StepLoop:
    return StepLoop(MODEL, **{**SETTINGS, **settings})


@pytest.fixture(scope="module")
def alone() -> dict[str, Answer]:
    """Each request by itself."""
    with made_loop(enable_prefix_caching=False, run_ahead=1) as loop:
        return {request.id: complete(loop, [request])[request.id] for request in requests()}


def check(answers: dict[str, Answer], alone: dict[str, Answer]) -> None:
    for name, answer in answers.items():
        assert answer.said == alone[name].said, name
        assert [entry.token_id for entry in answer.logprobs] == [entry.token_id for entry in alone[name].logprobs]


def test_outputs_match(alone: dict[str, Answer]) -> None:
    said = {name: text(vocabulary(), answer.ids) for name, answer in alone.items()}
    assert alone["free"].ids != alone["word"].ids and not re.fullmatch(b"[a-z]*", said["free"])
    for name in ("person", "greedy person"):
        assert said[name].startswith(b'{"name": "')
        if alone[name].ids[-1] == EOS_ID:
            jsonschema.validate(json.loads(said[name]), PERSON)
    for name in ("word", "word of some length", "penalties"):
        assert re.fullmatch(b"[a-z]{2,60}" if alone[name].ids[-1] == EOS_ID else b"[a-z]*", said[name])
    assert len(alone["word of some length"].ids) > 12
    assert re.fullmatch(b"[a-z]*e?", said["word up to an e"])
    for name in ("thinks", "thinks only"):
        thought, end, _ = said[name].partition(b"</t>")
        assert end and sum(len(vocabulary().tokens[i]) for i in alone[name].ids[:6]) == len(thought)
    assert said["thinks"].partition(b"</t>")[2].startswith(b'{"name": "')
    assert any(answer.last and answer.last.finish_reason == "stop" for answer in alone.values())
    assert all(entry.rank >= 1 and entry.logprob < 0 for entry in alone["word"].logprobs)


WAYS: dict[str, dict[str, Any]] = {
    "together": {},
    "run_ahead 1": {"run_ahead": 1},
    "run_ahead 2": {"run_ahead": 2},
    "run_ahead 3": {"run_ahead": 3},
    "chunks": {"prefill_chunk_tokens": 5, "run_ahead": 3},
    "small steps": {"max_num_batched_tokens": 16, "run_ahead": 2},
    "few rows": {"max_num_seqs": 3, "run_ahead": 3},
    "preemption": {"num_kv_blocks": 44, "run_ahead": 3},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("per_step", [1, 1000])
def test_tokens_are_those_of_each_request_alone(alone: dict[str, Answer], way: str, per_step: int) -> None:
    """The second time prompts and outputs are in the prefix cache."""
    with made_loop(**WAYS[way]) as loop:
        check(complete(loop, requests(), per_step), alone)
        check(complete(loop, requests()[::-1], per_step), alone)
        stats = loop.scheduler.stats()
        assert stats.prefix_hit_tokens > 100
        assert (stats.num_preemptions > 0) == (way == "preemption")


@pytest.mark.parametrize("cut", [0, 1, 3, 7, 11, 20])
def test_a_request_that_moves_to_this_engine_goes_on_with_its_output(alone: dict[str, Answer], cut: int) -> None:
    moved = [decode(Request, encode(request)) for request in requests()]
    with made_loop(run_ahead=3) as loop:
        for request in moved:
            ids = alone[request.id].ids
            if cut < len(ids):
                params = SamplingParams(**{f: getattr(request.params, f) for f in request.params.__struct_fields__})
                again = Request(
                    id=request.id,
                    client_id="t",
                    prompt_ids=request.prompt_ids,
                    params=params,
                    output_ids=tuple(ids[:cut]),
                )
                loop.scheduler.add((again,), now_s=0.0)
                found = complete_rest(loop)
                assert found == ids[cut:], request.id


def complete_rest(loop: StepLoop) -> list[int]:
    found: list[int] = []
    while loop.scheduler.has_work():
        plan = loop.scheduler.schedule(now_s=0.0)
        assert plan is not None
        loop.worker.submit(plan)
        for update in loop.scheduler.commit(loop.worker.result(plan.step), now_s=0.0):
            found += update.token_ids
    return found


@pytest.mark.parametrize("run_ahead", [1, 3])
def test_a_broken_grammar_fails_its_request_alone(alone: dict[str, Answer], run_ahead: int) -> None:
    broken = Request(
        id="broken",
        client_id="test",
        prompt_ids=tuple(range(3, 30)),
        params=SamplingParams(max_tokens=9, seed=1, constraint=Constraint(CompiledGrammar(b"bad", b"bad"))),
    )
    with made_loop(run_ahead=run_ahead) as loop:
        answers = complete(loop, [*requests()[:5], broken, *requests()[5:]])
    ids, reason, error = answers.pop("broken").said
    assert (ids, reason) == ([], "error") and str(error).startswith("its constraint failed: ")
    check(answers, alone)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with running(4) as started:
        yield started


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2)])
def test_several_ranks_give_the_same_tokens(alone: dict[str, Answer], ranks: Ranks, tp: int, pp: int) -> None:
    make_worker = functools.partial(GangWorker, ranks)
    parallel = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}
    with StepLoop(MODEL, make_worker, **{**SETTINGS, "num_kv_blocks": 60, **parallel}, run_ahead=3) as loop:
        check(complete(loop, requests(), 3), alone)


def test_a_model_without_a_tokenizer_fails_constrained_requests_alone(alone: dict[str, Answer], tmp_path: Path) -> None:
    for file in Path(MODEL).iterdir():
        if "tokenizer" not in file.name:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with StepLoop(str(tmp_path), **SETTINGS) as loop:
        answers = complete(loop, requests())
    for request in requests():
        if request.params.constraint is None:
            assert answers[request.id].said == alone[request.id].said
        else:
            _, reason, error = answers[request.id].said
            assert reason == "error" and "this model's outputs can't be constrained: " in str(error)
            assert "tokenizer" in str(error)
