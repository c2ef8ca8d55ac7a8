"""Several ranks give one rank's tokens, however the model is split over them and the work into steps."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch

from pagedray.engine.errors import ConfigError
from tests.engine.models.cases import VOCAB_SIZE
from tests.engine.models.test_families import smallest_pool
from tests.engine.worker.gangs import GangWorker, Ranks, running
from tests.step_loop import Output, StepLoop
from tests.tiny_models import tiny_model

SIZES = [(2, 1), (4, 1), (1, 2), (1, 3), (2, 2)]  # tensor- and pipeline-parallel
CASES = [(name, *sizes, "") for name in ("llama", "qwen3", "gemma3") for sizes in SIZES] + [
    ("llama-bias", 2, 2, ""),
    ("qwen2-window", 4, 1, ""),
    ("mixtral", 2, 1, ""),
    ("mixtral", 4, 1, "ep"),
    ("qwen2-moe", 2, 1, "ep"),
    ("qwen3-moe", 2, 1, "ep"),
    ("qwen3-moe", 2, 2, "ep"),
    ("qwen3-moe-dense-layers", 1, 3, ""),
]
LENGTHS = (1, 2, 3, 5, 8, 13, 16, 17, 19, 20, 24, 27, 31, 32, 33, 40, 47, 52, 60, 70)
MAX_TOKENS = 12
SAMPLED = {"temperature": 1.0, "seed": 11, "top_p": 0.95, "repetition_penalty": 1.1, "logprobs": 1}
SETTINGS = {
    "block_size": 4,
    "num_kv_blocks": 1000,
    "max_num_seqs": 20,
    "max_num_batched_tokens": 128,
    "prefill_chunk_tokens": 16,
}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    torch.set_num_threads(1)
    with running(4) as started:
        yield started


@functools.cache
def prompts() -> list[list[int]]:
    """Those with more than four blocks begin alike."""
    generator = torch.Generator().manual_seed(3)
    drawn = [torch.randint(3, VOCAB_SIZE, (num,), generator=generator).tolist() for num in LENGTHS]
    return [drawn[-1][:16] + ids[16:] if len(ids) > 16 else ids for ids in drawn]


def tokens(outputs: list[Output]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


@functools.cache
def of_one_rank(name: str) -> tuple[list[list[int]], list[list[int]]]:
    """Greedy and sampled."""
    with StepLoop(str(tiny_model(name)), **SETTINGS) as loop:
        return tokens(loop.generate(prompts(), MAX_TOKENS)), tokens(loop.generate(prompts(), MAX_TOKENS, **SAMPLED))


def gang(ranks: Ranks, name: str, tp: int, pp: int, ep: str = "", **settings: object) -> StepLoop:
    parallel = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "enable_expert_parallel": bool(ep)}
    make_worker = functools.partial(GangWorker, ranks)
    return StepLoop(str(tiny_model(name)), make_worker, **{**SETTINGS, **parallel, **settings})


def case_id(case: tuple[str, int, int, str]) -> str:
    name, tp, pp, ep = case
    return f"{name}-tp{tp}-pp{pp}{ep}"


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_all_ranks_together_give_the_tokens_of_one(ranks, case):
    """The first time whole prompts come in chunks of 16; the second time their beginnings are in the cache."""
    greedy, sampled = of_one_rank(case[0])
    with gang(ranks, *case) as loop:
        cold = loop.generate(prompts(), MAX_TOKENS)
        warm = loop.generate(prompts(), MAX_TOKENS, **SAMPLED)
    assert tokens(cold) == greedy
    assert tokens(warm) == sampled
    assert all(output.num_cached_tokens == (len(ids) - 1) // 4 * 4 for output, ids in zip(warm, prompts(), strict=True))


@pytest.mark.parametrize("case", [case for case in CASES if case[1] * case[2] != 4 and "-" not in case[0]], ids=case_id)
def test_preempted_sequences_go_on_as_if_nothing_happened(ranks, case):
    greedy, sampled = of_one_rank(case[0])
    with gang(ranks, *case, num_kv_blocks=2 * smallest_pool(case[0], 16)) as loop:
        assert tokens(loop.generate(prompts(), MAX_TOKENS)) == greedy
        assert tokens(loop.generate(prompts(), MAX_TOKENS, **SAMPLED)) == sampled
        assert loop.scheduler.stats().num_preemptions > 0


@pytest.mark.parametrize("run_ahead", [1, 4])
def test_the_number_of_steps_in_flight_changes_nothing(ranks, run_ahead):
    with gang(ranks, "llama", 1, 3, run_ahead=run_ahead, pipeline_layers=(1, 1, 1)) as loop:
        assert tokens(loop.generate(prompts(), MAX_TOKENS)) == of_one_rank("llama")[0]


def test_prompts_are_scored_by_the_last_stage(ranks):
    wanted = {"prompt_logprobs": 1, "logprobs": 2}
    with StepLoop(str(tiny_model("gemma3")), **SETTINGS) as loop:
        expected = loop.generate(prompts()[-3:], 4, **wanted)
    with gang(ranks, "gemma3", 2, 2) as loop:
        found = loop.generate(prompts()[-3:], 4, **wanted)
    for ours, theirs in zip(found, expected, strict=True):
        assert len(ours.prompt_logprobs) == len(theirs.prompt_logprobs) > 10
        for entry, other in zip(
            ours.prompt_logprobs + ours.logprobs, theirs.prompt_logprobs + theirs.logprobs, strict=True
        ):
            assert (entry.token_id, entry.rank, entry.top_ids) == (other.token_id, other.rank, other.top_ids)
            assert entry.logprob == pytest.approx(other.logprob, abs=1e-4)


@pytest.mark.parametrize(
    ("name", "tp", "pp", "words"),
    [
        ("llama", 3, 1, "8 query heads and 4 key-value heads can't be split by tensor_parallel_size 3"),
        ("llama", 1, 4, "pipeline_parallel_size is 4, the model has 3 layers"),
    ],
)
def test_what_cannot_be_split_is_refused_by_every_rank(ranks, name, tp, pp, words):
    with pytest.raises(ConfigError, match=words):
        gang(ranks, name, tp, pp)


def test_ranks_agree_on_the_blocks(ranks):
    """By memory a stage of one layer has room for twice the blocks of one with two."""
    with gang(ranks, "llama", 1, 2, num_kv_blocks=None, kv_cache_memory_bytes=100_000) as loop:
        facts = loop.worker.facts
    assert len({(rank.num_blocks, rank.max_model_len, rank.kv_capacity_tokens) for rank in facts}) == 1
    page = 2 * 2 * 4 * 4 * 8 * 4  # two layers, K and V, heads, positions, head size, bytes
    assert facts[0].num_blocks == 100_000 // page - 1
