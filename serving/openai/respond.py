"""From a POST body to a streamed or whole answer: what every API of generation has in common."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

import msgspec
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from pagedray.engine.config import Config, EngineFacts
from pagedray.engine.errors import PagedrayError, UnknownModel, Unsupported, UserError
from pagedray.engine.generation import GenerationParams, make_requests
from pagedray.engine.messages import ReasoningSpan, Request
from pagedray.engine.text.tokenizer import Tokenizer
from pagedray.serving.answer import Answer, Delta
from pagedray.serving.client import EngineClient
from pagedray.serving.deadline import Deadline
from pagedray.serving.disconnect import unless_disconnected
from pagedray.serving.edge import session_name
from pagedray.serving.grammars import Grammars
from pagedray.serving.limits import parse_object, read_body
from pagedray.serving.metrics import RequestMetrics
from pagedray.serving.openai import sse
from pagedray.serving.openai.prompts import PromptEncoder
from pagedray.serving.parsers.registry import ParserSetup

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
    grammars: Grammars
    parsers: ParserSetup

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
    """Token counts, written as OpenAI's APIs of completions do: prompts once whatever n is, completions summed."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]
    completion_tokens_details: dict[str, int] = {}

    @property
    def cached_tokens(self) -> int:
        return self.prompt_tokens_details.get("cached_tokens", 0)

    @property
    def reasoning_tokens(self) -> int:
        return self.completion_tokens_details.get("reasoning_tokens", 0)


class Form(Protocol):
    """How an API writes an answer. One object per answer, streamed or whole."""

    def begin(self, num_prompt_tokens: int) -> bytes:
        """Events before the first token."""

    def chunks(self, deltas: list[Delta], usage: Usage | None) -> bytes:
        """Events for what came. `usage` so far is given if each chunk should carry it."""

    def end(self, usage: Usage) -> bytes:
        """Events after the last delta."""

    def failed(self, error: PagedrayError | None) -> bytes:
        """Events instead of those of `end`, after an error. None: our own bug."""

    def add(self, deltas: list[Delta]) -> None:
        """Gather what came for `body`."""

    def body(self, usage: Usage) -> dict[str, Any]:
        """The whole answer."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A checked request, ready to be submitted."""

    prompts: list[list[int]]
    params: GenerationParams  # of each prompt
    form: Form
    facts: EngineFacts
    stream: bool
    reasoning: ReasoningSpan | None = None  # for the count of reasoning tokens
    usage_with_each: bool = False  # chunks carry the usage so far
    priority: int = 0
    cache_salt: str = ""
    names: dict[str, str] = {}  # what the client calls a field, where that isn't the engine's name for it
    keeps_output: bool = True  # False: max_tokens 0, where the one token that is generated is not part of the answer


class Endpoint:
    """ASGI app of one POST route.

    Args:
        prepare: a decoded body → a Job. Raises UserError.
        deliver: runs the job and sends its answer.
    """

    def __init__(
        self,
        context: Context,
        prepare: Callable[[Context, dict[str, Any]], Awaitable[Job]],
        deliver: Deliver | None = None,
    ):
        self._context = context
        self._prepare = prepare
        self._deliver = deliver or deliver_answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrival_s = time.monotonic()
        deadline = Deadline(scope["headers"])
        try:
            body = await read_body(scope, receive, self._context.config.server.max_body_bytes)
            session = session_name(scope["headers"])
            await unless_disconnected(receive, self._answer(body, session, send, deadline, arrival_s))
        except ClientDisconnect:
            log.debug("client left path=%s", scope["path"])

    async def _answer(
        self, body: bytes, session: bytes | None, send: Send, deadline: Deadline, arrival_s: float
    ) -> None:
        async with deadline.for_start():
            job = await self._prepare(self._context, parse_object(body, self._context.config.server.max_json_depth))
        await self._deliver(self._context, job, Call(session, deadline, arrival_s), send)


class Call(msgspec.Struct, frozen=True):
    """What a request says besides its body."""

    session: bytes | None
    deadline: Deadline
    arrival_s: float  # on the monotonic clock


Deliver = Callable[[Context, Job, Call, Send], Awaitable[None]]


