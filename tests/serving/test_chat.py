"""/v1/chat/completions over a fake worker whose tokens can be worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from pagedray.engine.messages import Constraint
from tests.fakes import EOS_ID, greedy
from tests.serving.rig import Rig, text_of, texts
from tests.serving.templates import HERMES

USER = [{"role": "user", "content": "hi"}]
PATH = "/v1/chat/completions"


def expected(prompt: str, num: int) -> str:
    return text_of(greedy(list(prompt.encode()), num))


async def test_a_whole_answer() -> None:
    async with Rig() as rig:
        got = await rig.chat(messages=USER, max_tokens=5)
        assert got["object"] == "chat.completion"
        assert got["choices"] == [
            {
                "index": 0,
                "message": {"role": "assistant", "content": expected("user:hi\nassistant:", 5), "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
            }
        ]
        assert got["usage"]["prompt_tokens"] == len("user:hi\nassistant:")
        assert got["usage"]["completion_tokens"] == 5


async def test_a_stream_is_role_then_content_then_reason() -> None:
    async with Rig() as rig:
        chunks = await rig.stream(PATH, messages=USER, max_tokens=5)
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert all(set(chunk["choices"][0]["delta"]) == {"content"} for chunk in chunks[1:-1])
        assert chunks[-1]["choices"][0]["delta"] == {}
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert texts(chunks) == {0: expected("user:hi\nassistant:", 5)}
        assert all("usage" not in chunk for chunk in chunks)


async def test_usage_comes_once_and_is_null_before() -> None:
    async with Rig() as rig:
        chunks = await rig.stream(PATH, messages=USER, max_tokens=5, n=2, stream_options={"include_usage": True})
        assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["prompt_tokens"] == 18
        assert chunks[-1]["usage"]["completion_tokens"] == 10
        assert chunks[-1]["usage"]["total_tokens"] == 28
        whole = await rig.chat(messages=USER, max_tokens=5, n=2, cache_salt="other")
        assert {**whole["usage"], "prompt_tokens_details": None} == {
            **chunks[-1]["usage"],
            "prompt_tokens_details": None,
        }


async def test_continuous_usage_grows() -> None:
    async with Rig() as rig:
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks = await rig.stream(PATH, messages=USER, max_tokens=4, stream_options=options)
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[0] >= 1 and counts[-1] == 4
        assert chunks[-1]["choices"] == []


async def test_several_choices_stream_beside_each_other() -> None:
    async with Rig() as rig:
        chunks = await rig.stream(PATH, messages=USER, max_tokens=4, n=3)
        assert texts(chunks) == {i: expected("user:hi\nassistant:", 4) for i in range(3)}
        roles = [c["choices"][0]["index"] for c in chunks if "role" in c["choices"][0]["delta"]]
        assert sorted(roles) == [0, 1, 2]


async def test_without_max_tokens_an_answer_goes_on_to_the_limit() -> None:
    async with Rig(max_model_len=40) as rig:
        got = await rig.chat(messages=USER)
        assert got["usage"]["total_tokens"] == 40
        assert got["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("fields", "num"),
    [
        ({"max_completion_tokens": 3}, 3),
        ({"max_tokens": 4}, 4),
        ({"max_tokens": 9, "max_completion_tokens": 3}, 3),
        ({"max_tokens": 2, "max_completion_tokens": 3}, 3),
    ],
)
async def test_max_completion_tokens_wins(fields: dict[str, int], num: int) -> None:
    async with Rig() as rig:
        assert (await rig.chat(messages=USER, **fields))["usage"]["completion_tokens"] == num


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_stand_beside_their_tokens(stream: bool) -> None:
    data = "é!".encode()
    body: dict[str, Any] = {"messages": USER, "allowed_token_ids": [*data, EOS_ID], "max_tokens": 9, "logprobs": True}
    async with Rig() as rig:
        for k in (None, 0, 2):
            body["top_logprobs"] = k
            if stream:
                chunks = await rig.stream(PATH, **body)
                entries = [e for c in chunks if (p := c["choices"][0]["logprobs"]) for e in p["content"]]
                assert texts(chunks) == {0: "é!"}
            else:
                choice = (await rig.chat(**body))["choices"][0]
                entries = choice["logprobs"]["content"]
                assert choice["message"]["content"] == "é!"
            assert [e["logprob"] for e in entries] == [-byte / 1000 for byte in [*data, EOS_ID]]
            assert bytes(b for e in entries[:3] for b in e["bytes"]) == data
            assert entries[2]["token"] == "!"
            assert [len(e["top_logprobs"]) for e in entries] == [k or 0] * 4
            if k == 2:
                top = entries[2]["top_logprobs"]
                assert [(t["token"], t["logprob"], t["bytes"]) for t in top] == [
                    ("!", -0.033, [33]),
                    ('"', -0.034, [34]),
                ]


async def test_a_second_turn_with_parts_and_null_content() -> None:
    history = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "ann"},
        {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "annotations": [],
            "audio": None,
            "function_call": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "42"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "assistant", "content": None, "refusal": "never"},
        {"role": "user", "content": "and?"},
    ]
    call = '[{"name": "f", "arguments": {"x": 1}}]'  # the template has no place for calls
    prompt = (
        f"system:be brief\nuser:a\nb\nassistant:{call}\ntool:42\nassistant:no\nassistant:never\nuser:and?\nassistant:"
    )
    async with Rig() as rig:
        got = await rig.chat(messages=history, max_tokens=3, return_token_ids=True)
        assert bytes(got["prompt_token_ids"]).decode() == prompt
        assert got["choices"][0]["token_ids"] == greedy(prompt.encode(), 3)


async def test_an_answer_can_be_sent_back_as_history() -> None:
    async with Rig() as rig, rig.openai() as client:
        first = await client.chat.completions.create(model="fake", messages=USER, max_tokens=3)
        answer = first.choices[0].message
        for message in (answer, answer.model_dump()):
            again = await client.chat.completions.create(
                model="fake", messages=[*USER, message, {"role": "user", "content": "more"}], max_tokens=2
            )
            assert again.usage is not None and again.usage.completion_tokens == 2


async def test_continuing_the_last_message() -> None:
    messages = [*USER, {"role": "assistant", "content": "We"}]
    async with Rig() as rig:
        got = await rig.chat(messages=messages, continue_final_message=True, max_tokens=1, return_token_ids=True)
        assert bytes(got["prompt_token_ids"]) == b"user:hi\nassistant:We"
        got = await rig.chat(messages=messages, add_generation_prompt=False, max_tokens=1, return_token_ids=True)
        assert bytes(got["prompt_token_ids"]) == b"user:hi\nassistant:We\n"


async def test_template_kwargs_reach_the_template() -> None:
    async with Rig() as rig:
        kwargs = {"note": {"deep": [1]}}
        got = await rig.chat(messages=USER, max_tokens=1, chat_template_kwargs=kwargs, return_token_ids=True)
        assert bytes(got["prompt_token_ids"]) == b'user:hi\n{"deep": [1]}assistant:'


async def test_prompt_logprobs() -> None:
    async with Rig() as rig:
        got = await rig.chat(messages=USER, max_tokens=1, prompt_logprobs=0)
        assert len(got["prompt_logprobs"]) == 18
        assert got["prompt_logprobs"][0] is None
        assert got["prompt_logprobs"][1] == {"115": {"logprob": -0.115, "rank": 1, "decoded_token": "s"}}


async def test_the_prompt_ids_begin_a_stream() -> None:
    async with Rig() as rig:
        chunks = await rig.stream(PATH, messages=USER, max_tokens=3, n=2, return_token_ids=True)
        assert [bytes(c["prompt_token_ids"]) for c in chunks if "prompt_token_ids" in c] == [b"user:hi\nassistant:"]
        ids = [i for c in chunks if c["choices"][0]["index"] == 1 for i in c["choices"][0].get("token_ids", [])]
        assert ids == greedy(b"user:hi\nassistant:", 3)


async def test_fingerprint_and_id_name_the_server_and_the_answer() -> None:
    async with Rig() as rig:
        one, two = await rig.chat(messages=USER, max_tokens=1), await rig.chat(messages=USER, max_tokens=1)
        assert one["system_fingerprint"] == two["system_fingerprint"]
        assert one["id"] != two["id"]


@pytest.mark.parametrize("cut", range(1, 12))
async def test_emoji_cut_at_every_offset_join_to_the_whole(cut: int) -> None:
    data = "👩‍👧".encode()[:cut]
    async with Rig() as rig:
        body: dict[str, Any] = {"messages": USER, "allowed_token_ids": list(data), "max_tokens": cut}
        whole = (await rig.chat(**body))["choices"][0]["message"]["content"]
        assert whole == data.decode("utf-8", "replace")
        assert texts(await rig.stream(PATH, **body)) == {0: whole}


async def test_tokens_can_be_named_by_their_ids() -> None:
    body: dict[str, Any] = {"messages": USER, "allowed_token_ids": [97], "max_tokens": 1, "logprobs": True}
    async with Rig() as rig:
        got = await rig.chat(**body, top_logprobs=2, return_tokens_as_token_ids=True)
        (entry,) = got["choices"][0]["logprobs"]["content"]
        assert entry["token"] == "token_id:97" and entry["bytes"] == [97]
        assert [top["token"] for top in entry["top_logprobs"]] == ["token_id:97", "token_id:98"]


async def test_a_prompt_can_be_cut_to_its_end() -> None:
    async with Rig(max_model_len=20) as rig:
        messages = [{"role": "user", "content": "0123456789abcdef"}]
        for size, max_tokens, prompt in [
            (12, 2, b"\nassistant:"),
            (-1, 6, b"ef\nassistant:"),
            (20, 6, None),
        ]:
            response = await rig.post(
                PATH,
                {
                    "model": "fake",
                    "messages": messages,
                    "max_tokens": max_tokens,
                    "truncate_prompt_tokens": size,
                    "return_token_ids": True,
                },
            )
            if prompt is None:
                assert response.status_code == 400
            else:
                assert bytes(response.json()["prompt_token_ids"])[-len(prompt) :] == prompt
                assert len(response.json()["prompt_token_ids"]) == (size if size > 0 else 20 - max_tokens)


async def test_words_that_must_not_come() -> None:
    async with Rig() as rig:
        await rig.chat(messages=USER, max_tokens=1, bad_words=["x", "y", "x", "no"], bad_token_ids=[5])
        params = rig.links[0].submitted[0].params
        assert params.bad_token_ids == (5, 120, 121)
        assert params.constraint == Constraint(bad_sequences=(tuple(b"no"),))


async def test_words_that_must_not_come_in_a_format() -> None:
    async with Rig() as rig:
        await rig.chat(messages=USER, max_tokens=2, bad_words=["no"], response_format={"type": "json_object"})
        constraint = rig.links[0].submitted[0].params.constraint
        assert constraint is not None and constraint.grammar and constraint.bad_sequences == (tuple(b"no"),)


async def test_an_answer_may_begin_with_the_message_that_it_goes_on_from() -> None:
    begun = [
        *USER,
        {"role": "assistant", "content": [{"type": "text", "text": "One, "}, {"type": "text", "text": "é"}]},
    ]
    async with Rig() as rig:
        for messages, begin in ((begun, "One, é"), (USER, "")):
            ask = {"messages": messages, "max_tokens": 3, "temperature": 0}
            plain = (await rig.chat(**ask))["choices"][0]["message"]["content"]
            assert (await rig.chat(**ask, echo=True))["choices"][0]["message"]["content"] == begin + plain
            chunks = await rig.stream("/v1/chat/completions", echo=True, **ask)
            assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks) == begin + plain


async def test_marks_for_prompt_caches_say_nothing_here() -> None:
    mark = {"type": "ephemeral"}
    part = {"type": "text", "text": "x", "cache_control": mark, "prompt_cache_breakpoint": {"mode": "explicit"}}
    async with Rig() as rig:
        for message in ({"role": "user", "content": [part]}, {"role": "user", "content": "x", "cache_control": mark}):
            await rig.chat(messages=[message], max_tokens=1)
        await rig.chat(messages=[{"role": "user", "content": [{"type": "text", "text": "x"}]}], max_tokens=1)
        assert len({request.prompt_ids for request in rig.links[0].submitted}) == 1


async def test_documents_and_verbosity_are_for_the_template() -> None:
    async with Rig(template=HERMES) as rig:
        got = await rig.chat(
            messages=USER,
            max_tokens=1,
            documents=[{"text": "a"}, {"text": "b"}],
            verbosity="low",
            return_token_ids=True,
        )
        prompt = bytes(got["prompt_token_ids"]).decode()
        assert prompt == "user:hi\ndoc a\ndoc b\nverbosity low\nassistant:"
    async with Rig() as rig:
        got = await rig.chat(messages=USER, max_tokens=1, documents=[], verbosity="low", return_token_ids=True)
        assert bytes(got["prompt_token_ids"]) == b"user:hi\nassistant:"


async def test_what_official_clients_add_to_history_is_taken() -> None:
    answer = {"role": "assistant", "content": "x", "refusal": None, "parsed": {"a": 1}, "tool_calls": None}
    async with Rig() as rig:
        assert (await rig.chat(messages=[*USER, answer, *USER], max_tokens=1))["usage"]["completion_tokens"] == 1
