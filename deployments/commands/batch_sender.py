"""Sends a batch's requests, again where the server is busy or away, and makes results of its answers."""

from __future__ import annotations

import asyncio
import email.utils
import random
import time
import uuid
from collections.abc import Callable
from datetime import datetime

import httpx
import msgspec

from pagedray.deployments.commands.api_server import error_text, unreachable
from pagedray.deployments.commands.batch_line import BatchRequest, Failure, Response, Result

AGAIN = (429, 502, 503)  # busy; a gateway whose server restarts; starting or rebuilding
LONGEST_WAIT_S = 60.0
FIRST_WAIT_S, GROWTH = 0.5, 2.0  # where the server doesn't say how long
CLIENT_HEADERS = {"/v1/messages": {"anthropic-version": "2023-06-01"}}


class BatchSender:
    """
    Args:
        http: its base URL ends where an API's does, in /v1 mostly.
        patience_s: how long a request is sent again.
        waits: told why, each time.
    """

    def __init__(self, http: httpx.AsyncClient, patience_s: float, waits: Callable[[str], None] = lambda reason: None):
        self._http, self._patience_s, self._waits = http, patience_s, waits

    async def send(self, request: BatchRequest) -> Result:
        """
        Raises:
            CommandError: the server is gone, and this request can be sent another time.
        """
        deadline_s, wait_s = time.monotonic() + self._patience_s, FIRST_WAIT_S
        while True:
            response: httpx.Response | None = None
            try:
                response = await self._post(request)
                if response.status_code not in AGAIN:
                    return _result(request, response)
                asked_s = retry_after_s(response.headers.get("retry-after"))
            except (httpx.ReadTimeout, httpx.WriteTimeout):
                message = "the server did not answer within --timeout-s"
                return Result(request.custom_id, error=Failure("timeout", message))
            except httpx.HTTPError as error:
                trouble, asked_s = str(error) or type(error).__name__, None
            pause_s = min(LONGEST_WAIT_S, wait_s if asked_s is None else asked_s) * random.uniform(1.0, 1.25)
            if time.monotonic() + pause_s > deadline_s:
                if response is not None:
                    return _result(request, response)
                return await self._lost(request, trouble)
            self._waits(trouble if response is None else f"the server answers {response.status_code}")
            await asyncio.sleep(pause_s)
            wait_s *= GROWTH

    async def _post(self, request: BatchRequest) -> httpx.Response:
        headers = {"content-type": "application/json", **CLIENT_HEADERS.get(request.url, {})}
        return await self._http.post(request.url.removeprefix("/v1"), content=request.body, headers=headers)

    async def _lost(self, request: BatchRequest, trouble: str) -> Result:
        """A server that answers others has lost this request alone."""
        try:
            await self._http.get("/models")
        except httpx.HTTPError as error:
            raise unreachable(self._http.base_url, error) from None
        failure = Failure("connection_error", f"the connection broke each time: {trouble}")
        return Result(request.custom_id, error=failure)


def retry_after_s(header: str | None, now_s: float | None = None) -> float | None:
    """Seconds that a Retry-After header asks to wait, in either of its forms; None without one that can be read."""
    if header is None:
        return None
    if header.strip().isdecimal():
        return float(header)
    try:
        when: datetime = email.utils.parsedate_to_datetime(header)
    except ValueError:
        return None
    return max(0.0, when.timestamp() - (time.time() if now_s is None else now_s))


def num_output_tokens(result: Result) -> int:
    """By the usage of whichever API answered."""
    body = result.response.body if result.response is not None else None
    usage = body.get("usage") if isinstance(body, dict) else None
    if not isinstance(usage, dict):
        return 0
    count = usage.get("completion_tokens", usage.get("output_tokens"))
    return count if isinstance(count, int) else 0


def _result(request: BatchRequest, response: httpx.Response) -> Result:
    try:
        body = msgspec.json.decode(response.content)
    except msgspec.DecodeError:
        body = response.text
    request_id = response.headers.get("x-request-id") or response.headers.get("request-id") or uuid.uuid4().hex
    answer = Response(response.status_code, request_id, body)
    if response.status_code == 200:
        return Result(request.custom_id, answer)
    error = body.get("error") if isinstance(body, dict) else None
    code = error.get("code") or error.get("type") if isinstance(error, dict) else None
    return Result(
        request.custom_id, answer, Failure(code if isinstance(code, str) else None, error_text(response.content))
    )
