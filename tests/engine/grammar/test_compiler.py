"""The compiler as an ingress uses it: one process beside it, a cache, and callers that may go away."""

from __future__ import annotations

import asyncio
import json
import time
import zlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import xgrammar

from pagedray.engine.errors import EngineUnavailable, Overloaded, UserError
from pagedray.engine.grammar import compiler as module
from pagedray.engine.grammar.compiler import GrammarCompiler
from pagedray.engine.grammar.source import GrammarKind, GrammarSource
from pagedray.engine.grammar.table import token_table
from pagedray.engine.messages import CompiledGrammar
from tests.engine.grammar.hostile import HOSTILE
from tests.engine.grammar.sampling import accepts, byte_vocabulary, smollm2

TIMEOUT_S = 5.0
ONE = {"type": "json_schema", "json_schema": {"const": 1}}
SLACK_S = 15.0  # of a busy machine


def source(kind: GrammarKind, text: Any, param: str = "guided") -> GrammarSource:
    return GrammarSource(kind, text if isinstance(text, str) else json.dumps(text), param)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared() -> AsyncIterator[GrammarCompiler]:
    """For tests that leave it as it was."""
    compiler = GrammarCompiler(smollm2(), TIMEOUT_S)
    compiler.start()
    yield compiler
    await compiler.close()


in_module = pytest.mark.asyncio(loop_scope="module")


def matcher_of(compiled: CompiledGrammar) -> xgrammar.CompiledGrammar:
    """As a worker reads it."""
    return xgrammar.CompiledGrammar.deserialize_json(zlib.decompress(compiled.data).decode(), token_table(smollm2()))


@in_module
@pytest.mark.parametrize(
    ("kind", "text", "good", "bad"),
    [
        ("json_object", "", '{"a": 1}', "[]"),
        ("json_schema", {"type": "object", "properties": {"a": {"type": "integer"}}}, '{"a": 1}', '{"a":"b"}'),
        ("regex", r"^(\d{3})-[a-f]+$", "123-abc", "12-abc"),
        ("regex", "a|b", "a", "ab"),
        ("regex", r"[^\W\d_]{2}\s?.", "ab!", "1b!"),
        ("regex", r"(?:x|(?P<n>y)|(?<m>z))+?\.\u00e9\x41\]", "xyz.éA]", "x.éA"),
        ("choice", ["yes", "no way", 'q"\n'], 'q"\n', "no"),
        ("ebnf", 'root ::= "(" root ")" | [0-9]+ # nested', "((42))", "((42)"),
        ("ebnf", "root ::= expr\nexpr ::= expr [+*] num | num\nnum ::= [1-9] [0-9]{0,2}", "12+3*456", "12+"),
        ("structural_tag", {"type": "tag", "begin": "<a>", "content": ONE, "end": "</a>"}, "<a>1</a>", "<a>2</a>"),
    ],
)
async def test_each_kind(shared: GrammarCompiler, kind: GrammarKind, text: Any, good: str, bad: str) -> None:
    compiled = await shared.compile(source(kind, text))
    assert accepts(matcher_of(compiled), good)
    assert not accepts(matcher_of(compiled), bad)


@in_module
async def test_tags_take_special_tokens_by_name(shared: GrammarCompiler) -> None:
    vocabulary = smollm2()
    begin = vocabulary.tokens.index(b"<|im_start|>")
    end = vocabulary.tokens.index(b"<|im_end|>")
    tag = {
        "type": "tag",
        "begin": "<|im_start|>call:",
        "content": {"type": "regex", "pattern": "a"},
        "end": "!<jupyter_code>",
    }
    code = vocabulary.tokens.index(b"<jupyter_code>")
    compiled = await shared.compile(source("structural_tag", {"type": "structural_tag", "format": tag}))
    matcher = xgrammar.GrammarMatcher(matcher_of(compiled))
    assert not matcher.accept_string("<|im_start|>")
    assert not matcher.accept_token(code)
    assert matcher.accept_token(begin)
    assert matcher.accept_string("call:a!")
    assert not matcher.accept_token(begin)
    assert matcher.accept_token(code)
    assert matcher.accept_token(end)  # SmolLM2's eos


@in_module
async def test_equal_sources_have_equal_keys(shared: GrammarCompiler) -> None:
    one = await shared.compile(source("choice", ["a", "b"]))
    assert one is await shared.compile(source("choice", ["a", "b"], "another field"))
    assert one.key != (await shared.compile(source("choice", ["a", "c"]))).key
    assert one.key != (await shared.compile(source("regex", '["a", "b"]'))).key


@in_module
async def test_errors_carry_the_clients_field(shared: GrammarCompiler) -> None:
    for param in ("response_format.json_schema.schema", "tools"):
        with pytest.raises(UserError, match="unmatched") as raised:
            await shared.compile(source("regex", ")", param))
        assert raised.value.param == param


