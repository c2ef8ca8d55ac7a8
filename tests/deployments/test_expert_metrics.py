"""Loads of experts on their way from two ranks through Ray to /metrics."""

from __future__ import annotations

import re

import httpx
import pytest

from pagedray.engine.load_watch import KEPT_S
from tests.deployments.requests import client
from tests.deployments.served import Served
from tests.tiny_models import tiny_model

MODEL = str(tiny_model("mixtral"))
COMMAND = ("-m", "pagedray.deployments.cli", "serve", MODEL, "--port", "0", "--no-haproxy")
SETTINGS = ("--dtype", "float32", "--cpu-threads", "1", "--num-kv-blocks", "64")
TOP_K, NUM_PROMPT, NUM_TOKENS = 2, 5, 4


@pytest.mark.ray
def test_what_experts_got_is_in_the_metrics() -> None:
    with Served(*COMMAND, *SETTINGS, "--tensor-parallel-size", "2", "--enable-expert-parallel") as server:
        server.wait_until_ready()
        before = total(server)
        client(server).completions.create(
            model=MODEL, prompt=[5, 6, 7, 8, 9], max_tokens=NUM_TOKENS, extra_body={"ignore_eos": True}
        )
        # Of three layers, behind whose last attention only sampled tokens are left.
        expected = TOP_K * (2 * (NUM_PROMPT + NUM_TOKENS - 1) + NUM_TOKENS)
        server.wait_for(lambda: total(server) == before + expected, "the new loads", 2 * KEPT_S + 20)


def total(server: Served) -> float:
    text = httpx.get(f"{server.url}/metrics", timeout=30).text
    layers = re.findall(r'^pagedray:moe_layer_tokens_mean_total\{.*layer="(\d+)"\}', text, re.MULTILINE)
    assert layers == ["0", "1", "2"], text
    return sum(map(float, re.findall(r"^pagedray:moe_expert_tokens_total\{.*\} (\S+)$", text, re.MULTILINE)))
