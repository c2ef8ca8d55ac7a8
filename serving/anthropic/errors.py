"""Errors as Anthropic's clients read them: the envelope, the type of each status, and where a status differs.

    {"type": "error", "error": {"type": "invalid_request_error", "message": "..."}, "request_id": "..."}

Clients choose an exception class by the status and tell causes apart by the type. There is no field for the offending
parameter, so the message begins with its path.
"""

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

MAX_MESSAGE = 2000

# Statuses of the Messages API that differ from those of the OpenAI API; serving/app.py looks here first. A full queue
# is the server's state and not a client's rate, which is what 529 says; clients retry after both.
STATUS: tuple[tuple[type[PagedrayError], int], ...] = ((Overloaded, 529),)

# What an error event says after the start of a stream, when no status can be sent any more. First match wins.
EVENT_STATUS: tuple[tuple[type[PagedrayError], int], ...] = (
    (UnknownModel, 404),
    (UserError, 400),
    (Overloaded, 529),
    (EngineUnavailable, 503),
    (DeadlineExceeded, 408),
)

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def anthropic_envelope(message: str, status: int, request_id: str | None = None) -> dict[str, Any]:
    """The body of an error answer."""
    if len(message) > MAX_MESSAGE:
        message = message[:MAX_MESSAGE] + "…"
    kind = TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    body: dict[str, Any] = {"type": "error", "error": {"type": kind, "message": message}}
    if request_id is not None:
        body["request_id"] = request_id
    return body


def anthropic_error(error: PagedrayError | None, status: int, request_id: str | None = None) -> dict[str, Any]:
    """The body for an error. None: our own bug, whose text is not the client's business."""
    body = anthropic_envelope("internal error" if error is None else error_message(error), status, request_id)
    if isinstance(error, Unsupported) and error.param == "thread":
        # By this the client's tool runner, which asks for a thread first, knows to go on without one.
        body["error"]["details"] = {"error_code": "thread_unsupported_request"}
    return body


def event_error(error: PagedrayError | None) -> dict[str, Any]:
    """The data of an error event in a stream that has begun."""
    return anthropic_error(error, next((s for cls, s in EVENT_STATUS if isinstance(error, cls)), 500))


def error_message(error: PagedrayError) -> str:
    """The error's text, with the path of the field where the text doesn't name it."""
    if isinstance(error, PromptTooLong):
        num, limit, limited_by = error.args
        return f"prompt is too long: {num} tokens > {limit} maximum ({limited_by})"
    text = str(error)
    param = getattr(error, "param", None)
    return text if param is None or param in text else f"{param}: {text}"
