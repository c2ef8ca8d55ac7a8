"""Reasoning in chat completions: apart from content, counted, bounded, switched off."""

from __future__ import annotations

from typing import Any

import pytest

from pagedray.engine.messages import Constraint, ReasoningSpan
from pagedray.serving.reasoning_count import ReasoningCount
from tests.serving.chat_chunks import join_choices
from tests.serving.rig import Rig, ScriptedGrammars
from tests.serving.scripted import says
from tests.serving.templates import HERMES, OPEN_THINKING, THINKING
from tests.serving.test_bad_requests import check

PATH = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
CLOCK = {"type": "function", "function": {"name": "clock"}}
CALL = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'


async def both(rig: Rig, **body: Any) -> dict[str, Any]:
    """The message of an answer, after checking that its stream joins to the same."""
    whole = (await rig.chat(messages=USER, **body))["choices"][0]
    joined = join_choices(await rig.stream(PATH, messages=USER, **body))[0]
    messages = whole["message"], joined["message"]
    for call in [call for message in messages for call in message.get("tool_calls", ())]:
        del call["id"]
    one, two = ({name: value for name, value in message.items() if value is not None} for message in messages)
    assert one == two
    assert whole["finish_reason"] == joined["finish_reason"]
    return one


@pytest.mark.parametrize(
    ("template", "output"),
    [(THINKING, "<think>\nLet me see.\n</think>\n\nYes."), (OPEN_THINKING, "Let me see.\n</think>\n\nYes.")],
)
async def test_reasoning_is_apart_from_content(template: str, output: str) -> None:
    async with Rig(says(output), template=template) as rig:
        message = await both(rig)
        assert message["reasoning_content"] == message["reasoning"]
        assert message["reasoning"].strip() == "Let me see."
        assert message["content"] == "Yes."
        usage = (await rig.chat(messages=USER))["usage"]
        assert usage["completion_tokens"] == len(output) + 1
        assert usage["completion_tokens_details"] == {"reasoning_tokens": output.index("</think>") + len("</think>")}


