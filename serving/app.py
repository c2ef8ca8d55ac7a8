"""The HTTP server of an ingress: routes, and which status each error gets. Answers are made in serving/openai/ and
serving/anthropic/.

POST bodies are checked and answered by `Endpoint` (generation) or `_json_post` (the tokenizer's routes). Every error of
every route has its protocol's envelope; nothing that a client sends makes a 5xx.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, Response
from starlette.routing import Match, Route
from starlette.types import Scope

from pagedray.engine.config import Config, ServerConfig
from pagedray.engine.errors import (
    DeadlineExceeded,
    EngineUnavailable,
    Overloaded,
    PagedrayError,
    UnknownModel,
    UserError,
)
from pagedray.engine.text.tokenizer import Tokenizer
from pagedray.serving.absent import absent_path
from pagedray.serving.access import KeyCheck, KeyRing
from pagedray.serving.anthropic.errors import STATUS as ANTHROPIC_STATUS
from pagedray.serving.anthropic.errors import anthropic_error
from pagedray.serving.anthropic.models import model_info, model_page
from pagedray.serving.anthropic.routes import ROUTES as ANTHROPIC_ROUTES
from pagedray.serving.client import EngineClient
from pagedray.serving.edge import Edge, is_anthropic
from pagedray.serving.grammars import Grammars
from pagedray.serving.limits import own_path, parse_object, read_body
from pagedray.serving.metrics import RequestMetrics
from pagedray.serving.openai import chat, completions
from pagedray.serving.openai.errors import error_envelope
from pagedray.serving.openai.models import model_card, model_list
from pagedray.serving.openai.prompts import PromptEncoder
from pagedray.serving.openai.respond import Context, Endpoint, package_version
from pagedray.serving.openai.responses.routes import response_routes
from pagedray.serving.openai.responses.store import MemoryStore, NotStored, ResponseStore
from pagedray.serving.openai.tokenize import detokenize, tokenize
from pagedray.serving.openapi.document import openapi_document
from pagedray.serving.openapi.page import docs_page
from pagedray.serving.parsers.registry import choose_parsers
from pagedray.serving.refusals import (
    BodyTooLarge,
    HeadersTooLarge,
    PathTooLong,
    Unauthorized,
    UnknownPath,
    UnsupportedMedia,
    WrongMethod,
)

# First match wins.
STATUS: tuple[tuple[type[PagedrayError], int], ...] = (
    (Unauthorized, 401),
    (UnknownPath, 404),
    (UnknownModel, 404),
    (NotStored, 404),
    (WrongMethod, 405),
    (BodyTooLarge, 413),
    (PathTooLong, 414),
    (UnsupportedMedia, 415),
    (HeadersTooLarge, 431),
    (UserError, 400),
    (DeadlineExceeded, 408),
    (Overloaded, 429),
    (EngineUnavailable, 503),
    (PagedrayError, 500),
)

# What pages of other origins may read of an answer, besides what browsers always let them.
EXPOSED_HEADERS = ("x-request-id", "request-id", "retry-after", "openai-processing-ms")


def create_app(
    client: EngineClient,
    tokenizer: Tokenizer,
    config: Config,
    *,
    adds_request_id: bool = True,
    grammars: Grammars | None = None,
    responses: ResponseStore | None = None,
) -> Starlette:
    """Build the ASGI app of one ingress. The client may get its links before or after.

    Args:
        adds_request_id: put X-Request-Id into answers; False where the server around the app does.
        grammars: None: made here. Whoever ends the app closes it (`app.state.grammars`).
        responses: what keeps answers of the Responses API; None: this process's memory.

    Raises:
        ConfigError: a parser's name is unknown, or the key file can't be used.
    """
    metrics = RequestMetrics()
    grammars = grammars or Grammars(tokenizer, config.api.grammar_timeout_s)
    parsers = choose_parsers(config.api, tokenizer.chat_template)
    context = Context(client, tokenizer, PromptEncoder(tokenizer), config, metrics, grammars, parsers)
    started = int(time.time())

    async def health(request: HttpRequest) -> Response:
        await client.health()
        return Json({"status": "healthy"})

    async def load(request: HttpRequest) -> Response:
        found = [stats.scheduler for stats in await client.stats()]
        return Json({"server_load": sum(engine.num_running + engine.num_waiting for engine in found)})

    async def version(request: HttpRequest) -> Response:
        return Json({"version": package_version()})

    async def scrape(request: HttpRequest) -> Response:
        text = metrics.render(await client.stats(), client)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(request: HttpRequest) -> Response:
        if "anthropic-version" in request.headers:
            return Json(model_page(client.facts, started))
        return Json(model_list(client.facts, started))

    async def model(request: HttpRequest) -> Response:
        name = request.path_params["id"]
        if not name:
            raise HTTPException(404)
        if "anthropic-version" in request.headers:
            return Json(model_info(name, context.facts_for(name), started))
        return Json(model_card(name, context.facts_for(name), started))

    ring = KeyRing(config.server)
    routes = [
        Route("/v1/chat/completions", Endpoint(context, chat.prepare), methods=["POST"]),
        Route("/v1/completions", Endpoint(context, completions.prepare), methods=["POST"]),
        Route("/v1/models", models),
        Route("/v1/models/{id:path}", model),
        *response_routes(context, MemoryStore(config.api) if responses is None else responses),
        *ANTHROPIC_ROUTES(context),
        Route("/tokenize", _json_post(context, tokenize), methods=["POST"]),
        Route("/detokenize", _json_post(context, detokenize), methods=["POST"]),
        Route("/health", health),
        Route("/ping", health, methods=["GET", "POST"]),
        Route("/load", load),
        Route("/version", version),
        Route("/metrics", scrape),
    ]
    app = Starlette(
        routes=[*routes, *_document_routes(routes, ring.is_needed)],
        middleware=_middleware(config.server, metrics, ring, adds_request_id),
        exception_handlers={
            PagedrayError: _pagedray_error,
            HTTPException: _routing_error,
            ClientDisconnect: _client_left,
        },
    )
    app.state.grammars = grammars
    app.router.redirect_slashes = False  # a redirected POST surprises clients; another path is another route
    return app


def _document_routes(routes: list[Route], needs_key: bool) -> list[Route]:
    """What the others are, for programs and for people. Made when first asked for."""

    @functools.cache
    def document() -> dict[str, Any]:
        return openapi_document(routes, package_version(), needs_key=needs_key)

    @functools.cache
    def page() -> str:
        return docs_page(document())

    async def openapi(request: HttpRequest) -> Response:
        root = request.scope.get("root_path", "")
        return Json({**document(), "servers": [{"url": root}]} if root else document())

    async def docs(request: HttpRequest) -> Response:
        return HTMLResponse(
            page(), headers={"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}
        )

    return [Route("/openapi.json", openapi), Route("/docs", docs)]


def _json_post(
    context: Context, answer: Callable[[Context, dict[str, Any]], Awaitable[dict[str, Any]]]
) -> Callable[[HttpRequest], Awaitable[Response]]:
    async def endpoint(request: HttpRequest) -> Response:
        limits = context.config.server
        body = await read_body(request.scope, request.receive, limits.max_body_bytes)
        return Json(await answer(context, parse_object(body, limits.max_json_depth)))

    return endpoint


class Json(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)  # long lists of ids take a tenth of what json.dumps needs


def _middleware(
    server: ServerConfig, metrics: RequestMetrics, ring: KeyRing, adds_request_id: bool
) -> list[Middleware]:
    """What every exchange passes, outermost first. A browser's preflight carries no key, so CORS comes before keys."""
    layers = [
        Middleware(
            Edge, limits=server, answered=metrics.answered, refuse=error_response, adds_request_id=adds_request_id
        )
    ]
    if server.cors_allow_origins:
        layers.append(
            Middleware(
                CORSMiddleware,
                allow_origins=server.cors_allow_origins,
                allow_methods=server.cors_allow_methods,
                allow_headers=server.cors_allow_headers,
                allow_credentials=server.cors_allow_credentials,
                expose_headers=EXPOSED_HEADERS,
            )
        )
    if ring.is_needed:
        layers.append(Middleware(KeyCheck, ring=ring, refuse=error_response))
    return layers


