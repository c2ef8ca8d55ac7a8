"""Steps as captured CUDA graphs: two launches instead of hundreds, over ladders of sizes.

A graph's inputs lie at one place on the device, and what it makes does so too. From a step's integers, which come in
one copy, one graph leads to hidden states and another from these to tokens. The second is left out where rows need
more than it does (edited logits, log-probabilities): they sample eagerly, from the same hidden states.
"""

from __future__ import annotations

import gc
import logging
import sys
import time
from bisect import bisect_left
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from pagedray.engine.models.registry import Model
from pagedray.engine.worker.attention.triton_backend import Layout, TritonAttention
from pagedray.engine.worker.forward_context import ForwardContext, forward_context
from pagedray.engine.worker.gpu_sampler import GpuSamplingState
from pagedray.engine.worker.stage import OnlyStage
from pagedray.engine.worker.step_plan import StepPlan
from pagedray.engine.worker.step_slots import HostTokens, StepSlot, StepSlots
from pagedray.kernels.sample_rows import FIELDS, sample_rows

log = logging.getLogger(__name__)

R = TypeVar("R")


class Recorder:
    """Captures what functions queue. Graphs share memory: what one of them made is valid until another is replayed,
    unless a tensor keeps it."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, function: Callable[[], R]) -> tuple[Callable[[], None], R]:
        """How to queue it again; and what it returned, which a replay fills anew."""
        function()  # compiles, and lets libraries make what they may not make while capturing
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool)  # torch.cuda.graph() would collect garbage each time, a tenth of a second
        made = function()
        graph.capture_end()
        return graph.replay, made


class StepGraph:
    """Steps of one layout.

    Args:
        model: makes hidden states from a step's batch.
        last_token: of `RowState`, where sampled tokens go.
        stage: gives the hidden states that the model begins with, behind a pipeline's first stage.
    """

    def __init__(
        self,
        layout: Layout,
        model: Model,
        attention: TritonAttention,
        pages: tuple[Tensor, ...],
        sampling: GpuSamplingState,
        last_token: Tensor,
        stage: OnlyStage,
        slots: StepSlots,
        recorder: Recorder,
    ):
        self._layout, self._attention, self._sampling, self._slots = layout, attention, sampling, slots
        self._stage, self._inputs = stage, stage.empty_inputs(layout.num_tokens)
        self._num_attention_ints = attention.num_ints(layout)
        self._ints = torch.empty(num_ints(attention, layout), dtype=torch.int32, device=last_token.device)
        slot = slots.take()
        self._fill(StepPlan.of_nothing(), slot)
        self._fill_fields(StepPlan.of_nothing(), slot)
        slot.send(self._ints)
        slot.end(0)

        def forward() -> Tensor:
            batch = attention.batch(layout, self._ints[: self._num_attention_ints])
            with forward_context(ForwardContext(pages, batch.plans, batch.wanted, batch.padded_slots)):
                return model(batch.token_ids if self._inputs is None else self._inputs, batch.positions)

        def sample(is_greedy: bool) -> None:
            fields = self._ints[self._num_attention_ints :].view(torch.int64).view(len(FIELDS), layout.num_hidden)
            sample_rows(model.logits(self._hidden), fields, None, last_token, is_greedy, slots.tokens)

        # [layout.num_hidden, hidden], before the last stage [2, layout.num_tokens, hidden]
        self._forward, self._hidden = recorder.record(forward)
        if stage.is_last:
            self._sample_greedy, _ = recorder.record(lambda: sample(True))
            self._sample_any, _ = recorder.record(lambda: sample(False))

    def can_sample(self, step: StepPlan) -> bool:
        """Whether all that its rows need was captured."""
        return self._stage.is_last and self._sampling.is_plain(step.sampling_row, step.sampling_position)

    def sample(self, step: StepPlan) -> HostTokens:
        """Queue a step and its sampling, which enters the tokens in `last_token` too."""
        slot = self._slots.take()
        self._fill(step, slot)
        is_greedy = self._fill_fields(step, slot)
        slot.send(self._ints)
        self._run_forward()
        if step.sampled:
            (self._sample_greedy if is_greedy else self._sample_any)()
        return slot.end(len(step.sampled))

    def forward(self, step: StepPlan) -> Tensor:
        """Queue a step up to the hidden states [S, hidden] that sequences sample after, or what the next stage needs.

        They are valid until the graph is replayed again.
        """
        slot = self._slots.take()
        self._fill(step, slot)
        slot.send(self._ints)
        self._run_forward()
        slot.end(0)
        return self._hidden[: len(step.sampled)] if self._stage.is_last else self._hidden

    def _run_forward(self) -> None:
        if self._inputs is not None:
            self._stage.receive(self._inputs)
        self._forward()

    def _fill(self, step: StepPlan, slot: StepSlot) -> None:
        self._attention.fill(step, self._layout, slot.ints_cpu[: self._num_attention_ints])

    def _fill_fields(self, step: StepPlan, slot: StepSlot) -> bool:
        """Whether all rows are greedy."""
        ints = slot.ints_cpu[self._num_attention_ints : len(self._ints)]
        fields = ints.view(np.int64).reshape(len(FIELDS), self._layout.num_hidden)
        return self._sampling.fill(step.sampling_row, step.sampling_position, slot.first_result, fields)


class StepGraphs:
    """
    Args:
        pages: of the KV cache, per slot.
        last_token: of `RowState`.
        num_seqs: ladder of steps with one token a sequence.
        num_tokens: ladder of steps that have prompt chunks too.
    """

    def __init__(
        self,
        model: Model,
        attention: TritonAttention,
        pages: tuple[Tensor, ...],
        sampling: GpuSamplingState,
        last_token: Tensor,
        stage: OnlyStage,
        num_seqs: tuple[int, ...],
        num_tokens: tuple[int, ...],
    ):
        self._attention = attention
        self._decode = [attention.decode_layout(size) for size in sorted(set(num_seqs))]
        self._prompt = [attention.prompt_layout(size) for size in sorted(set(num_tokens))]
        layouts = sorted([*self._decode, *self._prompt], key=lambda layout: -layout.num_tokens)
        slots = StepSlots(
            max(num_ints(attention, layout) for layout in layouts),
            max(layout.num_hidden for layout in layouts),
            last_token.device,
        )
        shared = model, attention, pages, sampling, last_token, stage, slots
        self._graphs = capture(
            layouts, lambda layout, recorder: StepGraph(layout, *shared, recorder), last_token.device
        )

    def pick(self, step: StepPlan) -> StepGraph | None:
        """The smallest graph that holds the step; None: it is too big for any, or scores a prompt."""
        if step.prompt_spans:
            return None
        ladder = self._decode if step.wanted_tokens is None else self._prompt
        first = bisect_left(ladder, step.num_tokens, key=lambda layout: layout.num_tokens)
        fitting = (layout for layout in ladder[first:] if self._attention.fits(step, layout))
        layout = next(fitting, None)
        return None if layout is None else self._graphs[layout]


def num_ints(attention: TritonAttention, layout: Layout) -> int:
    """What a step gets from the host: attention's integers, then the sampler's fields, of two each."""
    return attention.num_ints(layout) + 2 * len(FIELDS) * layout.num_hidden


@torch.inference_mode()
def capture(
    layouts: list[Layout], make: Callable[[Layout, Recorder], StepGraph], device: torch.device
) -> dict[Layout, StepGraph]:
    """Graphs of all layouts, the largest of which comes first: smaller ones find room in what it took."""
    began_s, graphs = time.monotonic(), {}
    gc.collect()
    torch.cuda.synchronize(device)
    free_before = torch.cuda.mem_get_info(device)[0]
    recorder = Recorder()
    with torch.cuda.stream(torch.cuda.Stream(device)):
        for layout in tqdm(
            layouts,
            desc="capturing graphs",
            bar_format="{desc} {percentage:3.0f}%|{bar:30}| {n}/{total} in {elapsed_s:.1f} s",
            disable=not sys.stderr.isatty(),
        ):
            graphs[layout] = make(layout, recorder)
    torch.cuda.synchronize(device)
    gib = (free_before - torch.cuda.mem_get_info(device)[0]) / 2**30
    log.info("graphs captured number=%d seconds=%.1f gib=%.2f", len(layouts), time.monotonic() - began_s, gib)
    return graphs
