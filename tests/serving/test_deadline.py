"""X-Request-Timeout-S: whatever the stage, the answer ends in time, as a typed error, and nothing is computed after."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import openai
import pytest

from pagedray.serving.client import Deadlines
from pagedray.serving.openai import chat
from tests.fakes import SlowFakeWorker
from tests.serving.rig import Rig
from tests.serving.test_bad_requests import CHAT, TEXT, check

LONG = {"max_tokens": 900}
SOON = {"X-Request-Timeout-S": "0.3"}
LATER = {"X-Request-Timeout-S": "2"}  # a busy machine has made some tokens by then


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "1e9", "soon", "", "1s", "é", "0x10", "1" * 5000])
async def test_what_is_no_time_is_refused(value: str) -> None:
    async with Rig(max_header_bytes=20_000) as rig:
        for path, body in (("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)):
            response = await rig.post(path, body, headers={"X-Request-Timeout-S": value.encode()})
            assert "X-Request-Timeout-S" in check(response, 400)["message"]
        response = await rig.post("/v1/messages", {}, headers={"X-Request-Timeout-S": value.encode()})
        assert response.status_code == 400 and response.json()["type"] == "error"
        assert rig.links[0].submitted == []


@pytest.mark.parametrize("value", ["30", "1e3", " 2.5 ", "+60"])
async def test_an_answer_in_time_is_as_without(value: str) -> None:
    async with Rig() as rig:
        plain = await rig.complete(prompt="x", max_tokens=4)
        timed = await rig.post("/v1/completions", {**TEXT, "max_tokens": 4}, headers={"X-Request-Timeout-S": value})
        assert timed.json()["choices"] == plain["choices"]


async def test_serves_name_of_the_header_counts_too() -> None:
    async with Rig(SlowFakeWorker) as rig:
        response = await rig.post("/v1/completions", {**TEXT, **LONG}, headers={"X-Request-Timeout-Seconds": "0.2"})
        check(response, 408, code="deadline_exceeded")


async def test_a_whole_answer_that_takes_too_long_is_408() -> None:
    async with Rig(SlowFakeWorker) as rig:
        for path, body in (("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)):
            begun = time.monotonic()
            response = await rig.post(path, {**body, **LONG, "n": 2}, headers=SOON)
            assert 0.3 <= time.monotonic() - begun < 8
            error = check(response, 408, code="deadline_exceeded")
            assert error["type"] == "timeout_error" and "0.3 s" in error["message"]
            assert response.headers["x-should-retry"] == "false"
            await rig.idle()
        assert rig.links[0].engine.stats().finished == {"abort": 4}
        message = {"model": "fake", "max_tokens": 900, "messages": [{"role": "user", "content": "x"}]}
        response = await rig.post("/v1/messages", message, headers=SOON)
        assert (response.status_code, response.json()["error"]["type"]) == (408, "timeout_error")
        await rig.idle()


async def test_a_stream_that_takes_too_long_ends_with_an_error_event() -> None:
    async with Rig(SlowFakeWorker) as rig:
        response = await rig.post("/v1/completions", {**TEXT, **LONG, "stream": True}, headers=LATER)
        assert response.status_code == 200
        events = response.text.split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        assert json.loads(events[-3].removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
        assert len(events) > 3  # tokens came before
        await rig.idle()
        async with rig.openai() as client:
            stream = await client.completions.create(
                model="fake", prompt="x", max_tokens=900, stream=True, extra_headers=LATER
            )
            seen = 0
            with pytest.raises(openai.APIError, match="X-Request-Timeout-S"):
                async for _ in stream:
                    seen += 1
            assert seen


async def test_the_official_client_does_not_ask_again() -> None:
    async with Rig(SlowFakeWorker) as rig, rig.served() as url:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            with pytest.raises(openai.APIStatusError) as caught:
                await client.completions.create(model="fake", prompt="x", max_tokens=900, extra_headers=SOON)
        assert caught.value.status_code == 408
        assert len(rig.links[0].submitted) == 1


async def test_waiting_in_the_queue_counts() -> None:
    async with Rig(SlowFakeWorker, max_num_seqs=1) as rig:
        holding = asyncio.ensure_future(rig.complete(prompt="hold", max_tokens=100))
        while not rig.links[0].engine.stats().scheduler.num_running:
            await asyncio.sleep(0.002)
        check(await rig.post("/v1/completions", TEXT, headers=SOON), 408, code="deadline_exceeded")
        assert rig.links[0].engine.stats().scheduler.num_waiting == 0
        await holding


async def test_an_engine_that_does_not_answer_counts() -> None:
    async with Rig(deadlines=Deadlines(abort_s=0.1)) as rig:
        rig.links[0].is_frozen = True
        check(await rig.post("/v1/completions", TEXT, headers=SOON), 408, code="deadline_exceeded")
        rig.links[0].kill()


async def test_preparing_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Rig() as rig:

        async def slowly(*args: Any) -> Any:
            await asyncio.sleep(60)

        monkeypatch.setattr(chat, "prepare_turn", slowly)
        check(await rig.post("/v1/chat/completions", CHAT, headers=SOON), 408, code="deadline_exceeded")
        assert rig.links[0].submitted == []
