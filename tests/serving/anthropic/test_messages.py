"""/v1/messages over fake workers, mostly through the official client over real HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import pydantic
import pytest
from anthropic import beta_async_tool
from anthropic.types import ToolParam

from tests.fakes import FakeWorker, SlowFakeWorker, greedy
from tests.serving.anthropic.events import message_of, read_events
from tests.serving.rig import Rig, text_of
from tests.serving.scripted import says

USER: Any = [{"role": "user", "content": "hi"}]
PROMPT = "user:hi\nassistant:"
PATH = "/v1/messages"
ADD: ToolParam = {
    "name": "add",
    "description": "Adds.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@asynccontextmanager
async def client_of(rig: Rig, **options: Any) -> AsyncIterator[anthropic.AsyncAnthropic]:
    options = {"api_key": "none", "max_retries": 0, **options}
    async with rig.served() as url, anthropic.AsyncAnthropic(base_url=url, **options) as client:
        yield client


async def post(rig: Rig, **body: Any) -> dict[str, Any]:
    response = await rig.post(PATH, {"model": "fake", "messages": USER, "max_tokens": 20, **body})
    assert response.status_code == 200, response.text
    return response.json()


async def stream(rig: Rig, **body: Any) -> list[dict[str, Any]]:
    body = {"model": "fake", "messages": USER, "max_tokens": 20, "stream": True, **body}
    response = await rig.post(PATH, body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return read_events(response.text)


async def test_a_whole_message() -> None:
    async with Rig() as rig:
        got = await post(rig, max_tokens=5)
        assert got.pop("id").startswith("msg_")
        assert got == {
            "type": "message",
            "role": "assistant",
            "model": "fake",
            "content": [{"type": "text", "text": text_of(greedy(PROMPT.encode(), 5))}],
            "stop_reason": "max_tokens",
            "stop_sequence": None,
            "usage": {
                "input_tokens": len(PROMPT),
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
                "output_tokens": 5,
                "output_tokens_details": {"thinking_tokens": 0},
                "service_tier": "standard",
            },
        }


async def test_the_client_reads_a_message() -> None:
    async with Rig(says("Hello!")) as rig, client_of(rig) as client:
        got = await client.messages.create(model="fake", messages=USER, max_tokens=50)
        assert [block.to_dict() for block in got.content] == [{"type": "text", "text": "Hello!"}]
        assert (got.stop_reason, got.stop_sequence) == ("end_turn", None)
        assert got.usage.output_tokens == len("Hello!") + 1
        assert got._request_id


async def test_the_client_streams_the_same_message() -> None:
    async with Rig(says("One two, three.")) as rig, client_of(rig) as client:
        whole = await client.messages.create(model="fake", messages=USER, max_tokens=50)
        async with client.messages.stream(model="fake", messages=USER, max_tokens=50) as streaming:
            texts = [text async for text in streaming.text_stream]
            final = await streaming.get_final_message()
        assert "".join(texts) == "One two, three."
        assert final.to_dict()["content"] == whole.to_dict()["content"]
        assert final.stop_reason == whole.stop_reason
        assert final.usage == whole.usage


async def test_events_come_in_order() -> None:
    async with Rig() as rig:
        events = await stream(rig, max_tokens=4)
        assert [event["type"] for event in events[:3]] == ["message_start", "content_block_start", "ping"]
        assert events[0]["message"]["usage"]["input_tokens"] == len(PROMPT)
        assert events[-2]["usage"]["output_tokens"] == 4
        whole = await post(rig, max_tokens=4)
        assert {**message_of(events), "id": ""} == {**whole, "id": ""}


@pytest.mark.parametrize("streams", [False, True])
async def test_a_stop_sequence_is_named(streams: bool) -> None:
    async with Rig(says("one, two, three")) as rig:
        body = {"stop_sequences": ["four", ", t"], "stream": streams}
        got = message_of(await stream(rig, **body)) if streams else await post(rig, **body)
        assert got["content"] == [{"type": "text", "text": "one"}]
        assert (got["stop_reason"], got["stop_sequence"]) == ("stop_sequence", ", t")


async def test_a_prefill_is_continued() -> None:
    async with Rig() as rig:
        got = await post(rig, messages=[*USER, {"role": "assistant", "content": "The sum is"}], max_tokens=5)
        prompt = "user:hi\nassistant:The sum is"
        assert got["content"][0]["text"] == text_of(greedy(prompt.encode(), 5))
        assert got["usage"]["input_tokens"] == len(prompt)


async def test_a_prefill_that_the_template_cannot_continue() -> None:
    async with Rig(template="{{ messages | length }} messages") as rig:
        body = {"model": "fake", "max_tokens": 5, "messages": [*USER, {"role": "assistant", "content": "x"}]}
        response = await rig.post(PATH, body)
        assert response.status_code == 400
        message = response.json()["error"]["message"]
        assert message.startswith("messages: the last one, the assistant's, can't be continued: the chat template")


async def test_sampling_reaches_the_engine() -> None:
    async with Rig() as rig:
        await post(rig, temperature=0.5, top_p=0.25, top_k=7, max_tokens=3)
        params = rig.links[0].submitted[0].params
        assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.5, 0.25, 7, 3)
        await post(rig)
        assert rig.links[0].submitted[1].params.temperature == 1.0


@pytest.mark.parametrize("marked", [False, True])
async def test_cached_tokens_are_told_apart_where_a_request_marks_its_cache(marked: bool) -> None:
    system: Any = [{"type": "text", "text": "be brief" * 4}]
    if marked:
        system[0]["cache_control"] = {"type": "ephemeral"}
    async with Rig() as rig:
        first = (await post(rig, system=system))["usage"]
        again = (await post(rig, system=system))["usage"]
        streamed = (await stream(rig, system=system))[-2]["usage"]
        assert first["cache_read_input_tokens"] == 0
        assert (again["cache_read_input_tokens"] > 0) == marked
        assert again["input_tokens"] + again["cache_read_input_tokens"] == first["input_tokens"]
        assert streamed == {k: v for k, v in again.items() if k != "service_tier"}


async def test_no_tokens_fill_the_cache() -> None:
    async with Rig() as rig:
        got = await post(rig, max_tokens=0)
        assert (got["content"], got["stop_reason"], got["usage"]["output_tokens"]) == ([], "max_tokens", 0)
        again = await post(rig, cache_control={"type": "ephemeral"})
        assert again["usage"]["cache_read_input_tokens"] > 0


async def test_the_end_of_the_context_window() -> None:
    async with Rig(max_model_len=40) as rig:
        got = await post(rig, max_tokens=40)
        assert got["stop_reason"] == "model_context_window_exceeded"
        assert got["usage"]["output_tokens"] == 40 - len(PROMPT)
        got = await post(rig, max_tokens=40 - len(PROMPT))
        assert got["stop_reason"] == "max_tokens"


async def test_diagnostics_are_unavailable() -> None:
    async with Rig() as rig:
        got = await post(rig, diagnostics={"previous_message_id": "msg_x"})
        assert got["diagnostics"] == {"cache_miss_reason": {"type": "unavailable"}}
        assert (await post(rig, diagnostics={}))["diagnostics"] is None
        assert "diagnostics" not in await post(rig)


@pytest.mark.parametrize("streams", [False, True])
async def test_a_round_of_tools(streams: bool) -> None:
    async with (
        Rig(says("Let me see.\n" + CALL, "It is 2."), tool_call_parser="hermes") as rig,
        client_of(rig) as client,
    ):
        request: Any = {"model": "fake", "max_tokens": 200, "tools": [ADD]}
        if streams:
            async with client.messages.stream(messages=USER, **request) as streaming:
                first: Any = await streaming.get_final_message()
        else:
            first = await client.messages.create(messages=USER, **request)
        assert first.stop_reason == "tool_use"
        said, call = first.content
        assert (said.type, said.text.strip()) == ("text", "Let me see.")
        assert (call.type, call.name, call.input) == ("tool_use", "add", {"a": 1})
        assert call.id.startswith("toolu_") and len(call.id) == len("toolu_") + 24
        result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "2"}
        messages = [*USER, first.to_param(), {"role": "user", "content": [result]}]
        second = await client.messages.create(messages=messages, **request)
        assert second.stop_reason == "end_turn"
        assert second.content[0].to_dict() == {"type": "text", "text": "It is 2."}


@pytest.mark.parametrize("streams", [False, True])
async def test_the_clients_tool_runner_goes_on_without_a_thread(streams: bool) -> None:
    @beta_async_tool
    async def add(a: int) -> str:
        """Adds."""
        return str(a + 1)

    async with Rig(says(CALL, "It is 2."), tool_call_parser="hermes") as rig, client_of(rig) as client:
        body = {"model": "fake", "messages": USER, "max_tokens": 20, "thread": {"type": "create"}}
        refused = await rig.post(PATH, body)
        assert refused.json()["error"]["details"] == {"error_code": "thread_unsupported_request"}
        runner = client.beta.messages.tool_runner(
            model="fake", max_tokens=200, messages=USER, tools=[add], stream=streams
        )
        last = await runner.until_done()
        assert last.content[0].text == "It is 2."
        assert len(rig.links[0].submitted) == 2


async def test_one_call_where_one_is_allowed() -> None:
    async with Rig(says(CALL + "\n" + CALL), tool_call_parser="hermes") as rig:
        choice = {"type": "auto"}
        assert len((await post(rig, tools=[ADD], tool_choice=choice, max_tokens=300))["content"]) == 2
        choice = {"type": "auto", "disable_parallel_tool_use": True}
        assert len((await post(rig, tools=[ADD], tool_choice=choice, max_tokens=300))["content"]) == 1


async def test_no_calls_with_choice_none() -> None:
    async with Rig(says(CALL), tool_call_parser="hermes") as rig:
        got = await post(rig, tools=[ADD], tool_choice={"type": "none"}, max_tokens=300)
        assert got["content"] == [{"type": "text", "text": CALL}]
        assert got["stop_reason"] == "end_turn"


async def test_count_tokens_is_the_prompt() -> None:
    async with Rig() as rig, client_of(rig) as client:
        request: Any = {"model": "fake", "messages": USER, "system": "be brief", "tools": [ADD]}
        counted = await client.messages.count_tokens(**request)
        got = await client.messages.create(**request, max_tokens=3)
        assert counted.input_tokens == got.usage.input_tokens > len(PROMPT)
        forced = await client.messages.count_tokens(**request, tool_choice={"type": "any"})
        assert forced.input_tokens >= len(PROMPT)
        assert (await client.messages.count_tokens(model="fake", messages=USER)).input_tokens == len(PROMPT)
        whole: Any = {"max_tokens": 3, "stream": True, "temperature": 0.5, "stop_sequences": ["a"], "metadata": {}}
        again = await client.messages.count_tokens(**request, extra_body=whole)
        assert again.input_tokens == counted.input_tokens


BAD: list[tuple[str, dict[str, Any], str]] = [
    (PATH, {"max_tokens": None}, "max_tokens: Input should be a valid integer"),
    (PATH, {"max_tokens": 10**6}, "max_tokens: 1000000 > 1024, the most that this model takes"),
    (PATH, {"messages": []}, "messages: at least one message is required"),
    (PATH, {"messages": [{"role": "user"}]}, "messages.0.content: is required"),
    (PATH, {"tools": 3}, "tools: Input should be a valid list"),
    (PATH, {"tools": [3]}, "tools.0: must be an object, not an integer"),
    (PATH, {"tools": [{"name": "x"}]}, "tools.0.input_schema: is required"),
    (
        PATH,
        {"tools": [{**ADD, "name": "no spaces"}]},
        "tools.0.name: String should match pattern '^[a-zA-Z0-9_-]{1,128}$'",
    ),
    (PATH, {"tools": [ADD, ADD]}, "tools.1.name: tool names must be unique, 'add' came before"),
    (
        PATH,
        {"tools": [{**ADD, "input_schema": {"type": "array"}}]},
        "tools.0.input_schema.type: must be \"object\", not 'array'",
    ),
    (PATH, {"tools": [{**ADD, "defer_loading": True}]}, "tools.0.defer_loading: Input should be False"),
    (
        PATH,
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        (
            "tools.0.type: tools of type 'web_search_20250305' are not implemented; define a custom tool and run it "
            "yourself"
        ),
    ),
    (PATH, {"tool_choice": {"type": "any"}}, "tool_choice: needs tools"),
    (
        PATH,
        {"tools": [ADD], "tool_choice": {"type": "tool", "name": "sub"}},
        "tool_choice.name: 'sub' is not among the tools: add",
    ),
    (PATH, {"container": "c"}, "container: is not implemented: no code runs here"),
    (PATH + "/count_tokens", {"n": 5}, "n: unknown field"),
    (PATH + "/count_tokens", {"messages": [3]}, "messages.0: must be an object, not an integer"),
]


@pytest.mark.parametrize(("path", "fields", "message"), BAD)
async def test_bad_requests(path: str, fields: dict[str, Any], message: str) -> None:
    async with Rig() as rig:
        body = {"model": "fake", "messages": USER, **({"max_tokens": 5} if path == PATH else {}), **fields}
        response = await rig.post(path, body)
        assert response.status_code == 400
        got = response.json()
        assert got["error"] == {"type": "invalid_request_error", "message": message}
        assert got["type"] == "error"
        assert got["request_id"] == response.headers["request-id"]
        assert not rig.links[0].submitted


async def test_errors_become_the_clients_classes() -> None:
    request: Any = {"model": "fake", "messages": USER, "max_tokens": 5}
    async with Rig(api_key="secret") as rig, client_of(rig, api_key="secret") as client:
        await client.messages.create(**request)
        with pytest.raises(anthropic.BadRequestError) as bad:
            await client.messages.create(**{**request, "max_tokens": -1})
        assert bad.value.type == "invalid_request_error"
        assert bad.value.request_id
        with pytest.raises(anthropic.NotFoundError) as missing:
            await client.messages.create(**{**request, "model": "other"})
        assert missing.value.type == "not_found_error"
        assert "'other'" in str(missing.value.api_message)
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.batches.list()
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long: 2013 tokens > 1023 maximum"):
            await client.messages.create(**{**request, "messages": [{"role": "user", "content": "x" * 1997}]})
        with pytest.raises(anthropic.AuthenticationError) as nobody:
            await client.with_options(api_key="wrong").messages.create(**request)
        assert nobody.value.type == "authentication_error"
        bearer = client.with_options(api_key=None, auth_token="secret")
        await bearer.messages.create(**request)


async def test_a_full_queue_is_529() -> None:
    async with Rig(SlowFakeWorker, max_num_seqs=1, max_queued_requests=1) as rig, client_of(rig) as client:
        request: Any = {"model": "fake", "messages": USER, "max_tokens": 20}
        got = await asyncio.gather(*(client.messages.create(**request) for _ in range(8)), return_exceptions=True)
        errors = [error for error in got if isinstance(error, Exception)]
        assert 0 < len(errors) < 8
        for error in errors:
            assert isinstance(error, anthropic.OverloadedError)
            assert error.type == "overloaded_error"
            assert int(error.response.headers["retry-after"]) >= 1


async def test_the_beta_client() -> None:
    async with Rig(says("Hello!")) as rig, client_of(rig) as client:
        got = await client.beta.messages.create(
            model="fake",
            messages=USER,
            max_tokens=50,
            betas=["context-management-2025-06-27"],
            context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        )
        assert got.content[0].to_dict() == {"type": "text", "text": "Hello!"}


async def test_models() -> None:
    async with Rig(served_model_name=["one", "org/two"]) as rig, client_of(rig) as client:
        models = [model async for model in client.models.list()]
        assert [model.id for model in models] == ["one", "org/two"]
        got = await client.models.retrieve("org/two")
        assert got == models[1]
        assert (got.type, got.display_name, got.max_input_tokens) == ("model", "org/two", 1024)
        assert got.created_at.year >= 2025
        with pytest.raises(anthropic.NotFoundError):
            await client.models.retrieve("three")
        assert (await rig.http.get("/v1/models/one")).json()["object"] == "model"


async def test_without_an_engine_the_client_may_retry() -> None:
    async with Rig(num_engines=0, resubmit_timeout_s=1) as rig, client_of(rig) as client:
        with pytest.raises(anthropic.ServiceUnavailableError) as caught:
            await client.messages.create(model="fake", messages=USER, max_tokens=5)
        assert caught.value.type == "overloaded_error"
        assert int(caught.value.response.headers["retry-after"]) >= 1


class FailingWorker(FakeWorker):
    def result(self, step: int) -> Any:
        if step == 4:
            raise RuntimeError("injected")
        return super().result(step)


async def test_an_error_after_the_start_is_an_event() -> None:
    async with Rig(FailingWorker, resubmit_timeout_s=1) as rig, client_of(rig) as client:
        seen = []
        with pytest.raises(anthropic.APIStatusError) as caught:
            async with client.messages.stream(model="fake", messages=USER, max_tokens=50) as streaming:
                async for event in streaming:
                    seen.append(event.type)
        assert seen[0] == "message_start"
        assert "message_stop" not in seen
        assert caught.value.type in ("api_error", "overloaded_error")


THINKING: Any = {"type": "enabled", "budget_tokens": 1024}


@pytest.mark.parametrize("streams", [False, True])
async def test_thinking(streams: bool) -> None:
    thought, answer = "1 and 1.\n", "It is 2."
    settings = {"reasoning_parser": "deepseek_r1", "max_model_len": 2048, "num_kv_blocks": 600}
    async with Rig(says(f"{thought}</think>{answer}"), **settings) as rig, client_of(rig) as client:
        request: Any = {"model": "fake", "messages": USER, "max_tokens": 1500, "thinking": THINKING}
        if streams:
            async with client.messages.stream(**request) as streaming:
                got: Any = await streaming.get_final_message()
        else:
            got = await client.messages.create(**request)
        thinking, text = got.content
        assert (thinking.type, thinking.thinking.strip(), thinking.signature) == ("thinking", thought.strip(), "")
        assert (text.type, text.text) == ("text", answer)
        assert len(thought) <= got.usage.output_tokens_details.thinking_tokens <= len(thought) + len("</think>")
        constraint = rig.links[0].submitted[0].params.constraint
        assert constraint is not None and constraint.reasoning is not None
        assert constraint.reasoning.max_tokens == 1024
        # what was thought goes back unchanged
        messages = [*USER, got.to_param(), {"role": "user", "content": "sure?"}]
        again = await client.messages.create(model="fake", messages=messages, max_tokens=100)
        assert again.stop_reason == "end_turn"


async def test_thinking_that_is_not_to_be_shown() -> None:
    async with Rig(says("hm</think>Yes."), reasoning_parser="deepseek_r1") as rig:
        for got in (
            await post(rig, thinking={"type": "adaptive", "display": "omitted"}),
            message_of(await stream(rig, thinking={"type": "adaptive", "display": "omitted"})),
        ):
            assert got["content"] == [
                {"type": "thinking", "thinking": "", "signature": ""},
                {"type": "text", "text": "Yes."},
            ]


class Sum(pydantic.BaseModel):
    a: int
    b: int = pydantic.Field(description="the second")


async def test_grammars() -> None:
    """One compiler's process for all of it: an answer's schema, a forced call, and schemas that can't be followed."""
    async with Rig(says('{"a":1,"b":2}', CALL), tool_call_parser="hermes") as rig, client_of(rig) as client:
        request: Any = {"model": "fake", "messages": USER, "max_tokens": 200}
        got = await client.messages.parse(**request, output_format=Sum)
        assert got.parsed_output == Sum(a=1, b=2)
        called = await client.messages.create(**request, tools=[ADD], tool_choice={"type": "any"})
        assert called.stop_reason == "tool_use"
        for submitted in rig.links[0].submitted:
            assert submitted.params.constraint is not None and submitted.params.constraint.grammar is not None
        broken: Any = {"type": "object", "properties": {"a": {"type": "whole"}}}
        with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format\.schema.*whole"):
            format_: Any = {"type": "json_schema", "schema": broken}
            await client.messages.create(**request, output_config={"format": format_})
        with pytest.raises(anthropic.BadRequestError, match=r"tools\.1\.input_schema.*whole"):
            tools: Any = [ADD, {"name": "sub", "input_schema": broken}]
            await client.messages.create(**request, tools=tools, tool_choice={"type": "any"})
