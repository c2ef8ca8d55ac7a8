"""What surrounds requests, through HAProxy: keys, heads, time limits, and clients that don't read."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.deployments.requests import PROMPT, metric
from tests.deployments.served import REBUILD_S, START_S, Served, wait_for

pytestmark = pytest.mark.ray
KEY = "sk-0123456789"
LEAVES_S = 10.0  # the answer takes 80
LONG = {"model": "fake", "prompt": PROMPT, "max_tokens": 4000}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    file: Path = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(KEY)
    flags = (
        "--api-key-file",
        str(file),
        "--client-stall-timeout-s",
        "2",
        "--cors-allow-origins",
        "http://page.example",
    )
    with Served("-m", "tests.deployments.serve_fakes", "--port", "0", "--max-model-len", "8192", *flags) as server:
        server.wait_until_ready()
        yield server


@pytest.fixture
def http(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, headers={"x-api-key": KEY}, timeout=START_S) as client:
        yield client


def test_it_is_haproxy(served: Served) -> None:
    assert "HAProxy, listening" in served.output


def test_keys_and_origins(http: httpx.Client) -> None:
    assert http.get("/v1/models").status_code == 200
    refused = http.get("/v1/models", headers={"x-api-key": "wrong", "origin": "http://page.example"})
    assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
    assert refused.headers["access-control-allow-origin"] == "http://page.example"
    asks = {"origin": "http://page.example", "access-control-request-method": "POST", "x-api-key": ""}
    assert http.options("/v1/chat/completions", headers=asks).status_code == 200


def test_long_heads_reach_our_own_limits(http: httpx.Client) -> None:
    assert http.get("/v1/models", headers={"x-long": "a" * 30_000}).status_code == 200
    for path, length, status in (("/v1/models", 34_000, 431), ("/v1/models/" + "a" * 9000, 1, 414)):
        answer = http.get(path, headers={"x-long": "a" * length})
        assert answer.status_code == status and answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("header", ["X-Request-Timeout-S", "X-Request-Timeout-Seconds"])
def test_time_limits_are_ours(http: httpx.Client, header: str) -> None:
    answer = http.post("/v1/completions", json=LONG, headers={header: "0.5"})
    assert answer.status_code == 408 and answer.json()["error"]["code"] == "deadline_exceeded"
    streamed = http.post("/v1/completions", json={**LONG, "stream": True}, headers={header: "0.5"}).text
    assert '"code":"deadline_exceeded"' in streamed and streamed.endswith("data: [DONE]\n\n")


def test_a_client_that_leaves_before_the_answer_is_given_up(served: Served) -> None:
    """Its body comes apart from its head: HAProxy would pass it on without looking at it, and not see the end."""
    wait_for(lambda: metric(served, "num_requests_running") == 0, "rest", REBUILD_S)
    host, port = served.url.removeprefix("http://").split(":")
    body = json.dumps(LONG).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Api-Key: {KEY}\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((host, int(port))) as client:
        client.sendall(head.encode())
        time.sleep(0.1)
        client.sendall(body)
        wait_for(lambda: metric(served, "num_requests_running") > 0, "running", REBUILD_S)
    wait_for(lambda: metric(served, "num_requests_running") == 0, "the end", LEAVES_S)


def test_a_client_that_does_not_read_is_given_up(served: Served, http: httpx.Client) -> None:
    wait_for(lambda: metric(served, "num_requests_running") == 0, "rest", REBUILD_S)
    host, port = served.url.removeprefix("http://").split(":")
    body = json.dumps({**LONG, "stream": True, "logprobs": 20, "n": 64}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Api-Key: {KEY}\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((host, int(port)))
        client.sendall(head.encode() + body)
        wait_for(lambda: metric(served, "num_requests_running") > 0, "running", REBUILD_S)
        wait_for(lambda: metric(served, "num_requests_running") == 0, "the end", REBUILD_S)
        logs = [path.read_text(errors="replace") for path in served.ray_tmpdir.rglob("*Ingress*.log")]
        assert any("client stopped reading path='/v1/completions'" in log for log in logs)
