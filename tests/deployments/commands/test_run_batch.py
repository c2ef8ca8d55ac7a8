"""`pagedray run-batch` on a server and on an engine of its own."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pagedray.deployments.cli import main
from pagedray.deployments.commands.batch_output import BatchOutput
from pagedray.deployments.commands.batch_progress import BatchProgress
from pagedray.deployments.commands.exit_code import ExitCode
from pagedray.deployments.commands.run_batch import BatchRun, local_backend
from pagedray.engine.config import load_config
from pagedray.engine.errors import EngineDead
from pagedray.engine.messages import NewSeq
from tests.deployments.fake_api import Asked, FakeApi, Reply, error_reply, free_url, json_reply, wait_until
from tests.deployments.served import ROOT
from tests.fakes import FakeWorker, next_token
from tests.serving.rig import Rig, TemplatedTokenizer
from tests.tiny_models import tiny_model


class Files:
    def __init__(self, folder: Path):
        self.input, self.output = folder / "in.jsonl", folder / "out.jsonl"

    def write(self, *lines: Any) -> None:
        """Strings as they are, anything else as JSON."""
        texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
        self.input.write_text("".join(f"{text}\n" for text in texts))

    @property
    def args(self) -> list[str]:
        return ["run-batch", "-i", str(self.input), "-o", str(self.output)]

    @property
    def results(self) -> list[dict[str, Any]]:
        text = self.output.read_text()
        assert text.endswith("\n") or not text
        return [json.loads(line) for line in text.splitlines()]

    @property
    def by_id(self) -> dict[str, dict[str, Any]]:
        found = {result["custom_id"]: result for result in self.results}
        assert len(found) == len(self.results)
        return found


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def line(custom_id: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def completion(asked: Asked) -> Reply:
    return json_reply({"text": asked.body["prompt"], "usage": {"completion_tokens": 2}})


def test_results_come_as_requests_end(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    def answer(asked: Asked) -> Reply:
        reply = completion(asked)
        return Reply(pieces=[0.5, *reply.pieces]) if asked.body["prompt"] == "slow" else reply

    files.write(line("s", prompt="slow"), line("a", prompt="1"), line("b", "/v1/messages", prompt="2"))
    with FakeApi(answer) as api:
        assert main([*files.args, "--url", api.url, "--api-key", "k", "--no-progress"]) == 0
    assert [result["custom_id"] for result in files.results][-1] == "s"
    assert {name: result["response"]["body"]["text"] for name, result in files.by_id.items()} == {
        "s": "slow",
        "a": "1",
        "b": "2",
    }
    assert {asked.path for asked in api.asked} == {"/v1/models", "/v1/completions", "/v1/messages"}
    assert {asked.headers["authorization"] for asked in api.asked} == {"Bearer k"}
    out, err = capsys.readouterr()
    assert out == "" and "3 results written; 0 failed" in err and "6 tokens" in err


def test_bad_lines_hurt_nobody_and_are_written_once(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    files.write("nonsense", line("a", prompt="1"), "", line("a", prompt="2"), line("b", "/v1/x"), line("c", prompt="3"))
    with FakeApi(lambda asked: error_reply(400, "no 3") if asked.body["prompt"] == "3" else completion(asked)) as api:
        assert main([*files.args, "--url", api.url, "--no-progress"]) == 0
        assert "5 results written; 4 failed" in capsys.readouterr().err
        before = files.output.read_bytes()
        assert main([*files.args, "--url", api.url, "--no-progress"]) == 0
        assert "0 results written, 5 were there already" in capsys.readouterr().err
    assert files.output.read_bytes() == before
    assert sorted(body["prompt"] for body in api.posted) == ["1", "3"]
    failed = {(r["custom_id"], r["error"]["line"], r["error"]["code"]) for r in files.results if r["error"]}
    assert failed == {
        (None, 1, "invalid_json_line"),
        ("a", 4, "duplicate_custom_id"),
        ("b", 5, "invalid_url"),
        ("c", None, "some_error"),
    }
    assert [r["response"]["status_code"] for r in files.results if r["custom_id"] == "c"] == [400]


def test_no_more_requests_at_once_than_allowed(files: Files) -> None:
    files.write(*(line(str(i), prompt="x") for i in range(12)))
    with FakeApi(lambda asked: Reply(pieces=[0.05, b"{}"])) as api:
        assert main([*files.args, "--url", api.url, "--concurrency", "3", "--no-progress"]) == 0
    assert api.most_at_once == 3
    assert len(files.by_id) == 12


def test_pipes_take_and_give_lines(
    files: Files, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    files.write(line("a", prompt="1"), line("b", prompt="2"))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(files.input.read_bytes())))
    with FakeApi(completion) as api:
        assert main(["run-batch", "-i", "-", "-o", "-", "--url", api.url]) == 0
    out, err = capfdbinary.readouterr()
    assert {json.loads(text)["custom_id"] for text in out.splitlines()} == {"a", "b"}
    assert b"2/2" in err and b"0 failed" in err and b"tok/s" in err  # the bar


def test_a_killed_run_goes_on_where_it_was(files: Files) -> None:
    files.write(*(line(str(i), prompt=str(i)) for i in range(40)))
    with FakeApi(lambda asked: Reply(pieces=[0.05, *completion(asked).pieces])) as api:
        command = [sys.executable, "-m", "pagedray.deployments.cli", *files.args, "--url", api.url]
        process = subprocess.Popen([*command, "--concurrency", "4"], cwd=ROOT, stderr=subprocess.PIPE)
        wait_until(lambda: files.output.exists() and files.output.read_bytes().count(b"\n") >= 9)
        process.kill()
        process.communicate()
        before = files.output.read_bytes()
        assert before.endswith(b"\n") and before.count(b"\n") < 40
        kept = before.splitlines()
        files.output.write_bytes(before + kept[0][:-9])  # as a machine's end might leave it
        num_asked = len(api.posted)
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert f"{40 - len(kept)} results written, {len(kept)} were there already" in done.stderr
    assert files.output.read_bytes().startswith(before)
    assert files.by_id.keys() == {str(i) for i in range(40)}
    assert len(api.posted) - num_asked == 40 - len(kept)


def test_ctrl_c_stops_and_says_what_is_done(files: Files) -> None:
    files.write(*(line(str(i), prompt=str(i)) for i in range(8)))
    with FakeApi(lambda asked: Reply(pieces=[0.0 if asked.body["prompt"] == "0" else 60.0, b"{}"])) as api:
        command = [sys.executable, "-m", "pagedray.deployments.cli", *files.args, "--url", api.url]
        process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        wait_until(lambda: files.output.exists() and files.output.read_bytes().count(b"\n") == 1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
    assert process.returncode == ExitCode.INTERRUPTED
    assert "stopped: 1 results written" in err and "Traceback" not in err


def test_a_server_that_goes_away_ends_the_run_without_false_results(
    files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    files.write(*(line(str(i), prompt=str(i)) for i in range(6)))
    with FakeApi(lambda asked: Reply(pieces=[None]) if asked.body["prompt"] == "3" else completion(asked)) as api:
        listening = api._server.socket
        original = api._answer

        def answer(asked: Asked) -> Reply:
            if asked.body["prompt"] == "3":
                listening.close()
            return original(asked)

        api._answer = answer
        args = ["--url", api.url, "--concurrency", "1", "--retry-s", "0.1", "--no-progress"]
        assert main([*files.args, *args]) == ExitCode.UNREACHABLE
    error = capsys.readouterr().err
    assert "ended early: 3 results written" in error and "no server answers" in error
    assert list(files.by_id) == ["0", "1", "2"]
    with FakeApi(completion) as api:
        assert main([*files.args, "--url", api.url]) == 0
    assert len(files.by_id) == 6


def test_what_is_wrong_from_the_start_is_said_at_once(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    files.write(line("a", prompt="1"))
    begun_s = time.monotonic()
    assert main([*files.args, "--url", free_url()]) == ExitCode.UNREACHABLE
    with FakeApi(completion, models=error_reply(401, "who?")) as api:
        assert main([*files.args, "--url", api.url]) == ExitCode.REFUSED
    assert time.monotonic() - begun_s < 20
    assert "--api-key" in capsys.readouterr().err
    assert files.results == []


def usage_error(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(["run-batch", *args]) == ExitCode.USAGE
    return capsys.readouterr().err


def test_flags_that_do_not_go_together_are_named(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    files.write(line("a"))
    url = ["--url", "http://127.0.0.1:1"]
    args = files.args[1:]
    assert "--dtype, --model: settings" in usage_error(capsys, *args, *url, "some-model", "--dtype", "bfloat16")
    assert "--config" in usage_error(capsys, *args, *url, "--config", "x.yaml")
    assert "--api-key" in usage_error(capsys, *args, "--api-key", "k")
    assert "--timeout-s" in usage_error(capsys, *args, "--timeout-s", "1")
    assert not files.output.exists()
    os.link(args[1], files.output)
    assert "is the input and the output" in usage_error(capsys, *args, *url)
    assert "-i: " in usage_error(capsys, "-i", "/nowhere", "-o", "-", *url)
    assert files.input.read_text() == json.dumps(line("a")) + "\n"


def test_an_input_that_is_empty_is_done(files: Files) -> None:
    files.write("", "  ")
    assert main(files.args) == 0
    assert files.output.read_bytes() == b""


def test_several_engines_are_refused(files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files.write(line("a"))
    settings = tmp_path / "c.yaml"
    settings.write_text("num_engine_replicas: 2\n")
    assert main([*files.args, "--config", str(settings)]) == ExitCode.FAILED
    assert "num_engine_replicas is 2" in capsys.readouterr().err


def test_an_unknown_parser_is_found_before_the_model_is_loaded(
    files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    files.write(line("a"))
    assert main([*files.args, "/nowhere", "--tool-call-parser", "other"]) == ExitCode.FAILED
    assert "tool_call_parser 'other' is unknown" in capsys.readouterr().err


REQUESTS = [
    line("text", prompt="The sky", max_tokens=6),
    line("n", prompt=["a", "b"], n=2, max_tokens=3),
    line("chat", "/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], max_tokens=4, logprobs=True),
    line("unknown", prompt="x", model="other"),
    line("long", prompt="x" * 5000),
    line("wrong", prompt="x", temperature=-1),
]


def with_model(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**item, "body": {"model": "fake", **item["body"]}} for item in lines]


def told(result: dict[str, Any]) -> Any:
    """What of a result must be equal whoever gave it."""
    body = {name: value for name, value in result["response"]["body"].items() if name not in ("id", "created")}
    return result["response"]["status_code"], body, result["error"]


async def run_here(files: Files, worker: type[FakeWorker], **settings: Any) -> None:
    """On an engine of fakes in this process."""
    config = load_config(overrides={"num_kv_blocks": 256, "block_size": 4, **settings})
    serve = local_backend(config, TemplatedTokenizer(), None, 10.0, worker)  # type: ignore[arg-type]
    with files.input.open("rb") as lines, contextlib.closing(BatchOutput(str(files.output))) as output:
        await BatchRun(lines, output, BatchProgress(0, 0, False)).all(serve)


async def test_an_engine_here_answers_as_the_server_does(files: Files, tmp_path: Path) -> None:
    files.write(*with_model(REQUESTS))
    served = Files(tmp_path)
    served.output = tmp_path / "served.jsonl"
    async with Rig() as rig, rig.served() as url:
        assert await asyncio.to_thread(main, [*served.args, "--url", url, "--no-progress"]) == 0
    await run_here(files, FakeWorker, api_key=("secret",))
    here, there = files.by_id, served.by_id
    assert here.keys() == there.keys() == {item["custom_id"] for item in REQUESTS}
    assert {name: told(here[name]) for name in here} == {name: told(there[name]) for name in here}
    codes = {name: result["response"]["status_code"] for name, result in here.items()}
    assert codes == {"text": 200, "n": 200, "chat": 200, "unknown": 404, "long": 400, "wrong": 400}


async def test_a_queue_that_is_full_is_waited_for(files: Files) -> None:
    files.write(*with_model([line(str(i), prompt="x", max_tokens=8) for i in range(24)]))
    await run_here(files, FakeWorker, max_num_seqs=4, max_queued_requests=1)
    assert [result["error"] for result in files.results] == [None] * 24


class Dying(FakeWorker):
    """Fails in the step in which any request gets its 40th token."""

    @staticmethod
    def choose(ids: Sequence[int], seq: NewSeq) -> int:
        if len(ids) - seq.num_prompt_tokens == 39:
            raise RuntimeError("out of memory")
        return next_token(ids)


async def test_the_engines_death_ends_the_run_without_false_results(files: Files) -> None:
    files.write(*with_model([line("short", prompt="x", max_tokens=2), line("long", prompt="x", max_tokens=60)]))
    with pytest.raises(EngineDead, match="out of memory"):
        await run_here(files, Dying)
    assert [result["custom_id"] for result in files.results] == ["short"]


def test_several_ranks_give_the_answers_of_one(files: Files, tmp_path: Path) -> None:
    """Flags, model, ranks and all, as a user runs it."""
    model = str(tiny_model("qwen3"))
    files.write(*(line(str(i), model=model, prompt=[5 + i, 7, 9], max_tokens=6, temperature=0) for i in range(5)))
    texts = []
    for size in ("1", "2"):
        files.output = tmp_path / f"{size}.jsonl"
        args = [
            model,
            "--dtype",
            "float32",
            "--num-kv-blocks",
            "64",
            "--cpu-threads",
            "1",
            "--tensor-parallel-size",
            size,
        ]
        command = [sys.executable, "-m", "pagedray.deployments.cli", *files.args, *args]
        environ = {name: value for name, value in os.environ.items() if not name.startswith("PAGEDRAY_")}
        done = subprocess.run(
            command, cwd=ROOT, env={**environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stderr
        assert "5 results written; 0 failed" in done.stderr, done.stderr
        found = files.by_id
        texts.append([found[str(i)]["response"]["body"]["choices"][0]["text"] for i in range(5)])
    assert texts[0] == texts[1]
    assert all(texts[0])
