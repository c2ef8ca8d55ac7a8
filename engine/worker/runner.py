"""One rank's step: from a plan to sampled tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from pagedray.engine.errors import ConfigError
from pagedray.engine.grammar.vocabulary import Vocabulary
from pagedray.engine.messages import PromptLogprobs, RunnerOutput, SchedulerOutput, TokenLogprobs
from pagedray.engine.models.registry import Model
from pagedray.engine.worker.attention.cpu_backend import CpuAttention
from pagedray.engine.worker.attention.flashinfer_backend import FlashInferAttention
from pagedray.engine.worker.attention.torch_backend import TorchAttention
from pagedray.engine.worker.attention.triton_backend import TritonAttention
from pagedray.engine.worker.constraints import Constraints
from pagedray.engine.worker.forward_context import ForwardContext, forward_context
from pagedray.engine.worker.gpu_sampler import GpuSampler, GpuSamplingState
from pagedray.engine.worker.graphs import StepGraphs
from pagedray.engine.worker.host_copies import HostCopies
from pagedray.engine.worker.kv_cache import KVCache
from pagedray.engine.worker.row_state import RowState
from pagedray.engine.worker.sampler import SampledTokens, Sampler, SamplingState, ScoredTokens, score_tokens
from pagedray.engine.worker.stage import OnlyStage
from pagedray.engine.worker.step_plan import PromptSpan, StepPlan
from pagedray.engine.worker.step_slots import HostTokens
from pagedray.engine.worker.upload import upload

_PROMPT_LOGITS_ROWS = 128  # of a long prompt at once: logits are as wide as the vocabulary


class ModelRunner:
    """Owns everything that a step reads and writes.

    Args:
        rows: what outlives steps, by row.
        attention: plans and computes attention; of the same rows and cache.
        stage: exchanges with the other stages of a pipeline; None: there are none.
        load_vocabulary: of the model, for constrained outputs; raises ConfigError where it has none. None: it has none.
    """

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        rows: RowState,
        attention: CpuAttention | TorchAttention | TritonAttention | FlashInferAttention,
        vocab_size: int,
        stage: OnlyStage | None = None,
        load_vocabulary: Callable[[], Vocabulary] | None = None,
    ):
        self.model, self.cache, self.rows, self.attention = model, cache, rows, attention
        self.device = rows.last_token.device
        self.stage = stage or OnlyStage()
        is_gpu = self.device.type == "cuda"
        self.sampling = (GpuSamplingState if is_gpu else SamplingState)(rows.num_rows, vocab_size, self.device)
        self.sampler = (GpuSampler if is_gpu else Sampler)(self.sampling)
        self.constraints = Constraints(rows.num_rows, vocab_size, load_vocabulary or _no_vocabulary)
        self._graphs: StepGraphs | None = None
        self._sampled_rows: tuple[tuple[int, ...], Tensor] = (), self.rows.last_token[:0]
        self._copy_stream = torch.cuda.Stream(self.device) if is_gpu else None

    def capture(self, num_seqs: tuple[int, ...], num_tokens: tuple[int, ...] = ()) -> None:
        """Capture steps of these sizes, see `StepGraphs`; later steps that fit one are replays."""
        assert isinstance(self.attention, TritonAttention), f"{self.attention.name} can't be captured"
        assert isinstance(self.sampling, GpuSamplingState)
        self.stage.catch_up()
        parts = self.model, self.attention, self.cache.pages, self.sampling, self.rows.last_token, self.stage
        self._graphs = StepGraphs(*parts, num_seqs, num_tokens)

    @torch.inference_mode()
    def run(self, out: SchedulerOutput) -> PendingOutput:
        """Queue one step on the device. Steps must come in order."""
        self.rows.apply(out)
        if self.stage.is_last:
            for row in out.freed_rows:
                self.sampling.free(row)
                self.constraints.free(row)
            for seq in out.added:
                self.sampling.add(seq)
                self.constraints.add(seq)
        if not out.scheduled:
            return PendingOutput(out, HostCopies(None), (), None, {})
        step = StepPlan.of(self.rows, out, by_length=self.attention.wants_by_length)
        self.stage.begin(out.step, step)
        graph = self._graphs.pick(step) if self._graphs else None
        if graph is not None and graph.can_sample(step) and not self.constraints.will_mask(step):
            host_tokens = graph.sample(step)
            self.stage.send_ids(step)
            return self._queued(out, step, HostCopies(None), host_tokens, {})
        hidden = self._forward(step) if graph is None else graph.forward(step)
        if not self.stage.is_last:
            self.stage.give(hidden, step)
            return PendingOutput(out, HostCopies(None), (), None, {})
        last = hidden[upload(step.sampling_tokens, self.device)] if step.prompt_spans else hidden
        tokens = self._sample(self.model.logits(last), step) if step.sampled else None
        prompts = {span.index: self._score_prompt(hidden, span) for span in step.prompt_spans}
        copies = HostCopies(self._copy_stream)
        tokens = None if tokens is None else tokens.to_host(copies.add)
        prompts = {index: scores.to_host(copies.add) for index, scores in prompts.items()}
        copies.finish()
        self.stage.send_ids(step)  # behind the copies, which don't wait for the stage that takes them
        return self._queued(out, step, copies, tokens, prompts)

    def _queued(
        self,
        out: SchedulerOutput,
        step: StepPlan,
        copies: HostCopies,
        tokens: SampledTokens | HostTokens | None,
        prompts: dict[int, PromptScores],
    ) -> PendingOutput:
        """A step that is queued with its sampling."""
        pending = PendingOutput(out, copies, step.sampled, tokens, prompts, self.constraints.take_failed())
        self.constraints.await_tokens(step, pending)
        return pending

    def _forward(self, step: StepPlan) -> Tensor:
        """Hidden states [T, hidden], or of the step's wanted tokens alone; what the next stage begins with."""
        batch = self.attention.gather(step)
        inputs = self.stage.empty_inputs(step.num_tokens)
        if inputs is None:
            inputs = batch.token_ids
        else:
            self.stage.receive(inputs)
        with forward_context(ForwardContext(self.cache.pages, batch.plans, batch.wanted)):
            hidden: Tensor = self.model(inputs, batch.positions)
        return hidden

    def _sample(self, logits: Tensor, step: StepPlan) -> SampledTokens:  # logits [S, V]
        masks = self.constraints.masks(step)  # may wait for tokens of steps before: as late as possible
        tokens = self.sampler.sample(logits, self.sampling.gather(step.sampling_rows, step.sampling_positions, masks))
        if step.sampling_rows != self._sampled_rows[0]:  # they rarely change from one decode step to the next
            self._sampled_rows = step.sampling_rows, upload(step.sampling_rows, self.device)
        self.rows.last_token.index_copy_(0, self._sampled_rows[1], tokens.token_ids)
        return tokens

    def _score_prompt(self, hidden: Tensor, span: PromptSpan) -> PromptScores:
        targets = upload(span.targets, self.device)
        rows = zip(hidden[span.tokens].split(_PROMPT_LOGITS_ROWS), targets.split(_PROMPT_LOGITS_ROWS), strict=True)
        return PromptScores(
            span.start, [score_tokens(self.model.logits(part), ids, span.num_top) for part, ids in rows]
        )


