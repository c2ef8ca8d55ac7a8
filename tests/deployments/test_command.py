"""`pagedray serve` as a user runs it, in a process of its own."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from pagedray.deployments.devices import device_here
from tests.deployments.served import ROOT, START_S, Served

COMMAND = ("-m", "pagedray.deployments.cli", "serve")
SETTINGS = ("--port", "0", "--num-ingress-replicas", "2", "--cpu-threads", "1", "--log-stats-interval-s", "1")
REFERENCES = json.loads((ROOT / "tests" / "data" / "reference_outputs.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def started() -> Iterator[tuple[Served, float]]:
    """The embedded model behind HAProxy, and the seconds until the ready line came."""
    begun = time.monotonic()
    with Served(*COMMAND, *SETTINGS) as server:
        server.wait_until_ready()
        yield server, time.monotonic() - begun


@pytest.fixture
def served(started: tuple[Served, float]) -> Served:
    return started[0]


@pytest.mark.ray
def test_the_phases_account_for_the_start(started: tuple[Served, float]) -> None:
    served, seconds = started
    phases = dict(re.findall(r"^  (\S.*?) +(\d+\.\d) s", served.output, re.MULTILINE))
    assert {"Ray", "Serve", "load weights"} <= set(phases)
    assert sum(map(float, phases.values())) >= 0.95 * seconds


@pytest.mark.ray
def test_no_process_runs_that_nobody_needs(served: Served) -> None:
    commands = [process.command for process in served.left_over()]
    assert not [command for command in commands if "dashboard/dashboard.py" in command]
    # Ray is told of a process for every actor, so that none has to wait for its own to begin, and none is left over.
    idle = [command for command in commands if command.startswith("ray::IDLE")]
    assert len(idle) <= max(0, (os.cpu_count() or 1) - 8)  # eight: two ingresses here


@pytest.mark.ray
def test_it_says_what_it_serves(served: Served) -> None:
    assert "HAProxy, listening on 127.0.0.1:" in served.output
    assert re.search(r"KV cache +[\d,]+ blocks of 16 tokens, [\d,]+ tokens: [\d.]+ sequences", served.output)
    assert re.search(r"attention +(cpu|torch): \S", served.output)
    assert "GiB" in served.output  # the bar of the weights
    assert "(pid=" not in served.output


@pytest.mark.ray
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_printed_curl_works(served: Served) -> None:
    (line,) = re.findall(r"^  curl .*$", served.output, re.MULTILINE)
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=START_S)
    answer = json.loads(done.stdout)
    assert answer["choices"][0]["message"]["content"]
    assert "-d" in shlex.split(line)


@pytest.mark.ray
def test_answers_are_the_references(served: Served) -> None:
    """Two at once over two ingresses: the whole path changes no token."""
    cases = [case for case in REFERENCES["models"]["smollm2-135m-instruct"] if not case["chat"]]
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=START_S)
    for case in cases:
        stream = client.completions.create(
            model="smollm2-135m-instruct",
            prompt=case["prompt"],
            max_tokens=len(case["output_ids"]),
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True, "skip_special_tokens": False},
        )
        assert "".join(chunk.choices[0].text for chunk in stream) == case["output_text"], case["key"]
    served.wait_for(lambda: "throughput " in served.output, "a throughput line", 60)


@pytest.mark.ray
def test_sigterm_ends_it_without_a_trace(served: Served) -> None:
    (haproxy,) = {
        Path(p.command.split(" -f ")[1].split()[0]).parents[1] for p in served.left_over() if " -f " in p.command
    }
    assert haproxy.exists()
    assert served.stop() == 0
    assert served.left_over() == []
    assert not haproxy.exists()
    assert "Traceback" not in served.output


@pytest.mark.ray
def test_a_model_that_cannot_load_is_an_error_of_one_line() -> None:
    with Served(*COMMAND, "--port", "0", "--device", "cpu", "--attention-backend", "triton") as server:
        assert server.ended(START_S) == 1
        last = server.output.strip().splitlines()[-1]
        assert last.startswith("pagedray: EngineReplica does not start: ConfigError: ")
        assert "triton" in last
        assert server.left_over() == []


@pytest.mark.ray
@pytest.mark.skipif(device_here() == "cuda", reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_an_error_of_one_line() -> None:
    with Served(*COMMAND, "--port", "0", "--device", "cuda") as server:
        assert server.ended(START_S) == 1
        last = server.output.strip().splitlines()[-1]
        assert last == "pagedray: device is cuda and 1 GPUs are needed, this machine has 0; use device auto or cpu"
        assert server.left_over() == []


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *COMMAND, *args], capture_output=True, text=True, timeout=START_S, cwd=ROOT)


def test_a_port_in_use_is_found_before_anything_starts() -> None:
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        port = other.getsockname()[1]
        done = run("--port", str(port))
    assert done.returncode == 1
    assert f"port {port}" in done.stderr and "already in use" in done.stderr
    assert "Ray" not in done.stdout


def test_a_model_that_is_not_there_is_found_before_anything_starts() -> None:
    done = run("/nowhere/at/all")
    assert done.returncode == 1
    assert done.stderr.startswith("pagedray: ") and "/nowhere/at/all" in done.stderr
    assert "Traceback" not in done.stderr
