"""Routes of the Messages API, for serving/app.py."""

from __future__ import annotations

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from pagedray.serving.anthropic.count_tokens import count_tokens
from pagedray.serving.anthropic.messages import prepare
from pagedray.serving.limits import parse_object, read_body
from pagedray.serving.openai.respond import Context, Endpoint


def ROUTES(context: Context) -> list[Route]:
    async def count(request: HttpRequest) -> Response:
        body = await read_body(request.scope, request.receive, context.config.server.max_body_bytes)
        counted = await count_tokens(context, parse_object(body, context.config.server.max_json_depth))
        return Response(msgspec.json.encode(counted), media_type="application/json")

    return [
        Route("/v1/messages", Endpoint(context, prepare), methods=["POST"]),
        Route("/v1/messages/count_tokens", count, methods=["POST"]),
    ]
