"""The OpenAPI document tells the truth: every route is in it, real answers fit it, and what it lets one make breaks
nothing.
"""

from __future__ import annotations

import asyncio
import collections
import copy
import html.parser
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import hypothesis
import jsonschema
import pytest
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.generation.modes import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.routing import Route

from pagedray.engine.errors import UserError
from pagedray.engine.generation import GenerationParams, check_params
from pagedray.serving.openapi.operations import ERRORS, OPERATIONS
from pagedray.serving.openapi.request_schemas import BY_HAND, RANGES
from tests.serving.rig import Rig
from tests.serving.test_bad_requests import CHAT, TEXT

MESSAGE = {"model": "fake", "max_tokens": 3, "messages": [{"role": "user", "content": "hi"}]}
CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
)


async def document_of(rig: Rig) -> dict[str, Any]:
    response = await rig.http.get("/openapi.json")
    assert response.status_code == 200 and response.headers["content-type"] == "application/json"
    return response.json()


def check(document: dict[str, Any], component: str, value: Any) -> None:
    """Hold a value against a component."""
    schema = {"$ref": f"#/components/schemas/{component}", "components": document["components"]}
    errors = jsonschema.Draft202012Validator(schema).iter_errors(value)
    wrong = [f"{error.json_path}: {error.message}" for error in errors]
    assert not wrong, (component, wrong, value)


async def test_every_route_is_in_it_and_nothing_else() -> None:
    async with Rig() as rig:
        document = await document_of(rig)
        made = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
        routes = {
            (method, route.path.replace(":path}", "}"))
            for route in rig.app.routes
            if isinstance(route, Route)
            for method in (route.methods or set()) - {"HEAD"}
        }
        assert routes - made == {("GET", "/openapi.json"), ("GET", "/docs")}
        assert made == set(OPERATIONS), "a route that is gone is still described"


