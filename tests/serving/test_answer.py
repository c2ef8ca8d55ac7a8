"""Answer over scripted deliveries: what gathers for a slow client, what counts after a stop string, what is timed."""

from __future__ import annotations

from typing import Any

from pagedray.engine.generation import GenerationParams
from pagedray.engine.messages import PromptLogprobs, RequestUpdate
from pagedray.serving.answer import Answer, Delta
from tests.fakes import EOS_ID, ByteTokenizer, fake_logprobs


class Script:
    """A generation that delivers what it was given."""

    def __init__(self, *deliveries: list[tuple[int, RequestUpdate]]):
        self.deliveries = list(deliveries)
        self.finished: list[int] = []

    async def next(self) -> list[tuple[int, RequestUpdate]]:
        return self.deliveries.pop(0) if self.deliveries else []

    def finish(self, index: int) -> None:
        self.finished.append(index)


class Timings:
    def __init__(self) -> None:
        self.said: list[str] = []

    def first_token(self, seconds: float) -> None:
        self.said.append("first")

    def next_tokens(self, seconds: float) -> None:
        self.said.append("next")

    def finished(self, reason: str, seconds: float) -> None:
        self.said.append(reason)


def update(first: int, text: bytes, **fields: Any) -> RequestUpdate:
    logprobs = tuple(fake_logprobs(byte, 0) for byte in text)
    return RequestUpdate("r", first, fields.pop("ids", tuple(text)), logprobs=logprobs, **fields)


def reading(script: Script, num_choices: int = 1, **params: Any) -> tuple[Answer, Timings]:
    timings = Timings()
    answer = Answer(script, num_choices, ByteTokenizer(), GenerationParams(**params), timings, 0.0)  # type: ignore[arg-type]
    return answer, timings


async def all_of(answer: Answer) -> list[list[Delta]]:
    out = []
    while deltas := await answer.next():
        out.append(deltas)
    return out


async def test_updates_of_one_delivery_become_one_delta_per_choice() -> None:
    part = PromptLogprobs(1, (fake_logprobs(1, 0),))
    script = Script(
        [
            (0, update(0, b"a", num_cached_tokens=4, prompt_logprobs=(part,))),
            (1, update(0, b"x")),
            (0, update(1, b"bc", num_cached_tokens=4)),
            (0, update(3, b"d", finish_reason="length")),
        ],
        [(1, update(1, b"y", finish_reason="length"))],
    )
    answer, timings = reading(script, 2)
    first, second = await all_of(answer)
    assert [(d.index, d.text, d.token_ids, d.finish_reason) for d in first] == [
        (0, "abcd", tuple(b"abcd"), "length"),
        (1, "x", (120,), None),
    ]
    assert [e.token_id for e in first[0].logprobs] == list(b"abcd")
    assert first[0].prompt_logprobs == (part,)
    assert [(d.index, d.text) for d in second] == [(1, "y")]
    assert answer.num_completion_tokens == 6
    assert answer.num_cached_tokens == 4
    assert timings.said == ["length", "first", "length", "next"]


async def test_nothing_after_a_stop_string_counts() -> None:
    script = Script([(0, update(0, b"ab.cdef"))])
    answer, _ = reading(script, stop=(".",))
    ((delta,),) = await all_of(answer)
    assert (delta.text, delta.token_ids, len(delta.logprobs)) == ("ab", tuple(b"ab."), 3)
    assert (delta.finish_reason, delta.stop_reason) == ("stop", ".")
    assert answer.num_completion_tokens == 3
    assert script.finished == [0]


async def test_a_stop_string_before_the_engines_end_wins() -> None:
    script = Script([(0, update(0, b"a.b", finish_reason="stop", stop_id=98))])
    answer, timings = reading(script, stop=(".",), stop_token_ids=(98,))
    ((delta,),) = await all_of(answer)
    assert (delta.text, delta.stop_reason, answer.num_completion_tokens) == ("a", ".", 2)
    assert timings.said == ["stop", "first"]


async def test_the_first_token_is_not_the_first_part_of_a_prompt() -> None:
    part = PromptLogprobs(1, (fake_logprobs(1, 0),))
    script = Script(
        [(0, update(0, b"", prompt_logprobs=(part,)))],
        [(0, update(0, b"a"))],
        [(0, update(1, b"b", finish_reason="length"))],
    )
    answer, timings = reading(script)
    assert len(await all_of(answer)) == 3
    assert timings.said == ["first", "length", "next"]


async def test_cached_tokens_are_those_of_the_first_admission() -> None:
    script = Script([(0, update(0, b"a", num_cached_tokens=0))], [(0, update(1, b"b", num_cached_tokens=16))])
    answer, _ = reading(script)
    await all_of(answer)
    assert answer.num_cached_tokens == 0


async def test_eos_is_no_stop_reason() -> None:
    script = Script([(0, update(0, b"a", ids=(97, EOS_ID), finish_reason="stop", stop_id=EOS_ID))])
    answer, _ = reading(script)
    ((delta,),) = await all_of(answer)
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("a", "stop", None)
    assert answer.num_completion_tokens == 2
