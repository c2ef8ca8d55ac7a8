"""Every field that bears token ids, on every route, refuses those that the vocabulary hasn't: on both sides of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from pagedray.serving.openapi.operations import OPERATIONS
from tests.fakes import VOCAB_SIZE
from tests.serving.rig import Rig
from tests.serving.test_bad_requests import CHAT, TEXT, check

WRONG = {
    "-1": -1,
    "vocab": VOCAB_SIZE,
    "2^31": 2**31,
    "2^32 - 1": 2**32 - 1,
    "2^62": 2**62,
    "2^63": 2**63,
    "2^64": 2**64,
    "-2^63": -(2**63),
    "10^30": 10**30,
}
RESPONSE = {"model": "fake", "input": "x"}
LISTS = ("allowed_token_ids", "bad_token_ids", "stop_token_ids")
BODIES = {"/v1/completions": TEXT, "/v1/chat/completions": CHAT, "/v1/responses": RESPONSE}


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with Rig() as rig:
        yield rig
        await rig.idle()
        assert rig.links[0].submitted == []
        assert (await rig.complete(prompt=[0, VOCAB_SIZE - 1], max_tokens=1))["usage"]["prompt_tokens"] == 2


def id_fields(path: str) -> list[str]:
    """Names of a route's fields that bear token ids: from its class, so that a new one is tested too."""
    body = OPERATIONS[("POST", path)].body
    assert body is not None
    return [name for name in body.kind.model_fields if name.endswith(("token_ids", "_ids")) or name == "logit_bias"]


def test_the_fields_are_known() -> None:
    flags = {"return_token_ids", "return_tokens_as_token_ids"}
    for path in BODIES:
        assert set(id_fields(path)) - flags == {*LISTS, "logit_bias"}
    for (method, path), operation in OPERATIONS.items():
        if method == "POST" and operation.body is not None and path not in BODIES:
            assert id_fields(path) == [], path


@pytest.mark.parametrize("token_id", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("path", BODIES)
async def test_in_fields(rig: Rig, path: str, token_id: int) -> None:
    for name in LISTS:
        for ids in ([token_id], [1, token_id], [token_id] * 3):
            for more in ({}, {"stream": True}):
                check(await rig.post(path, {**BODIES[path], name: ids, **more}), 400, name)
    check(await rig.post(path, {**BODIES[path], "logit_bias": {"1": 1, str(token_id): 1}}), 400, "logit_bias")


@pytest.mark.parametrize("token_id", WRONG.values(), ids=WRONG)
async def test_in_prompts(rig: Rig, token_id: int) -> None:
    for prompt in ([token_id], [1, token_id], [[1], [token_id]]):
        check(await rig.post("/v1/completions", {**TEXT, "prompt": prompt}), 400, "prompt")
        check(await rig.post("/v1/completions", {**TEXT, "prompt": prompt, "echo": True, "logprobs": 1}), 400, "prompt")
    check(await rig.post("/detokenize", {"tokens": [token_id]}), 400, "tokens")


@pytest.mark.parametrize("value", [True, 1.5, "1", None, [1], {}])
async def test_what_is_no_id(rig: Rig, value: Any) -> None:
    for path, body in BODIES.items():
        for name in LISTS:
            check(await rig.post(path, {**body, name: [1, value]}), 400, f"{name}[1]")
    check(await rig.post("/detokenize", {"tokens": [1, value]}), 400, "tokens[1]")
