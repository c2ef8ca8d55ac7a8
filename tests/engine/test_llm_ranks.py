"""LLM over several ranks of a real model: processes of this machine, and the tokens of one rank."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from pagedray.engine import LLM, GenerationParams
from pagedray.engine.config import EngineFacts
from pagedray.engine.errors import ConfigError, EngineDead
from pagedray.engine.worker.spawned_gang import SpawnedGang
from pagedray.engine.worker.worker import Worker
from tests.tiny_models import tiny_model

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "cpu_threads": 1,
    "block_size": 4,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 48,
    "num_kv_blocks": 160,  # fewer than 8 sequences need: some are preempted
}


def generate(name: str, **sizes: Any) -> list[tuple[int, ...]]:
    """Greedy and seeded, longer than a step and beginning alike, twice: then from the prefix cache."""
    rng = random.Random(1)
    shared = [rng.randrange(3, 500) for _ in range(20)]
    prompts = [[*shared, *(rng.randrange(3, 500) for _ in range(rng.randrange(1, 70)))] for _ in range(10)]
    params = [GenerationParams(max_tokens=24, temperature=i % 2, seed=i, ignore_eos=True) for i in range(10)]
    with LLM(str(tiny_model(name)), **SETTINGS, **sizes) as llm:
        results = [llm.generate(prompts, params, progress=False) for _ in range(2)]
    assert results[1][0].num_cached_tokens > 0
    return [result.choices[0].token_ids for run in results for result in run]


def test_all_ranks_together_give_the_tokens_of_one() -> None:
    alone = generate("qwen3")
    assert alone[:10] == alone[10:]
    assert generate("qwen3", tensor_parallel_size=2, pipeline_parallel_size=2) == alone


def test_what_cannot_be_split_is_refused_by_every_rank() -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size|heads"):
        generate("qwen3", tensor_parallel_size=3)


class LateToFail(Worker):
    """On rank 1, before it meets the others, who have come by then."""

    def _load(self, *args: Any) -> EngineFacts:
        if self.rank == 1:
            time.sleep(1.0)
            raise ConfigError("no such device")
        return super()._load(*args)


def test_a_rank_that_fails_before_it_meets_the_others_ends_the_start() -> None:
    before = set(threading.enumerate())
    with pytest.raises(ConfigError, match=r"rank 1 on process \d+: no such device"):
        LLM(str(tiny_model("qwen3")), worker_class=LateToFail, **SETTINGS, tensor_parallel_size=2)
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_ends_generation_with_its_name(number: signal.Signals) -> None:
    llm = LLM(str(tiny_model("qwen3")), **SETTINGS, tensor_parallel_size=2, step_timeout_s=1.0)
    gang = llm._engine._executor._worker
    assert isinstance(gang, SpawnedGang)
    pid = gang._processes[1].pid
    lose = threading.Timer(0.5, os.kill, (pid, number))
    lose.start()
    params = GenerationParams(max_tokens=400, ignore_eos=True)
    with pytest.raises(EngineDead, match=rf"rank 1 on process {pid} (died|does not answer)"):
        while True:
            llm.generate([[1, 2, 3]] * 8, params, progress=False)
    llm.close()
    assert not Path(f"/proc/{pid}").exists()
