"""Decode steps as captured CUDA graphs: one launch instead of hundreds, over a ladder of batch sizes."""

from __future__ import annotations

import dataclasses
import gc
import logging
import sys
import time
from bisect import bisect_left
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from pagedray.engine.models.registry import Model
from pagedray.engine.worker.attention.triton_backend import TritonAttention
from pagedray.engine.worker.forward_context import ForwardContext, forward_context
from pagedray.engine.worker.step_plan import StepPlan

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class DecodeGraph:
    """The forward of `size` sequences with one token each, from the step's integers to logits."""

    size: int
    attention: TritonAttention
    ints: Tensor  # what `attention.fill` writes and the graph reads
    graph: torch.cuda.CUDAGraph
    logits: Tensor  # [size, V]: valid until any graph of the ladder is replayed again

    def replay(self, step: StepPlan) -> Tensor:
        """Queue the step; logits [S, V] of its sequences."""
        self.attention.fill(step, self.size, self.ints)
        self.graph.replay()
        return self.logits[: step.num_seqs]


class DecodeGraphs:
    """
    Args:
        sizes: numbers of sequences to capture for.
        pages: of the KV cache, per slot.
    """

    def __init__(self, model: Model, attention: TritonAttention, pages: tuple[Tensor, ...], sizes: tuple[int, ...]):
        self._attention = attention
        self._graphs: dict[int, DecodeGraph] = {}
        self.sizes: list[int] = []
        self._capture(model, pages, sorted(set(sizes)))

    def pick(self, step: StepPlan) -> DecodeGraph | None:
        """The smallest graph that holds the step; None: it is too big, or not one token and one sample a sequence."""
        if step.num_tokens > len(step.sampled) or step.prompt_spans:
            return None
        at = bisect_left(self.sizes, step.num_seqs)
        return self._graphs[self.sizes[at]] if at < len(self.sizes) else None

    @torch.inference_mode()
    def _capture(self, model: Model, pages: tuple[Tensor, ...], sizes: list[int]) -> None:
        began_s, device = time.monotonic(), pages[0].device
        gc.collect()
        torch.cuda.synchronize(device)
        free_before = torch.cuda.mem_get_info(device)[0]
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(device)
        # Largest first: smaller ones find room in what it took.
        with torch.cuda.stream(stream):
            for size in tqdm(
                reversed(sizes),
                total=len(sizes),
                desc="capturing decode graphs",
                bar_format="{desc} {percentage:3.0f}%|{bar:30}| {n}/{total} in {elapsed_s:.1f} s",
                disable=not sys.stderr.isatty(),
            ):
                self._graphs[size] = self._capture_one(model, pages, size, pool)
        torch.cuda.synchronize(device)
        self.sizes = sizes
        gib = (free_before - torch.cuda.mem_get_info(device)[0]) / 2**30
        seconds = time.monotonic() - began_s
        log.info("decode graphs captured sizes=%s seconds=%.1f gib=%.2f", ",".join(map(str, sizes)), seconds, gib)

    def _capture_one(self, model: Model, pages: tuple[Tensor, ...], size: int, pool: Any) -> DecodeGraph:
        attention = self._attention
        layout = attention.decode_layout(size)
        ints = torch.empty(attention.num_ints(layout), dtype=torch.int32, device=pages[0].device)
        attention.fill_empty(layout, ints)

        def forward() -> Tensor:
            batch = attention.decode_batch(layout, ints)
            with forward_context(ForwardContext(pages, batch.plans)):
                return model.logits(model(batch.token_ids, batch.positions))

        forward()  # compiles, and lets libraries make what they may not make while capturing
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=pool)  # torch.cuda.graph() would collect garbage each time, a tenth of a second
        logits = forward()
        graph.capture_end()
        return DecodeGraph(size, attention, ints, graph, logits)
