"""One rank's step: from a plan to sampled tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from pagedray.engine.messages import PromptLogprobs, RunnerOutput, SchedulerOutput, TokenLogprobs
from pagedray.engine.models.registry import Model
from pagedray.engine.worker.forward_context import ForwardContext, forward_context
from pagedray.engine.worker.input_batch import InputBatch, PromptRows
from pagedray.engine.worker.kv_cache import KVCache
from pagedray.engine.worker.row_state import RowState
from pagedray.engine.worker.sampler import SampledTokens, Sampler, SamplingState, prompt_logprobs

_PROMPT_LOGITS_ROWS = 128  # of a long prompt at once: logits are as wide as the vocabulary


class ModelRunner:
    """Owns everything that a step reads and writes.

    Args:
        num_rows: most sequences that run at once.
        max_model_len: most tokens of one sequence.
    """

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        *,
        num_rows: int,
        max_model_len: int,
        vocab_size: int,
        device: torch.device,
    ):
        self.model, self.cache, self.device = model, cache, device
        max_blocks = -(-max_model_len // cache.block_size)
        self.rows = RowState(num_rows, len(cache.windows), max_blocks, device)
        self.sampling = SamplingState(num_rows, vocab_size, device)
        self.sampler = Sampler(self.sampling)

    @torch.inference_mode()
    def run(self, out: SchedulerOutput) -> PendingOutput:
        """Queue one step on the device. Steps must come in order."""
        self.rows.apply(out)
        for row in out.freed_rows:
            self.sampling.free(row)
        for seq in out.added:
            self.sampling.add(seq)
        if not out.scheduled:
            return PendingOutput(out, (), None, {})
        batch = InputBatch.gather(self.rows, out, self.cache)
        with forward_context(ForwardContext(self.cache.pages, batch.plans)):
            hidden = self.model(batch.token_ids, batch.positions)  # [T, hidden]
        tokens = self._sample(hidden, batch) if batch.sampled else None
        prompts = {rows.index: self._score_prompt(hidden, rows) for rows in batch.prompt_rows}
        return PendingOutput(out, batch.sampled, tokens, prompts)

    def _sample(self, hidden: Tensor, batch: InputBatch) -> SampledTokens:
        logits = self.model.logits(hidden[batch.sampling_tokens])  # [S, V]
        sampling = self.sampling.gather(batch.sampling_rows, batch.sampling_positions)
        tokens = self.sampler.sample(logits, sampling)
        self.rows.last_token[torch.tensor(batch.sampling_rows, device=self.device)] = tokens.token_ids
        return tokens

    def _score_prompt(self, hidden: Tensor, rows: PromptRows) -> PromptLogprobs:
        entries: list[TokenLogprobs] = []
        for part, targets in zip(
            hidden[rows.tokens].split(_PROMPT_LOGITS_ROWS), rows.targets.split(_PROMPT_LOGITS_ROWS), strict=True
        ):
            entries += prompt_logprobs(self.model.logits(part), targets, rows.num_top)
        return PromptLogprobs(rows.start, tuple(entries))


class PendingOutput:
    """A step that is queued or done."""

    def __init__(
        self,
        out: SchedulerOutput,
        sampled: tuple[int, ...],
        tokens: SampledTokens | None,
        prompts: dict[int, PromptLogprobs],
    ):
        self._out, self._sampled, self._tokens, self._prompts = out, sampled, tokens, prompts

    def wait(self) -> RunnerOutput:
        """The step's result, aligned with its plan; waits until the device is done with it."""
        token_ids = [-1] * len(self._out.scheduled)
        logprobs: list[TokenLogprobs | None] = [None] * len(token_ids)
        if self._tokens is not None:
            for i, (index, token_id) in enumerate(zip(self._sampled, self._tokens.token_ids.tolist(), strict=True)):
                token_ids[index], logprobs[index] = token_id, self._tokens.logprobs(i)
        return RunnerOutput(
            step=self._out.step,
            token_ids=tuple(token_ids),
            logprobs=tuple(logprobs) if any(entry is not None for entry in logprobs) else (),
            prompt_logprobs=tuple(map(self._prompts.get, range(len(token_ids)))) if self._prompts else (),
        )
