"""The OpenAPI 3.1 document of an app: its routes, what they take, what they answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from starlette.routing import BaseRoute, Route

from pagedray.serving.access import OPEN_PATHS
from pagedray.serving.openapi.answer_schemas import ANSWERS
from pagedray.serving.openapi.operations import ERRORS, EVERYWHERE, OPERATIONS, Operation, Parameter
from pagedray.serving.openapi.request_schemas import body_schema
from pagedray.serving.openapi.shapes import Schema, ref

DESCRIPTION = (
    "Text generation with the APIs of OpenAI and Anthropic. Fields that those don't have are named as vLLM names them. "
    "A null means: not given. Of equal names in one object the last one counts."
)


def openapi_document(routes: Iterable[BaseRoute], version: str, *, needs_key: bool) -> dict[str, Any]:
    """
    Args:
        routes: of the app; those that `OPERATIONS` doesn't know, such as this document's own, are left out.
        needs_key: the server has API keys.
    """
    paths: dict[str, dict[str, Any]] = {}
    schemas = dict(ANSWERS)
    for method, path, operation in operations_of(routes):
        is_closed = needs_key and path not in OPEN_PATHS
        paths.setdefault(path, {})[method.lower()] = _operation(method, path, operation, is_closed)
        if operation.body is not None:
            schemas |= body_schema(operation.body.kind, operation.tag, operation.body.ignored, operation.body.refused)
    components: dict[str, Any] = {"schemas": dict(sorted(schemas.items()))}
    if needs_key:
        components["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "pagedray", "version": version, "description": DESCRIPTION},
        "paths": paths,
        "components": components,
    }


def operations_of(routes: Iterable[BaseRoute]) -> Iterator[tuple[str, str, Operation]]:
    """Method, path as OpenAPI writes it, and what is known of it."""
    for route in routes:
        if isinstance(route, Route):
            path = route.path.replace(":path}", "}")
            for method in sorted((route.methods or set()) - {"HEAD"}):  # where there is GET, there is HEAD
                if (operation := OPERATIONS.get((method, path))) is not None:
                    yield method, path, operation


def _operation(method: str, path: str, operation: Operation, needs_key: bool) -> dict[str, Any]:
    out: dict[str, Any] = {
        "operationId": f"{method.lower()}_{path.strip('/').replace('/', '_').replace('{', '').replace('}', '')}",
        "tags": [operation.tag],
        "summary": operation.summary,
        "responses": _responses(operation, needs_key),
    }
    if operation.parameters:
        out["parameters"] = [_parameter(parameter) for parameter in operation.parameters]
    if operation.body is not None:
        content = {"application/json": {"schema": ref(operation.body.kind.__name__)}}
        out["requestBody"] = {"required": True, "content": content}
    if needs_key:
        out["security"] = [{"bearer": []}, {"x-api-key": []}]
    return out


def _parameter(parameter: Parameter) -> dict[str, Any]:
    return {
        "name": parameter.name,
        "in": parameter.place,
        "required": parameter.place == "path",
        "schema": parameter.schema,
        "description": parameter.description,
    }


def _responses(operation: Operation, needs_key: bool) -> dict[str, Any]:
    responses: dict[str, Any] = {}
    if operation.answer is not None:
        content: dict[str, Any] = {"application/json": {"schema": ref(operation.answer)}}
        if operation.event is not None:
            events: Schema = {"type": "string", "description": f"Events, each with a {operation.event} as its data."}
            content["text/event-stream"] = {"schema": events}
        responses["200"] = {"description": "The answer.", "content": content}
    elif operation.errors == ():
        responses["200"] = {"description": "The answer.", "content": {"text/plain": {"schema": {"type": "string"}}}}
    for status in sorted({*operation.errors, *EVERYWHERE, *([401] if needs_key else [])}):
        content = {"application/json": {"schema": ref(operation.error)}}
        responses[str(status)] = {"description": ERRORS[status], "content": content}
    return responses
