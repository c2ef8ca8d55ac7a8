"""Steps as captured CUDA graphs: one launch instead of hundreds, over ladders of sizes."""

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
from pagedray.engine.worker.attention.triton_backend import Layout, TritonAttention
from pagedray.engine.worker.forward_context import ForwardContext, forward_context
from pagedray.engine.worker.step_plan import StepPlan

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class StepGraph:
    """The forward of one layout, from a step's integers to the hidden states that are wanted."""

    layout: Layout
    attention: TritonAttention
    ints: Tensor  # what `attention.fill` writes and the graph reads
    graph: torch.cuda.CUDAGraph
    hidden: Tensor  # [layout's, hidden]: valid until any graph of the ladders is replayed again

    def replay(self, step: StepPlan) -> Tensor:
        """Queue the step; hidden states of the tokens that sequences sample after."""
        self.attention.fill(step, self.layout, self.ints)
        self.graph.replay()
        return self.hidden[: len(step.sampled)]


class StepGraphs:
    """
    Args:
        pages: of the KV cache, per slot.
        num_seqs: ladder of steps with one token a sequence.
        num_tokens: ladder of steps that have prompt chunks too.
    """

    def __init__(
        self,
        model: Model,
        attention: TritonAttention,
        pages: tuple[Tensor, ...],
        num_seqs: tuple[int, ...],
        num_tokens: tuple[int, ...],
    ):
        self._attention = attention
        self._decode = [attention.decode_layout(size) for size in sorted(set(num_seqs))]
        self._prompt = [attention.prompt_layout(size) for size in sorted(set(num_tokens))]
        self._graphs: dict[Layout, StepGraph] = {}
        self._capture(model, pages)

    def pick(self, step: StepPlan) -> StepGraph | None:
        """The smallest graph that holds the step; None: it is too big for any, or scores a prompt."""
        if step.prompt_spans:
            return None
        ladder = self._decode if step.wanted_tokens is None else self._prompt
        first = bisect_left(ladder, step.num_tokens, key=lambda layout: layout.num_tokens)
        fitting = (layout for layout in ladder[first:] if self._attention.fits(step, layout))
        layout = next(fitting, None)
        return None if layout is None else self._graphs[layout]

    @torch.inference_mode()
    def _capture(self, model: Model, pages: tuple[Tensor, ...]) -> None:
        began_s, device = time.monotonic(), pages[0].device
        layouts = sorted([*self._decode, *self._prompt], key=lambda layout: -layout.num_tokens)
        gc.collect()
        torch.cuda.synchronize(device)
        free_before = torch.cuda.mem_get_info(device)[0]
        pool = torch.cuda.graph_pool_handle()
        # Largest first: smaller ones find room in what it took.
        with torch.cuda.stream(torch.cuda.Stream(device)):
            for layout in tqdm(
                layouts,
                desc="capturing graphs",
                bar_format="{desc} {percentage:3.0f}%|{bar:30}| {n}/{total} in {elapsed_s:.1f} s",
                disable=not sys.stderr.isatty(),
            ):
                self._graphs[layout] = self._capture_one(model, pages, layout, pool)
        torch.cuda.synchronize(device)
        gib = (free_before - torch.cuda.mem_get_info(device)[0]) / 2**30
        seconds = time.monotonic() - began_s
        log.info("graphs captured number=%d seconds=%.1f gib=%.2f", len(layouts), seconds, gib)

    def _capture_one(self, model: Model, pages: tuple[Tensor, ...], layout: Layout, pool: Any) -> StepGraph:
        ints = self._attention.empty_ints(layout)

        def forward() -> Tensor:
            batch = self._attention.batch(layout, ints)
            with forward_context(ForwardContext(pages, batch.plans, batch.wanted)):
                return model(batch.token_ids, batch.positions)

        forward()  # compiles, and lets libraries make what they may not make while capturing
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=pool)  # torch.cuda.graph() would collect garbage each time, a tenth of a second
        hidden = forward()
        graph.capture_end()
        return StepGraph(layout, self._attention, ints, graph, hidden)
