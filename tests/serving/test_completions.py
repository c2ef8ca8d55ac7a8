"""/v1/completions over a fake worker whose tokens can be worked out by hand."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pagedray.engine.messages import Constraint, TokenLogprobs
from tests.fakes import EOS_ID, FakeWorker, greedy
from tests.serving.rig import Rig, text_of, texts


def expected(prompt: str, num: int) -> str:
    return text_of(greedy(list(prompt.encode()), num))


async def test_text_usage_and_finish_reason() -> None:
    async with Rig() as rig:
        got = await rig.complete(prompt="hello", max_tokens=7)
        assert got["object"] == "text_completion"
        assert got["model"] == "fake"
        assert got["choices"] == [
            {"index": 0, "text": expected("hello", 7), "logprobs": None, "finish_reason": "length", "stop_reason": None}
        ]
        assert got["usage"] == {
            "prompt_tokens": 5,
            "completion_tokens": 7,
            "total_tokens": 12,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        }
        await rig.idle()


async def test_max_tokens_is_16_by_default() -> None:
    async with Rig() as rig:
        assert (await rig.complete(prompt="x"))["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("stream", [False, True])
async def test_every_form_of_prompt(stream: bool) -> None:
    async with Rig() as rig:
        for prompt, parts in [
            ("ab", ["ab"]),
            (["ab", "c"], ["ab", "c"]),
            ([97, 98], ["ab"]),
            ([[97, 98], [99]], ["ab", "c"]),
        ]:
            if stream:
                got = texts(await rig.stream("/v1/completions", prompt=prompt, max_tokens=4))
            else:
                body = await rig.complete(prompt=prompt, max_tokens=4)
                got = {choice["index"]: choice["text"] for choice in body["choices"]}
                assert body["usage"]["prompt_tokens"] == sum(map(len, parts))
                assert body["usage"]["completion_tokens"] == 4 * len(parts)
            assert got == {i: expected(part, 4) for i, part in enumerate(parts)}


async def test_choices_are_numbered_prompt_by_prompt_and_prompts_count_once() -> None:
    async with Rig() as rig:
        got = await rig.complete(prompt=["ab", "xyz"], n=3, max_tokens=2, return_token_ids=True)
        assert [choice["index"] for choice in got["choices"]] == list(range(6))
        assert [bytes(choice["prompt_token_ids"]) for choice in got["choices"]] == [b"ab"] * 3 + [b"xyz"] * 3
        assert [choice["token_ids"] for choice in got["choices"]] == [greedy(b"ab", 2)] * 3 + [greedy(b"xyz", 2)] * 3
        assert got["usage"]["prompt_tokens"] == 5
        assert got["usage"]["completion_tokens"] == 12


async def test_cached_tokens_are_those_of_the_first_choice() -> None:
    async with Rig() as rig:
        prompt = "0123456789abcdef!"  # four full blocks and a token
        assert (await rig.complete(prompt=prompt, max_tokens=1))["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        warm = await rig.complete(prompt=prompt, n=2, max_tokens=1)
        assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] == 16
        salted = await rig.complete(prompt=prompt, max_tokens=1, cache_salt="s")
        assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("include", "shown"), [(False, "one "), (True, "one STOP")])
async def test_a_stop_string_ends_the_text_and_the_count(stream: bool, include: bool, shown: str) -> None:
    async with Rig() as rig:
        body: dict[str, Any] = {
            "prompt": "x",
            "allowed_token_ids": list(b"one STOP and more"),
            "max_tokens": 17,
            "stop": ["STOP", "never"],
            "include_stop_str_in_output": include,
        }
        if stream:
            chunks = await rig.stream("/v1/completions", stream_options={"include_usage": True}, **body)
            usage, last = chunks[-1]["usage"], chunks[-2]["choices"][0]
            assert texts(chunks) == {0: shown}
        else:
            got = await rig.complete(**body)
            usage, last = got["usage"], got["choices"][0]
            assert last["text"] == shown
        assert usage["completion_tokens"] == 8
        assert (last["finish_reason"], last["stop_reason"]) == ("stop", "STOP")
        await rig.idle()


async def test_no_part_of_a_stop_string_is_streamed() -> None:
    async with Rig() as rig:
        chunks = await rig.stream(
            "/v1/completions", prompt="x", allowed_token_ids=list(b"abSTOabSTOP"), max_tokens=11, stop="STOP"
        )
        seen = ""
        for chunk in chunks:
            seen += chunk["choices"][0]["text"]
            assert "abSTOab".startswith(seen)
        assert seen == "abSTOab"


async def test_an_unfinished_stop_string_comes_at_the_end() -> None:
    async with Rig() as rig:
        chunks = await rig.stream(
            "/v1/completions", prompt="x", allowed_token_ids=list(b"abSTO"), max_tokens=5, stop="STOP"
        )
        assert texts(chunks) == {0: "abSTO"}
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("fields", "text", "stop_reason", "num"),
    [
        ({}, "ab", None, 3),
        ({"ignore_eos": True}, "abcc", None, 5),
        ({"skip_special_tokens": False}, "ab", None, 3),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, "ab<eos>", None, 3),
        ({"stop_token_ids": [98]}, "a", 98, 2),
        ({"stop_token_ids": [98], "include_stop_str_in_output": True}, "ab", 98, 2),
    ],
)
async def test_eos_and_stop_ids(fields: dict[str, Any], text: str, stop_reason: int | None, num: int) -> None:
    async with Rig() as rig:
        got = await rig.complete(prompt="x", allowed_token_ids=[97, 98, EOS_ID, 99], max_tokens=5, **fields)
        choice = got["choices"][0]
        assert choice["text"] == text
        assert choice["finish_reason"] == ("length" if "ignore_eos" in fields else "stop")
        assert choice["stop_reason"] == stop_reason
        assert got["usage"]["completion_tokens"] == num


@pytest.mark.parametrize("text", ["👍🏽 ok", "日本語", "é👩‍👩‍👧z"])
async def test_characters_are_never_split(text: str) -> None:
    data = text.encode()
    async with Rig() as rig:
        for cut in range(1, len(data) + 1):
            body: dict[str, Any] = {"prompt": "x", "allowed_token_ids": list(data), "max_tokens": cut}
            whole = (await rig.complete(**body))["choices"][0]["text"]
            chunks = await rig.stream("/v1/completions", **body)
            assert texts(chunks) == {0: whole}
            assert whole == data[:cut].decode("utf-8", "replace")
            clean = data[:cut].decode("utf-8", "ignore")
            for chunk in chunks[:-1]:
                assert "\ufffd" not in chunk["choices"][0]["text"]
            assert whole.startswith(clean)


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_stand_beside_their_tokens(stream: bool) -> None:
    data = "a👍b".encode()
    body: dict[str, Any] = {"prompt": "x", "allowed_token_ids": list(data), "max_tokens": len(data), "logprobs": 2}
    async with Rig() as rig:
        if stream:
            chunks = await rig.stream("/v1/completions", **body)
            parts = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"] is not None]
            got = {key: [item for part in parts for item in part[key]] for key in parts[0]}
        else:
            got = (await rig.complete(**body))["choices"][0]["logprobs"]
        assert got["token_logprobs"] == [-byte / 1000 for byte in data]
        assert got["text_offset"] == [0, 1, 1, 1, 1, 2]
        assert got["tokens"][0] == "a" and got["tokens"][5] == "b"
        assert got["top_logprobs"][0] == {"a": -0.097, "b": -0.098}
        assert got["top_logprobs"][5] == {"b": -0.098, "c": -0.099}


async def test_logprobs_0_gives_the_chosen_token_alone() -> None:
    async with Rig() as rig:
        got = await rig.complete(prompt="x", allowed_token_ids=[97], max_tokens=1, logprobs=0)
        assert got["choices"][0]["logprobs"]["top_logprobs"] == [{"a": -0.097}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["hé", list("hé".encode())])
@pytest.mark.parametrize("chunk", [1, 2, None])
async def test_echo_with_logprobs_covers_the_prompt(stream: bool, prompt: Any, chunk: int | None) -> None:
    async with Rig(prefill_chunk_tokens=chunk) as rig:
        for _ in ("cold", "warm"):
            body = {
                "prompt": prompt,
                "allowed_token_ids": [97, 98],
                "max_tokens": 2,
                "echo": True,
                "logprobs": 1,
                "n": 2,
            }
            if stream:
                chunks = await rig.stream("/v1/completions", **body)
                shown = texts(chunks)
                lists: dict[int, list[Any]] = {0: [], 1: []}
                for item in chunks:
                    choice = item["choices"][0]
                    lists[choice["index"]].append(choice["logprobs"])
                logprobs = {
                    index: {key: [x for part in parts if part for x in part[key]] for key in parts[0]}
                    for index, parts in lists.items()
                }
            else:
                choices = (await rig.complete(**body))["choices"]
                shown = {choice["index"]: choice["text"] for choice in choices}
                logprobs = {choice["index"]: choice["logprobs"] for choice in choices}
            assert shown == {0: "héab", 1: "héab"}
            data = "hé".encode()
            for got in logprobs.values():
                assert got["token_logprobs"] == [None, *(-b / 1000 for b in data[1:]), -0.097, -0.098]
                assert got["text_offset"] == [0, 1, 1, 2, 3]
                assert got["top_logprobs"][0] is None
                assert got["top_logprobs"][3] == {"a": -0.097}
                assert len(got["tokens"]) == 5


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_with_max_tokens_0_is_the_prompt_alone(stream: bool) -> None:
    async with Rig() as rig:
        body: dict[str, Any] = {"prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": 1}
        if stream:
            chunks = await rig.stream("/v1/completions", stream_options={"include_usage": True}, **body)
            assert texts(chunks) == {0: "abc"}
            usage, reason = chunks[-1]["usage"], chunks[-2]["choices"][0]["finish_reason"]
        else:
            got = await rig.complete(**body)
            assert got["choices"][0]["text"] == "abc"
            assert got["choices"][0]["logprobs"]["token_logprobs"] == [None, -0.098, -0.099]
            usage, reason = got["usage"], got["choices"][0]["finish_reason"]
        assert reason == "length"
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (3, 0, 3)


async def test_prompt_logprobs() -> None:
    async with Rig() as rig:
        got = await rig.complete(prompt="abc", max_tokens=1, prompt_logprobs=1, echo=True, logprobs=3)
        first, second, third = got["choices"][0]["prompt_logprobs"]
        assert first is None
        assert second == {"98": {"logprob": -0.098, "rank": 1, "decoded_token": "b"}}
        assert third == {"99": {"logprob": -0.099, "rank": 1, "decoded_token": "c"}}
        assert len(got["choices"][0]["logprobs"]["top_logprobs"][1]) == 3


async def test_the_prompt_begins_its_stream_with_return_token_ids() -> None:
    async with Rig() as rig:
        chunks = await rig.stream("/v1/completions", prompt="ab", max_tokens=3, return_token_ids=True)
        assert chunks[0]["choices"][0]["prompt_token_ids"] == [97, 98]
        assert [i for chunk in chunks for i in chunk["choices"][0]["token_ids"]] == greedy(b"ab", 3)
        assert all("prompt_token_ids" not in chunk["choices"][0] for chunk in chunks[1:])


async def test_priority_and_salt_reach_the_engine() -> None:
    async with Rig(scheduling_policy="priority") as rig:
        await rig.complete(prompt="x", max_tokens=1, priority=-3, cache_salt="s")
        request = rig.links[0].submitted[0]
        assert (request.priority, request.cache_salt) == (-3, "s")
        assert request.client_id == rig.client.client_id


async def test_add_special_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Rig() as rig:
        said: list[bool] = []

        def encode(text: str, add_special_tokens: bool = True) -> list[int]:
            said.append(add_special_tokens)
            return [97]

        monkeypatch.setattr(rig.tokenizer, "encode", encode)
        chat = {"messages": [{"role": "user", "content": "x"}]}
        for value in (None, True, False):
            await rig.complete(prompt="x", max_tokens=1, add_special_tokens=value)
            await rig.post("/tokenize", {"prompt": "x", "add_special_tokens": value})
            await rig.chat(max_tokens=1, add_special_tokens=value, **chat)
            await rig.post("/tokenize", {"add_special_tokens": value, **chat})
        assert said == [True, True, False, False, True, True, True, True, False, False, False, False]


async def test_min_tokens_delays_stop_strings() -> None:
    async with Rig() as rig:
        got = await rig.complete(prompt="x", allowed_token_ids=list(b"a.b.c"), max_tokens=5, stop=".", min_tokens=3)
        assert got["choices"][0]["text"] == "a.b"


async def test_special_ids_in_an_echoed_prompt() -> None:
    async with Rig() as rig:
        body: dict[str, Any] = {
            "prompt": [257, 97],
            "allowed_token_ids": [98],
            "max_tokens": 1,
            "echo": True,
            "logprobs": 0,
        }
        for skips, text, offsets in [(True, "ab", [0, 0, 1]), (False, "<bos>ab", [0, 5, 6])]:
            choice = (await rig.complete(skip_special_tokens=skips, **body))["choices"][0]
            assert choice["text"] == text
            assert choice["logprobs"]["text_offset"] == offsets


async def test_special_tokens_around_an_echoed_text_have_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Rig() as rig:
        monkeypatch.setattr(rig.tokenizer, "encode", lambda text, special: [257, *text.encode()])
        got = await rig.complete(
            prompt="a", allowed_token_ids=[98], max_tokens=1, echo=True, logprobs=0, skip_special_tokens=False
        )
        assert got["choices"][0]["text"] == "ab"
        assert got["choices"][0]["logprobs"]["text_offset"] == [0, 0, 1]


async def test_minus_infinity_is_written_as_a_number() -> None:
    class Never(FakeWorker):
        def _run(self, out: Any) -> Any:
            got = super()._run(out)
            certain = TokenLogprobs(97, float("-inf"), 1, (97, 98), (float("-inf"), float("nan")))
            return msgspec.structs.replace(got, logprobs=tuple(certain for _ in got.token_ids))

    async with Rig(Never) as rig:
        got = await rig.complete(prompt="x", max_tokens=1, logprobs=2)
        assert got["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0]
        assert got["choices"][0]["logprobs"]["top_logprobs"] == [{"a": -9999.0, "b": -9999.0}]


@pytest.mark.parametrize("stream", [False, True])
async def test_max_tokens_0_is_an_empty_answer(stream: bool) -> None:
    async with Rig() as rig:
        if stream:
            chunks = await rig.stream("/v1/completions", prompt="x", max_tokens=0)
            assert texts(chunks) == {0: ""}
        else:
            got = await rig.complete(prompt="x", max_tokens=0)
            assert (got["choices"][0]["text"], got["choices"][0]["finish_reason"]) == ("", "length")
            assert got["usage"]["completion_tokens"] == 0


class Liked(FakeWorker):
    """Its choices are one token each: a, b, c, d in turn, of which c is the most likely and a the least."""

    choose = staticmethod(lambda ids, seq: 97 + int(seq.seq_id.rpartition("-")[2]))

    def _run(self, out: Any) -> Any:
        got = super()._run(out)
        odds = {97: -3.0, 98: -1.0, 99: -0.5, 100: -2.0}
        logprobs = (TokenLogprobs(i, odds[i], 1, (), ()) if i in odds else None for i in got.token_ids)
        return msgspec.structs.replace(got, logprobs=tuple(logprobs))


async def test_the_best_of_several() -> None:
    async with Rig(Liked) as rig:
        got = await rig.complete(prompt=["x", "y"], n=2, best_of=4, max_tokens=1)
        assert [(choice["index"], choice["text"]) for choice in got["choices"]] == [
            (0, "c"),
            (1, "b"),
            (2, "c"),
            (3, "b"),
        ]
        assert all(choice["logprobs"] is None for choice in got["choices"])
        assert got["usage"]["completion_tokens"] == 8
        got = await rig.complete(prompt="x", best_of=3, max_tokens=1, logprobs=0, return_token_ids=True)
        (choice,) = got["choices"]
        assert (choice["text"], choice["logprobs"]["token_logprobs"]) == ("c", [-0.5])
        assert (choice["token_ids"], choice["prompt_token_ids"]) == ([99], [120])
        same = await rig.complete(prompt="x", n=2, best_of=2, max_tokens=1)
        assert [choice["text"] for choice in same["choices"]] == ["a", "b"]


async def test_tokens_can_be_named_by_their_ids() -> None:
    async with Rig() as rig:
        got = await rig.complete(
            prompt="x", allowed_token_ids=[97], max_tokens=1, logprobs=2, echo=True, return_tokens_as_token_ids=True
        )
        logprobs = got["choices"][0]["logprobs"]
        assert logprobs["tokens"] == ["token_id:120", "token_id:97"]
        assert logprobs["top_logprobs"][1] == {"token_id:97": -0.097, "token_id:98": -0.098}
        assert logprobs["text_offset"] == [0, 1]


async def test_a_prompt_can_be_cut_to_its_end() -> None:
    async with Rig() as rig:
        got = await rig.complete(prompt=["abcdef", "xy"], max_tokens=1, truncate_prompt_tokens=3, echo=True)
        assert [choice["text"][:-1] for choice in got["choices"]] == ["def", "xy"]
        assert got["usage"]["prompt_tokens"] == 5


async def test_words_that_must_not_come() -> None:
    async with Rig() as rig:
        await rig.complete(prompt="x", max_tokens=1, bad_words=["x", "no", " no"])
        params = rig.links[0].submitted[0].params
        assert params.bad_token_ids == (120,)
        assert params.constraint == Constraint(bad_sequences=(tuple(b"no"), tuple(b" no")))


async def test_words_that_must_not_come_in_a_choice() -> None:
    async with Rig() as rig:
        await rig.complete(prompt="x", max_tokens=2, bad_words=["no"], structured_outputs={"choice": ["a"]})
        constraint = rig.links[0].submitted[0].params.constraint
        assert constraint is not None and constraint.grammar and constraint.bad_sequences == (tuple(b"no"),)


async def test_a_prompt_can_be_cut_to_its_beginning() -> None:
    async with Rig() as rig:
        got = await rig.complete(
            prompt="abcdef", max_tokens=1, truncate_prompt_tokens=3, truncation_side="right", echo=True
        )
        assert got["choices"][0]["text"][:-1] == "abc"
