"""Routes besides generation, and what surrounds every exchange."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pagedray.serving.client import Deadlines
from pagedray.serving.edge import HeaderGuard
from pagedray.serving.openai import prompts
from tests.fakes import SlowFakeWorker, greedy
from tests.serving.rig import Rig, text_of


async def test_models() -> None:
    async with Rig(served_model_name=["one", "org/two"]) as rig:
        got = (await rig.http.get("/v1/models")).json()
        assert got["object"] == "list"
        assert [card["id"] for card in got["data"]] == ["one", "org/two"]
        assert all(card["object"] == "model" and card["owned_by"] == "pagedray" for card in got["data"])
        assert got["data"][0]["max_model_len"] == 1024
        assert (await rig.http.get("/v1/models/org/two")).json() == got["data"][1]
        assert (await rig.complete(model="org/two", prompt="x", max_tokens=1))["model"] == "org/two"


async def test_version() -> None:
    async with Rig() as rig:
        assert (await rig.http.get("/version")).json().keys() == {"version"}


async def test_before_the_first_engine_and_after_the_last() -> None:
    async with Rig(num_engines=0, resubmit_timeout_s=1) as rig:
        for call in (
            rig.http.get("/health"),
            rig.http.get("/v1/models"),
            rig.post("/v1/completions", {"model": "fake", "prompt": "x"}),
            rig.post("/tokenize", {"prompt": "x"}),
        ):
            response = await call
            assert response.status_code == 503
            assert int(response.headers["retry-after"]) >= 1
            assert response.json()["error"]["code"] == "engine_unavailable"
        assert (await rig.http.get("/metrics")).status_code == 200
        link = rig.start_engine()
        assert (await rig.http.get("/health")).status_code == 200
        link.kill()
        async with asyncio.timeout(5):
            while (await rig.http.get("/health")).status_code != 503:
                await asyncio.sleep(0.01)
        assert (await rig.post("/v1/completions", {"model": "fake", "prompt": "x"})).status_code == 503
        assert (await rig.http.get("/v1/models")).status_code == 200
        assert (await rig.http.get("/metrics")).status_code == 200


async def test_ping_is_health_and_load_counts_sequences() -> None:
    async with Rig(num_engines=0) as rig:
        assert {(await rig.http.request(method, "/ping")).status_code for method in ("GET", "POST")} == {503}
        assert (await rig.http.get("/load")).json() == {"server_load": 0}
        rig.start_engine()
        for method in ("GET", "POST"):
            assert (await rig.http.request(method, "/ping")).json() == {"status": "healthy"}
        body = {"model": "fake", "prompt": "x", "max_tokens": 900, "n": 3, "ignore_eos": True}
        running = asyncio.create_task(rig.post("/v1/completions", body))
        async with asyncio.timeout(5):
            while (await rig.http.get("/load")).json()["server_load"] != 3:
                await asyncio.sleep(0)
        assert (await running).status_code == 200
        assert (await rig.http.get("/load")).json() == {"server_load": 0}


async def test_health_is_503_when_the_only_engine_is_frozen_and_200_with_a_healthy_one() -> None:
    async with Rig(deadlines=Deadlines(health_s=0.1)) as rig:
        rig.links[0].is_frozen = True
        response = await rig.http.get("/health")
        assert response.status_code == 503
        assert "did not answer" in response.json()["error"]["message"]
        rig.start_engine()
        assert (await rig.http.get("/health")).status_code == 200


async def test_health_is_200_while_busy() -> None:
    async with Rig(SlowFakeWorker) as rig:
        working = asyncio.ensure_future(rig.complete(prompt="x", max_tokens=20))
        await asyncio.sleep(0.1)
        assert (await rig.http.get("/health")).status_code == 200
        await working


async def test_tokenize_and_back() -> None:
    async with Rig() as rig:
        got = (await rig.post("/tokenize", {"model": "fake", "prompt": "né"})).json()
        assert got == {"count": 3, "max_model_len": 1024, "tokens": list("né".encode())}
        got = (await rig.post("/tokenize", {"prompt": "ab", "return_token_strs": True})).json()
        assert got["token_strs"] == ["a", "b"]
        got = (await rig.post("/detokenize", {"tokens": list("né".encode())})).json()
        assert got == {"prompt": "né"}
        assert (await rig.post("/detokenize", {"tokens": [97, 256]})).json() == {"prompt": "a<eos>"}
        assert (await rig.post("/detokenize", {"tokens": []})).json() == {"prompt": ""}
        assert (await rig.post("/tokenize", {"prompt": ""})).json()["count"] == 0


async def test_tokenize_messages_as_chat_does() -> None:
    async with Rig() as rig:
        messages = [{"role": "user", "content": "hi"}]
        got = (await rig.post("/tokenize", {"messages": messages})).json()
        assert bytes(got["tokens"]) == b"user:hi\nassistant:"
        answer = await rig.chat(messages=messages, max_tokens=1, return_token_ids=True)
        assert answer["prompt_token_ids"] == got["tokens"]
        got = (await rig.post("/tokenize", {"messages": messages, "add_generation_prompt": False})).json()
        assert bytes(got["tokens"]) == b"user:hi\n"


@pytest.mark.parametrize("length", [prompts.THREAD_CHARS - 1, prompts.THREAD_CHARS])
async def test_long_texts_are_tokenized_off_the_loop(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Rig(num_kv_blocks=4096) as rig:
        threads = []
        encode = rig.tokenizer.encode

        def watched(*args: object) -> list[int]:
            threads.append(threading.current_thread() is threading.main_thread())
            return encode(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(rig.tokenizer, "encode", watched)
        await rig.post("/tokenize", {"prompt": "a" * length})
        await rig.post(
            "/v1/completions", {"model": "fake", "prompt": ["a" * (length // 2), "b" * (length - length // 2)]}
        )
        on_loop = length < prompts.THREAD_CHARS
        assert threads == [on_loop] * 3


async def test_a_long_prompt_gives_the_same_tokens_as_a_short_path_would(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Rig() as rig:
        short = await rig.complete(prompt="abc" * 100, max_tokens=4, return_token_ids=True)
        monkeypatch.setattr(prompts, "THREAD_CHARS", 10)
        monkeypatch.setattr("pagedray.serving.openai.respond.THREAD_TOKENS", 10)
        long = await rig.complete(prompt="abc" * 100, max_tokens=4, return_token_ids=True)
        assert long["choices"] == short["choices"]


@pytest.mark.parametrize(
    ("sent", "echoed"),
    [
        ("abc-123", "abc-123"),
        ("a b\tc<script>", "abcscript"),
        ("x" * 1000, "x" * 128),
        ("<>", None),
        (None, None),
    ],
)
async def test_request_ids_are_echoed_without_what_does_not_belong(sent: str | None, echoed: str | None) -> None:
    async with Rig() as rig:
        headers = {} if sent is None else {"X-Request-Id": sent}
        for path in ("/version", "/nothing"):
            got = (await rig.http.get(path, headers=headers)).headers["x-request-id"]
            assert got == echoed if echoed is not None else len(got) == 32


async def test_live_requests_may_share_an_id() -> None:
    async with Rig(SlowFakeWorker) as rig:
        headers = {"X-Request-Id": "same"}
        body = {"model": "fake", "prompt": "x", "max_tokens": 5}
        one, two = await asyncio.gather(
            rig.post("/v1/completions", body, headers=headers), rig.post("/v1/completions", body, headers=headers)
        )
        assert one.headers["x-request-id"] == two.headers["x-request-id"] == "same"
        assert one.json()["id"] != two.json()["id"]
        assert one.json()["choices"] == two.json()["choices"]
        assert all("same" not in request.id for request in rig.links[0].submitted)


async def metrics(rig: Rig) -> dict[tuple[str, str], float]:
    """(sample name, its one label's value or "") → value."""
    text = (await rig.http.get("/metrics")).text
    out = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if "le" not in sample.labels and not sample.name.endswith("_created"):
                out[(sample.name, next(iter(sample.labels.values()), ""))] = sample.value
    return out


async def test_metrics_count_what_happened() -> None:
    async with Rig() as rig:
        await rig.complete(prompt="0123456789", max_tokens=3, n=2)
        await rig.complete(prompt="0123456789", max_tokens=9, allowed_token_ids=list(b"ab."), stop=".")
        await rig.stream("/v1/completions", prompt="x", max_tokens=2)
        await rig.post("/v1/completions", {"model": "gpt-4", "prompt": "x"})
        await rig.idle()
        got = await metrics(rig)
        engine = rig.links[0].facts.engine_id
        assert got[("pagedray:request_success_total", "length")] == 3
        assert got[("pagedray:request_success_total", "stop")] == 1
        assert got[("pagedray:time_to_first_token_seconds_count", "")] == 3
        assert got[("pagedray:e2e_request_latency_seconds_count", "")] == 4
        assert got[("pagedray:inter_token_latency_seconds_count", "")] >= 3
        assert got[("pagedray:http_responses_total", "200")] == 3
        assert got[("pagedray:http_responses_total", "404")] == 1
        assert got[("pagedray:prompt_tokens_total", engine)] == 31
        assert got[("pagedray:generation_tokens_total", engine)] >= 6 + 3 + 2
        assert got[("pagedray:num_requests_running", engine)] == 0
        assert got[("pagedray:num_requests_waiting", engine)] == 0
        assert got[("pagedray:kv_cache_usage_perc", engine)] == 0
        assert got[("pagedray:prefix_cache_queries_total", engine)] >= 31
        assert got[("pagedray:prefix_cache_hits_total", engine)] >= 8
        assert got[("pagedray:num_preemptions_total", engine)] == 0


async def test_metrics_leave_out_an_engine_that_does_not_answer() -> None:
    async with Rig(num_engines=2, deadlines=Deadlines(stats_s=0.1)) as rig:
        rig.links[0].is_frozen = True
        got = await metrics(rig)
        assert ("pagedray:num_requests_running", rig.links[1].facts.engine_id) in got
        assert ("pagedray:num_requests_running", rig.links[0].facts.engine_id) not in got


async def test_chunks_reach_a_socket_one_by_one() -> None:
    async with Rig(SlowFakeWorker) as rig, rig.openai() as client:
        seen = []
        stream = await client.completions.create(model="fake", prompt="x", max_tokens=5, stream=True)
        async for chunk in stream:
            seen.append((chunk.choices[0].text, rig.links[0].engine.stats().generated_tokens))
        assert "".join(text for text, _ in seen) == text_of(greedy(b"x", 5))
        assert seen[0][1] < 5  # the first came before the last was made


async def test_headers_reach_the_app_as_utf8() -> None:
    """Serve decodes every header as UTF-8, and would fail on others."""
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["headers"])

    given = [(b"a", b"plain"), (b"b", "é€".encode()), (b"c", b"caf\xe9"), (b"d", b"\xff\xfe\x80")]
    await HeaderGuard(app)({"type": "http", "headers": given}, app, app)  # type: ignore[arg-type]
    assert seen.pop() == [(b"a", b"plain"), (b"b", "é€".encode()), (b"c", "café".encode()), (b"d", "ÿþ\x80".encode())]
    headers = [(b"x-request-timeout-seconds", b"5")]
    await HeaderGuard(app)({"type": "http", "headers": headers}, app, app)  # type: ignore[arg-type]
    assert seen == [[(b"x-request-timeout-s", b"5")]]
