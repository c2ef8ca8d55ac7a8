"""What is kept of responses: reading, listing, going on, deleting, cancelling; and those that run in the background."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from pagedray.engine.errors import EngineUnavailable
from pagedray.serving.app import create_app
from pagedray.serving.openai.responses.store import MemoryStore, Record
from tests.fakes import FakeWorker, SlowFakeWorker, greedy
from tests.serving.responses.events import Event, check_response, check_stream, read_events
from tests.serving.rig import Rig, text_of
from tests.serving.scripted import says

PATH = "/v1/responses"


async def create(rig: Rig, **body: Any) -> Event:
    response = await rig.post(PATH, {"model": "fake", "input": "hi", **body})
    assert response.status_code == 200, response.text
    got: Event = response.json()
    check_response(got)
    return got


async def read(rig: Rig, response_id: str, **query: Any) -> Event:
    response = await rig.http.get(f"{PATH}/{response_id}", params=query)
    assert response.status_code == 200, response.text
    got: Event = response.json()
    check_response(got)
    return got


async def ended(rig: Rig, response_id: str) -> Event:
    async with asyncio.timeout(20):
        while (got := await read(rig, response_id))["status"] in ("queued", "in_progress"):
            await asyncio.sleep(0.01)
    return got


def prompt_of(rig: Rig, index: int = -1) -> str:
    return bytes(rig.links[0].submitted[index].prompt_ids).decode()


async def test_a_response_is_read_again_as_it_was() -> None:
    async with Rig() as rig:
        got = await create(rig, max_output_tokens=3, metadata={"a": "b"})
        assert await read(rig, got["id"]) == got
        assert await read(rig, got["id"], include="message.output_text.logprobs", stream="false") == got
        response = await rig.post(PATH, {"model": "fake", "input": "hi", "stream": True, "max_output_tokens": 2})
        last = check_stream(read_events(response.text))
        assert await read(rig, last["id"]) == last


async def test_what_is_not_to_be_stored_is_not() -> None:
    async with Rig() as rig, rig.openai() as client:
        got = await client.responses.create(model="fake", input="hi", max_output_tokens=1, store=False)
        for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
            with pytest.raises(openai.NotFoundError) as missing:
                await call(got.id)
            assert missing.value.type == "invalid_request_error" and got.id in missing.value.message
        with pytest.raises(openai.BadRequestError) as previous:
            await client.responses.create(model="fake", input="hi", previous_response_id=got.id)
        assert previous.value.code == "previous_response_not_found"
        assert previous.value.param == "previous_response_id"
        with pytest.raises(openai.NotFoundError) as item:
            reference: Any = [{"type": "item_reference", "id": got.output[0].id}]
            await client.responses.create(model="fake", input=reference)
        assert item.value.param == "input[0].id"


async def test_a_server_may_store_nothing() -> None:
    async with Rig(max_stored_responses=0) as rig:
        got = await create(rig, max_output_tokens=1)
        assert got["store"] is False
        assert (await rig.http.get(f"{PATH}/{got['id']}")).status_code == 404
        response = await rig.post(PATH, {"model": "fake", "input": "hi", "background": True})
        assert response.status_code == 400 and "max_stored_responses" in response.json()["error"]["message"]


async def test_turns_go_on_from_each_other_without_instructions() -> None:
    async with Rig(says("one", "two", "three")) as rig, rig.openai() as client:
        first = await client.responses.create(model="fake", input="a", instructions="first only")
        second = await client.responses.create(model="fake", input="b", previous_response_id=first.id)
        assert second.previous_response_id == first.id
        assert prompt_of(rig) == "user:a\nassistant:one\nuser:b\nassistant:"
        third: Any = await client.responses.create(
            model="fake", input="c", previous_response_id=second.id, instructions="now", store=False
        )
        assert prompt_of(rig) == "system:now\nuser:a\nassistant:one\nuser:b\nassistant:two\nuser:c\nassistant:"
        assert third.output_text == "three"
        await client.responses.create(model="fake", input="d", previous_response_id=first.id)  # another branch
        assert prompt_of(rig) == "user:a\nassistant:one\nuser:d\nassistant:"
        await client.responses.create(model="fake", previous_response_id=first.id)
        assert prompt_of(rig) == "user:a\nassistant:one\nassistant:"
        await client.responses.delete(first.id)
        with pytest.raises(openai.BadRequestError, match=first.id):
            await client.responses.create(model="fake", input="c", previous_response_id=second.id)


async def test_a_stream_can_be_gone_on_from_as_soon_as_it_ends() -> None:
    async with Rig(says("one", "two")) as rig, rig.openai() as client:
        async with client.responses.stream(model="fake", input="a") as events:
            async for event in events:
                if event.type == "response.completed":
                    await client.responses.create(model="fake", input="b", previous_response_id=event.response.id)
        assert prompt_of(rig) == "user:a\nassistant:one\nuser:b\nassistant:"


async def test_input_items_are_paged() -> None:
    async with Rig(says("one", "two")) as rig, rig.openai() as client:
        first = await client.responses.create(model="fake", input="a")
        messages: Any = [{"role": "user", "content": str(i)} for i in range(5)]
        second = await client.responses.create(model="fake", input=messages, previous_response_id=first.id)
        for limit in (1, 3, 100):
            for order in ("asc", "desc"):
                items = client.responses.input_items.list(second.id, limit=limit, order=order)  # type: ignore[arg-type]
                texts = [item.content[0].text async for item in items]  # type: ignore[union-attr]
                assert texts == (["a", "one", *"01234"] if order == "asc" else [*"43210", "one", "a"])
        page = await client.responses.input_items.list(second.id, limit=2)
        assert page.has_more and [item.id for item in page.data][-1] == page.last_id  # type: ignore[attr-defined]
        own = await client.responses.input_items.list(first.id)
        assert [item.type for item in own.data] == ["message"] and not own.has_more
        assert (await client.responses.delete(first.id)) is None
        left = await client.responses.input_items.list(second.id)
        assert len(left.data) == 5


async def test_deleting_says_so() -> None:
    async with Rig() as rig:
        got = await create(rig, max_output_tokens=1)
        response = await rig.http.delete(f"{PATH}/{got['id']}")
        assert response.json() == {"id": got["id"], "object": "response", "deleted": True}
        assert (await rig.http.delete(f"{PATH}/{got['id']}")).status_code == 404


async def test_a_background_response_runs_on_by_itself() -> None:
    async with Rig() as rig:
        got = await create(rig, background=True, max_output_tokens=5)
        assert got["status"] == "queued" and got["output"] == [] and got["background"] is True
        last = await ended(rig, got["id"])
        assert last["status"] == "incomplete"
        assert last["output"][0]["content"][0]["text"] == text_of(greedy(b"user:hi\nassistant:", 5))
        assert last["usage"]["output_tokens"] == 5
        for _ in range(2):
            response = await rig.post(f"{PATH}/{got['id']}/cancel")
            assert response.status_code == 200 and response.json() == last, "what has ended stays as it is"
        response = await rig.http.get(f"{PATH}/{got['id']}", params={"stream": "true"})
        assert response.status_code == 400 and response.json()["error"]["param"] == "stream"


async def test_cancelling_frees_the_engine_and_keeps_what_came() -> None:
    async with Rig(SlowFakeWorker) as rig, rig.openai() as client:
        got = await client.responses.create(model="fake", input="hi", background=True)
        while (now := await client.responses.retrieve(got.id)).status == "queued":
            await asyncio.sleep(0.01)
        assert now.status == "in_progress"
        with pytest.raises(openai.BadRequestError, match="has not ended"):
            await client.responses.create(model="fake", input="hi", previous_response_id=got.id)
        await asyncio.sleep(0.2)
        cancelled = await client.responses.cancel(got.id)
        assert cancelled.status == "cancelled"
        await rig.idle()
        again = await client.responses.cancel(got.id)
        assert again.status == "cancelled"
        kept = await client.responses.retrieve(got.id)
        assert text_of(greedy(b"user:hi\nassistant:", 500)).startswith(kept.output_text)
        assert len(kept.output_text) >= 5 and kept.usage is not None and kept.usage.output_tokens >= 5


async def test_deleting_what_runs_stops_it() -> None:
    async with Rig(SlowFakeWorker) as rig:
        got = await create(rig, background=True)
        await rig.http.delete(f"{PATH}/{got['id']}")
        await rig.idle()
        assert (await rig.http.get(f"{PATH}/{got['id']}")).status_code == 404


async def test_only_background_responses_can_be_cancelled() -> None:
    async with Rig() as rig, rig.openai() as client:
        got = await client.responses.create(model="fake", input="hi", max_output_tokens=1)
        with pytest.raises(openai.BadRequestError, match="background"):
            await client.responses.cancel(got.id)


async def test_a_background_stream_survives_its_reader() -> None:
    async with Rig(SlowFakeWorker) as rig, rig.openai() as client:
        events = await client.responses.create(
            model="fake", input="hi", background=True, stream=True, max_output_tokens=30
        )
        seen, response_id = [], ""
        async for event in events:
            seen.append(event.sequence_number)
            if event.type == "response.created":
                response_id = event.response.id
            if event.type == "response.output_text.delta":
                break
        await events.close()
        async with client.responses.stream(response_id=response_id, starting_after=seen[-1]) as rest:
            seen += [later.sequence_number async for later in rest]
        assert seen == list(range(len(seen)))
        response = await rig.http.get(f"{PATH}/{response_id}", params={"stream": "true"})
        whole = read_events(response.text)
        last = check_stream(whole, background=True)
        assert last == await read(rig, response_id)
        response = await rig.http.get(f"{PATH}/{response_id}", params={"stream": "true", "starting_after": "5"})
        assert read_events(response.text) == whole[6:]


async def test_cancelling_ends_a_background_stream() -> None:
    async with Rig(SlowFakeWorker) as rig, rig.openai() as client:
        events = await client.responses.create(model="fake", input="hi", background=True, stream=True)
        kinds, response_id = [], ""
        async for event in events:
            kinds.append(event.type)
            if event.type == "response.created":
                response_id = event.response.id
            if event.type == "response.output_text.delta" and kinds.count(event.type) == 1:
                await client.responses.cancel(response_id)
        assert kinds[0] == "response.created" and kinds[-1] == "response.output_text.delta"
        await rig.idle()


async def test_a_background_response_counts_like_any_other() -> None:
    async with Rig(SlowFakeWorker, max_queued_requests=1, max_num_seqs=1, max_num_batched_tokens=64) as rig:
        bodies = [{"model": "fake", "input": "hi", "background": True, "max_output_tokens": 20}] * 4
        responses = [await rig.post(PATH, body) for body in bodies]
        codes = [response.status_code for response in responses]
        assert codes[0] == 200 and 429 in codes
        refused = next(response for response in responses if response.status_code == 429)
        assert refused.headers["retry-after"] and refused.json()["error"]["code"] == "rate_limit_exceeded"
        for response in responses:
            if response.status_code == 200:
                assert (await ended(rig, response.json()["id"]))["status"] == "incomplete"
        response = await rig.post(PATH, {"model": "fake", "input": "x" * 5000, "background": True})
        assert response.status_code == 400, "what can't run is refused at once"


class FailingWorker(FakeWorker):
    """Its engine dies in the third step, and nobody starts another."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.fail_at_step = 3


