"""A response while its model writes: the response object at every stage, and the stream of events.

Events are numbered from 0: response.created, with background also response.queued, response.in_progress, those of the
items (output.py), and last response.completed, response.incomplete or response.failed. The last event's response equals
the body of an answer that isn't streamed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from pagedray.engine.errors import Overloaded, PagedrayError, UserError
from pagedray.engine.text.tokenizer import Tokenizer
from pagedray.serving.answer import Delta
from pagedray.serving.openai.errors import error_envelope
from pagedray.serving.openai.logprobs import chat_logprobs
from pagedray.serving.openai.respond import Usage
from pagedray.serving.openai.responses.output import ApiEvent, Logprobs, OutputWriter
from pagedray.serving.openai.responses.store import Record, ids_of
from pagedray.serving.parsers.events import OutputParser

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]

encode = msgspec.json.encode


class ResponseForm:
    """
    Args:
        head: the response object with all that is known at the start; `status`, `output` and such are written here.
        parser: of its one choice.
        wants_logprobs: the model's log-probabilities were asked for.
        items: the request's own input items, which are kept with the response.
        streams: the client reads events.
    """

    def __init__(
        self,
        head: dict[str, Any],
        parser: OutputParser,
        tokenizer: Tokenizer,
        wants_logprobs: bool,
        *,
        items: list[dict[str, Any]],
        streams: bool,
    ):
        self.id: str = head["id"]
        self.is_background: bool = head["background"]
        self.is_kept: bool = head["store"]
        self.streams = streams
        self._head = head
        self._items = items
        self._parser = parser
        self._tokenizer = tokenizer
        self._wants_logprobs = wants_logprobs
        self._writer = OutputWriter()
        self._num_events = 0
        self._finish_reason: str | None = None
        self.current = self._response("in_progress")  # the response object as it was last said to be

    def begin(self, num_prompt_tokens: int) -> bytes:
        return b"".join(self.begin_events())

    def chunks(self, deltas: list[Delta], usage: Usage | None) -> bytes:
        return b"".join(self.delta_events(deltas))

    def end(self, usage: Usage) -> bytes:
        self.finish(usage)
        return self.end_event()

    def failed(self, error: PagedrayError | None) -> bytes:
        return b"".join(self.failed_events(error))

    def add(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            self._take(delta)

    def body(self, usage: Usage) -> dict[str, Any]:
        self.finish(usage)
        return self.current

    def begin_events(self) -> list[bytes]:
        stages: list[Status] = ["queued", "in_progress"] if self.is_background else ["in_progress"]
        events: list[ApiEvent] = [("created", {"response": self._response(stages[0])})]
        events += [(stage, {"response": self._response(stage)}) for stage in stages]
        return self._encoded(events)

    def delta_events(self, deltas: Iterable[Delta]) -> list[bytes]:
        return self._encoded(event for delta in deltas for event in self._take(delta))

    def end_event(self) -> bytes:
        """The last event, once the response has ended."""
        return self._event(self.current["status"], {"response": self.current})

    def failed_events(self, error: PagedrayError | None) -> list[bytes]:
        """What ends a stream after an error: the end of the open item, the error, the failed response."""
        out = self._encoded(self._writer.close("incomplete", needs_item=False))
        out.append(error_event(error, self._num_events))
        self._num_events += 1
        self.fail(error)
        return [*out, self.end_event()]

    def start(self, status: Status) -> None:
        """The response has got so far, and has no output yet."""
        self.current = self._response(status)

    def finish(self, usage: Usage) -> None:
        """The model has stopped."""
        counts = _counts(usage)
        if self._finish_reason == "length":
            details = {"reason": "max_output_tokens"}
            self.current = self._response("incomplete", usage=counts, incomplete_details=details)
        else:
            self.current = self._response("completed", usage=counts, completed_at=int(time.time()))

    def fail(self, error: PagedrayError | None) -> None:
        """Something went wrong. None: our own bug."""
        self._writer.close("incomplete", needs_item=False)
        code = "server_error"
        if isinstance(error, Overloaded):
            code = "rate_limit_exceeded"
        elif isinstance(error, UserError):
            code = "invalid_prompt"
        told = {"code": code, "message": error_envelope(error)["error"]["message"]}
        self.current = self._response("failed", error=told)

    def cancel(self, usage: Usage) -> None:
        """Nobody wants the rest."""
        self._writer.close("incomplete", needs_item=False)
        self.current = self._response("cancelled", usage=_counts(usage))

    def record(self) -> Record:
        """The response as it is now, to keep."""
        return Record(
            id=self.id,
            body=encode(self.current),
            items=encode(self._items),
            previous_id=self._head["previous_response_id"],
            item_ids=ids_of([*self._items, *self.current["output"]]),
            is_final=self.current["status"] not in ("queued", "in_progress"),
            is_background=self.is_background,
            has_events=self.is_background and self.streams,
        )

    def _response(self, status: Status, **fields: Any) -> dict[str, Any]:
        return {**self._head, "status": status, "output": list(self._writer.items), **fields}

    def _take(self, delta: Delta) -> list[ApiEvent]:
        events = self._parser.feed(delta.text)
        if delta.finish_reason is not None:
            events = [*events, *self._parser.finish()]
        logprobs: Logprobs = []
        if self._wants_logprobs and delta.logprobs:
            logprobs = chat_logprobs(delta.logprobs, self._tokenizer)["content"]
        out = self._writer.feed(events, logprobs)
        if delta.finish_reason is not None:
            self._finish_reason = delta.finish_reason
            out += self._writer.close("incomplete" if delta.finish_reason == "length" else "completed")
        return out

    def _encoded(self, events: Iterable[ApiEvent]) -> list[bytes]:
        return [self._event(kind, fields) for kind, fields in events]

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        self._num_events += 1
        return _event(f"response.{kind}", self._num_events - 1, fields)


def error_event(error: PagedrayError | None, number: int) -> bytes:
    """Event `number` of a stream, which tells of an error. None: our own bug."""
    told = error_envelope(error)["error"]
    return _event("error", number, {name: told[name] for name in ("code", "message", "param")})


def _event(kind: str, number: int, fields: dict[str, Any]) -> bytes:
    data = encode({"type": kind, "sequence_number": number, **fields})
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


def _counts(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        # Nobody pays for what is written to the cache, so it isn't counted.
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }
