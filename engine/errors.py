"""Errors that cross layers.

    PagedrayError
    ├── UserError               the request is wrong: 400
    │   ├── PromptTooLong       more tokens than the model or the KV cache takes: 400
    │   ├── UnknownModel        no such model is served: 404
    │   └── Unsupported         a field or value that pagedray doesn't implement, refused by name: 400
    ├── Overloaded              the queue is full; try again: 429 with Retry-After
    ├── EngineUnavailable       starting, draining or rebuilding: 503 with Retry-After
    ├── DeadlineExceeded        the client's own time limit passed: 408
    ├── RequestFailed           this request alone went wrong in the engine: 500
    ├── EngineDead              a worker or the scheduler died and the request could not be moved: 500
    └── ConfigError             the server can't start like this; the message names the setting
        └── UnsupportedModel    an architecture or checkpoint that can't be loaded

Kinds of UserError that only HTTP knows are in serving/refusals.py, and codes are chosen in serving/app.py alone. All of
them survive pickling: args are the constructor's arguments.
"""

from __future__ import annotations


class PagedrayError(Exception):
    """Base of all errors that pagedray raises on purpose."""


class UserError(PagedrayError):
    """The request can't be served as it is. `param` is the offending field's name, as the client wrote it."""

    def __init__(self, message: str, param: str | None = None):
        super().__init__(message, param)
        self.message, self.param = message, param

    def __str__(self) -> str:
        return self.message


class Unsupported(UserError):
    """A field or value that is known and not implemented."""


class UnknownModel(UserError):
    def __init__(self, model: str, served: tuple[str, ...]):
        super().__init__(f"model {model!r} is not served here; served: {', '.join(served)}", "model")
        self.args = (model, served)


class PromptTooLong(UserError):
    """The prompt, or the prompt and the tokens asked for, exceed a limit."""

    def __init__(self, num_tokens: int, limit: int, limited_by: str):
        super().__init__(f"prompt has {num_tokens} tokens, the limit is {limit} ({limited_by})", "prompt")
        self.args = (num_tokens, limit, limited_by)
        self.num_tokens, self.limit = num_tokens, limit


class Overloaded(PagedrayError):
    """Admission refused: nothing is wrong with the request, the queue is full."""

    def __init__(self, reason: str, retry_after_s: float = 1.0):
        super().__init__(reason, retry_after_s)
        self.reason, self.retry_after_s = reason, retry_after_s

    def __str__(self) -> str:
        return self.reason


class EngineUnavailable(PagedrayError):
    """No engine can take requests now: it is starting, draining, or being rebuilt after a failure."""

    def __init__(self, reason: str, retry_after_s: float = 2.0):
        super().__init__(reason, retry_after_s)
        self.reason, self.retry_after_s = reason, retry_after_s

    def __str__(self) -> str:
        return self.reason


class DeadlineExceeded(PagedrayError):
    """The answer took longer than its client gave it."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


class RequestFailed(PagedrayError):
    """The engine ended this request with an error; it and its other requests are well."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


class EngineDead(PagedrayError):
    """The engine that ran this request is gone."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


class ConfigError(PagedrayError):
    """A setting, or two settings together, that can't work. The message names them and says what would."""


class UnsupportedModel(ConfigError):
    """A checkpoint whose architecture or format isn't implemented."""
