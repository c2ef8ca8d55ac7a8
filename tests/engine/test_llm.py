"""LLM over a fake worker: lists in, lists out, in order; the same checks as HTTP."""

from collections.abc import Iterator

import pytest

from pagedray.engine import LLM, GenerationParams
from pagedray.engine.errors import EngineDead, PromptTooLong, UserError
from tests.fakes import EOS_ID, ByteTokenizer, FakeWorker, greedy


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM("fake", worker_class=FakeWorker, tokenizer=ByteTokenizer(), num_kv_blocks=64, block_size=4) as llm:  # type: ignore[arg-type]
        yield llm


def script(text: str, **params: object) -> GenerationParams:
    """Have the fake worker generate `text`."""
    return GenerationParams(allowed_token_ids=tuple(text.encode()), **params)  # type: ignore[arg-type]


def test_texts_and_ids_give_one_result_each_in_order(llm: LLM) -> None:
    results = llm.generate(["abc", [1, 2, 3], "z"], GenerationParams(max_tokens=6))
    expected = [greedy(ids, 6) for ids in ([97, 98, 99], [1, 2, 3], [122])]
    assert [list(r.choices[0].token_ids) for r in results] == expected
    assert [r.choices[0].text for r in results] == [bytes(e).decode() for e in expected]
    assert {r.choices[0].finish_reason for r in results} == {"length"}


def test_a_single_prompt_needs_no_list(llm: LLM) -> None:
    assert [r.prompt_ids for r in llm.generate("ab")] == [(97, 98)]
    assert [r.prompt_ids for r in llm.generate([97, 98])] == [(97, 98)]
    assert llm.generate([]) == []


def test_a_stop_string_ends_the_choice_and_frees_its_blocks(llm: LLM) -> None:
    (result,) = llm.generate("p", script("hello STOP world", max_tokens=50, stop=("STOP",)))
    choice = result.choices[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("hello ", "stop", "STOP")
    assert bytes(choice.token_ids) == b"hello STOP"
    assert llm._engine.stats().scheduler.num_used_blocks == 0


def test_eos_ends_the_choice_without_a_stop_reason(llm: LLM) -> None:
    params = GenerationParams(allowed_token_ids=(104, 105, EOS_ID), max_tokens=50)
    choice = llm.generate("p", params)[0].choices[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("hi", "stop", None)
    assert choice.token_ids[-1] == EOS_ID


def test_a_stop_id_is_the_stop_reason(llm: LLM) -> None:
    choice = llm.generate("p", script("abc", max_tokens=50, stop_token_ids=(98,)))[0].choices[0]
    assert (choice.text, choice.stop_reason) == ("a", 98)


def test_logprobs_come_one_per_token_and_prompt_logprobs_from_the_second_on(llm: LLM) -> None:
    (result,) = llm.generate([[1, 2, 3, 4, 5]], GenerationParams(max_tokens=3, logprobs=2, prompt_logprobs=0))
    assert [entry.token_id for entry in result.choices[0].logprobs] == list(result.choices[0].token_ids)
    assert [entry.token_id for entry in result.prompt_logprobs] == [2, 3, 4, 5]


def test_chat_renders_one_conversation_or_several(llm: LLM) -> None:
    one = [{"role": "user", "content": "hi"}]
    (single,) = llm.chat(one, GenerationParams(max_tokens=2))
    assert bytes(single.prompt_ids) == b"user:hi\nassistant:"
    assert len(llm.chat([one, one], GenerationParams(max_tokens=2))) == 2


def test_n_choices_of_a_prompt(llm: LLM) -> None:
    (result,) = llm.generate("ab", GenerationParams(max_tokens=3, n=3))
    assert len(result.choices) == 3


def test_a_repeated_prompt_is_found_in_the_prefix_cache(llm: LLM) -> None:
    params = GenerationParams(max_tokens=2)
    assert llm.generate([[5] * 13], params)[0].num_cached_tokens == 0
    assert llm.generate([[5] * 13], params)[0].num_cached_tokens == 12


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ([], GenerationParams(), "prompt"),
        ([1, 999], GenerationParams(), "prompt"),
        ([1, -1], GenerationParams(), "prompt"),
        ([1], GenerationParams(max_tokens=0), "max_tokens"),
        ([1], GenerationParams(max_tokens=10_000), "max_tokens"),
        ([1], GenerationParams(temperature=float("nan")), "temperature"),
        ([1], GenerationParams(top_p=0.0), "top_p"),
        ([1], GenerationParams(logit_bias=((260, 1.0),)), "logit_bias"),
        ([1], GenerationParams(stop_token_ids=(2**62,)), "stop_token_ids"),
        ([1], GenerationParams(allowed_token_ids=(-1,)), "allowed_token_ids"),
        ([1], GenerationParams(bad_token_ids=(260,)), "bad_token_ids"),
        ([1], GenerationParams(stop_token_ids=(1,) * 4097), "stop_token_ids"),
        ([1], GenerationParams(logit_bias=tuple((1, 0.0) for _ in range(4097))), "logit_bias"),
        ([1] * 40_000, GenerationParams(n=128), "prompt"),
        ([1], GenerationParams(logprobs=21), "logprobs"),
        ([1], GenerationParams(min_tokens=5, max_tokens=4), "min_tokens"),
        ([1], GenerationParams(stop=("",)), "stop"),
        ([1], GenerationParams(n=0), "n"),
        ([1], GenerationParams(seed=2**64), "seed"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name_and_harms_nothing(
    llm: LLM, prompt: list[int], params: GenerationParams, field: str
) -> None:
    with pytest.raises(UserError) as error:
        llm.generate([[1], prompt], [GenerationParams(max_tokens=1), params])
    assert error.value.param == field
    assert len(llm.generate("ok", GenerationParams(max_tokens=2))[0].choices[0].token_ids) == 2


def test_a_prompt_beyond_the_limit_names_both_numbers(llm: LLM) -> None:
    with pytest.raises(PromptTooLong, match=r"300 tokens.*limit is 255"):
        llm.generate([[1] * 300])


def test_more_prompts_than_any_queue_would_take_are_fine(llm: LLM) -> None:
    results = llm.generate([[i % 200] for i in range(1500)], GenerationParams(max_tokens=1), progress=False)
    assert [r.choices[0].token_ids for r in results] == [tuple(greedy([i % 200], 1)) for i in range(1500)]


def test_a_dead_worker_raises_and_closing_still_works() -> None:
    llm = LLM("fake", worker_class=FailingWorker, tokenizer=ByteTokenizer(), num_kv_blocks=64)  # type: ignore[arg-type]
    with pytest.raises(EngineDead, match="injected"):
        llm.generate("abc")
    llm.close()
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("abc")


class FailingWorker(FakeWorker):
    def load(self, *args: object):  # type: ignore[no-untyped-def]
        self.fail_at_step = 0
        return super().load()


def test_stop_strings_wait_for_min_tokens(llm: LLM) -> None:
    choice = llm.generate("p", script("a.b.c.", max_tokens=50, stop=(".",), min_tokens=3))[0].choices[0]
    assert (choice.text, choice.finish_reason) == ("a.b", "stop")
