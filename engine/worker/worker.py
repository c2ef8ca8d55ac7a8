"""One rank: loads its model, then computes steps in the order they are submitted."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

import torch

from pagedray.engine.checkpoint import Checkpoint, open_checkpoint
from pagedray.engine.config import Config, EngineFacts
from pagedray.engine.errors import ConfigError, EngineDead
from pagedray.engine.grammar.vocabulary import Vocabulary, make_vocabulary
from pagedray.engine.layers.moe import expert_loads, forget_expert_loads
from pagedray.engine.messages import RunnerOutput, SchedulerOutput
from pagedray.engine.metrics import ExpertCounts
from pagedray.engine.models.parse import model_spec
from pagedray.engine.models.registry import build_model
from pagedray.engine.models.spec import ModelSpec
from pagedray.engine.models.stages import check_ranks, stage_spec
from pagedray.engine.text.tokenizer import load_tokenizer
from pagedray.engine.worker.assemble import Assembly
from pagedray.engine.worker.backend import choose_backend, choose_device, choose_dtype
from pagedray.engine.worker.device import find_machine, memory_for, with_compiled_kernels
from pagedray.engine.worker.host_copies import HostCopies
from pagedray.engine.worker.host_memory import keep_freed_memory
from pagedray.engine.worker.parallel import ALONE, Parallel
from pagedray.engine.worker.runner import ModelRunner, PendingOutput
from pagedray.engine.worker.weights import fill_with_noise, load_weights

log = logging.getLogger(__name__)

_KEPT_RESULTS = 6  # beside those of steps in flight, so that an answer that got lost can be asked for again


class Worker:
    """Steps are queued on the device by one thread. On a CPU, which has no queue, that thread computes them.

    Args:
        connect: makes this rank's groups, with all other ranks of its gang; called while they load.
    """

    def __init__(
        self, config: Config, rank: int = 0, connect: Callable[[torch.device], Parallel] = lambda device: ALONE
    ):
        self.config, self.rank = config, rank
        self._connect, self._parallel = connect, ALONE
        self._stream = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pagedray-worker")
        self._steps: dict[int, Future[PendingOutput]] = {}  # the last few, oldest first
        self._failure: Exception | None = None
        self._closing = contextlib.ExitStack()
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
        self._steps[out.step] = self._stream.submit(self._launch, out)
        self._steps.pop(out.step - self.config.scheduler.run_ahead - _KEPT_RESULTS, None)

    def result(self, step: int) -> RunnerOutput:
        """Wait for a step; it may be one of the last few again.

        Raises:
            Exception: whatever the step failed with, and EngineDead for every step after it.
        """
        if step not in self._steps:
            raise LookupError(f"step {step} is not among those kept: {list(self._steps)}")
        try:
            pending = self._steps[step].result()
        except CancelledError:
            raise EngineDead("the worker was closed") from None
        with self._failures_of(step):
            return pending.wait()

    def expert_loads(self) -> ExpertCounts:
        """Of the layers of this stage, in the steps submitted so far, which it waits for; they don't wait for it."""
        layers, loads, copies = self._stream.submit(self._copy_loads).result()
        copies.wait()
        return {} if loads is None else dict(zip(layers, map(tuple, loads.tolist()), strict=True))

    def abort(self) -> None:
        """End a step that waits for ranks which are gone."""
        self._parallel.abort()

    def close(self) -> None:
        """Finish the step that runs, drop those that wait. Safe to call twice."""
        self._stream.shutdown(wait=True, cancel_futures=True)
        self._closing.close()

    def _copy_loads(self) -> tuple[tuple[int, ...], torch.Tensor | None, HostCopies]:
        layers, loads = expert_loads(self._runner.model)
        copies = HostCopies(torch.cuda.Stream(loads.device) if loads is not None and loads.is_cuda else None)
        return layers, None if loads is None else copies.add(loads), copies.finish()

    def _launch(self, out: SchedulerOutput) -> PendingOutput:
        if self._failure is not None:  # rows and pages are in an unknown state
            raise EngineDead(f"an earlier step failed: {self._failure!r}")
        with self._failures_of(out.step):
            return self._runner.run(out)

    @contextlib.contextmanager
    def _failures_of(self, step: int) -> Iterator[None]:
        """A GPU tells of a step's failure when it is waited for, or while a later one is queued."""
        try:
            yield
        except Exception as error:
            if self._failure is None:
                self._failure = error
                log.exception("step failed step=%d", step)
            raise

    def _load(self, on_phase: Callable[[str, float], None]) -> EngineFacts:
        phases = _Phases(on_phase)
        config, machine = self.config, find_machine()
        device = torch.device(choose_device(config.worker.device, machine))
        parallel = self._parallel = self._connect(device)
        torch.set_num_threads(
            config.worker.cpu_threads or max(1, len(os.sched_getaffinity(0)) // parallel.num_ranks_here)
        )
        if parallel.world.size > 1:
            phases.end("connect ranks")
        checkpoint = open_checkpoint(config.model.model, config.model.revision, config.model.needs_weights)
        whole = model_spec(checkpoint)
        check_ranks(whole, config.worker)
        spec = stage_spec(whole, parallel.pp.rank, parallel.pp.size, config.worker.pipeline_layers)
        dtype_name = choose_dtype(config.model.dtype, spec.dtype, device.type)
        dtype: torch.dtype = getattr(torch, dtype_name)
        kv_dtype = torch.float8_e4m3fn if config.cache.kv_cache_dtype == "fp8" else dtype
        phases.end("read configuration")
        if device.type == "cpu":
            machine, was_compiled = with_compiled_kernels(machine)
            if was_compiled:
                phases.end("compile kernels")
        backend, reason = choose_backend(
            machine, device.type, _name(kv_dtype), spec.head_dim, config.worker.attention_backend
        )
        with memory_for("the weights", "use a smaller model, a narrower dtype or more GPUs"):
            model = build_model(spec, dtype, device, parallel)
            if config.model.load_format == "dummy":
                fill_with_noise(model, device)
            else:
                load_weights(model, checkpoint, device, set(range(spec.num_layers)) - set(spec.layers))
            phases.end("load weights")
            model.finish_loading()
        phases.end("pack weights")

        rank_spec = spec.of_one_rank(parallel.tp.size)
        load_vocabulary = functools.partial(_load_vocabulary, checkpoint, spec)
        parts = Assembly(model, rank_spec, device, dtype, kv_dtype, backend, config, parallel, load_vocabulary)
        with memory_for("a step", "lower max_num_batched_tokens or max_num_seqs"):
            size = parts.size()
        if device.type == "cuda":
            phases.end("measure memory")
        self._runner = parts.runner(size)
        self._closing.callback(self._runner.constraints.close)
        phases.end("allocate kv cache")
        for out in parts.made_up_steps(size).everything(device.type == "cuda"):
            self._runner.run(out).wait()
        phases.end("warm up")
        sizes = parts.graph_sizes()
        if any(sizes):
            with memory_for("graphs", "lower gpu_memory_utilization, or give fewer cuda_graph_sizes"):
                self._runner.capture(*sizes)
            phases.end("capture graphs")
        forget_expert_loads(model)  # those of made-up steps
        if parallel.is_last_stage:
            self._runner.constraints.start()  # in the background: the first one shouldn't hold up a step for it
        log.info(
            "worker ready model=%s dtype=%s threads=%d blocks=%d gib=%.2f tokens=%d attention=%s (%s)",
            *(checkpoint.name, dtype_name, torch.get_num_threads()),
            *(size.num_blocks, size.total_bytes / 2**30, size.capacity_tokens, backend, reason),
        )
        cache = self._runner.cache
        return EngineFacts(
            model_names=config.model.served_model_name or (config.model.model,),
            vocab_size=spec.vocab_size,
            max_model_len=size.max_model_len,
            block_size=cache.block_size,
            num_blocks=size.num_blocks,
            block_groups=cache.windows,
            kv_capacity_tokens=size.capacity_tokens,
            eos_ids=_eos_ids(checkpoint, spec) if self.rank == 0 else (),  # whose facts are the gang's
            enable_prefix_caching=config.cache.enable_prefix_caching,
            dtype=dtype_name,
            device=device.type,
            attention_backend=backend,
            attention_backend_reason=reason,
            num_graphs=sum(map(len, sizes)),
            engine_id=secrets.token_hex(8),
            start_phases=tuple(phases.ended),
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _eos_ids(checkpoint: Checkpoint, spec: ModelSpec) -> tuple[int, ...]:
    """What ends generation by the model's configuration, or by its tokenizer: many fine-tunes name it there alone."""
    ids = list(spec.eos_ids)
    if checkpoint.kind == "safetensors":  # a GGUF file has one place for both
        with contextlib.suppress(ConfigError):  # without a tokenizer there is nothing to add; who needs one will say so
            ids += load_tokenizer(checkpoint).eos_ids
    return tuple(token_id for token_id in dict.fromkeys(ids) if token_id < spec.vocab_size)


def _load_vocabulary(checkpoint: Checkpoint, spec: ModelSpec) -> Vocabulary:
    """As the ingress has it. Raises: ConfigError: the checkpoint has no tokenizer that can be used."""
    return make_vocabulary(load_tokenizer(checkpoint), spec.vocab_size, _eos_ids(checkpoint, spec))


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
