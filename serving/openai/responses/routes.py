"""Routes of the Responses API."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, get_args

import msgspec
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from pagedray.engine.errors import EngineUnavailable, PagedrayError, UserError
from pagedray.serving.disconnect import unless_disconnected
from pagedray.serving.limits import own_path, parse_object, read_body
from pagedray.serving.openai import sse
from pagedray.serving.openai.respond import Call, Context, Endpoint, Job, deliver_answer, send_part
from pagedray.serving.openai.responses import create
from pagedray.serving.openai.responses.background import Background
from pagedray.serving.openai.responses.form import ResponseForm, error_event
from pagedray.serving.openai.responses.schema import Include
from pagedray.serving.openai.responses.store import ResponseStore, find, not_stored, read_items
from pagedray.serving.refusals import UnsupportedPath

log = logging.getLogger(__name__)

PATH = "/v1/responses"
MAX_LIMIT, DEFAULT_LIMIT = 100, 20  # items of a page
READ_S = 5.0  # how long a reader of events waits at a time


def response_routes(context: Context, store: ResponseStore) -> list[Route]:
    """The API's routes. Responses are kept in `store`."""
    api = ResponsesApi(context, store)
    return [
        Route(PATH, Endpoint(context, api.prepare, api.deliver), methods=["POST"]),
        Route(f"{PATH}/input_tokens", api.count, methods=["POST"]),
        Route(f"{PATH}/compact", api.compact, methods=["POST"]),
        Route(f"{PATH}/{{id}}", api.read, methods=["GET"]),
        Route(f"{PATH}/{{id}}", api.delete, methods=["DELETE"]),
        Route(f"{PATH}/{{id}}/cancel", api.cancel, methods=["POST"]),
        Route(f"{PATH}/{{id}}/input_items", api.input_items, methods=["GET"]),
    ]


