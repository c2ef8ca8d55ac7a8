from __future__ import annotations

import email.utils
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from pagedray.deployments.commands.batch_line import BatchRequest, Result
from pagedray.deployments.commands.batch_sender import BatchSender, num_output_tokens, retry_after_s
from pagedray.deployments.commands.exit_code import CommandError, ExitCode

REQUEST = BatchRequest("a", "/v1/messages", b'{"x":1.50}')
Answer = httpx.Response | Exception


class Script:
    """Answers requests one after the other; keeps them, and the pauses between them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: Answer, models: Answer | None = None):
        self._answers = iter(answers)
        self._models = models or httpx.Response(200)
        self.posts: list[httpx.Request] = []
        self.pauses: list[float] = []
        self.reasons: list[str] = []
        self._now_s = 1000.0
        module = "pagedray.deployments.commands.batch_sender"
        monkeypatch.setattr(f"{module}.asyncio.sleep", self._sleep)
        monkeypatch.setattr(f"{module}.time.monotonic", lambda: self._now_s)
        monkeypatch.setattr(f"{module}.random.uniform", lambda low, high: low)

    async def send(self, patience_s: float = 60.0) -> Result:
        async with httpx.AsyncClient(
            transport=httpx.MockTransport(self._handle), base_url="http://there/api/v1"
        ) as http:
            return await BatchSender(http, patience_s, self.reasons.append).send(REQUEST)

    def _handle(self, request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            answer = self._models
        else:
            self.posts.append(request)
            answer = next(self._answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def _sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self._now_s += seconds


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Script]:
    return lambda *answers, **how: Script(monkeypatch, *answers, **how)


def answer(status: int, value: Any, **headers: str) -> httpx.Response:
    return httpx.Response(status, json=value, headers={name.replace("_", "-"): text for name, text in headers.items()})


async def test_an_answer_is_a_result(script: Callable[..., Script]) -> None:
    sent = script(answer(200, {"usage": {"output_tokens": 3}}, x_request_id="r1"))
    result = await sent.send()
    assert result.custom_id == "a" and result.error is None and result.response is not None
    assert (result.response.status_code, result.response.request_id) == (200, "r1")
    assert num_output_tokens(result) == 3
    (post,) = sent.posts
    assert str(post.url) == "http://there/api/v1/messages"
    assert post.content == REQUEST.body
    assert post.headers["anthropic-version"]


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        ({"error": {"message": "no", "type": "t", "code": "c"}}, "c", "no"),
        ({"type": "error", "error": {"type": "t", "message": "no"}}, "t", "no"),
        ({"detail": "no"}, None, "no"),
        (["no"], None, "['no']"),
    ],
)
async def test_a_refusal_is_a_response_and_an_error(
    script: Callable[..., Script], body: Any, code: str | None, message: str
) -> None:
    result = await script(answer(400, body)).send()
    assert result.response is not None and result.response.body == body and result.response.status_code == 400
    assert result.error is not None and (result.error.code, result.error.message) == (code, message)
    assert result.error.line is None


async def test_a_body_that_is_not_json_is_kept_as_text(script: Callable[..., Script]) -> None:
    result = await script(httpx.Response(500, text="<oh>\nno")).send()
    assert result.response is not None and result.response.body == "<oh>\nno"
    assert b"\n" not in result.encode() and json.loads(result.encode())["error"]["message"] == "<oh> no"


async def test_a_busy_server_is_asked_again_when_it_says(script: Callable[..., Script]) -> None:
    busy = [answer(429, {}, retry_after="7"), answer(503, {}, retry_after="nonsense"), answer(502, {}), answer(200, {})]
    sent = script(*busy)
    assert (await sent.send()).error is None
    assert sent.pauses == [7.0, 1.0, 2.0]  # as asked; then 0.5 s doubled each time
    assert sent.reasons == [f"the server answers {status}" for status in (429, 503, 502)]


async def test_patience_ends_with_the_last_answer(script: Callable[..., Script]) -> None:
    sent = script(*(answer(429, {"error": "busy"}, retry_after="4") for _ in range(10)))
    result = await sent.send(patience_s=10.0)
    assert result.response is not None and result.response.status_code == 429
    assert sum(sent.pauses) <= 10.0 and len(sent.posts) == 3


async def test_no_wait_is_longer_than_a_minute(script: Callable[..., Script]) -> None:
    sent = script(answer(429, {}, retry_after="100000"), answer(200, {}))
    await sent.send(patience_s=100.0)
    assert sent.pauses == [60.0]


async def test_a_broken_connection_is_tried_again(script: Callable[..., Script]) -> None:
    sent = script(httpx.ReadError("reset"), httpx.ConnectError("refused"), answer(200, {}))
    assert (await sent.send()).error is None
    assert sent.reasons == ["reset", "refused"]


async def test_a_request_that_breaks_every_connection_is_an_error_of_its_own(script: Callable[..., Script]) -> None:
    result = await script(httpx.RemoteProtocolError("cut"), models=answer(404, {})).send(patience_s=0.0)
    assert result.error is not None and result.error.code == "connection_error" and "cut" in result.error.message


async def test_a_server_that_is_gone_ends_the_run(script: Callable[..., Script]) -> None:
    sent = script(httpx.ReadError("reset"), models=httpx.ConnectError("refused"))
    with pytest.raises(CommandError, match="no server answers at http://there/api/v1: refused") as caught:
        await sent.send(patience_s=0.0)
    assert caught.value.code == ExitCode.UNREACHABLE


async def test_an_answer_that_takes_too_long_is_not_asked_for_again(script: Callable[..., Script]) -> None:
    sent = script(httpx.ReadTimeout("slow"))
    result = await sent.send()
    assert result.error is not None and result.error.code == "timeout" and len(sent.posts) == 1


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, None),
        ("0", 0.0),
        (" 12 ", 12.0),
        ("-1", None),
        ("soon", None),
        (email.utils.formatdate(1000.0, usegmt=True), 100.0),
        (email.utils.formatdate(800.0, usegmt=True), 0.0),
    ],
)
def test_retry_after_has_two_forms(header: str | None, seconds: float | None) -> None:
    assert retry_after_s(header, now_s=900.0) == seconds
