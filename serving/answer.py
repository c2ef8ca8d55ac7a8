"""The words of one HTTP request: updates of its choices in, text out."""

from __future__ import annotations

import time
from typing import Literal

import msgspec

from pagedray.engine.generation import GenerationParams
from pagedray.engine.messages import PromptLogprobs, ReasoningSpan, RequestUpdate, TokenLogprobs
from pagedray.engine.text.detokenizer import Detokenizer
from pagedray.engine.text.tokenizer import Tokenizer
from pagedray.serving.client import Generation
from pagedray.serving.metrics import RequestMetrics
from pagedray.serving.reasoning_count import ReasoningCount


class Delta(msgspec.Struct):
    """What one delivery adds to one choice.

    `token_ids` and `logprobs` are those of the tokens that came, while `text` may hold back a part of a character or of
    what could become a stop string: it follows with a later delta. So per choice there are as many log-probabilities as
    completion tokens, and the deltas' texts join to the whole text.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: int | str | None = None  # the stop id or stop string that ended it; None for eos and length


class ChoiceSoFar:
    """All deltas of one choice, joined."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    def add(self, delta: Delta) -> None:
        self.text.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        for part in delta.prompt_logprobs:
            self.prompt_logprobs += part.entries
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


class Answer:
    """Reads a generation to its end.

    Args:
        generation: its requests are the choices, those of the first prompt first.
        params: what was asked for each prompt; `params.n` choices belong to one prompt.
        metrics: told of each delivery and end.
        arrival_s: when the HTTP request came, on the monotonic clock.
        reasoning: where the model reasons, for the count of those tokens.
    """

    def __init__(
        self,
        generation: Generation,
        num_choices: int,
        tokenizer: Tokenizer,
        params: GenerationParams,
        metrics: RequestMetrics,
        arrival_s: float,
        reasoning: ReasoningSpan | None = None,
    ):
        self._generation = generation
        self._params = params
        self._metrics = metrics
        self._start_s = self._last_s = arrival_s
        self._detokenizers = [
            Detokenizer(
                tokenizer,
                stop=params.stop,
                include_stop=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
                min_tokens=params.min_tokens,
            )
            for _ in range(num_choices)
        ]
        self._cached: list[int | None] = [None] * num_choices
        self._reasoning = [ReasoningCount(reasoning, tokenizer.token_bytes) for _ in range(num_choices)]
        self.num_completion_tokens = 0  # up to and with the one that completes a stop

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens taken from the prefix cache; like prompt tokens, counted once for all choices of a prompt."""
        return sum(num or 0 for num in self._cached[:: self._params.n])

    @property
    def num_reasoning_tokens(self) -> int:
        """Those of the completion tokens in which the model reasoned."""
        return sum(count.num_tokens for count in self._reasoning)

    async def next(self) -> list[Delta]:
        """What came since the last call, at most one delta per choice; waits for something. Empty at the end.

        Raises:
            PagedrayError: see `Generation.next`.
        """
        arrived = await self._generation.next()
        deltas = [self._delta(index, update) for index, update in _merged(arrived)]
        if any(delta.token_ids for delta in deltas):
            self._observe()
        return deltas

    def _delta(self, index: int, update: RequestUpdate) -> Delta:
        if self._cached[index] is None:
            self._cached[index] = update.num_cached_tokens
        is_last = update.finish_reason is not None
        words = self._detokenizers[index].feed(update.token_ids, is_last, update.stop_id)
        num = words.num_tokens
        self.num_completion_tokens += num
        self._reasoning[index].add(update.token_ids[:num])
        delta = Delta(index, words.text, update.token_ids[:num], update.logprobs[:num], update.prompt_logprobs)
        if words.stop is not None:
            delta.finish_reason, delta.stop_reason = "stop", words.stop
            self._generation.finish(index)  # the engine doesn't know text: it would go on
        elif update.finish_reason == "stop" or update.finish_reason == "length":
            delta.finish_reason = update.finish_reason
            if update.stop_id in self._params.stop_token_ids:
                delta.stop_reason = update.stop_id
        if delta.finish_reason is not None:
            self._metrics.finished(delta.finish_reason, time.monotonic() - self._start_s)
        return delta

    def _observe(self) -> None:
        now = time.monotonic()
        if self._last_s == self._start_s:
            self._metrics.first_token(now - self._start_s)
        else:
            self._metrics.next_tokens(now - self._last_s)
        self._last_s = now


def _merged(arrived: list[tuple[int, RequestUpdate]]) -> list[tuple[int, RequestUpdate]]:
    """One update per choice: what gathered while the client read slowly is said at once."""
    if len(arrived) < 2:
        return arrived
    by_index: dict[int, list[RequestUpdate]] = {}
    for index, update in arrived:
        by_index.setdefault(index, []).append(update)
    return [(index, updates[0] if len(updates) == 1 else _join(updates)) for index, updates in by_index.items()]


def _join(updates: list[RequestUpdate]) -> RequestUpdate:
    last = updates[-1]
    return msgspec.structs.replace(
        last,
        first=updates[0].first,
        token_ids=sum((u.token_ids for u in updates), ()),
        logprobs=sum((u.logprobs for u in updates), ()),
        prompt_logprobs=sum((u.prompt_logprobs for u in updates), ()),
        num_cached_tokens=updates[0].num_cached_tokens,
    )