@in_module
async def test_equal_sources_are_compiled_once(shared: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[object] = []
    send = GrammarCompiler._send
    monkeypatch.setattr(GrammarCompiler, "_send", lambda self, pending: (sent.append(pending), send(self, pending)))
    found = await asyncio.gather(*(shared.compile(source("choice", ["once"])) for _ in range(20)))
    await shared.compile(source("choice", ["once"]))
    assert len(sent) == 1
    assert len({id(compiled) for compiled in found}) == 1


@in_module
async def test_a_caller_that_is_cancelled_disturbs_nobody(shared: GrammarCompiler) -> None:
    both = [asyncio.create_task(shared.compile(source("regex", "cancel{1,3}"))) for _ in range(2)]
    await asyncio.sleep(0)
    both[0].cancel()
    assert (await both[1]).data
    assert both[0].cancelled()
    alone = asyncio.create_task(shared.compile(source("regex", "alone")))
    await asyncio.sleep(0)
    alone.cancel()
    await asyncio.gather(alone, return_exceptions=True)
    assert (await shared.compile(source("regex", "alone"))).data


@in_module
async def test_hostile_sources_beside_good_ones(shared: GrammarCompiler) -> None:
    """All at once: each hostile one is refused in time, and each good one compiles."""

    async def refused(kind: str, text: str, names: str) -> None:
        start_s = time.monotonic()
        with pytest.raises((UserError, Overloaded)) as raised:
            await shared.compile(GrammarSource(kind, text, "p"))  # type: ignore[arg-type]
        assert isinstance(raised.value, Overloaded) or names in raised.value.message
        assert time.monotonic() - start_s < TIMEOUT_S + SLACK_S

    async def good(number: int) -> None:
        schema = {"type": "object", "properties": {f"name{number}": {"type": "string"}, "n": {"type": "integer"}}}
        assert (await shared.compile(source("json_schema", schema))).data

    # The queue is bounded, so not more than may wait.
    for start in range(0, len(HOSTILE), 100):
        some = HOSTILE[start : start + 100]
        await asyncio.gather(
            *(refused(case.kind, case.text, case.names) for case in some), *map(good, range(start, start + 20))
        )


@in_module
async def test_the_process_may_die(shared: GrammarCompiler) -> None:
    assert shared._process is not None
    waiting = asyncio.create_task(shared.compile(source("regex", "while it dies")))
    shared._process.kill()
    assert (await waiting).data
    assert (await shared.compile(source("regex", "afterwards"))).data


async def test_a_process_that_cannot_live_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHILD", "raise SystemExit(1)")
    compiler = GrammarCompiler(byte_vocabulary(), TIMEOUT_S)
    with pytest.raises(EngineUnavailable, match="ended"):
        await compiler.compile(source("regex", "a"))
    await compiler.close()


async def test_a_process_that_cannot_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.sys, "executable", "/nonexistent")
    compiler = GrammarCompiler(byte_vocabulary(), TIMEOUT_S)
    with pytest.raises(EngineUnavailable, match="can't be started"):
        await compiler.compile(source("regex", "a"))
    await compiler.close()


async def test_a_process_that_talks_nonsense_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHILD", r"import os, sys; os.write(1, b'\x01\0\0\0?'); sys.stdin.read()")
    compiler = GrammarCompiler(byte_vocabulary(), TIMEOUT_S)
    with pytest.raises(EngineUnavailable, match="can't be used"):
        await asyncio.wait_for(compiler.compile(source("regex", "a")), 30)
    await compiler.close()


async def test_closing_ends_what_waits() -> None:
    compiler = GrammarCompiler(byte_vocabulary(), TIMEOUT_S)
    waiting = asyncio.create_task(compiler.compile(source("regex", "a")))
    await asyncio.sleep(0.1)
    await compiler.close()
    await compiler.close()
    with pytest.raises(EngineUnavailable, match="closed"):
        await waiting
    with pytest.raises(EngineUnavailable, match="closed"):
        await compiler.compile(source("regex", "a"))


async def test_too_many_waiting_is_overload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 2)
    compiler = GrammarCompiler(byte_vocabulary(), TIMEOUT_S)
    waiting = [asyncio.create_task(compiler.compile(source("regex", text))) for text in ("a", "b")]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="2 grammars wait"):
        await compiler.compile(source("regex", "c"))
    assert all(compiled.data for compiled in await asyncio.gather(*waiting))
    assert (await compiler.compile(source("regex", "c"))).data
    await compiler.close()


async def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(byte_vocabulary(), TIMEOUT_S)
    first = await compiler.compile(source("regex", "r0"))
    monkeypatch.setattr(module, "MAX_CACHE_BYTES", 4 * (len(first.data) + module.ENTRY_BYTES))
    for number in range(1, 20):
        await compiler.compile(source("regex", f"r{number}"))
    assert compiler._cache_bytes <= module.MAX_CACHE_BYTES
    assert len(compiler._cache) <= 4
    again = await compiler.compile(source("regex", "r0"))
    assert (again is not first, again) == (True, first)
    await compiler.close()
