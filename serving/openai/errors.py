"""The one error envelope: {"error": {"message", "type", "param", "code"}}, as OpenAI's clients read it."""

from __future__ import annotations

from typing import Any

from pagedray.engine.errors import (
    EngineUnavailable,
    Overloaded,
    PagedrayError,
    PromptTooLong,
    UnknownModel,
    Unsupported,
    UserError,
)

MAX_MESSAGE = 2000

# First match wins: class, type, code.
KINDS: tuple[tuple[type[PagedrayError], str, str | None], ...] = (
    (UnknownModel, "invalid_request_error", "model_not_found"),
    (PromptTooLong, "invalid_request_error", "context_length_exceeded"),
    (Unsupported, "invalid_request_error", "unsupported_parameter"),
    (UserError, "invalid_request_error", None),
    (Overloaded, "rate_limit_error", "rate_limit_exceeded"),
    (EngineUnavailable, "server_error", "engine_unavailable"),
    (PagedrayError, "server_error", "engine_error"),
)


def envelope(message: str, kind: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """Args: `kind` is the type, e.g. "invalid_request_error"; `param` the offending field as the client wrote it."""
    if len(message) > MAX_MESSAGE:
        message = message[:MAX_MESSAGE] + "…"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_envelope(error: PagedrayError) -> dict[str, Any]:
    kind, code = next((kind, code) for cls, kind, code in KINDS if isinstance(error, cls))
    return envelope(str(error), kind, code, getattr(error, "param", None))
