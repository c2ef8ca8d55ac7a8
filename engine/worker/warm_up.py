"""Made-up steps: to measure memory with, and to compile and load all that real steps will touch."""

from __future__ import annotations

from collections.abc import Iterator

from pagedray.engine.messages import Constraint, NewSeq, ReasoningSpan, SamplingParams, ScheduledSeq, SchedulerOutput
from pagedray.engine.worker.kv_cache import CacheSize

_PROMPT_TOKENS = 64
_GREEDY = SamplingParams(max_tokens=2, seed=0, temperature=0.0)
_SAMPLED = SamplingParams(max_tokens=2, seed=0)
_FILTERED = SamplingParams(max_tokens=2, seed=0, top_p=0.9, top_k=50)
_EDITED = SamplingParams(
    max_tokens=2, seed=0, top_p=0.9, repetition_penalty=1.1, logit_bias=((0, 1.0),), logprobs=1, prompt_logprobs=1
)
_FORCED = SamplingParams(  # by a constraint that needs no tokenizer
    max_tokens=2, seed=0, constraint=Constraint(reasoning=ReasoningSpan(b"", b"", (0,) * 2, is_open=True, max_tokens=0))
)
_FEW = (1, 2, 4, 8, 16)  # numbers of rows that kernels for few of them are compiled for


class MadeUpSteps:
    """Their numbers rise, and all lie below those of real steps: `PipelineStage` takes sampled ids in order of number,
    and those of made-up steps may still be on their way when the first real step comes.

    Args:
        size: of the cache. Blocks are used several times over: values don't matter, and nobody looks for them later.
        num_groups: block groups.
        max_tokens: of one step.
        num_rows: sequences of one step.
    """

    def __init__(self, size: CacheSize, num_groups: int, block_size: int, max_tokens: int, num_rows: int):
        self._size, self._num_groups, self._block_size = size, num_groups, block_size
        self._max_tokens, self._num_rows = max_tokens, num_rows
        self._step = -(2**31)

    def everything(self, is_gpu: bool) -> Iterator[SchedulerOutput]:
        """Prompts, whole and in chunks, and single tokens, with every way to sample that a GPU compiles kernels for."""
        yield from self._prompt_and_token(_GREEDY, 1)
        if not is_gpu:
            return
        for params in (_SAMPLED, _FILTERED, _EDITED, _FORCED):
            yield from self._prompt_and_token(params, 2)
        for size in _FEW:
            if size <= min(self._num_rows, self._max_tokens):
                yield self._begin([1] * size, _GREEDY)
                yield self._free(size)

    def widest(self) -> Iterator[SchedulerOutput]:
        """As many prompt tokens as a step may have, then as many sequences, all of them sampling."""
        longest = min(self._max_tokens, self._size.max_model_len - 1)
        full, rest = divmod(self._max_tokens, longest)
        lengths = ([longest] * full + [rest] * (rest > 0))[: self._num_rows]
        yield self._begin(lengths, _GREEDY)
        yield self._free(len(lengths))
        yield self._begin([1] * self._num_rows, _FILTERED)
        yield self._free(self._num_rows)

    def _prompt_and_token(self, params: SamplingParams, num_chunks: int) -> Iterator[SchedulerOutput]:
        num_prompt = min(_PROMPT_TOKENS, self._max_tokens, self._size.max_model_len - 1)
        if num_chunks > num_prompt:
            return
        first = num_prompt // num_chunks
        yield self._begin([num_prompt], params, first)
        if first < num_prompt:
            yield self._go_on(first, num_prompt - first, True)
        yield self._go_on(num_prompt, 1, True)
        yield self._free(1)

    def _begin(self, lengths: list[int], params: SamplingParams, first: int | None = None) -> SchedulerOutput:
        new, parts = [], []
        for row, length in enumerate(lengths):
            name = f"made-up-{row}"
            new.append(NewSeq(name, row, (0,) * length, length, params, ()))
            count = -(-(length + 1) // self._block_size)
            blocks = tuple(1 + i % self._size.num_blocks for i in range(count))
            num_tokens = length if first is None else first
            parts.append(ScheduledSeq(name, row, 0, num_tokens, num_tokens == length, (blocks,) * self._num_groups))
        return self._out(tuple(new), tuple(parts), ())

    def _go_on(self, start: int, num_tokens: int, samples: bool) -> SchedulerOutput:
        part = ScheduledSeq("made-up-0", 0, start, num_tokens, samples, ((),) * self._num_groups)
        return self._out((), (part,), ())

    def _free(self, count: int) -> SchedulerOutput:
        return self._out((), (), tuple(range(count)))

    def _out(
        self, added: tuple[NewSeq, ...], scheduled: tuple[ScheduledSeq, ...], freed: tuple[int, ...]
    ) -> SchedulerOutput:
        self._step += 1
        return SchedulerOutput(self._step, added, scheduled, freed)
