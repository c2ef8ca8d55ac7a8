"""From a POST body to a streamed or whole answer: what chat and text completions have in common."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

import msgspec
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from pagedray.engine.config import Config, EngineFacts
from pagedray.engine.errors import PagedrayError, UnknownModel, Unsupported, UserError
from pagedray.engine.generation import GenerationParams, make_requests
from pagedray.engine.messages import Request
from pagedray.engine.text.tokenizer import Tokenizer
from pagedray.serving.answer import Answer, Delta
from pagedray.serving.client import EngineClient
from pagedray.serving.disconnect import unless_disconnected
from pagedray.serving.edge import session_name
from pagedray.serving.limits import parse_object, read_body
from pagedray.serving.metrics import RequestMetrics
from pagedray.serving.openai import sse
from pagedray.serving.openai.errors import envelope, error_envelope
from pagedray.serving.openai.prompts import PromptEncoder
from pagedray.serving.openai.schema import GenerationRequest

log = logging.getLogger(__name__)

THREAD_TOKENS = 16384  # checking and hashing more is done off the event loop, which serves all streams meanwhile


def package_version() -> str:
    try:
        return version("pagedray")
    except PackageNotFoundError:  # run from a tree that isn't installed
        return "unknown"


class Context(msgspec.Struct, frozen=True):
    """What endpoints share."""

    client: EngineClient
    tokenizer: Tokenizer
    encoder: PromptEncoder
    config: Config
    metrics: RequestMetrics

    def facts_for(self, model: str | None) -> EngineFacts:
        """Facts of the engine that serves `model`. Raises UnknownModel, EngineUnavailable."""
        facts = self.client.facts
        if model is not None and model not in facts.model_names:
            raise UnknownModel(model[:256], facts.model_names)
        return facts


class Head(msgspec.Struct, frozen=True):
    """What every chunk of an answer, and a whole answer, begin with."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str

    @classmethod
    def new(cls, prefix: str, kind: str, model: str, facts: EngineFacts) -> Head:
        """Args: `prefix` of the id; `kind` is the `object` field."""
        backend = f"{package_version()} {facts.model_names[0]} {facts.dtype} {facts.device} {facts.attention_backend}"
        fingerprint = "fp_" + hashlib.blake2b(backend.encode(), digest_size=5).hexdigest()
        return cls(f"{prefix}-{uuid.uuid4().hex}", kind, int(time.time()), model, fingerprint)