def error_response(scope: Scope, error: PagedrayError | None) -> Response:
    """The answer to an error, in the form of the path's protocol. None: our own bug."""
    speaks_anthropic = is_anthropic(own_path(scope))
    codes = (*ANTHROPIC_STATUS, *STATUS) if speaks_anthropic else STATUS
    status = next((status for cls, status in codes if isinstance(error, cls)), 500)
    headers = {}
    if isinstance(error, Overloaded | EngineUnavailable):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    elif isinstance(error, DeadlineExceeded):
        headers["x-should-retry"] = "false"  # official clients retry a 408: whoever has no more time doesn't want that
    elif isinstance(error, BodyTooLarge):
        headers["connection"] = "close"  # the rest of the body is still on its way
    elif isinstance(error, Unauthorized):
        headers["www-authenticate"] = "Bearer"
    elif isinstance(error, WrongMethod):
        headers["allow"] = ", ".join(error.allowed)
    elif isinstance(error, UnsupportedMedia):
        headers.update([error.accepted])
    if speaks_anthropic:
        return Json(anthropic_error(error, status, scope["state"]["request_id"]), status, headers)
    return Json(error_envelope(error), status, headers)


async def _pagedray_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, PagedrayError)
    return error_response(request.scope, error)


async def _routing_error(request: HttpRequest, error: Exception) -> Response:
    """No such path, no such method on it."""
    assert isinstance(error, HTTPException)
    method, path = request.method, own_path(request.scope)
    if error.status_code == 405:
        routes = [route for route in request.app.routes if route.matches(request.scope)[0] != Match.NONE]
        allowed = sorted({name for route in routes for name in route.methods or ()})
        return error_response(request.scope, WrongMethod(method, path, tuple(allowed)))
    return error_response(request.scope, absent_path(method, path))


async def _client_left(request: HttpRequest, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it; the count of answers does
