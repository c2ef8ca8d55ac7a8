"""The schema knows every field of the official client's requests, and each field has one place."""

from __future__ import annotations

import typing
from typing import Any

import pytest
from openai.types.responses import input_token_count_params, response_create_params
from openai.types.responses.response_includable import ResponseIncludable

from pagedray.engine.errors import UserError
from pagedray.engine.generation import GenerationParams
from pagedray.serving.openai.responses.schema import (
    ECHOED,
    IGNORED,
    REFUSED,
    CountRequest,
    Include,
    ResponseRequest,
    parse_request,
)
from pagedray.serving.openai.schema import ChatRequest

BODY = {"model": "m", "input": "hi"}


def test_every_field_of_the_client_has_one_place() -> None:
    create: Any = response_create_params
    names = typing.get_type_hints(create.ResponseCreateParamsStreaming).keys()
    for name in {*names, *IGNORED, *REFUSED}:
        places = [name in ResponseRequest.model_fields, name in IGNORED, name in REFUSED]
        assert sum(places) == 1, f"{name} is in {places} of fields, IGNORED, REFUSED"
    assert len(names) > 30
    assert ECHOED.keys() <= ResponseRequest.model_fields.keys()
    assert set(typing.get_args(Include)) == set(typing.get_args(ResponseIncludable))


def test_every_field_of_a_count_has_one_place() -> None:
    names = typing.get_type_hints(input_token_count_params.InputTokenCountParams).keys()
    assert all((name in CountRequest.model_fields) != (name in REFUSED) for name in names)


def test_names_that_chat_completions_has_too_are_of_the_same_type() -> None:
    for name in ("seed", "stop", "logit_bias", "top_k", "min_p", "min_tokens", "priority", "cache_salt", "bad_words"):
        assert repr(ResponseRequest.model_fields[name]) == repr(ChatRequest.model_fields[name])


def test_every_parameter_of_the_engine_can_be_given_but_those_that_make_no_sense() -> None:
    absent = {"max_tokens", "n", "logprobs", "prompt_logprobs", "constraint"}
    assert set(GenerationParams.__struct_fields__) - absent <= ResponseRequest.model_fields.keys()


def test_null_is_not_given() -> None:
    required = {name for name, field in ResponseRequest.model_fields.items() if field.is_required()} | {"input"}
    nulls = {name: None for name in [*ResponseRequest.model_fields, *IGNORED, *REFUSED] if name not in required}
    assert parse_request(ResponseRequest, {**BODY, **nulls}) == parse_request(ResponseRequest, BODY)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_so_and_takes_what_asks_for_nothing(name: str) -> None:
    with pytest.raises(UserError, match=f"^{name} ") as caught:
        parse_request(ResponseRequest, {**BODY, name: "something"})
    assert caught.value.param == name
    for neutral in REFUSED[name][1]:
        parse_request(ResponseRequest, {**BODY, name: neutral})


def test_a_misspelt_field_is_told() -> None:
    with pytest.raises(UserError, match="did you mean max_output_tokens"):
        parse_request(ResponseRequest, {**BODY, "max_output_token": 3})