async def test_it_is_a_valid_document() -> None:
    async with Rig() as rig:
        document = await document_of(rig)
    assert document["openapi"] == "3.1.0"
    schemathesis.openapi.from_dict(document).validate()
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    refs = set(_refs(document))
    assert refs <= {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    ids = [operation["operationId"] for methods in document["paths"].values() for operation in methods.values()]
    assert len(ids) == len(set(ids))


def _refs(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for inner in value.values():
            yield from _refs(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _refs(inner)


async def test_keys_are_in_it_where_they_are_needed() -> None:
    async with Rig(api_key="k") as rig:
        document = await document_of(rig)
        for path, methods in document["paths"].items():
            for operation in methods.values():
                is_open = path in ("/health", "/ping", "/load", "/version", "/metrics")
                assert ("security" in operation) == ("401" in operation["responses"]) == (not is_open), path
    async with Rig() as rig:
        text = (await rig.http.get("/openapi.json")).text
        assert "security" not in text and '"401"' not in text


async def test_fields_by_hand_belong_to_their_classes() -> None:
    kinds = {operation.body.kind.__name__: operation.body.kind for operation in OPERATIONS.values() if operation.body}
    for kind, field in BY_HAND:
        assert field in kinds[kind].model_fields
    statuses = {status for operation in OPERATIONS.values() for status in operation.errors}
    assert statuses <= set(ERRORS)


@pytest.mark.parametrize("name", [name for name in RANGES if name in GenerationParams.__struct_fields__])
def test_ranges_are_those_of_the_engine(name: str) -> None:
    bounds = RANGES[name]
    for key, inside, outside in (("minimum", 0, -1), ("maximum", 0, 1), ("exclusiveMinimum", 1e-9, 0)):
        if key not in bounds or (name, key) == ("max_tokens", "minimum"):  # 0 is for completions that echo
            continue
        whole = isinstance(bounds[key], int) and name not in ("temperature", "min_p", "top_p")
        step = 1 if whole else 1e-9
        check_params(GenerationParams(**{name: bounds[key] + inside * step}), 1000)
        with pytest.raises(UserError, match=name):
            check_params(GenerationParams(**{name: bounds[key] + outside * step}), 1000)


# Real answers


async def test_answers_fit_their_schemas() -> None:
    async with Rig() as rig:
        document = await document_of(rig)
        rich = {"logprobs": True, "top_logprobs": 2, "n": 2, "max_tokens": 3, "prompt_logprobs": 1, "seed": 1}
        check(document, "ChatCompletion", (await rig.post("/v1/chat/completions", {**CHAT, **rich})).json())
        ids = {"return_token_ids": True, "max_tokens": 3}
        check(document, "ChatCompletion", (await rig.post("/v1/chat/completions", {**CHAT, **ids})).json())
        rich = {"logprobs": 2, "echo": True, "n": 2, "max_tokens": 3, "prompt_logprobs": 1, "return_token_ids": True}
        check(document, "Completion", (await rig.post("/v1/completions", {**TEXT, **rich})).json())
        check(document, "ModelList", (await rig.http.get("/v1/models")).json())
        check(document, "Model", (await rig.http.get("/v1/models/fake")).json())
        strings = {"prompt": "x", "return_token_strs": True}
        check(document, "Tokens", (await rig.post("/tokenize", strings)).json())
        check(document, "Text", (await rig.post("/detokenize", {"tokens": [65]})).json())
        check(document, "Message", (await rig.post("/v1/messages", MESSAGE)).json())
        counted = {name: value for name, value in MESSAGE.items() if name != "max_tokens"}
        check(document, "MessageTokens", (await rig.post("/v1/messages/count_tokens", counted)).json())
        response = (await rig.post("/v1/responses", {"model": "fake", "input": "hi", "max_output_tokens": 3})).json()
        check(document, "Response", response)
        check(document, "Response", (await rig.http.get(f"/v1/responses/{response['id']}")).json())
        items = await rig.http.get(f"/v1/responses/{response['id']}/input_items")
        check(document, "ResponseItems", items.json())
        check(document, "ResponseDeleted", (await rig.http.delete(f"/v1/responses/{response['id']}")).json())
        counted = {"model": "fake", "input": "hi"}
        check(document, "ResponseInputTokens", (await rig.post("/v1/responses/input_tokens", counted)).json())
        check(document, "Error", (await rig.post("/v1/completions", {})).json())
        check(document, "AnthropicError", (await rig.post("/v1/messages", {})).json())


async def test_events_fit_their_schemas() -> None:
    async with Rig() as rig:
        document = await document_of(rig)
        usage = {"include_usage": True, "continuous_usage_stats": True}
        rich = {"logprobs": True, "top_logprobs": 1, "n": 2, "max_tokens": 3, "stream_options": usage}
        for chunk in await rig.stream("/v1/chat/completions", messages=CHAT["messages"], **rich):
            check(document, "ChatCompletionChunk", chunk)
        rich = {"logprobs": 1, "echo": True, "n": 2, "max_tokens": 3, "stream_options": usage, "return_token_ids": True}
        for chunk in await rig.stream("/v1/completions", prompt="x", **rich):
            check(document, "CompletionChunk", chunk)
        for path, body, component in (
            ("/v1/messages", {**MESSAGE, "stream": True}, "MessageEvent"),
            (
                "/v1/responses",
                {"model": "fake", "input": "hi", "max_output_tokens": 3, "stream": True},
                "ResponseEvent",
            ),
        ):
            lines = [line for line in (await rig.post(path, body)).text.splitlines() if line.startswith("data: ")]
            events = read_sse_data(lines)
            assert len(events) > 4
            for event in events:
                check(document, component, event)


def read_sse_data(lines: list[str]) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in lines if line != "data: [DONE]"]


# The page


class Page(html.parser.HTMLParser):
    def __init__(self, text: str):
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids += [given["id"] or ""] if "id" in given else []
        self.links += [given["href"] or ""] if tag == "a" else []
        self.loads += [tag] if tag in ("script", "link", "img", "iframe") else []


async def test_the_page_shows_all_and_loads_nothing() -> None:
    async with Rig() as rig:
        document = await document_of(rig)
        response = await rig.http.get("/docs")
        assert response.status_code == 200 and response.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in response.headers["content-security-policy"]
    page = Page(response.text)
    assert page.loads == []
    assert len(page.ids) == len(set(page.ids))
    assert {link.removeprefix("#") for link in page.links if link.startswith("#")} <= set(page.ids)
    assert set(document["components"]["schemas"]) <= set(page.ids)
    assert [link for link in page.links if not link.startswith("#")] == ["openapi.json"]
    for path in document["paths"]:
        assert path in response.text


# Made-up requests


@contextmanager
def serving(**settings: Any) -> Iterator[str]:
    """A server in a thread of its own: the one that makes requests waits for their answers."""
    begun, ended, urls = threading.Event(), threading.Event(), []

    async def serve() -> None:
        async with Rig(**settings) as rig, rig.served() as url:
            urls.append(url)
            begun.set()
            await asyncio.to_thread(ended.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert begun.wait(30)
        yield urls[0]
    finally:
        ended.set()
        thread.join(30)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(max_model_len=64, num_kv_blocks=512, max_queued_requests=4096) as url:
        yield url


def narrowed(document: dict[str, Any]) -> dict[str, Any]:
    """The document with what only this server knows, so that made-up requests get past the first checks."""
    for name, schema in document["components"]["schemas"].items():
        if not name.endswith("Request"):
            continue
        fields, required = schema["properties"], schema.get("required", [])
        fields["model"] = {"enum": ["fake"]}
        for field in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            if field in fields:
                fields[field] = {"type": "integer", "minimum": 1, "maximum": 20}
        if "input" in fields:
            schema["required"] = [*required, "input"]
            fields["input"] = {"type": "string", "minLength": 1, "maxLength": 8}
        if "prompt" in fields and "messages" in fields:
            del fields["messages"]
            schema["required"] = ["prompt"]
        if name in ("MessagesRequest", "CountTokensRequest"):
            said = {"role": {"enum": ["user"]}, "content": {"type": "string", "minLength": 1, "maxLength": 8}}
            message = {"type": "object", "properties": said, "required": list(said), "additionalProperties": False}
            fields["messages"] = {"type": "array", "items": message, "minItems": 1, "maxItems": 2}
        if "prompt" in fields:
            fields["prompt"] = {"type": "string", "minLength": 1, "maxLength": 8}
        for field in fields.keys() - {"model", "max_tokens", *schema.get("required", ())}:
            fields[field] = {"anyOf": [fields[field], {"type": "null"}]}
    return document


@pytest.fixture(scope="module")
def schemas(url: str) -> dict[bool, Any]:
    """As it is, for requests that break it; narrowed, for those that don't."""
    document = httpx.get(f"{url}/openapi.json").json()
    whole = schemathesis.openapi.from_dict(copy.deepcopy(document))
    return {True: whole, False: schemathesis.openapi.from_dict(narrowed(document))}


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize(("method", "path"), sorted(OPERATIONS), ids=lambda part: part)
def test_made_up_requests(url: str, schemas: dict[bool, Any], method: str, path: str, mode: GenerationMode) -> None:
    operation = schemas[mode.is_negative][path][method]
    if mode.is_negative and not operation.body and not operation.query:
        return  # there is nothing to get wrong
    checks = [*CHECKS, *([negative_data_rejection] if mode.is_negative else [])]
    codes = collections.Counter[int]()

    @hypothesis.settings(
        max_examples=25,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def one(case: Any) -> None:
        response = case.call(base_url=url, timeout=30)
        codes[response.status_code] += 1
        case.validate_response(response, checks=checks)

    one()
    if operation.body and not mode.is_negative:
        assert codes[200] > 2, codes
