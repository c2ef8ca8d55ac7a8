"""Loads of experts, counted by one rank and by several: processes of this machine, over gloo."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import pytest

from pagedray.engine import LLM, GenerationParams
from pagedray.engine.metrics import ExpertCounts
from tests.tiny_models import tiny_model

NUM_TOKENS, TOP_K, NUM_EXPERTS = 6, 3, 5
PROMPTS = [list(range(5 + i, 15 + 20 * i)) for i in range(4)]  # the longest takes several steps
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "cpu_threads": 1,
    "block_size": 4,
    "num_kv_blocks": 160,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 24,
    "enable_prefix_caching": False,
}


def loads(**sizes: int) -> ExpertCounts:
    """Of a model with experts in its layers 1 and 5, the last one."""
    params = GenerationParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    with LLM(str(tiny_model("qwen3-moe-dense-layers")), **SETTINGS, **sizes) as llm:
        llm.generate(PROMPTS, params, progress=False)
        asking = llm._engine._executor.expert_loads()
        return asyncio.run_coroutine_threadsafe(asking, llm._loop).result(60)


alone = functools.cache(loads)


def test_every_token_counts_once() -> None:
    counts = alone()
    assert counts.keys() == {1, 5} and {len(of_layer) for of_layer in counts.values()} == {NUM_EXPERTS}
    computed = sum(map(len, PROMPTS)) + len(PROMPTS) * (NUM_TOKENS - 1)  # the last one is never an input
    assert sum(counts[1]) == TOP_K * computed
    assert sum(counts[5]) == TOP_K * len(PROMPTS) * NUM_TOKENS  # behind the last attention only who samples is left


@pytest.mark.parametrize(
    "sizes",
    [
        {"tensor_parallel_size": 2, "enable_expert_parallel": True},
        {"pipeline_parallel_size": 2},
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    ],
)
def test_several_ranks_count_as_one_does(sizes: dict[str, int]) -> None:
    assert loads(**sizes) == alone()
