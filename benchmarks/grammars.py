"""Compiling grammars: how long a good schema takes, alone and while hostile sources come at the same time.

The baseline of the first row is xgrammar's own compiler on the same schemas, in this process; ours also checks the
schema, tries the grammar out, and goes to another process and back. `correct`: every good schema compiles and every
hostile source is refused, the latter within the limit of time.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from typing import Any

import xgrammar

from benchmarks import report
from pagedray.engine.checkpoint import open_checkpoint
from pagedray.engine.config import EMBEDDED_MODEL
from pagedray.engine.errors import Overloaded, UserError
from pagedray.engine.grammar.compiler import GrammarCompiler
from pagedray.engine.grammar.source import GrammarSource
from pagedray.engine.grammar.table import token_table
from pagedray.engine.grammar.vocabulary import Vocabulary, make_vocabulary
from pagedray.engine.text.tokenizer import load_tokenizer
from tests.engine.grammar.hostile import HOSTILE

TIMEOUT_S = 5.0
NUM_GOOD = 60
GOOD_EVERY_S = 0.1
NUM_AT_ONCE = 16  # hostile sources
SHARE = 0.99  # of good ones that the printed latency holds for


def good_schema(number: int) -> dict[str, Any]:
    """What an agent sends: a dozen fields, some nested, some optional. Each number has names of its own."""
    choose = random.Random(number)
    kinds: list[dict[str, Any]] = [
        {"type": "string"},
        {"type": "integer"},
        {"type": "number", "minimum": 0},
        {"type": "boolean"},
        {"enum": ["low", "medium", "high"]},
        {"anyOf": [{"type": "string"}, {"type": "null"}]},
        {"type": "array", "items": {"type": "string"}},
        {"type": "string", "format": "date"},
    ]
    names = [f"field_{number}_{i}" for i in range(8)]
    fields: dict[str, Any] = {name: choose.choice(kinds) for name in names}
    inner = {"type": "object", "properties": dict(list(fields.items())[:4]), "required": names[:2]}
    fields["items"] = {"type": "array", "items": inner}
    return {"type": "object", "properties": fields, "required": names[:6], "additionalProperties": False}


async def compile_s(compiler: GrammarCompiler, source: GrammarSource) -> tuple[float, bool]:
    """How long it took, and whether it compiled."""
    start_s = time.perf_counter()
    try:
        await compiler.compile(source)
        is_compiled = True
    except (UserError, Overloaded):
        is_compiled = False
    return time.perf_counter() - start_s, is_compiled


async def run_good(compiler: GrammarCompiler, first: int) -> list[tuple[float, bool]]:
    """A good load: one new schema every so often, whatever became of those before."""
    tasks = []
    for number in range(first, first + NUM_GOOD):
        source = GrammarSource("json_schema", json.dumps(good_schema(number)), "schema")
        tasks.append(asyncio.create_task(compile_s(compiler, source)))
        await asyncio.sleep(GOOD_EVERY_S)
    return list(await asyncio.gather(*tasks))


async def run_hostile(compiler: GrammarCompiler) -> list[tuple[float, bool]]:
    free = asyncio.Semaphore(NUM_AT_ONCE)

    async def one(kind: Any, text: str) -> tuple[float, bool]:
        async with free:
            return await compile_s(compiler, GrammarSource(kind, text, "hostile"))

    return list(await asyncio.gather(*(one(case.kind, case.text) for case in HOSTILE)))


def bare_s(vocabulary: Vocabulary) -> list[float]:
    compiler = xgrammar.GrammarCompiler(token_table(vocabulary), max_threads=1, cache_enabled=False)
    found = []
    for number in range(NUM_GOOD):
        text = json.dumps(good_schema(number))
        start_s = time.perf_counter()
        compiler.compile_json_schema(text, any_whitespace=False).serialize_json()
        found.append(time.perf_counter() - start_s)
    return found


async def run(vocabulary: Vocabulary) -> None:
    compiler = GrammarCompiler(vocabulary, TIMEOUT_S)
    start_s = time.perf_counter()
    await compile_s(compiler, GrammarSource("json_object", "", "first"))
    first_s = time.perf_counter() - start_s
    alone = await run_good(compiler, 0)
    hostile, beside = await asyncio.gather(run_hostile(compiler), run_good(compiler, NUM_GOOD))
    await compiler.close()

    report.header()
    ours_ms = [1e3 * took_s for took_s, _ in alone]
    report.row(
        "compile a schema",
        "median, 9 fields, SmolLM2",
        statistics.median(ours_ms),
        1e3 * statistics.median(bare_s(vocabulary)),
        "xgrammar in process",
        unit="ms",
        correct=_verdict(all(is_compiled for _, is_compiled in alone)),
        details={"first_ms": 1e3 * first_s, "max_ms": max(ours_ms)},
    )
    beside_ms, alone_ms = _late_ms(beside), _late_ms(alone)
    report.row(
        "compile a schema",
        f"99 %, beside {len(HOSTILE)} hostile",
        beside_ms,
        alone_ms,
        "99 % alone",
        unit="ms",
        correct=_verdict(all(is_compiled for _, is_compiled in beside)),
        details={"median_ms": 1e3 * statistics.median(took_s for took_s, _ in beside)},
    )
    slowest_s = max(took_s for took_s, _ in hostile)
    report.row(
        "refuse a hostile source",
        f"slowest of {len(HOSTILE)}",
        slowest_s,
        TIMEOUT_S,
        "limit",
        unit="s",
        correct=_verdict(not any(is_compiled for _, is_compiled in hostile) and slowest_s < TIMEOUT_S + 0.5),
        details={"median_ms": 1e3 * statistics.median(took_s for took_s, _ in hostile)},
    )


def _late_ms(results: list[tuple[float, bool]]) -> float:
    times_s = sorted(took_s for took_s, _ in results)
    return 1e3 * times_s[min(len(times_s) - 1, round(SHARE * len(times_s)))]


def _verdict(is_right: bool) -> str:
    return "yes" if is_right else "no"


def main() -> None:
    tokenizer = load_tokenizer(open_checkpoint(EMBEDDED_MODEL, None, False))
    asyncio.run(run(make_vocabulary(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)))


if __name__ == "__main__":
    main()
