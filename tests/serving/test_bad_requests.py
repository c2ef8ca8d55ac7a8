"""Bad requests: one envelope, the right status and class, never a 5xx, and the neighbours go on unharmed."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.fakes import VOCAB_SIZE
from tests.serving.rig import Rig

USER = [{"role": "user", "content": "hi"}]
CHAT = {"model": "fake", "messages": USER}
TEXT = {"model": "fake", "prompt": "x"}
BIG = 2**62
IDS = {"-1": -1, "vocab": VOCAB_SIZE, "huge": BIG, "very huge": 10**30}


def check(response: Any, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"]
    assert len(error["message"]) < 3000
    assert "Traceback" not in response.text and "pydantic" not in response.text
    assert error["param"] == param
    if code is not None:
        assert error["code"] == code
    return error


CHAT_CASES: list[tuple[dict[str, Any], str]] = [
    ({"tools": []}, "tools"),
    ({"functions": []}, "functions"),
    ({"max_reasoning_tokens": 1, "thinking_token_budget": 1}, "thinking_token_budget"),
    ({"thinking_token_budget": -2}, "thinking_token_budget"),
    ({"echo": "x"}, "echo"),
    ({"messages": None}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{}]}, "messages[0].role"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].name"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "tool", "tool_call_id": 5, "content": "x"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "file", "file": {}}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "assistant", "audio": {"id": "x"}}]}, "messages[0].audio"),
    ({"messages": [{"role": "assistant", "reasoning": 5}]}, "messages[0].reasoning"),
    (
        {"messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": "{"}}]},
        "messages[0].function_call.arguments",
    ),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [*USER, {"role": "user", "content": ["x"]}]}, "messages[1].content[0]"),
    ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "y": 1}]}]}, "messages[0].content[0].y"),
    ({"messages": [{"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}]}, "messages[0].content[0].type"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
        "messages[0].content[0].type",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "user", "content": "x", "colour": 1}]}, "messages[0].colour"),
    ({"messages": [{"role": "user", "content": "x", "name": 1}]}, "messages[0].name"),
    (
        {
            "messages": [
                {"role": "assistant", "tool_calls": {}, "content": "x"},
                {"role": "assistant", "tool_calls": {"a": 1}},
            ]
        },
        "messages[1].tool_calls",
    ),
    ({"messages": [{"role": "assistant", "tool_calls": ["f"]}]}, "messages[0].tool_calls[0]"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "alloy", "format": "wav"}}, "audio"),
    ({"reasoning_effort": "enormous"}, "reasoning_effort"),
    ({"max_reasoning_tokens": -1}, "max_reasoning_tokens"),
    ({"verbosity": "chatty"}, "verbosity"),
    ({"documents": [{"text": "x"}]}, "documents"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": BIG}, "max_tokens"),
    ({"max_tokens": 5000}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": 5000}, "max_completion_tokens"),
    ({"max_completion_tokens": "5"}, "max_completion_tokens"),
    ({"top_logprobs": 1}, "top_logprobs"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ({"top_logprobs": -1, "logprobs": True}, "top_logprobs"),
    ({"logprobs": 2}, "logprobs"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "add_generation_prompt"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
]

TEXT_CASES: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": {}}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [[1], "a"]}, "prompt"),
    ({"prompt": [[1], ["a"]]}, "prompt[1]"),
    ({"prompt": [[[1]]]}, "prompt[0]"),
    ({"prompt": ["a"] * 2000}, "prompt"),
    ({"prompt": ["a"] * 100, "n": 100}, "prompt"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": -1, "echo": True}, "max_tokens"),
    ({"best_of": 0}, "best_of"),
    ({"best_of": 129}, "best_of"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"suffix": "x"}, "suffix"),
    ({"logprobs": True}, "logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"prompt": "a" * 5000}, "prompt"),
    ({"prompt": "a" * 100_000}, "prompt"),
]

SHARED_CASES: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model"),
    ({"model": 5}, "model"),
    ({"colour": "red"}, "colour"),
    ({"temprature": 1}, "temprature"),
    ({"stream": "yes"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": False, "stream_options": {}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": "x"}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": {"include_usages": True}}, "stream_options.include_usages"),
    ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
    ({"n": 0}, "n"),
    ({"n": -1}, "n"),
    ({"n": 129}, "n"),
    ({"n": BIG}, "n"),
    ({"n": 1.5}, "n"),
    ({"n": True}, "n"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 1000}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 10**30}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"seed": 10**30}, "seed"),
    ({"seed": "x"}, "seed"),
    ({"stop": 5}, "stop"),
    ({"stop": [5]}, "stop[0]"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a"] * 5}, "stop"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"user": 1}, "user"),
    ({"user": []}, "user"),
    ({"metadata": {"a": 1}}, "metadata.a"),
    ({"store": "x"}, "store"),
    ({"truncation_side": "middle"}, "truncation_side"),
    ({"structured_outputs": {"choice": ["a"], "whitespace_pattern": "x"}}, "structured_outputs.whitespace_pattern"),
    ({"structured_outputs": {"disable_fallback": True}}, "structured_outputs"),
    ({"vllm_xargs": {"a": 1}}, "vllm_xargs"),
    ({"logprob_token_ids": [1]}, "logprob_token_ids"),
    ({"logit_bias": []}, "logit_bias"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"1_0": 1}}, "logit_bias"),
    ({"logit_bias": {"1": "x"}}, "logit_bias.1"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"priority": 2**40}, "priority"),
    ({"priority": 1}, "priority"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": 5}, "cache_salt"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"logits_processors": ["x"]}, "logits_processors"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 5000}, "truncate_prompt_tokens"),
    ({"temperature": 2.1}, "temperature"),
    ({"bad_words": "x"}, "bad_words"),
    ({"bad_words": ["x", ""]}, "bad_words[1]"),
    ({"bad_words": ["x" * 5000]}, "bad_words"),
    ({"allowed_token_ids": [1], "bad_token_ids": [1]}, "bad_token_ids"),
    *[
        ({name: [1, i]}, name)
        for name in ("allowed_token_ids", "bad_token_ids", "stop_token_ids")
        for i in IDS.values()
    ],
    *[({"logit_bias": {str(i): 1}}, "logit_bias") for i in IDS.values()],
]


@pytest.fixture
async def rig() -> Any:
    async with Rig() as rig:
        yield rig
        # Nothing of a refused request is left, and a good one is still answered.
        await rig.idle()
        assert (await rig.complete(prompt="x", max_tokens=2))["usage"]["completion_tokens"] == 2


def sent(base: dict[str, Any], fields: dict[str, Any]) -> bytes:
    return json.dumps({**base, **fields}).encode()


@pytest.mark.parametrize(("fields", "param"), CHAT_CASES + SHARED_CASES)
async def test_chat(rig: Rig, fields: dict[str, Any], param: str) -> None:
    check(await rig.post("/v1/chat/completions", content=sent(CHAT, fields)), 400, param)


@pytest.mark.parametrize(("fields", "param"), TEXT_CASES + SHARED_CASES)
async def test_completions(rig: Rig, fields: dict[str, Any], param: str) -> None:
    check(await rig.post("/v1/completions", content=sent(TEXT, fields)), 400, param)


@pytest.mark.parametrize("token_id", IDS.values(), ids=IDS)
async def test_prompt_ids_are_checked_against_the_vocabulary(rig: Rig, token_id: int) -> None:
    check(await rig.post("/v1/completions", {**TEXT, "prompt": [1, token_id]}), 400, "prompt")
    check(await rig.post("/v1/completions", {**TEXT, "prompt": [[1], [token_id]]}), 400, "prompt")
    check(await rig.post("/detokenize", {"tokens": [1, token_id]}), 400, "tokens")


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": USER}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "x", "chat_template_kwargs": {}}, "chat_template_kwargs"),
        ("/tokenize", {"prompt": "x", "colour": 1}, "colour"),
        ("/tokenize", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("/tokenize", {"prompt": "a" * 100_000}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [1, "x"]}, "tokens[1]"),
    ],
)
async def test_the_tokenizers_routes(rig: Rig, path: str, fields: dict[str, Any], param: str) -> None:
    check(await rig.post(path, fields), 400, param)


BAD_BODIES = {
    "empty": b"",
    "not json": b"{model: 'x'}",
    "half": b'{"model": "fake", "prompt": "x"',
    "array": b"[1]",
    "string": b'"x"',
    "null": b"null",
    "bad utf-8": b'{"model": "fake", "prompt": "\xff"}',
    "half a surrogate pair": b'{"model": "fake", "prompt": "\\ud800 and more"}',
    "nan": b'{"model": "fake", "prompt": "x", "temperature": NaN}',
    "infinity": b'{"model": "fake", "prompt": "x", "temperature": -Infinity}',
    "overflow": b'{"model": "fake", "prompt": "x", "temperature": 1e999}',
    "long number": b'{"model": "fake", "prompt": "x", "seed": ' + b"9" * 10_000 + b"}",
    "deep": b'{"model": "fake", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "trailing": b'{"model": "fake", "prompt": "x"} {}',
}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("body", BAD_BODIES.values(), ids=BAD_BODIES)
async def test_bodies_that_are_no_json_object(rig: Rig, path: str, body: bytes) -> None:
    check(await rig.post(path, content=body), 400)


async def test_values_nested_too_deeply_for_a_template(rig: Rig) -> None:
    for depth in range(300, 1000, 50):
        deep = b'{"note": ' + b"[" * depth + b"]" * depth + b"}"
        body = json.dumps({**CHAT, "max_tokens": 1}).encode()[:-1] + b', "chat_template_kwargs": ' + deep + b"}"
        response = await rig.post("/v1/chat/completions", content=body)
        assert response.status_code in (200, 400)
    check(response, 400, response.json()["error"]["param"])


async def test_a_wrong_name_hints_at_the_right_one(rig: Rig) -> None:
    error = check(await rig.post("/v1/completions", {**TEXT, "temprature": 1}), 400, "temprature")
    assert "did you mean temperature" in error["message"]


async def test_a_long_list_of_wrong_values_gives_a_short_message(rig: Rig) -> None:
    error = check(
        await rig.post("/v1/completions", {**TEXT, "stop_token_ids": ["x"] * 100_000}), 400, "stop_token_ids[0]"
    )
    assert len(error["message"]) < 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_an_unknown_model(rig: Rig, path: str) -> None:
    base = TEXT if path == "/v1/completions" else CHAT
    error = check(await rig.post(path, {**base, "model": "gpt-4"}), 404, "model", "model_not_found")
    assert "gpt-4" in error["message"] and "fake" in error["message"]
    check(await rig.http.get("/v1/models/gpt-4"), 404, "model", "model_not_found")
    check(await rig.post("/tokenize", {"model": "gpt-4", "prompt": "x"}), 404, "model", "model_not_found")


async def test_routes_and_methods(rig: Rig) -> None:
    check(await rig.http.get("/v1/nothing"), 404, code="unknown_url")
    check(await rig.post("/v1/chat/completions/", CHAT), 404, code="unknown_url")
    response = await rig.http.get("/v1/chat/completions")
    check(response, 405, code="method_not_allowed")
    assert response.headers["allow"] == "POST"
    check(await rig.http.delete("/health"), 405, code="method_not_allowed")


async def test_a_prompt_that_fills_the_model_is_refused_with_both_numbers() -> None:
    async with Rig(max_model_len=20) as rig:
        error = check(
            await rig.post("/v1/completions", {**TEXT, "prompt": "a" * 20}), 400, "prompt", "context_length_exceeded"
        )
        assert "20" in error["message"] and "19" in error["message"]
        assert (await rig.complete(prompt="a" * 19, max_tokens=1))["usage"]["total_tokens"] == 20


async def test_a_prompt_that_no_tokens_could_hold_is_not_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Rig(max_model_len=700) as rig:
        monkeypatch.setattr(rig.tokenizer, "encode", lambda *args: pytest.fail("was tokenized"))
        longest = len("<extra>")
        for path, fields in [
            ("/v1/completions", {**TEXT, "prompt": "a" * (700 * longest + 1)}),
            ("/tokenize", {"prompt": "a" * (700 * longest + 1)}),
        ]:
            error = check(await rig.post(path, fields), 400, "prompt")
            assert "700" in error["message"]
        messages = [{"role": "user", "content": "a" * 5000}]
        check(await rig.post("/v1/chat/completions", {**CHAT, "messages": messages}), 400, "messages")


async def test_a_body_that_is_too_large() -> None:
    async with Rig(max_body_bytes=2000) as rig:
        body = sent(TEXT, {"user": "a" * 2000})

        async def chunked() -> Any:
            for i in range(0, len(body), 100):
                yield body[i : i + 100]

        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            check(await rig.post(path, content=body), 413)
            check(await rig.post(path, content=chunked()), 413)
        just = sent(TEXT, {"user": ""})
        just = sent(TEXT, {"user": "a" * (2000 - len(just))})
        assert len(just) == 2000
        assert (await rig.post("/v1/completions", content=just)).status_code == 200


async def test_an_announced_length_is_refused_before_the_body_is_read() -> None:
    async def receive() -> Any:
        raise AssertionError("the body was read")

    async with Rig(max_body_bytes=2000) as rig:
        for length in (b"2001", b"9" * 5000):
            sent: list[Any] = []

            async def send(message: Any, sent: list[Any] = sent) -> None:
                sent.append(message)

            headers = [(b"content-length", length)]
            scope = {"type": "http", "method": "POST", "path": "/tokenize", "headers": headers, "query_string": b""}
            await rig.app(scope, receive, send)
            assert sent[0]["status"] == 413


async def test_a_too_large_body_over_a_socket() -> None:
    async with Rig(max_body_bytes=2000) as rig, rig.openai() as client:
        for size in (3000, 3_000_000):
            with pytest.raises(openai.APIStatusError) as caught:
                await client.completions.create(model="fake", prompt="a" * size)
            assert caught.value.status_code == 413
        assert (await client.completions.create(model="fake", prompt="a", max_tokens=1)).usage is not None


async def test_the_official_client_raises_the_right_classes() -> None:
    async with Rig() as rig, rig.openai() as client:
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="gpt-4", messages=USER)  # type: ignore[arg-type]
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(model="fake", messages=USER, temperature=-1)  # type: ignore[arg-type]
        assert bad.value.param == "temperature"
        with pytest.raises(openai.BadRequestError) as unsupported:
            await client.chat.completions.create(
                model="fake",
                messages=USER,
                tools=[{"type": "custom", "custom": {"name": "f"}}],
            )
        assert unsupported.value.code == "unsupported_parameter"


async def test_our_own_bugs_are_500_without_details(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Rig() as rig:
        monkeypatch.setattr(rig.tokenizer, "encode", lambda *args: 1 / 0)
        error = check(await rig.post("/v1/completions", TEXT), 500, code="internal_error")
        assert error["message"] == "internal error"
