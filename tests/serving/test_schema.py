"""Every field of OpenAI's API is applied, ignored or refused: none is dropped in silence."""

from __future__ import annotations

from typing import Any, get_type_hints

import pytest
from openai.types import completion_create_params as text_params
from openai.types.chat import ChatCompletionStreamOptionsParam
from openai.types.chat import completion_create_params as chat_params

from pagedray.engine.errors import Unsupported, UserError
from pagedray.engine.generation import GenerationParams
from pagedray.serving.openai.schema import (
    IGNORED,
    REFUSED,
    ChatRequest,
    CompletionRequest,
    StreamOptions,
    parse,
)

USER = [{"role": "user", "content": "hi"}]
BASE: dict[type, dict[str, Any]] = {
    ChatRequest: {"model": "m", "messages": USER},
    CompletionRequest: {"model": "m", "prompt": "x"},
}
OPENAI = {
    ChatRequest: (chat_params.CompletionCreateParamsStreaming, chat_params.CompletionCreateParamsNonStreaming),
    CompletionRequest: (text_params.CompletionCreateParamsStreaming, text_params.CompletionCreateParamsNonStreaming),
}

# A value for each field that changes what is asked for, so that it must show in the parameters or in the form.
APPLIED: dict[str, Any] = {
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "temperature": 0.5,
    "top_p": 0.5,
    "n": 2,
    "seed": 7,
    "max_tokens": 5,
    "stop": "x",
    "logit_bias": {"5": 1.0},
    "top_k": 5,
    "min_p": 0.5,
    "repetition_penalty": 1.5,
    "allowed_token_ids": [5],
    "bad_token_ids": [5],
    "min_tokens": 3,
    "ignore_eos": True,
    "stop_token_ids": [5],
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "prompt_logprobs": 2,
}


@pytest.mark.parametrize("kind", BASE)
def test_every_openai_field_has_a_place(kind: Any) -> None:
    fields: set[str] = set()
    for params in OPENAI[kind]:
        fields |= set(get_type_hints(params))
    assert len(fields) > 15
    for name in fields:
        places = [name in kind.model_fields, name in REFUSED]
        assert sum(places) == 1, f"{name} is in {places} of fields, REFUSED"
    assert set(IGNORED) <= set(kind.model_fields) and not set(IGNORED) & set(REFUSED)


def test_every_stream_option_has_a_place() -> None:
    assert set(get_type_hints(ChatCompletionStreamOptionsParam)) <= set(StreamOptions.model_fields)


def test_every_generation_parameter_can_be_asked_for() -> None:
    assert set(GenerationParams.__struct_fields__) - {"logprobs", "constraint"} == set(APPLIED)
    for kind in (ChatRequest, CompletionRequest):
        assert set(APPLIED) <= set(kind.model_fields)


@pytest.mark.parametrize("kind", BASE)
@pytest.mark.parametrize("name", APPLIED)
def test_a_given_field_reaches_the_engine(kind: Any, name: str) -> None:
    params = parse(kind, {**BASE[kind], name: APPLIED[name]}).params()
    expected = {
        "stop": ("x",),
        "logit_bias": ((5, 1.0),),
        "allowed_token_ids": (5,),
        "bad_token_ids": (5,),
        "stop_token_ids": (5,),
    }
    assert getattr(params, name) == expected.get(name, APPLIED[name])
    assert getattr(params, name) != getattr(GenerationParams(), name)


@pytest.mark.parametrize("kind", BASE)
def test_null_means_not_given(kind: Any) -> None:
    required = set(BASE[kind])
    nulls = {name: None for name in [*kind.model_fields, *IGNORED, *REFUSED] if name not in required}
    assert parse(kind, {**BASE[kind], **nulls}) == parse(kind, BASE[kind])


@pytest.mark.parametrize("kind", BASE)
@pytest.mark.parametrize("name", REFUSED)
def test_refused_fields_are_named_and_their_neutral_values_pass(kind: Any, name: str) -> None:
    with pytest.raises(Unsupported) as caught:
        parse(kind, {**BASE[kind], name: {"something": "else"}})
    assert caught.value.param == name
    assert name in str(caught.value)
    for neutral in REFUSED[name][1]:
        assert parse(kind, {**BASE[kind], name: neutral}) == parse(kind, BASE[kind])


def test_a_neutral_value_of_another_type_is_refused() -> None:
    with pytest.raises(Unsupported):
        parse(ChatRequest, {**BASE[ChatRequest], "use_beam_search": 0})  # equal to False in Python


OF_KIND = {dict: {"a": "b"}, bool: True, int: 5, str: "any"}


@pytest.mark.parametrize("kind", BASE)
@pytest.mark.parametrize("name", IGNORED)
def test_ignored_fields_are_checked_change_nothing_and_say_why(kind: Any, name: str) -> None:
    plain = parse(kind, BASE[kind])
    accepted = []
    for value in OF_KIND.values():
        try:
            wire = parse(kind, {**BASE[kind], name: value})
        except UserError as error:
            assert error.param == name
            continue
        accepted.append(value)
        assert wire.params() == plain.params()
        assert wire.model_dump(exclude={name}) == plain.model_dump(exclude={name})
    assert len(accepted) == 1
    assert len(IGNORED[name]) > 10


@pytest.mark.parametrize("name", ["n", "max_tokens", "seed", "top_k", "min_tokens", "prompt_logprobs"])
def test_an_integer_may_be_written_with_a_fraction_of_zero(name: str) -> None:
    for kind in BASE:
        assert getattr(parse(kind, {**BASE[kind], name: 5.0}), name) == 5
        for value in (5.5, "5", True):
            with pytest.raises(UserError) as caught:
                parse(kind, {**BASE[kind], name: value}).params()
            assert caught.value.param == name


@pytest.mark.parametrize(
    ("fields", "budget"),
    [
        ({}, None),
        ({"max_reasoning_tokens": 3}, 3),
        ({"thinking_token_budget": 3}, 3),
        ({"thinking_token_budget": -1}, None),
    ],
)
def test_the_reasoning_budget_has_two_names(fields: dict[str, Any], budget: int | None) -> None:
    assert parse(ChatRequest, {**BASE[ChatRequest], **fields}).reasoning_budget == budget


@pytest.mark.parametrize("kind", BASE)
@pytest.mark.parametrize("missing", ["model", "messages", "prompt"])
def test_what_is_required(kind: Any, missing: str) -> None:
    body = {name: value for name, value in BASE[kind].items() if name != missing}
    if missing not in BASE[kind]:
        return
    with pytest.raises(UserError, match=f"{missing}: is required") as caught:
        parse(kind, body)
    assert caught.value.param == missing


@pytest.mark.parametrize("key", ["-1", "0", "00012"])
def test_logit_bias_keys_are_ids(key: str) -> None:
    params = parse(ChatRequest, {**BASE[ChatRequest], "logit_bias": {key: -1}}).params()
    assert params.logit_bias == ((int(key), -1.0),)


@pytest.mark.parametrize("key", ["", "-", "+1", " 1", "1.0", "٣", "0x10", "1e3", "--1"])
def test_other_logit_bias_keys_are_refused(key: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(ChatRequest, {**BASE[ChatRequest], "logit_bias": {key: 1}}).params()
    assert caught.value.param == "logit_bias"
