"""Pages of keys and values, and how many of them there should be."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch

from pagedray.engine.block_pool import capacity_tokens, peak_blocks
from pagedray.engine.config import CacheConfig, SchedulerConfig
from pagedray.engine.errors import ConfigError
from pagedray.engine.models.spec import ModelSpec, layer_groups, num_page_slots

CPU_MEMORY_BYTES = 2**30


@dataclasses.dataclass(frozen=True)
class CacheSize:
    num_blocks: int  # without the null block
    page_bytes: int
    max_model_len: int
    capacity_tokens: int  # the most tokens one sequence alone can hold

    @property
    def total_bytes(self) -> int:
        return (self.num_blocks + 1) * self.page_bytes


class KVCache:
    """One pool of equal pages for all block groups: slot i of a page belongs to the i-th layer of each group.

    Args:
        spec: with the heads and layers of this rank.

    Attributes:
        pages: per slot [num_blocks + 1, 2, K, block_size, D]; block 0 is the null page. Zeros at first, since a masked
            position's value is multiplied by 0 and must be a number.
    """

    def __init__(self, spec: ModelSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device):
        num_slots = num_page_slots(spec)
        self.windows = tuple(group.window for group in layer_groups(spec.windows))
        self.block_size = block_size
        shape = (num_blocks + 1, 2, spec.num_kv_heads, block_size, spec.head_dim)
        try:
            self.pages = tuple(torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_slots))
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            gib = num_slots * math.prod(shape) * dtype.itemsize / 2**30
            raise ConfigError(
                f"the KV cache needs {gib:.1f} GiB for {num_blocks} blocks, which can't be had; "
                "lower num_kv_blocks, kv_cache_memory_bytes or gpu_memory_utilization"
            ) from error


def page_bytes(spec: ModelSpec, block_size: int, dtype: torch.dtype) -> int:
    return num_page_slots(spec) * 2 * spec.num_kv_heads * block_size * spec.head_dim * dtype.itemsize


def size_cache(
    spec: ModelSpec,
    dtype: torch.dtype,
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    max_model_len: int | None,
    free_bytes: int = CPU_MEMORY_BYTES,
    least: Callable[[int], int] = lambda num: num,
) -> CacheSize:
    """Blocks and longest sequence that fit the settings and each other.

    Args:
        spec: with the heads and layers of this rank.
        dtype: of keys and values as they are stored.
        max_model_len: as configured; None: what model and cache allow.
        free_bytes: what the cache may take where the settings don't say.
        least: of all ranks' values: a block has a page on each of them.

    Raises:
        ConfigError: max_model_len exceeds the model's context or what the cache can hold.
    """
    windows = tuple(group.window for group in layer_groups(spec.windows))
    wanted = max_model_len or spec.max_context
    if wanted > spec.max_context:
        raise ConfigError(f"max_model_len is {wanted}, the model's longest context is {spec.max_context}; lower it")
    chunk = min(scheduler.prefill_chunk_tokens or scheduler.max_num_batched_tokens, scheduler.max_num_batched_tokens)
    size = page_bytes(spec, cache.block_size, dtype)
    memory_bytes = cache.kv_cache_memory_bytes or free_bytes
    num_blocks = least(cache.num_kv_blocks or memory_bytes // size - 1)

    def capacity(limit: int) -> int:
        return capacity_tokens(num_blocks, cache.block_size, windows, chunk, limit)

    source = "num_kv_blocks" if cache.num_kv_blocks else "kv_cache_memory_bytes"
    found = f"{max(num_blocks, 0)} blocks of {cache.block_size} tokens in {len(windows)} block groups"
    if num_blocks < 1 or capacity(2) < 2:
        raise ConfigError(f"the KV cache can't hold 2 tokens ({found}, {size} bytes each); raise {source}")
    if max_model_len is not None and capacity(max_model_len) < max_model_len:
        raise ConfigError(
            f"max_model_len is {max_model_len}, the KV cache holds {capacity(max_model_len)} tokens of one sequence "
            f"({found}); raise {source} or lower max_model_len"
        )
    longest = capacity(wanted)
    if not cache.num_kv_blocks:
        one = sum(peak_blocks(longest, cache.block_size, window, chunk) for window in windows)
        num_blocks = min(num_blocks, scheduler.max_num_seqs * one)
    return CacheSize(num_blocks, size, longest, capacity(spec.max_context))
