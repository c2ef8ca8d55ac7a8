"""The one error envelope: {"error": {"message", "type", "param", "code"}}, as OpenAI's clients read it."""

from __future__ import annotations

from typing import Any

from pagedray.engine.errors import (
    DeadlineExceeded,
    EngineUnavailable,
    Overloaded,
    PagedrayError,
    PromptTooLong,
    UnknownModel,
    Unsupported,
    UserError,
)
from pagedray.serving.openai.prompts import TextTooLong
from pagedray.serving.openai.responses.store import PreviousNotStored
from pagedray.serving.refusals import (
    BodyTooLarge,
    HeadersTooLarge,
    PathTooLong,
    Unauthorized,
    UnknownPath,
    UnsupportedMedia,
    UnsupportedPath,
    WrongMethod,
)

MAX_MESSAGE = 2000

# First match wins: class, type, code.
KINDS: tuple[tuple[type[PagedrayError], str, str | None], ...] = (
    (Unauthorized, "invalid_request_error", "invalid_api_key"),
    (UnknownPath, "invalid_request_error", "unknown_url"),
    (UnsupportedPath, "invalid_request_error", "unsupported_endpoint"),
    (WrongMethod, "invalid_request_error", "method_not_allowed"),
    (BodyTooLarge, "invalid_request_error", "request_too_large"),
    (PathTooLong, "invalid_request_error", "url_too_long"),
    (UnsupportedMedia, "invalid_request_error", "unsupported_content_type"),
    (HeadersTooLarge, "invalid_request_error", "headers_too_large"),
    (UnknownModel, "invalid_request_error", "model_not_found"),
    (PromptTooLong, "invalid_request_error", "context_length_exceeded"),
    (TextTooLong, "invalid_request_error", "context_length_exceeded"),
    (Unsupported, "invalid_request_error", "unsupported_parameter"),
    (PreviousNotStored, "invalid_request_error", "previous_response_not_found"),
    (UserError, "invalid_request_error", None),
    (Overloaded, "rate_limit_error", "rate_limit_exceeded"),
    (EngineUnavailable, "server_error", "engine_unavailable"),
    (DeadlineExceeded, "timeout_error", "deadline_exceeded"),
    (PagedrayError, "server_error", "engine_error"),
)


def envelope(message: str, kind: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """Args: `kind` is the type, e.g. "invalid_request_error"; `param` the offending field as the client wrote it."""
    if len(message) > MAX_MESSAGE:
        message = message[:MAX_MESSAGE] + "…"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_envelope(error: PagedrayError | None) -> dict[str, Any]:
    """The envelope of an error. None: our own bug, whose text is not the client's business."""
    if error is None:
        return envelope("internal error", "server_error", "internal_error")
    kind, code = next((kind, code) for cls, kind, code in KINDS if isinstance(error, cls))
    return envelope(str(error), kind, code, getattr(error, "param", None))
