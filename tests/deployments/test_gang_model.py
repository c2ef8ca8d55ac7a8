"""A gang with a real model on Ray: two ranks that share each layer give the tokens of one, also after one is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import ray

from pagedray.deployments.build import APP
from pagedray.deployments.directory import Directory
from pagedray.deployments.place import Place
from pagedray.engine import LLM, GenerationParams
from pagedray.engine.config import load_config
from pagedray.engine.messages import decode
from tests.deployments.requests import client
from tests.deployments.served import REBUILD_S, Served, wait_for
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.ray
MODEL = str(tiny_model("qwen3"))
SETTINGS: dict[str, Any] = {"dtype": "float32", "cpu_threads": 1, "num_kv_blocks": 256}
PROMPT = list(range(40, 90))
NUM_TOKENS = 300


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    flags = [word for name, value in SETTINGS.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    command = ("-m", "pagedray.deployments.cli", "serve", MODEL, "--port", "0", "--no-haproxy", *flags)
    with Served(*command, "--tensor-parallel-size", "2", "--step-timeout-s", "3") as server:
        server.wait_until_ready()
        yield server


@pytest.fixture(scope="module")
def expected() -> str:
    params = GenerationParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    with LLM(MODEL, **SETTINGS) as llm:
        return llm.generate([PROMPT], params, progress=False)[0].choices[0].text


def stream(served: Served) -> Iterator[str]:
    body = {"ignore_eos": True}
    chunks = client(served).completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=NUM_TOKENS, temperature=0, stream=True, extra_body=body
    )
    return (chunk.choices[0].text for chunk in chunks)


@pytest.mark.parametrize("how", ["", "kill", "stop"])
def test_the_text_is_that_of_one_rank(served: Served, expected: str, how: str) -> None:
    served.join_ray()
    directory = Directory(APP, load_config({"model": MODEL, **SETTINGS}).model)
    wait_for(lambda: _answers(served), "answer", REBUILD_S, lambda: served.output)
    pieces = stream(served)
    text = next(pieces)
    if how:
        (rank,) = directory.find("worker", 1).values()
        pid = decode(Place, ray.get(rank.place.remote(), timeout=60)).pid
        os.kill(pid, signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    assert text + "".join(pieces) == expected
    if how:
        assert pid not in [process.pid for process in served.left_over()]
        assert "rank 1 on " in served.output


def _answers(served: Served) -> bool:
    try:
        client(served).completions.create(model=MODEL, prompt=PROMPT, max_tokens=1)
    except openai.APIError:
        return False
    return True
