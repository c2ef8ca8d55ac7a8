"""`pagedray chat` against a server that is told what to say, and against the real application."""

from __future__ import annotations

import asyncio
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pagedray.deployments.cli import main
from pagedray.deployments.commands.exit_code import ExitCode
from tests.deployments.fake_api import (
    DONE,
    Asked,
    FakeApi,
    Reply,
    chat_event,
    chat_reply,
    error_reply,
    event,
    free_url,
    json_reply,
    wait_until,
)
from tests.deployments.served import ROOT
from tests.serving.rig import Rig


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def typed(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


def echo(asked: Asked) -> Reply:
    """Says how many messages there were, and repeats the last one."""
    messages = asked.body["messages"]
    return chat_reply(f"{len(messages)}:", messages[-1]["content"])


def test_a_prompt_is_answered_once(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeApi(echo) as api:
        assert main(["chat", "--url", api.url, "hello"]) == ExitCode.OK
    assert capsys.readouterr() == ("1:hello\n", "")
    assert [asked.path for asked in api.asked] == ["/v1/models", "/v1/chat/completions"]
    said = [{"role": "user", "content": "hello"}]
    assert api.posted == [{"model": "first", "messages": said, "stream": True, "max_tokens": 1024}]
    assert "authorization" not in api.asked[1].headers


def test_flags_become_fields(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k1")
    flags = [
        "--model",
        "m",
        "--system",
        "Be.",
        "--max-tokens",
        "7",
        "--temperature",
        "0",
        "--top-k",
        "3",
        "--seed",
        "1",
    ]
    flags += ["--stop", "a", "--stop", "b", "--body", '{"top_k": 4, "min_tokens": 2}']
    with FakeApi(echo) as api:
        assert main(["chat", "--url", api.url, *flags, "hi"]) == 0
        assert main(["chat", "--url", api.url.removesuffix("/v1"), "--api-key", "k2", "--model", "m", "hi"]) == 0
    assert api.posted[0] == {
        "model": "m",
        "messages": [{"role": "system", "content": "Be."}, {"role": "user", "content": "hi"}],
        "stream": True,
        "max_tokens": 7,
        "temperature": 0.0,
        "top_k": 4,
        "min_tokens": 2,
        "seed": 1,
        "stop": ["a", "b"],
    }
    assert [asked.headers["authorization"] for asked in api.asked] == ["Bearer k1", "Bearer k2"]
    assert [asked.path for asked in api.asked] == ["/v1/chat/completions"] * 2


def test_each_line_of_a_pipe_is_a_turn(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    typed(monkeypatch, "a\n\n/system S\nb\n/reset\nc\n/what\n/exit\nnever\n")
    with FakeApi(echo) as api:
        assert main(["chat", "--url", api.url]) == 0
    out, err = capsys.readouterr()
    assert out == "1:a\n4:b\n2:c\n"
    assert api.posted[1]["messages"] == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "1:a"},
        {"role": "user", "content": "b"},
    ]
    assert "system: S" in err and "/what is no command" in err


def test_all_of_a_pipe_can_be_one_prompt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    typed(monkeypatch, "a\n/b\n")
    with FakeApi(echo) as api:
        assert main(["chat", "--url", api.url, "-"]) == 0
    assert api.posted[0]["messages"] == [{"role": "user", "content": "a\n/b\n"}]


def test_reasoning_stays_out_of_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    pieces = [chat_event(reasoning_content="hm"), chat_event(content="yes"), chat_event("length"), DONE]
    with FakeApi(lambda asked: Reply(pieces=pieces)) as api:
        assert main(["chat", "--url", api.url, "hi"]) == 0
    assert capsys.readouterr() == ("yes\n", "(the answer ended by: length)\n")


@pytest.mark.parametrize(
    ("reply", "code", "text"),
    [
        (error_reply(401, "who?"), ExitCode.REFUSED, "401 Unauthorized: who?; give --api-key or set OPENAI_API_KEY"),
        (error_reply(404, "no model x"), ExitCode.REFUSED, "no model x; check --model"),
        (error_reply(429, "busy", retry_after="7"), ExitCode.REFUSED, "busy; it asks to wait 7 s"),
        (error_reply(500, "oh"), ExitCode.BROKEN, "500 Internal Server Error: oh"),
        (Reply(502, {}, [b"<html>\nbad gateway " + b"x" * 1000]), ExitCode.BROKEN, "<html> bad gateway xxx"),
        (Reply(308, {"location": "http://there/v1"}), ExitCode.REFUSED, "it points to http://there/v1"),
        (Reply(pieces=[chat_event(content="a")]), ExitCode.BROKEN, "the answer broke off"),
        (Reply(pieces=[chat_event(content="a"), None]), ExitCode.BROKEN, "broke"),
        (Reply(pieces=[event({"error": {"message": "died"}}), DONE]), ExitCode.BROKEN, "broke the answer off: died"),
        (Reply(pieces=[b"data: {\n\n"]), ExitCode.BROKEN, "not JSON"),
        (Reply(pieces=[b"data: 1\n\n"]), ExitCode.BROKEN, "no object"),
        (Reply(pieces=[1.0]), ExitCode.BROKEN, "nothing for 0.3 s"),
    ],
)
def test_errors_have_words_and_codes(
    reply: Reply, code: ExitCode, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeApi(lambda asked: reply) as api:
        assert main(["chat", "--url", api.url, "--timeout-s", "0.3", "hi"]) == code
    error = capsys.readouterr().err
    assert error.startswith("pagedray: ") and text in error and error.count("\n") == 1
    assert len(error) < 600


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    url = free_url()
    assert main(["chat", "--url", url, "hi"]) == ExitCode.UNREACHABLE
    error = capsys.readouterr().err
    assert url in error and "pagedray serve" in error and error.count("\n") == 1


@pytest.mark.parametrize("models", [json_reply({"data": []}), json_reply([]), Reply(pieces=[b"ok"])])
def test_a_server_that_lists_no_model(models: Reply, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeApi(echo, models) as api:
        assert main(["chat", "--url", api.url, "hi"]) == ExitCode.BROKEN
        assert "give --model" in capsys.readouterr().err
        assert main(["chat", "--url", api.url, "--model", "m", "hi"]) == 0


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://a/v1", "http://", "http://a:x"])
def test_urls_that_are_none(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["chat", "--url", url, "hi"])
    assert ended.value.code == ExitCode.USAGE
    assert url in capsys.readouterr().err


@pytest.mark.parametrize("body", ["{", "[]", '{"messages": []}'])
def test_more_fields_must_be_an_object_of_others(body: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["chat", "--body", body, "hi"])
    assert ended.value.code == ExitCode.USAGE


def test_a_key_that_no_header_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--api-key", "ключ", "hi"]) == ExitCode.FAILED
    assert "--api-key" in capsys.readouterr().err


async def test_with_the_real_application(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    typed(monkeypatch, "one\ntwo\n")
    async with Rig() as rig, rig.served() as url:
        assert await asyncio.to_thread(main, ["chat", "--url", url, "--max-tokens", "5"]) == 0
        out = capsys.readouterr().out
        messages: list[Any] = [{"role": "user", "content": "one"}]
        answers = []
        for prompt in ("two", ""):
            answer = await rig.chat(messages=messages, max_tokens=5)
            answers.append(answer["choices"][0]["message"]["content"])
            messages += [{"role": "assistant", "content": answers[-1]}, {"role": "user", "content": prompt}]
        assert out == "".join(f"{text}\n" for text in answers)
        assert await asyncio.to_thread(main, ["chat", "--url", url, "--max-tokens", "0", "hi"]) == ExitCode.REFUSED
        assert "max_tokens" in capsys.readouterr().err


class Typist:
    """`pagedray chat` on a terminal of its own."""

    def __init__(self, home: Path, *args: str):
        self._mine, theirs = pty.openpty()
        environ = {**os.environ, "TERM": "xterm", "XDG_STATE_HOME": str(home), "PYTHONPATH": str(ROOT)}
        environ.pop("NO_COLOR", None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pagedray.deployments.cli", "chat", *args],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environ,
            cwd=ROOT,
            start_new_session=True,
        )
        os.close(theirs)
        self.shown = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def type(self, text: str) -> None:
        os.write(self._mine, text.encode())

    def sees(self, text: str) -> None:
        wait_until(lambda: text in self.shown)

    def ended(self) -> int:
        try:
            return self.process.wait(20)
        finally:
            self.process.kill()
            self.process.wait()
            self._reader.join()
            os.close(self._mine)

    def _read(self) -> None:
        try:
            while data := os.read(self._mine, 4096):
                self.shown += data.decode()
        except OSError:  # the other side is closed
            pass


@pytest.fixture
def slow_api() -> Iterator[FakeApi]:
    def answer(asked: Asked) -> Reply:
        if asked.body["messages"][-1]["content"] == "long":
            pieces = [chat_event(reasoning="hm"), chat_event(content="beginning"), 60.0, chat_event(content="end")]
            return Reply(pieces=pieces)
        return echo(asked)

    with FakeApi(answer) as api:
        yield api


def test_in_a_terminal_ctrl_c_stops_the_answer_alone(slow_api: FakeApi, tmp_path: Path) -> None:
    chat = Typist(tmp_path, "--url", slow_api.url)
    chat.sees("> ")
    chat.type("long\n")
    chat.sees("beginning")
    chat.process.send_signal(signal.SIGINT)
    chat.sees("stopped")
    chat.type("next\n")
    chat.sees("3:next")
    chat.process.send_signal(signal.SIGINT)  # at the prompt
    wait_until(lambda: chat.shown.count("stopped") == 2)
    chat.type("/exit\n")
    assert chat.ended() == 0, chat.shown
    assert slow_api.posted[1]["messages"][1] == {"role": "assistant", "content": "beginning"}
    assert "\x1b[2mhm\x1b[0m\r\n\r\nbeginning" in chat.shown
    assert "Traceback" not in chat.shown

    again = Typist(tmp_path, "--url", slow_api.url)
    again.sees("> ")
    again.type("\x1b[A\x1b[A\n")  # twice up: the line before /exit
    again.sees("1:next")
    again.type("\x04")
    assert again.ended() == 0, again.shown
    history = tmp_path / "pagedray" / "chat_history"
    assert history.read_text().split() == ["long", "next", "/exit", "next"]
    assert history.stat().st_mode & 0o777 == 0o600


def test_an_error_does_not_end_a_conversation_in_a_terminal(tmp_path: Path) -> None:
    replies = iter([error_reply(500, "oh"), chat_reply("fine")])
    with FakeApi(lambda asked: next(replies)) as api:
        chat = Typist(tmp_path, "--url", api.url)
        chat.sees("> ")
        chat.type("a\n")
        chat.sees("oh")
        chat.type("b\n")
        chat.sees("fine")
        chat.type("/help\n")
        chat.sees("/system")
        chat.type("\x04")
        assert chat.ended() == 0
    assert api.posted[1]["messages"] == [{"role": "user", "content": "b"}]


def test_answers_come_as_they_are_made(slow_api: FakeApi) -> None:
    """Also into a pipe; and Ctrl-C ends a command that nobody can go on typing to."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pagedray.deployments.cli", "chat", "--url", slow_api.url, "long"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    )
    assert process.stdout is not None
    assert os.read(process.stdout.fileno(), 100) == b"beginning"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == ExitCode.INTERRUPTED
    assert b"Traceback" not in err


def test_who_reads_may_leave(slow_api: FakeApi) -> None:
    command = f"{sys.executable} -m pagedray.deployments.cli chat --url {slow_api.url} hi"
    script = f"set -o pipefail; {command} | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert re.fullmatch(r"[01]\n", done.stdout)
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr


def test_no_package_of_a_client_is_needed() -> None:
    code = "import json, sys, pagedray.deployments.cli; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert not {"openai", "anthropic", "torch", "ray"} & set(json.loads(done.stdout))