@pytest.mark.parametrize("streams", [False, True])
async def test_a_failure_in_the_background_is_kept(streams: bool) -> None:
    async with Rig(FailingWorker, resubmit_timeout_s=0.2) as rig:
        response = await rig.post(PATH, {"model": "fake", "input": "hi", "background": True, "stream": streams})
        if streams:
            last = check_stream(read_events(response.text), background=True)
        else:
            last = await ended(rig, response.json()["id"])
        assert last["status"] == "failed" and last["error"]["code"] == "server_error"
        assert await ended(rig, last["id"]) == last


class BrokenStore(MemoryStore):
    """A store in another process that doesn't answer."""

    async def put(self, record: Record) -> None:
        raise EngineUnavailable("the response store is gone")


async def test_without_its_store_a_server_answers_on() -> None:
    async with Rig() as rig:
        app = create_app(
            rig.client,
            rig.tokenizer,  # type: ignore[arg-type]
            rig.config,
            grammars=rig.app.state.grammars,
            responses=BrokenStore(rig.config.api),
        )
        rig.http._transport = type(rig.http._transport)(app)  # type: ignore[call-arg]
        got = await create(rig, max_output_tokens=1)
        assert (await rig.http.get(f"{PATH}/{got['id']}")).status_code == 404
        response = await rig.post(PATH, {"model": "fake", "input": "hi", "background": True})
        assert response.status_code == 503 and response.headers["retry-after"]
        await rig.idle()


async def test_a_long_history_is_read_whole() -> None:
    async with Rig(num_kv_blocks=1024, max_model_len=4000) as rig:
        first = await create(rig, input="x" * 3000, max_output_tokens=1)
        got = await create(rig, input="y", previous_response_id=first["id"], max_output_tokens=1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("pagedray.serving.openai.responses.store.THREAD_BYTES", 100)
            again = await create(rig, input="y", previous_response_id=first["id"], max_output_tokens=1)
        assert got["usage"]["input_tokens"] == again["usage"]["input_tokens"] > 3000