async def deliver_answer(context: Context, job: Job, call: Call, send: Send) -> None:
    """Run a job for as long as its client waits. Raises PagedrayError before the answer has begun."""
    async with open_answer(context, job, call.session, deadline=call.deadline, arrival_s=call.arrival_s) as answer:
        await (_stream if job.stream else _whole)(job, answer, send)


@asynccontextmanager
async def open_answer(
    context: Context,
    job: Job,
    session: bytes | None = None,
    *,
    deadline: Deadline | None = None,
    arrival_s: float | None = None,
) -> AsyncIterator[Answer]:
    """Submit a job and read its answer. Leaving the context aborts what has not ended.

    Args:
        session: requests of one session go to one engine, as far as load allows.
        deadline: of the client; None: none.
        arrival_s: when the job came, on the monotonic clock; None: now.

    Raises:
        UserError, Overloaded, EngineUnavailable, DeadlineExceeded: before the first token.
    """
    deadline = deadline or Deadline([])
    async with deadline.for_start():
        if sum(map(len, job.prompts)) < THREAD_TOKENS:
            requests = _requests(context, job)
        else:
            requests = await asyncio.to_thread(_requests, context, job)
        generation = await context.client.submit(requests, session)
    async with generation:
        with deadline.for_answer(generation):
            yield Answer(
                generation,
                len(requests),
                context.tokenizer,
                job.params,
                context.metrics,
                time.monotonic() if arrival_s is None else arrival_s,
                job.reasoning,
            )


def usage_of(job: Job, answer: Answer) -> Usage:
    """Token counts so far."""
    num_prompt, num_output = sum(map(len, job.prompts)), answer.num_completion_tokens if job.keeps_output else 0
    return Usage(
        num_prompt,
        num_output,
        num_prompt + num_output,
        {"cached_tokens": answer.num_cached_tokens},
        {"reasoning_tokens": answer.num_reasoning_tokens if job.keeps_output else 0},
    )


def _requests(context: Context, job: Job) -> tuple[Request, ...]:
    limit = context.config.scheduler.max_queued_requests
    num = len(job.prompts) * job.params.n
    try:
        if num > limit:
            raise UserError(f"prompts times n is {num}; at most {limit} (max_queued_requests) fit the queue", "prompt")
        if job.priority and context.config.scheduler.scheduling_policy != "priority":
            raise Unsupported("priority needs scheduling_policy priority, a setting of the server", "priority")
        internal_id = uuid.uuid4().hex  # never the client's: two live requests may carry the same X-Request-Id
        return tuple(
            request
            for i, prompt_ids in enumerate(job.prompts)
            for request in make_requests(
                prompt_ids,
                job.params,
                job.facts,
                request_id=f"{internal_id}-{i}",
                client_id=context.client.client_id,
                priority=job.priority,
                cache_salt=job.cache_salt,
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
    body = msgspec.json.encode(job.form.body(usage_of(job, answer)))
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send_part(send, {"type": "http.response.start", "status": 200, "headers": headers})
    await send_part(send, {"type": "http.response.body", "body": body})


async def _stream(job: Job, answer: Answer, send: Send) -> None:
    """One send per delivery. An error after the start becomes an event, then the stream ends as usual."""
    form = job.form
    await send_part(send, {"type": "http.response.start", "status": 200, "headers": sse.HEADERS})
    try:
        data = form.begin(sum(map(len, job.prompts)))
        if data:
            await send_part(send, {"type": "http.response.body", "body": data, "more_body": True})
        while deltas := await answer.next():
            data = form.chunks(deltas, usage_of(job, answer) if job.usage_with_each else None)
            if data:
                await send_part(send, {"type": "http.response.body", "body": data, "more_body": True})
        end = form.end(usage_of(job, answer))
    except ClientDisconnect:
        raise
    except PagedrayError as error:
        end = form.failed(error)
    except Exception:
        log.exception("writing a stream failed")
        end = form.failed(None)
    await send_part(send, {"type": "http.response.body", "body": end, "more_body": False})


async def send_part(send: Send, message: dict[str, Any]) -> None:
    """Raises ClientDisconnect."""
    try:
        await send(message)
    except OSError:  # how some servers tell that the client left
        raise ClientDisconnect from None
