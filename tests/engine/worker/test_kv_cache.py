import dataclasses
from typing import Any

import pytest
import torch

from pagedray.engine.config import CacheConfig, SchedulerConfig
from pagedray.engine.errors import ConfigError
from pagedray.engine.worker.kv_cache import CacheSize, KVCache, page_bytes, size_cache
from tests.engine.worker.test_input_batch import tiny_spec

SPEC = tiny_spec((None, None))  # pages of 4 positions: 2 layers * 2 * 4 * 4 numbers of 4 bytes
PAGE = 256


def size(
    spec: Any = SPEC, max_model_len: int | None = None, scheduler: SchedulerConfig | None = None, **cache: Any
) -> CacheSize:
    settings = CacheConfig(block_size=4, **cache)
    limits = scheduler or SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=8)
    return size_cache(spec, torch.float32, settings, limits, max_model_len)


def test_bytes_of_a_page() -> None:
    assert page_bytes(SPEC, 4, torch.float32) == PAGE
    assert page_bytes(SPEC, 4, torch.bfloat16) == PAGE // 2
    assert page_bytes(tiny_spec((None, 3, 3)), 4, torch.float32) == PAGE // 2  # three groups of one layer


def test_pages_hold_each_group_and_the_null_block() -> None:
    cache = KVCache(tiny_spec((4, None, 4, None, 4)), 6, 4, torch.float32, torch.device("cpu"))
    assert cache.windows == (None, 4, 4)
    assert [tuple(pages.shape) for pages in cache.pages] == [(7, 2, 1, 4, 4)] * 2
    assert not any(pages.any() for pages in cache.pages)


def test_no_more_blocks_than_the_sequences_need() -> None:
    assert size() == CacheSize(num_blocks=3 * 16, page_bytes=PAGE, max_model_len=64, capacity_tokens=64)
    assert size(max_model_len=9).num_blocks == 3 * 3
    assert size(kv_cache_memory_bytes=2**40).num_blocks == 48


def test_memory_decides_where_it_is_short() -> None:
    found = size(kv_cache_memory_bytes=11 * PAGE + PAGE - 1)
    assert (found.num_blocks, found.max_model_len, found.capacity_tokens) == (10, 40, 40)
    assert found.total_bytes == 11 * PAGE


def test_a_number_of_blocks_is_taken_as_it_is() -> None:
    assert size(num_kv_blocks=5, kv_cache_memory_bytes=2**30).num_blocks == 5
    assert size(num_kv_blocks=500).num_blocks == 500
    assert size(num_kv_blocks=5).max_model_len == 20


def test_a_window_needs_blocks_for_itself_and_a_step() -> None:
    """Group 1 sees 5 positions and a step adds 8: 12 positions lie in at most 4 blocks of 4."""
    found = size(tiny_spec((None, 5)), num_kv_blocks=10)
    assert found.max_model_len == found.capacity_tokens == 24  # 6 blocks of the full group, 4 of the other
    small_steps = SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=8, prefill_chunk_tokens=1)
    assert size(tiny_spec((None, 5)), scheduler=small_steps, num_kv_blocks=10).capacity_tokens == 32
    assert size(tiny_spec((5,)), num_kv_blocks=4).capacity_tokens == 64


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_model_len": 41, "kv_cache_memory_bytes": 11 * PAGE}, ["41", "40", "kv_cache_memory_bytes"]),
        ({"max_model_len": 21, "num_kv_blocks": 5}, ["21", "20", "num_kv_blocks"]),
        ({"max_model_len": 65}, ["65", "64", "max_model_len"]),
        ({"kv_cache_memory_bytes": PAGE}, ["0 blocks", "kv_cache_memory_bytes"]),
        ({"kv_cache_memory_bytes": 3}, ["0 blocks", "kv_cache_memory_bytes"]),
        ({"spec": tiny_spec((None, 3, 3)), "num_kv_blocks": 2}, ["2 blocks", "3 block groups", "num_kv_blocks"]),
    ],
)
def test_what_cannot_fit_is_refused_with_the_numbers(options: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        size(**options)
    assert [text for text in said if text not in str(raised.value)] == []


def test_an_explicit_length_that_just_fits() -> None:
    assert size(max_model_len=40, kv_cache_memory_bytes=11 * PAGE).max_model_len == 40


def test_a_stage_has_pages_for_its_own_layers_alone() -> None:
    """Of ten layers, 2 see everything and 8 a window: groups of two layers, one and four of them."""
    spec = tiny_spec(((4,) * 4 + (None,)) * 2)
    whole = KVCache(spec, 6, 4, torch.float32, torch.device("cpu"))
    stages = [dataclasses.replace(spec, stage=layers) for layers in ((0, 5), (5, 10), (0, 4), (4, 10))]
    caches = [KVCache(stage, 6, 4, torch.float32, torch.device("cpu")) for stage in stages]
    assert len(whole.pages) == 2
    assert [len(cache.pages) for cache in caches] == [1, 1, 1, 2]
    assert [page_bytes(stage, 4, torch.float32) for stage in stages] == [128, 128, 128, 256]
    assert all(cache.windows == whole.windows == (None, 4, 4, 4, 4) for cache in caches)


def test_the_rank_with_the_fewest_blocks_decides() -> None:
    settings = CacheConfig(block_size=4, kv_cache_memory_bytes=11 * PAGE)
    asked = []

    def least(num: int) -> int:
        asked.append(num)
        return 7

    found = size_cache(SPEC, torch.float32, settings, SchedulerConfig(max_num_seqs=3), None, least=least)
    assert asked == [10]
    assert (found.num_blocks, found.max_model_len, found.capacity_tokens) == (7, 28, 28)
