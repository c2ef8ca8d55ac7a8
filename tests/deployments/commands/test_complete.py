from __future__ import annotations

import asyncio
import io

import pytest

from pagedray.deployments.cli import main
from pagedray.deployments.commands.exit_code import ExitCode
from tests.deployments.fake_api import FakeApi, Reply, event, free_url
from tests.serving.rig import Rig


def text_event(text: str, finish_reason: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]})


def test_into_a_pipe_goes_exactly_the_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("The sky\n"))
    with FakeApi(lambda asked: Reply(pieces=[text_event(" is\u2028"), text_event("blue", "stop")])) as api:
        assert main(["complete", "--url", api.url, "--max-tokens", "2", "-"]) == 0
    assert capsys.readouterr() == (" is\u2028blue", "")
    assert api.asked[1].path == "/v1/completions"
    assert api.posted == [{"model": "first", "prompt": "The sky\n", "max_tokens": 2, "stream": True}]


def test_what_came_before_an_error_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeApi(lambda asked: Reply(pieces=[text_event("half")])) as api:
        assert main(["complete", "--url", api.url, "x"]) == ExitCode.BROKEN
    assert capsys.readouterr().out == "half"
    assert main(["complete", "--url", free_url(), "x"]) == ExitCode.UNREACHABLE


async def test_with_the_real_application(capsys: pytest.CaptureFixture[str]) -> None:
    async with Rig() as rig, rig.served() as url:
        assert await asyncio.to_thread(main, ["complete", "--url", url, "--max-tokens", "9", "The sky"]) == 0
        answer = await rig.complete(prompt="The sky", max_tokens=9)
    assert capsys.readouterr().out == answer["choices"][0]["text"]
