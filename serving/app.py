"""The HTTP server of an ingress: routes, and which status each error gets. Answers are made in serving/openai/.

POST bodies are checked and answered by `Endpoint` (generation) or `_json_post` (the tokenizer's routes). Every error of
every route has the same envelope; nothing that a client sends makes a 5xx.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from pagedray.engine.config import Config
from pagedray.engine.errors import EngineUnavailable, Overloaded, PagedrayError, UnknownModel, UserError
from pagedray.engine.text.tokenizer import Tokenizer
from pagedray.serving.client import EngineClient
from pagedray.serving.edge import Edge
from pagedray.serving.limits import BodyTooLarge, parse_object, read_body
from pagedray.serving.metrics import RequestMetrics
from pagedray.serving.openai import chat, completions
from pagedray.serving.openai.errors import envelope, error_envelope
from pagedray.serving.openai.models import model_card, model_list
from pagedray.serving.openai.prompts import PromptEncoder
from pagedray.serving.openai.respond import Context, Endpoint, package_version
from pagedray.serving.openai.tokenize import detokenize, tokenize

# First match wins.
STATUS: tuple[tuple[type[PagedrayError], int], ...] = (
    (BodyTooLarge, 413),
    (UnknownModel, 404),
    (UserError, 400),
    (Overloaded, 429),
    (EngineUnavailable, 503),
    (PagedrayError, 500),
)


def create_app(
    client: EngineClient, tokenizer: Tokenizer, config: Config, *, adds_request_id: bool = True
) -> Starlette:
    """Build the ASGI app of one ingress. The client may get its links before or after.

    Args:
        adds_request_id: put X-Request-Id into answers; False where the server around the app does.
    """
    metrics = RequestMetrics()
    context = Context(client, tokenizer, PromptEncoder(tokenizer), config, metrics)
    started = int(time.time())

    async def health(request: HttpRequest) -> Response:
        await client.health()
        return Json({"status": "healthy"})

    async def version(request: HttpRequest) -> Response:
        return Json({"version": package_version()})

    async def scrape(request: HttpRequest) -> Response:
        text = metrics.render(await client.stats(), client)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(request: HttpRequest) -> Response:
        return Json(model_list(client.facts, started))

    async def model(request: HttpRequest) -> Response:
        name = request.path_params["id"]
        return Json(model_card(name, context.facts_for(name), started))

    app = Starlette(
        routes=[
            Route("/health", health),
            Route("/version", version),
            Route("/metrics", scrape),
            Route("/v1/models", models),
            Route("/v1/models/{id:path}", model),
            Route("/v1/completions", Endpoint(context, completions.prepare), methods=["POST"]),
            Route("/v1/chat/completions", Endpoint(context, chat.prepare), methods=["POST"]),
            Route("/tokenize", _json_post(context, tokenize), methods=["POST"]),
            Route("/detokenize", _json_post(context, detokenize), methods=["POST"]),
        ],
        middleware=[
            Middleware(Edge, answered=metrics.answered, failure=_internal_error, adds_request_id=adds_request_id)
        ],
        exception_handlers={
            PagedrayError: _pagedray_error,
            HTTPException: _http_error,
            ClientDisconnect: _client_left,
        },
    )
    app.router.redirect_slashes = False  # a redirected POST surprises clients; another path is another route
    return app


def _json_post(
    context: Context, answer: Callable[[Context, dict[str, Any]], Awaitable[dict[str, Any]]]
) -> Callable[[HttpRequest], Awaitable[Response]]:
    async def endpoint(request: HttpRequest) -> Response:
        body = await read_body(request.scope, request.receive, context.config.server.max_body_bytes)
        return Json(await answer(context, parse_object(body)))

    return endpoint


class Json(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)  # long lists of ids take a tenth of what json.dumps needs


async def _pagedray_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, PagedrayError)
    status = next(status for cls, status in STATUS if isinstance(error, cls))
    headers = {}
    if isinstance(error, Overloaded | EngineUnavailable):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, BodyTooLarge):
        headers["connection"] = "close"  # the rest of the body is still on its way
    return Json(error_envelope(error), status, headers)


async def _http_error(request: HttpRequest, error: Exception) -> Response:
    """Errors of routing: no such path, no such method on it."""
    assert isinstance(error, HTTPException)
    code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code)
    message = f"{error.detail}: {request.method} {request.url.path}"
    return Json(envelope(message, "invalid_request_error", code), error.status_code, error.headers)


async def _client_left(request: HttpRequest, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it; the count of answers does


async def _internal_error(scope: Scope, receive: Receive, send: Send) -> None:
    response = Json(envelope("internal error", "server_error", "internal_error"), 500)
    await response(scope, receive, send)
