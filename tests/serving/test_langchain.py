"""LangChain's ChatOpenAI against a served app, as one more client that nobody adjusted."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field, SecretStr

from tests.serving.rig import Rig
from tests.serving.scripted import says


@asynccontextmanager
async def langchain(rig: Rig, **options: Any) -> AsyncIterator[ChatOpenAI]:
    async with rig.served() as url:
        yield ChatOpenAI(model="fake", base_url=f"{url}/v1", api_key=SecretStr("none"), max_retries=0, **options)


class Add(BaseModel):
    """Adds two numbers."""

    a: int = Field(description="the first")
    b: int


CALL = '<tool_call>\n{"name": "Add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


async def test_invoke() -> None:
    async with Rig(says("Hello!")) as rig, langchain(rig, max_tokens=50) as chat:
        got = await chat.ainvoke([SystemMessage("be brief"), HumanMessage("hi")])
        assert got.content == "Hello!"
        assert got.response_metadata["finish_reason"] == "stop"
        assert got.usage_metadata is not None
        assert got.usage_metadata["input_tokens"] == len("system:be brief\nuser:hi\nassistant:")


async def test_stream() -> None:
    async with Rig(says("One two, three.")) as rig, langchain(rig, max_tokens=50) as chat:
        pieces = [chunk async for chunk in chat.astream("hi", stream_usage=True)]
        assert "".join(str(piece.content) for piece in pieces) == "One two, three."
        usages = [piece.usage_metadata for piece in pieces if piece.usage_metadata]
        assert len(usages) == 1
        assert usages[0]["output_tokens"] == len("One two, three.") + 1


@pytest.mark.parametrize("streams", [False, True])
async def test_tools(streams: bool) -> None:
    async with Rig(says(CALL, "It is 3.")) as rig, langchain(rig, max_tokens=200, streaming=streams) as chat:
        bound = chat.bind_tools([Add])
        question = HumanMessage("1 + 2?")
        asked = await bound.ainvoke([question])
        (call,) = asked.tool_calls
        assert (call["name"], call["args"]) == ("Add", {"a": 1, "b": 2})
        answer = await bound.ainvoke([question, asked, ToolMessage("3", tool_call_id=call["id"])])
        assert answer.content == "It is 3."
        assert not answer.tool_calls


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
async def test_structured_output(method: Any) -> None:
    written = '{"a":1,"b":2}' if method == "json_schema" else CALL
    async with Rig(says(written)) as rig, langchain(rig, max_tokens=200) as chat:
        got = await chat.with_structured_output(Add, method=method).ainvoke("1 + 2?")
        assert got == Add(a=1, b=2)
