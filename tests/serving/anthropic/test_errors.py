"""Errors in Anthropic's envelope."""

from __future__ import annotations

import pytest

from pagedray.engine.errors import (
    EngineDead,
    EngineUnavailable,
    Overloaded,
    PagedrayError,
    PromptTooLong,
    UnknownModel,
    UserError,
)
from pagedray.serving.anthropic.errors import (
    MAX_MESSAGE,
    anthropic_envelope,
    anthropic_error,
    error_message,
    event_error,
)
from pagedray.serving.anthropic.names import client_name, client_names


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (413, "request_too_large"),
        (415, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (502, "api_error"),
        (529, "overloaded_error"),
    ],
)
def test_types_follow_from_statuses(status: int, kind: str) -> None:
    assert anthropic_envelope("m", status) == {"type": "error", "error": {"type": kind, "message": "m"}}
    assert anthropic_envelope("m", status, "r")["request_id"] == "r"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (None, "api_error"),
        (EngineDead("gone"), "api_error"),
        (EngineUnavailable("starting"), "overloaded_error"),
        (Overloaded("full"), "overloaded_error"),
        (UnknownModel("a", ("b",)), "not_found_error"),
        (UserError("no"), "invalid_request_error"),
    ],
)
def test_types_of_events(error: PagedrayError | None, kind: str) -> None:
    assert event_error(error)["error"]["type"] == kind


def test_a_message_names_its_field_once() -> None:
    assert error_message(UserError("is odd", "top_k")) == "top_k: is odd"
    assert error_message(UserError("top_k is odd", "top_k")) == "top_k is odd"
    assert error_message(UserError("it is odd")) == "it is odd"
    assert (
        error_message(PromptTooLong(9, 5, "max_model_len"))
        == "prompt is too long: 9 tokens > 5 maximum (max_model_len)"
    )


def test_our_own_bugs_and_long_messages() -> None:
    assert anthropic_error(None, 500)["error"]["message"] == "internal error"
    assert len(anthropic_error(UserError("x" * 9999), 400)["error"]["message"]) == MAX_MESSAGE + 1


def test_names_of_other_layers_become_the_clients() -> None:
    assert client_name("tools[2].function.parameters") == "tools.2.input_schema"
    assert client_name("tools[0].parameters.properties") == "tools.0.input_schema.properties"
    assert client_name("output_config.format.schema") == "output_config.format.schema"
    with pytest.raises(UserError) as caught, client_names():
        raise UserError("no", "tools[1].function.name")
    assert caught.value.param == "tools.1.name"