class ResponsesApi:
    def __init__(self, context: Context, store: ResponseStore):
        self._context = context
        self._store = store
        self._background = Background(store)

    async def prepare(self, context: Context, body: dict[str, Any]) -> Job:
        return await create.prepare(context, self._store, body)

    async def deliver(self, context: Context, job: Job, call: Call, send: Send) -> None:
        form = job.form
        assert isinstance(form, ResponseForm)
        if form.is_background:
            record = await self._background.start(context, job, form, call)
            if form.streams:
                await self._send_events(form.id, 0, send)
            else:
                headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(record.body))]
                await send_part(send, {"type": "http.response.start", "status": 200, "headers": headers})
                await send_part(send, {"type": "http.response.body", "body": record.body})
        elif form.is_kept:
            await deliver_answer(context, job, call, self._keeping(form, send))
        else:
            await deliver_answer(context, job, call, send)

    async def count(self, request: HttpRequest) -> ASGIApp:
        limits = self._context.config.server
        body = await read_body(request.scope, request.receive, limits.max_body_bytes)
        return _json(await create.count(self._context, self._store, parse_object(body, limits.max_json_depth)))

    async def compact(self, request: HttpRequest) -> ASGIApp:
        why = "compaction is not implemented; truncation: auto drops what doesn't fit"
        raise UnsupportedPath(request.method, own_path(request.scope), why)

    async def read(self, request: HttpRequest) -> ASGIApp:
        query = Query(request)
        query.check_include()
        record = await find(self._store, request.path_params["id"])
        after = query.number("starting_after", 0, 2**53)
        if not query.flag("stream"):
            if after is not None:
                raise UserError("starting_after needs stream=true", "starting_after")
            return _raw(record.body)
        if not record.has_events:
            raise UserError(
                "only the stream of a response that was created with background: true and stream: true can be read "
                "again; read this one without stream",
                "stream",
            )

        async def stream(scope: Scope, receive: Receive, send: Send) -> None:
            first = 0 if after is None else after + 1
            try:
                await unless_disconnected(receive, self._send_events(record.id, first, send))
            except ClientDisconnect:
                log.debug("client left path=%s", scope["path"])

        return stream

    async def delete(self, request: HttpRequest) -> ASGIApp:
        record = await find(self._store, request.path_params["id"])
        await self._store.delete(record.id)
        return _json({"id": record.id, "object": "response", "deleted": True})

    async def cancel(self, request: HttpRequest) -> ASGIApp:
        record = await find(self._store, request.path_params["id"])
        if not record.is_background:
            raise UserError(
                f"response {record.id!r} can't be cancelled: it was not created with background: true. To stop one "
                "that you wait for, close the connection"
            )
        ended = await self._store.cancel(record.id)
        if ended is None:
            raise not_stored(record.id)
        return _raw(ended.body)

    async def input_items(self, request: HttpRequest) -> ASGIApp:
        """What the response was made from, that of earlier responses included."""
        query = Query(request)
        query.check_include()
        record = await find(self._store, request.path_params["id"])
        items = await read_items((await self._store.chain(record.id))[:-1]) + record.input_items()
        if query.one_of("order", ("desc", "asc")) == "desc":
            items.reverse()
        after = query.text("after")
        if after is not None:
            places = [i for i, item in enumerate(items) if item["id"] == after]
            if not places:
                raise UserError(f"after: there is no item with id {after[:80]!r}", "after")
            items = items[places[-1] + 1 :]
        page = items[: query.number("limit", 1, MAX_LIMIT) or DEFAULT_LIMIT]
        return _json(
            {
                "object": "list",
                "data": page,
                "first_id": page[0]["id"] if page else None,
                "last_id": page[-1]["id"] if page else None,
                "has_more": len(page) < len(items),
            }
        )

    def _keeping(self, form: ResponseForm, send: Send) -> Send:
        """`send` that keeps the response before its end is sent: the client may go on from it at once."""

        async def keep_and_send(message: Any) -> None:
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                try:
                    await self._store.put(form.record())
                except EngineUnavailable as error:
                    log.warning("a response is not stored response=%s reason=%s", form.id, error)
            await send(message)

        return keep_and_send

    async def _send_events(self, response_id: str, first: int, send: Send) -> None:
        """Events of a background response from number `first` on, as they come, to the last one."""
        await send_part(send, {"type": "http.response.start", "status": 200, "headers": sse.HEADERS})
        is_last, data = False, b""
        while not is_last:
            try:
                page = await self._store.events(response_id, first, READ_S)
                if page is None:
                    raise not_stored(response_id)
                first, is_last, data = first + len(page.events), page.is_last, b"".join(page.events)
            except PagedrayError as error:
                is_last, data = True, error_event(error, first)
            if data or is_last:
                await send_part(send, {"type": "http.response.body", "body": data, "more_body": not is_last})


class Query:
    """Parameters in a URL. Every method raises UserError for what it can't read."""

    def __init__(self, request: HttpRequest):
        self._params = request.query_params

    def text(self, name: str) -> str | None:
        return self._params.get(name)

    def one_of(self, name: str, values: Sequence[str]) -> str:
        """One of `values`, the first unless it is given."""
        value = self._params.get(name, values[0])
        if value not in values:
            raise UserError(f"{name} must be one of {', '.join(values)}", name)
        return value

    def flag(self, name: str) -> bool:
        return self.one_of(name, ("false", "true")) == "true"

    def number(self, name: str, low: int, high: int) -> int | None:
        value = self._params.get(name)
        if value is None:
            return None
        if not (value.isascii() and value.isdigit() and len(value) < 18 and low <= int(value) <= high):
            raise UserError(f"{name} must be a whole number from {low} to {high}", name)
        return int(value)

    def check_include(self) -> None:
        """What may be included is there already, or was never made."""
        for name in ("include", "include[]"):
            for value in self._params.getlist(name):
                if value not in get_args(Include):
                    raise UserError(f"include must be of {', '.join(get_args(Include))}", "include")


def _json(value: Any) -> Response:
    return _raw(msgspec.json.encode(value))


def _raw(body: bytes) -> Response:
    return Response(body, media_type="application/json")
