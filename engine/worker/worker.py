"""One rank: loads its model, then computes steps in the order they are submitted."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

import torch

from pagedray.engine.checkpoint import Checkpoint, open_checkpoint
from pagedray.engine.config import Config, EngineFacts
from pagedray.engine.errors import ConfigError, EngineDead
from pagedray.engine.messages import NewSeq, RunnerOutput, SamplingParams, ScheduledSeq, SchedulerOutput
from pagedray.engine.models.parse import model_spec
from pagedray.engine.models.registry import build_model
from pagedray.engine.models.spec import ModelSpec
from pagedray.engine.text.tokenizer import load_tokenizer
from pagedray.engine.worker.backend import choose_backend, choose_device, choose_dtype
from pagedray.engine.worker.host_memory import keep_freed_memory
from pagedray.engine.worker.kv_cache import CacheSize, KVCache, size_cache
from pagedray.engine.worker.runner import ModelRunner
from pagedray.engine.worker.weights import load_weights

log = logging.getLogger(__name__)

_KEPT_RESULTS = 8  # more than steps may be in flight, so that an answer that got lost can be asked for again
_WARM_UP_TOKENS = 64


class Worker:
    """Steps run in one thread, which stands for a GPU's stream: a planned step starts when the one before it ends."""

    def __init__(self, config: Config, rank: int = 0):
        self.config, self.rank = config, rank
        self._stream = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pagedray-worker")
        self._steps: dict[int, Future[RunnerOutput]] = {}  # the last few, oldest first
        self._failure: Exception | None = None
        self._runner: ModelRunner

    def load(self, on_phase: Callable[[str, float], None] = lambda name, seconds: None) -> EngineFacts:
        """Everything until the first step can be computed.

        Args:
            on_phase: told name and seconds of each phase as it ends.

        Raises:
            ConfigError: settings, checkpoint and machine don't go together.
        """
        keep_freed_memory()  # before the thread starts: it keeps the arena it begins with
        return self._stream.submit(self._load, on_phase).result()

    def submit(self, out: SchedulerOutput) -> None:
        """Queue a step; returns before it is computed. A step that was submitted before is ignored."""
        last = max(self._steps, default=None)
        if last is not None and out.step <= last:
            return
        if last is not None and out.step != last + 1:
            raise ValueError(f"step {out.step} was submitted after step {last}: the steps between are lost")
        self._steps[out.step] = self._stream.submit(self._compute, out)
        self._steps.pop(out.step - _KEPT_RESULTS, None)

    def result(self, step: int) -> RunnerOutput:
        """Wait for a step; it may be one of the last few again.

        Raises:
            Exception: whatever the step failed with, and EngineDead for every step after it.
        """
        if step not in self._steps:
            raise LookupError(f"step {step} is not among those kept: {list(self._steps)}")
        try:
            return self._steps[step].result()
        except CancelledError:
            raise EngineDead("the worker was closed") from None

    def close(self) -> None:
        """Finish the step that runs, drop those that wait. Safe to call twice."""
        self._stream.shutdown(wait=True, cancel_futures=True)

    def _compute(self, out: SchedulerOutput) -> RunnerOutput:
        if self._failure is not None:  # rows and pages are in an unknown state
            raise EngineDead(f"an earlier step failed: {self._failure!r}")
        try:
            return self._runner.run(out).wait()
        except Exception as error:
            self._failure = error
            log.exception("step failed step=%d sequences=%d", out.step, len(out.scheduled))
            raise

    def _load(self, on_phase: Callable[[str, float], None]) -> EngineFacts:
        phases = _Phases(on_phase)
        config = self.config
        device = torch.device(choose_device(config.worker.device))
        torch.set_num_threads(config.worker.cpu_threads or len(os.sched_getaffinity(0)))
        checkpoint = open_checkpoint(config.model.model, config.model.revision)
        spec = model_spec(checkpoint)
        dtype_name = choose_dtype(config.model.dtype, spec.dtype, device.type)
        dtype: torch.dtype = getattr(torch, dtype_name)
        backend, reason = choose_backend(device.type, dtype_name, spec.head_dim, config.worker.attention_backend)
        size = size_cache(spec, dtype, config.cache, config.scheduler, config.model.max_model_len)
        phases.end("read configuration")

        model = build_model(spec, dtype, device)
        load_weights(model, checkpoint, device)
        phases.end("load weights")
        model.finish_loading()
        phases.end("pack weights")

        cache = KVCache(spec, size.num_blocks, config.cache.block_size, dtype, device)
        self._runner = ModelRunner(
            model,
            cache,
            num_rows=config.scheduler.max_num_seqs,
            max_model_len=size.max_model_len,
            vocab_size=spec.vocab_size,
            device=device,
        )
        phases.end("allocate kv cache")
        for out in _warm_up_steps(size, len(cache.windows), cache.block_size, config.scheduler.max_num_batched_tokens):
            self._runner.run(out).wait()
        phases.end("warm up")
        log.info(
            "worker ready model=%s dtype=%s threads=%d blocks=%d gib=%.2f tokens=%d attention=%s (%s)",
            *(checkpoint.name, dtype_name, torch.get_num_threads()),
            *(size.num_blocks, size.total_bytes / 2**30, size.capacity_tokens, backend, reason),
        )
        return EngineFacts(
            model_names=config.model.served_model_name or (config.model.model,),
            vocab_size=spec.vocab_size,
            max_model_len=size.max_model_len,
            block_size=cache.block_size,
            num_blocks=size.num_blocks,
            block_groups=cache.windows,
            kv_capacity_tokens=size.capacity_tokens,
            eos_ids=_eos_ids(checkpoint, spec),
            enable_prefix_caching=config.cache.enable_prefix_caching,
            dtype=dtype_name,
            device=device.type,
            attention_backend=backend,
            attention_backend_reason=reason,
            engine_id=secrets.token_hex(8),
            start_phases=tuple(phases.ended),
        )


