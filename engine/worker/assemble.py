"""Puts a rank's parts together: cache, rows, attention backend and runner around a loaded model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from pagedray.engine.config import Config
from pagedray.engine.grammar.vocabulary import Vocabulary
from pagedray.engine.models.registry import Model
from pagedray.engine.models.spec import ModelSpec, layer_groups
from pagedray.engine.worker.attention.cpu_backend import CpuAttention
from pagedray.engine.worker.attention.flashinfer_backend import FlashInferAttention
from pagedray.engine.worker.attention.torch_backend import TorchAttention
from pagedray.engine.worker.attention.triton_backend import TritonAttention
from pagedray.engine.worker.device import free_for_cache
from pagedray.engine.worker.kv_cache import CacheSize, KVCache, page_bytes, size_cache
from pagedray.engine.worker.parallel import ALONE, Parallel
from pagedray.engine.worker.row_state import RowState
from pagedray.engine.worker.runner import ModelRunner
from pagedray.engine.worker.stage import OnlyStage, PipelineStage
from pagedray.engine.worker.warm_up import MadeUpSteps

KV_SCALE = 1.0  # of fp8 keys and values: theirs lie far within e4m3's range of +-448


@dataclasses.dataclass(frozen=True)
class Assembly:
    model: Model
    spec: ModelSpec  # of this rank: its stage's layers, its share of the heads
    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype  # of keys and values as they are stored
    backend: str
    config: Config
    parallel: Parallel = ALONE
    load_vocabulary: Callable[[], Vocabulary] | None = None  # see ModelRunner

    def size(self) -> CacheSize:
        """Of the KV cache, the same on all ranks; on a GPU measured, which computes made-up steps.

        Raises:
            ConfigError: memory and settings don't go together.
        """
        config = self.config
        settings = self.kv_dtype, config.cache, config.scheduler, config.model.max_model_len
        if self.device.type == "cpu":
            return size_cache(self.spec, *settings, least=self.parallel.minimum)
        if config.cache.num_kv_blocks or config.cache.kv_cache_memory_bytes:
            self._run_widest_steps()  # finds out whether a step has room too
            return size_cache(self.spec, *settings, least=self.parallel.minimum)
        return size_cache(
            self.spec,
            *settings,
            free_for_cache(
                self.device,
                config.cache.gpu_memory_utilization,
                self._run_widest_steps,
                will_capture=any(self.graph_sizes()),
            ),
            self.parallel.minimum,
        )

    def runner(self, size: CacheSize) -> ModelRunner:
        config = self.config
        cache = KVCache(self.spec, size.num_blocks, config.cache.block_size, self.kv_dtype, self.device)
        max_blocks = -(-size.max_model_len // cache.block_size)
        rows = RowState(config.scheduler.max_num_seqs, len(cache.windows), max_blocks, self.device)
        stage = OnlyStage()
        if self.parallel.pp.size > 1:
            stage = PipelineStage(self.parallel, rows.last_token, self.spec.hidden, self.dtype)
        attention, vocab_size = self._attention(cache, rows), self.spec.vocab_size
        return ModelRunner(self.model, cache, rows, attention, vocab_size, stage, self.load_vocabulary)

    def made_up_steps(self, size: CacheSize) -> MadeUpSteps:
        scheduler = self.config.scheduler
        return MadeUpSteps(
            size,
            len(layer_groups(self.spec.windows)),
            self.config.cache.block_size,
            scheduler.max_num_batched_tokens,
            scheduler.max_num_seqs,
        )

    def graph_sizes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Numbers of sequences and of tokens to capture steps for; none where graphs are off or can't be."""
        worker, scheduler = self.config.worker, self.config.scheduler
        if not worker.cuda_graphs or self.device.type == "cpu" or self.backend != "triton":
            return (), ()
        return (
            _up_to(scheduler.max_num_seqs, worker.cuda_graph_sizes),
            _up_to(scheduler.max_num_batched_tokens, worker.cuda_graph_token_sizes),
        )

    def _attention(
        self, cache: KVCache, rows: RowState
    ) -> CpuAttention | TorchAttention | TritonAttention | FlashInferAttention:
        if self.backend == "cpu":
            return CpuAttention(cache, rows, self.spec.num_heads)
        if self.backend == "torch":
            return TorchAttention(cache, rows)
        if self.backend == "flashinfer":
            return FlashInferAttention(cache, rows, self.spec, self.dtype, KV_SCALE)
        num_sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        return TritonAttention(cache, rows, self.spec.num_heads, self.dtype, KV_SCALE, num_sms)

    def _run_widest_steps(self) -> None:
        """With a cache of a few blocks, which all sequences share."""
        block_size, config = self.config.cache.block_size, self.config
        longest = min(config.model.max_model_len or self.spec.max_context, config.scheduler.max_num_batched_tokens + 1)
        num_blocks = -(-longest // block_size)
        size = CacheSize(num_blocks, page_bytes(self.spec, block_size, self.kv_dtype), longest, longest)
        runner = self.runner(size)
        for out in self.made_up_steps(size).widest():
            runner.run(out).wait()
        runner.stage.catch_up()


def _up_to(most: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The sizes of a ladder that can occur; its last step is `most` where the ladder goes on beyond."""
    return tuple(sorted({min(size, most) for size in sizes}))