async def test_a_model_that_reasons_but_did_not() -> None:
    async with Rig(says("Yes."), template=THINKING) as rig:
        got = await rig.chat(messages=USER)
        message = got["choices"][0]["message"]
        assert (message["content"], message["reasoning"], message["reasoning_content"]) == ("Yes.", None, None)
        assert got["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
        assert await both(rig) == {"role": "assistant", "content": "Yes."}


async def test_reasoning_that_is_cut_off() -> None:
    async with Rig(says("<think>on and on"), template=THINKING) as rig:
        message = await both(rig, max_tokens=12)
        assert message == {
            "role": "assistant",
            "content": "",
            "reasoning": "on an",
            "reasoning_content": "on an",
        }


async def test_reasoning_then_a_call() -> None:
    async with Rig(says(f"<think>Time?</think>\n{CALL}"), template=THINKING) as rig:
        message = await both(rig, tools=[CLOCK])
        assert message == {
            "role": "assistant",
            "reasoning": "Time?",
            "reasoning_content": "Time?",
            "tool_calls": [{"type": "function", "function": {"name": "clock", "arguments": "{}"}}],
        }


async def test_reasoning_that_the_client_does_not_want() -> None:
    async with Rig(says("<think>Hm.</think>Yes."), template=THINKING) as rig:
        assert await both(rig, include_reasoning=False) == {"role": "assistant", "content": "Yes."}
        assert (await rig.chat(messages=USER))["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


async def test_log_probabilities_cover_the_reasoning() -> None:
    output = "<think>Hm.</think>Yes."
    async with Rig(says(output), template=THINKING) as rig:
        for include in (True, False):
            body: dict[str, Any] = {"messages": USER, "logprobs": True, "include_reasoning": include}
            whole = (await rig.chat(**body))["choices"][0]["logprobs"]["content"]
            assert "".join(entry["token"] for entry in whole) == f"{output}<eos>"
            assert join_choices(await rig.stream(PATH, **body))[0]["logprobs"] == whole


@pytest.mark.parametrize(
    ("effort", "end"),
    [(None, "assistant:"), ("none", "assistant:(none)<think>\n\n</think>\n\n"), ("high", "assistant:(high)")],
)
async def test_the_effort_is_for_the_template(effort: str | None, end: str) -> None:
    async with Rig(says("x"), template=THINKING) as rig:
        got = await rig.chat(messages=USER, reasoning_effort=effort, return_token_ids=True)
        assert bytes(got["prompt_token_ids"]).decode() == f"user:hi\n{end}"
        kwargs = {"enable_thinking": True, "reasoning_effort": "mine"}
        got = await rig.chat(messages=USER, reasoning_effort=effort, chat_template_kwargs=kwargs, return_token_ids=True)
        assert bytes(got["prompt_token_ids"]).decode() == "user:hi\nassistant:(mine)"


async def test_reasoning_in_history_has_either_name() -> None:
    async with Rig(says("x"), template=THINKING) as rig:
        for name in ("reasoning", "reasoning_content"):
            history = [*USER, {"role": "assistant", "content": "Yes.", name: "Hm."}, *USER]
            got = await rig.chat(messages=history, return_token_ids=True)
            prompt = bytes(got["prompt_token_ids"]).decode()
            assert prompt == "user:hi\nassistant:<think>Hm.</think>Yes.\nuser:hi\nassistant:"


async def test_a_budget_reaches_the_worker() -> None:
    async with Rig(says("x"), template=THINKING) as rig:
        await rig.chat(messages=USER, max_reasoning_tokens=7)
        await rig.chat(messages=USER)
        await rig.chat(messages=USER, max_reasoning_tokens=7, reasoning_effort="none")
        end = tuple(b"</think>")
        span = ReasoningSpan(b"<think>", b"</think>", end, is_open=False, max_tokens=7)
        assert rig.links[0].worker.constraints == [Constraint(None, span), None, None]
    async with Rig(says("x"), template=HERMES) as rig:
        await rig.chat(messages=USER, max_reasoning_tokens=7)
        assert rig.links[0].worker.constraints == [None]


async def test_a_format_holds_behind_the_reasoning() -> None:
    async with Rig(says("x"), template=OPEN_THINKING, grammars=ScriptedGrammars("Hm.</think>{}")) as rig:
        message = await both(rig, response_format={"type": "json_object"})
        assert (message["reasoning"], message["content"]) == ("Hm.", "{}")
        constraint = rig.links[0].worker.constraints[0]
        assert constraint is not None and constraint.reasoning is not None and constraint.reasoning.is_open


async def test_parsers_can_be_named_or_off() -> None:
    output = "<think>Hm.</think>Yes."
    async with Rig(says(output), template=HERMES, reasoning_parser="qwen3") as rig:
        assert (await both(rig))["reasoning"] == "Hm."
    async with Rig(says(output), template=THINKING, reasoning_parser="none") as rig:
        assert await both(rig) == {"role": "assistant", "content": output}


async def test_values_that_are_none() -> None:
    async with Rig(says("x"), template=THINKING) as rig:
        for fields, param in [
            ({"reasoning_effort": "some"}, "reasoning_effort"),
            ({"reasoning_effort": 5}, "reasoning_effort"),
            ({"max_reasoning_tokens": -1}, "max_reasoning_tokens"),
            ({"max_reasoning_tokens": "5"}, "max_reasoning_tokens"),
            ({"include_reasoning": "no"}, "include_reasoning"),
        ]:
            check(await rig.post(PATH, {"model": "fake", "messages": USER, **fields}), 400, param)


@pytest.mark.parametrize(
    ("is_open", "text", "num"),
    [
        (True, "ab</think>cd", 10),
        (True, "ab", 2),
        (False, "<think>a</think>b", 16),
        (False, " \n<think>a</think>b", 18),
        (False, "<thin", 0),
        (False, "a<think>b</think>", 0),
        (False, "<think>a", 8),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_reasoning_tokens_are_counted(is_open: bool, text: str, num: int, size: int) -> None:
    count = ReasoningCount(ReasoningSpan(b"<think>", b"</think>", (), is_open), lambda i: bytes([i]))
    for at in range(0, len(text), size):
        count.add(text[at : at + size].encode())
    assert count.num_tokens == num
    none = ReasoningCount(None, lambda i: bytes([i]))
    none.add(text.encode())
    assert none.num_tokens == 0