@dataclasses.dataclass(frozen=True)
class PromptScores:
    """Log-probabilities of a sequence's prompt tokens from position `start` on, a part at a time."""

    start: int
    parts: list[ScoredTokens]

    def to_host(self, copy: Callable[[Tensor], Tensor]) -> PromptScores:
        return PromptScores(self.start, [part.to_host(copy) for part in self.parts])

    def to_message(self) -> PromptLogprobs:
        return PromptLogprobs(self.start, tuple(entry for part in self.parts for entry in part.to_messages()))


def _no_vocabulary() -> Vocabulary:
    raise ConfigError("the model was loaded without a tokenizer")


class PendingOutput:
    """A step that is queued or done.

    Args:
        failed: as in `RunnerOutput`.
    """

    def __init__(
        self,
        out: SchedulerOutput,
        copies: HostCopies,
        sampled: tuple[int, ...],
        tokens: SampledTokens | HostTokens | None,
        prompts: dict[int, PromptScores],
        failed: tuple[tuple[str, str], ...] = (),
    ):
        self._out, self._copies = out, copies
        self._sampled, self._tokens, self._prompts, self._failed = sampled, tokens, prompts, failed
        self._result: RunnerOutput | None = None

    def wait_for_tokens(self) -> list[int]:
        """Those that were sampled, in the order of `StepPlan.sampled`; waits until they are on the host."""
        self._copies.wait()
        return self._tokens.read() if self._tokens is not None else []

    def wait(self) -> RunnerOutput:
        """The step's result, aligned with its plan; waits until the device is done with it."""
        if self._result is None:
            self._copies.wait()
            self._result = self._message()
        return self._result

    def _message(self) -> RunnerOutput:
        token_ids = [-1] * len(self._out.scheduled)
        logprobs: list[TokenLogprobs | None] = [None] * len(token_ids)
        scored: dict[int, TokenLogprobs] = {}
        if self._tokens is not None:
            sampled, scored = self._tokens.to_messages()
            for index, token_id in zip(self._sampled, sampled, strict=True):
                token_ids[index] = token_id
            for i, entry in scored.items():
                logprobs[self._sampled[i]] = entry
        prompts = {index: scores.to_message() for index, scores in self._prompts.items()}
        return RunnerOutput(
            step=self._out.step,
            token_ids=tuple(token_ids),
            logprobs=tuple(logprobs) if scored else (),
            prompt_logprobs=tuple(map(prompts.get, range(len(token_ids)))) if prompts else (),
            failed=self._failed,
        )