class Usage(msgspec.Struct):
    """Token counts: prompts once whatever n is, completions summed over choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]

    @classmethod
    def of(cls, num_prompt_tokens: int, answer: Answer) -> Usage:
        num = answer.num_completion_tokens
        return cls(num_prompt_tokens, num, num_prompt_tokens + num, {"cached_tokens": answer.num_cached_tokens})


class Form(Protocol):
    """How an API writes an answer. One object per answer."""

    def chunks(self, deltas: list[Delta], usage: Usage | None) -> bytes:
        """Events for what came. `usage` so far is given if each chunk should carry it."""

    def last_chunk(self, usage: Usage) -> bytes:
        """The event with usage and no choices."""

    def add(self, deltas: list[Delta]) -> None:
        """Gather what came for `body`."""

    def body(self, usage: Usage) -> dict[str, Any]:
        """The whole answer."""


class Job(msgspec.Struct, frozen=True):
    """A checked request, ready to be submitted."""

    prompts: list[list[int]]
    params: GenerationParams
    form: Form
    wire: GenerationRequest
    facts: EngineFacts
    names: dict[str, str] = {}  # what the client calls a field, where that isn't the engine's name for it
    keeps_output: bool = True  # False: max_tokens 0, where the one token that is generated is not part of the answer


class Endpoint:
    """ASGI app of one POST route.

    Args:
        prepare: a decoded body → a Job. Raises UserError.
    """

    def __init__(self, context: Context, prepare: Callable[[Context, dict[str, Any]], Awaitable[Job]]):
        self._context = context
        self._prepare = prepare

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrival_s = time.monotonic()
        try:
            body = await read_body(scope, receive, self._context.config.server.max_body_bytes)
            session = session_name(scope["headers"])
            await unless_disconnected(receive, self._answer(body, session, send, arrival_s))
        except ClientDisconnect:
            log.debug("client left path=%s", scope["path"])

    async def _answer(self, body: bytes, session: bytes | None, send: Send, arrival_s: float) -> None:
        context = self._context
        job = await self._prepare(context, parse_object(body))
        if sum(map(len, job.prompts)) < THREAD_TOKENS:
            requests = self._requests(job)
        else:
            requests = await asyncio.to_thread(self._requests, job)
        async with await context.client.submit(requests, session) as generation:
            answer = Answer(generation, len(requests), context.tokenizer, job.params, context.metrics, arrival_s)
            write = _stream if job.wire.stream else _whole
            await write(job, answer, send)

    def _requests(self, job: Job) -> tuple[Request, ...]:
        limit = self._context.config.scheduler.max_queued_requests
        num = len(job.prompts) * job.params.n
        if num > limit:
            raise UserError(f"prompts times n is {num}; at most {limit} (max_queued_requests) fit the queue", "prompt")
        if job.wire.priority and self._context.config.scheduler.scheduling_policy != "priority":
            raise Unsupported("priority needs scheduling_policy priority, a setting of the server", "priority")
        internal_id = uuid.uuid4().hex  # never the client's: two live requests may carry the same X-Request-Id
        try:
            return tuple(
                request
                for i, prompt_ids in enumerate(job.prompts)
                for request in make_requests(
                    prompt_ids,
                    job.params,
                    job.facts,
                    request_id=f"{internal_id}-{i}",
                    client_id=self._context.client.client_id,
                    priority=job.wire.priority or 0,
                    cache_salt=job.wire.cache_salt or "",
                    arrival_s=time.time(),
                )
            )
        except UserError as error:
            if error.param is not None:
                error.param = job.names.get(error.param, error.param)
            raise


async def _whole(job: Job, answer: Answer, send: Send) -> None:
    while deltas := await answer.next():
        job.form.add(deltas)
    body = msgspec.json.encode(job.form.body(_usage(job, answer)))
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await _send(send, {"type": "http.response.start", "status": 200, "headers": headers})
    await _send(send, {"type": "http.response.body", "body": body})


async def _stream(job: Job, answer: Answer, send: Send) -> None:
    """One send per delivery. An error after the start becomes an event, then the stream ends as usual."""
    options = job.wire.stream_options
    with_usage = options is not None and bool(options.include_usage)
    with_each = with_usage and options is not None and bool(options.continuous_usage_stats)
    await _send(send, {"type": "http.response.start", "status": 200, "headers": sse.HEADERS})
    try:
        while deltas := await answer.next():
            data = job.form.chunks(deltas, _usage(job, answer) if with_each else None)
            if data:
                await _send(send, {"type": "http.response.body", "body": data, "more_body": True})
        end = job.form.last_chunk(_usage(job, answer)) if with_usage else b""
    except ClientDisconnect:
        raise
    except PagedrayError as error:
        end = sse.event(error_envelope(error))
    except Exception:
        log.exception("writing a stream failed")
        end = sse.event(envelope("internal error", "server_error", "internal_error"))
    await _send(send, {"type": "http.response.body", "body": end + sse.DONE, "more_body": False})


def _usage(job: Job, answer: Answer) -> Usage:
    usage = Usage.of(sum(map(len, job.prompts)), answer)
    if not job.keeps_output:
        usage.completion_tokens, usage.total_tokens = 0, usage.prompt_tokens
    return usage


async def _send(send: Send, message: dict[str, Any]) -> None:
    try:
        await send(message)
    except OSError:  # how some servers tell that the client left
        raise ClientDisconnect from None