def _eos_ids(checkpoint: Checkpoint, spec: ModelSpec) -> tuple[int, ...]:
    """What ends generation by the model's configuration, or by its tokenizer: many fine-tunes name it there alone."""
    ids = list(spec.eos_ids)
    if checkpoint.kind == "safetensors":  # a GGUF file has one place for both
        with contextlib.suppress(ConfigError):  # without a tokenizer there is nothing to add; who needs one will say so
            ids += load_tokenizer(checkpoint).eos_ids
    return tuple(token_id for token_id in dict.fromkeys(ids) if token_id < spec.vocab_size)


class _Phases:
    """Clock of the start: each phase lasts from the end of the one before it."""

    def __init__(self, on_phase: Callable[[str, float], None]):
        self.ended: list[tuple[str, float]] = []
        self._on_phase, self._began_s = on_phase, time.monotonic()

    def end(self, name: str) -> None:
        now_s = time.monotonic()
        self.ended.append((name, now_s - self._began_s))
        self._on_phase(*self.ended[-1])
        self._began_s = now_s


def _warm_up_steps(size: CacheSize, num_groups: int, block_size: int, max_tokens: int) -> list[SchedulerOutput]:
    """A prompt and a token after it, through everything that a real step touches; frees what it took."""
    num_prompt = min(_WARM_UP_TOKENS, max_tokens, size.max_model_len - 1)
    num_blocks = -(-(num_prompt + 1) // block_size)
    # A small pool's blocks may occur twice in a table: the values don't matter, and nobody looks for them later.
    blocks = tuple(1 + i % size.num_blocks for i in range(num_blocks))
    params = SamplingParams(max_tokens=2, seed=0, temperature=0.0)
    new = NewSeq("warm-up", 0, (0,) * num_prompt, num_prompt, params, ())
    prompt = ScheduledSeq("warm-up", 0, 0, num_prompt, True, (blocks,) * num_groups)
    token = ScheduledSeq("warm-up", 0, num_prompt, 1, True, ((),) * num_groups)
    return [
        SchedulerOutput(-3, (new,), (prompt,), ()),
        SchedulerOutput(-2, (), (token,), ()),
        SchedulerOutput(-1, (), (), (0,)),
    ]
