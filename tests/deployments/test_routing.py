"""Two ingresses over two engines: requests spread from the first one on; prefixes and sessions find their engine."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import pytest

from tests.deployments.requests import Stream
from tests.deployments.served import REBUILD_S, Served, wait_for

pytestmark = pytest.mark.ray

FACTOR = 2.0
BEGINNING = "{0} is the number of this long beginning, and no other prompt that is sent here begins like this. "


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    flags = ("--port", "0", "--num-engine-replicas", "2", "--num-ingress-replicas", "2")
    with Served("-m", "tests.deployments.serve_fakes", *flags) as server:
        server.wait_until_ready()
        wait_for(lambda: len(gauge(server, "num_requests_running")) == 2, "second engine", REBUILD_S)
        wait_for(lambda: all(len(gauge(server, "routing_load")) == 2 for _ in range(8)), "both linked", REBUILD_S)
        yield server


def gauge(served: Served, name: str) -> dict[str, float]:
    """By engine, as the ingress that answers sees it."""
    text = httpx.get(f"{served.url}/metrics", timeout=60).text
    return {
        engine: float(value)
        for engine, value in re.findall(rf'^pagedray:{name}\{{engine="(\w+)"\}} (\S+)$', text, re.MULTILINE)
    }


def complete(served: Served, prompt: str, **headers: str) -> int:
    """Prompt tokens that the prefix cache of the engine had."""
    body = {"model": "fake", "prompt": prompt, "max_tokens": 2}
    response = httpx.post(f"{served.url}/v1/completions", json=body, headers=headers, timeout=60)
    assert response.status_code == 200, response.text
    cached: int = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def test_requests_spread_from_the_first_one_on(served: Served) -> None:
    streams = []
    for number in range(1, 9):
        streams.append(Stream(served, 150))
        streams[-1].wait_for_text()
        counts = list(gauge(served, "num_requests_running").values())
        assert sum(counts) == number
        assert max(counts) <= FACTOR * (min(counts) + 1), counts
    for stream in streams:
        stream.check()


def test_a_prompt_finds_the_engine_that_knows_its_beginning(served: Served) -> None:
    for number in range(6):
        prompt = BEGINNING.format(number)
        assert complete(served, prompt + "First.") == 0
        for again in range(4):
            assert complete(served, prompt + f"Then {again}.") >= len(prompt) - 16, "whichever ingress it came to"


def test_a_session_stays_with_one_engine(served: Served) -> None:
    """Its prompts have nothing in common, so only the engines' counters tell."""
    before = gauge(served, "prompt_tokens_total")
    for number in range(8):
        complete(served, f"{number} is how this begins, and it is long enough", **{"X-Session-Id": "mine"})
    after = gauge(served, "prompt_tokens_total")
    assert sorted(after[engine] > before[engine] for engine in before) == [False, True]
