"""The offline engine: lists of prompts in, lists of texts out, in one process and without Ray.

    from pagedray.engine import LLM, GenerationParams

    with LLM() as llm:                                    # the embedded model; or a directory, GGUF file or hub id
        for result in llm.generate(["The sky is", "Once upon"], GenerationParams(max_tokens=32)):
            print(result.choices[0].text)

Requests pass through the same checks, scheduler and worker as those that come over HTTP, so the tokens are the same.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from tqdm import tqdm

from pagedray.engine.config import EMBEDDED_MODEL, Device, EngineFacts, load_config
from pagedray.engine.engine import Engine
from pagedray.engine.errors import UserError
from pagedray.engine.executor import LocalExecutor, RankWorker
from pagedray.engine.generation import GenerationParams, make_requests
from pagedray.engine.grammar.compiler import GrammarCompiler
from pagedray.engine.grammar.source import GrammarSource
from pagedray.engine.grammar.vocabulary import make_vocabulary
from pagedray.engine.local_worker import local_tokenizer, local_worker
from pagedray.engine.messages import (
    CompiledGrammar,
    Constraint,
    FinishReason,
    PromptLogprobs,
    Request,
    RequestUpdate,
    TokenLogprobs,
)
from pagedray.engine.text.detokenizer import Detokenizer
from pagedray.engine.text.tokenizer import Tokenizer

CLIENT_ID = "local"
UNBOUNDED = 2**62  # the caller's own lists need no admission control
POLL_S = 3600.0

Prompt = str | Sequence[int]
Grammars = GrammarSource | Sequence[GrammarSource | None] | None


class Choice(msgspec.Struct, frozen=True):
    """One completion of a prompt. `token_ids` include the id that ended it; `text` doesn't, nor a stop string."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: int | str | None = None  # the stop id or stop string; None for eos and length
    logprobs: tuple[TokenLogprobs, ...] = ()


class Generation(msgspec.Struct, frozen=True):
    """Result for one prompt: params.n choices."""

    prompt_ids: tuple[int, ...]
    choices: tuple[Choice, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of prompt_ids[1:], when asked
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache


class LLM:
    """A loaded model that generates for lists of prompts.

    Args:
        model: the embedded default, a checkpoint directory, a GGUF file or a hub id.
        worker_class: builds the worker from (config), of each rank if there are several; tests pass a fake.
        tokenizer: replaces the checkpoint's.
        settings: any field of the configuration tree, e.g. `dtype="bfloat16"`, `max_num_seqs=128`.

    Raises:
        ConfigError: a setting or the checkpoint can't be used.
    """

    def __init__(
        self,
        model: str = EMBEDDED_MODEL,
        *,
        worker_class: Callable[..., RankWorker] | None = None,
        tokenizer: Tokenizer | None = None,
        **settings: Any,
    ):
        unbounded = {"max_queued_requests": UNBOUNDED, "max_queued_tokens": UNBOUNDED}
        self.config = load_config(overrides={"model": model, **unbounded, **settings}, auto_device=_device)
        worker = local_worker(self.config, worker_class)
        if tokenizer is None:
            tokenizer = local_tokenizer(self.config)
        self.tokenizer = tokenizer
        self.facts: EngineFacts = worker.load()
        self._ids = itertools.count()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="pagedray-llm", daemon=True)
        self._thread.start()
        self._engine = Engine(self.config, self.facts, LocalExecutor(worker))
        asyncio.run_coroutine_threadsafe(self._engine.run(), self._loop)
        self._ack = 0
        self._grammars: GrammarCompiler | None = None  # made when the first grammar comes

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: GenerationParams | Sequence[GenerationParams] | None = None,
        *,
        grammar: Grammars = None,
        progress: bool = True,
    ) -> list[Generation]:
        """Complete prompts.

        Args:
            prompts: a text, a list of token ids, or a list of either.
            params: for all prompts, or one for each. Default: 16 tokens, temperature 1, as the completions API.
            grammar: what the outputs must look like, for all prompts, or one (or None) for each.
            progress: show a bar on stderr.

        Returns:
            One result per prompt, in order.

        Raises:
            UserError: a prompt, a parameter or a grammar can't be served; nothing was generated then.
        """
        items: list[Any] = [prompts] if isinstance(prompts, str) or _is_ids(prompts) else list(prompts)
        ids = [self.tokenizer.encode(item) if isinstance(item, str) else list(item) for item in items]
        default = GenerationParams(max_tokens=16)
        return self._generate(
            ids, self._with_grammars(default if params is None else params, grammar, len(ids)), progress
        )

    def chat(
        self,
        conversations: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        params: GenerationParams | Sequence[GenerationParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        grammar: Grammars = None,
        progress: bool = True,
    ) -> list[Generation]:
        """Answer conversations: one list of {"role", "content"} messages, or a list of such lists.

        Other arguments as in `generate`; without params an answer may be as long as the model allows.
        """
        several = bool(conversations) and not isinstance(conversations[0], Mapping)
        items: list[Any] = list(conversations) if several else [conversations]
        ids = [
            self.tokenizer.encode(
                self.tokenizer.apply_chat_template(
                    messages,
                    add_generation_prompt=add_generation_prompt and not continue_final_message,
                    continue_final_message=continue_final_message,
                    kwargs=dict(chat_template_kwargs or {}),
                ),
                add_special_tokens=False,
            )
            for messages in items
        ]
        default = GenerationParams()
        return self._generate(
            ids, self._with_grammars(default if params is None else params, grammar, len(ids)), progress
        )

    def close(self) -> None:
        """Stop the engine and free the model. Safe to call twice."""
        if self._loop.is_closed():
            return
        if self._grammars is not None:
            asyncio.run_coroutine_threadsafe(self._grammars.close(), self._loop).result()
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _with_grammars(
        self, params: GenerationParams | Sequence[GenerationParams], grammar: Grammars, num: int
    ) -> list[GenerationParams]:
        """One set of parameters for each prompt, with its grammar compiled."""
        each = _per_prompt(params, num)
        if grammar is not None and not isinstance(grammar, GrammarSource | list | tuple):
            raise UserError(
                f"grammar must be a GrammarSource or a list of them, not {type(grammar).__name__}", "grammar"
            )
        sources = [grammar] * num if grammar is None or isinstance(grammar, GrammarSource) else list(grammar)
        if len(sources) != num:
            raise UserError(f"{len(sources)} grammars for {num} prompts; give one for all, or one for each", "grammar")
        for source in sources:
            if source is not None and not isinstance(source, GrammarSource):
                raise UserError(f"each grammar must be a GrammarSource or None, not {source!r}", "grammar")
        if not any(sources):
            return each
        if self._loop.is_closed():
            raise RuntimeError("this LLM is closed")
        compiled = asyncio.run_coroutine_threadsafe(self._compile(sources), self._loop).result()
        return [p if g is None else _constrained(p, g) for p, g in zip(each, compiled, strict=True)]

    async def _compile(self, sources: Sequence[GrammarSource | None]) -> list[CompiledGrammar | None]:
        if self._grammars is None:
            vocabulary = make_vocabulary(self.tokenizer, self.facts.vocab_size, self.facts.eos_ids)
            self._grammars = GrammarCompiler(vocabulary, self.config.api.grammar_timeout_s)
        # One after the other: a batch may have more than may wait at once, and most will be equal.
        return [None if source is None else await self._grammars.compile(source) for source in sources]

    def _generate(self, prompts: list[list[int]], params: list[GenerationParams], progress: bool) -> list[Generation]:
        if self._loop.is_closed():
            raise RuntimeError("this LLM is closed")
        now = time.time()
        groups = [
            make_requests(ids, p, self.facts, request_id=f"llm-{next(self._ids)}", client_id=CLIENT_ID, arrival_s=now)
            for ids, p in zip(prompts, params, strict=True)
        ]
        bar = tqdm(total=sum(map(len, groups)), desc="generating", unit="seq", disable=not progress)
        with bar:
            future = asyncio.run_coroutine_threadsafe(self._run(groups, params, bar), self._loop)
            try:
                return future.result()
            finally:
                future.cancel()

    async def _run(
        self, groups: list[tuple[Request, ...]], params: list[GenerationParams], bar: tqdm[Any]
    ) -> list[Generation]:
        choices = {
            request.id: _ChoiceBuilder(self.tokenizer, p)
            for group, p in zip(groups, params, strict=True)
            for request in group
        }
        open_ids = set(choices)
        num_tokens, start = 0, time.monotonic()
        self._engine.submit(tuple(itertools.chain.from_iterable(groups)))
        try:
            while open_ids:
                batch = await self._engine.poll(CLIENT_ID, self._ack, POLL_S)
                self._ack = batch.seq
                for update in batch.updates:
                    if update.request_id not in open_ids:
                        continue
                    num_tokens += len(update.token_ids)
                    choice = choices[update.request_id]
                    if choice.feed(update):
                        open_ids.discard(update.request_id)
                        if update.finish_reason is None:
                            self._engine.abort([update.request_id])  # a stop string: the engine doesn't know text
                        bar.update()
                bar.set_postfix_str(f"{num_tokens / (time.monotonic() - start):.1f} tok/s", refresh=False)
        finally:
            self._engine.abort(open_ids)
        return [
            Generation(
                prompt_ids=group[0].prompt_ids,
                choices=tuple(choices[request.id].choice() for request in group),
                prompt_logprobs=choices[group[0].id].prompt_logprobs(),
                num_cached_tokens=choices[group[0].id].num_cached_tokens,
            )
            for group in groups
        ]


class _ChoiceBuilder:
    """Collects the updates of one request."""

    def __init__(self, tokenizer: Tokenizer, params: GenerationParams):
        self._detokenizer = Detokenizer(
            tokenizer,
            stop=params.stop,
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            min_tokens=params.min_tokens,
        )
        self._stop_token_ids = params.stop_token_ids
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[PromptLogprobs] = []
        self._finish_reason: FinishReason | None = None
        self._stop_reason: int | str | None = None
        self.num_cached_tokens = 0

    def feed(self, update: RequestUpdate) -> bool:
        """Take an update; True once the choice is complete.

        Raises:
            EngineDead, UserError: the engine ended the request with an error.
        """
        if update.finish_reason in ("error", "abort"):
            raise UserError(update.error or f"the request ended with {update.finish_reason}")
        delta = self._detokenizer.feed(update.token_ids, update.finish_reason is not None, update.stop_id)
        self._text.append(delta.text)
        self._token_ids += update.token_ids[: delta.num_tokens]
        self._logprobs += update.logprobs[: delta.num_tokens]
        self._prompt_logprobs += update.prompt_logprobs
        self.num_cached_tokens = max(self.num_cached_tokens, update.num_cached_tokens)
        if delta.stop is not None:
            self._finish_reason, self._stop_reason = "stop", delta.stop
        elif update.finish_reason is not None:
            self._finish_reason = update.finish_reason
            if update.stop_id in self._stop_token_ids:
                self._stop_reason = update.stop_id
        return self._finish_reason is not None

    def choice(self) -> Choice:
        assert self._finish_reason is not None
        return Choice(
            "".join(self._text), tuple(self._token_ids), self._finish_reason, self._stop_reason, tuple(self._logprobs)
        )

    def prompt_logprobs(self) -> tuple[TokenLogprobs, ...]:
        return tuple(entry for part in self._prompt_logprobs for entry in part.entries)


def _device() -> Device:
    from pagedray.engine.worker.device import find_machine

    return "cuda" if find_machine().num_gpus else "cpu"


async def _cancel_others() -> None:
    """Cancel every other task of this loop and wait until they have ended."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def _is_ids(prompts: Sequence[Any]) -> bool:
    return bool(prompts) and all(isinstance(item, int) for item in prompts)


def _constrained(params: GenerationParams, grammar: CompiledGrammar) -> GenerationParams:
    constraint = msgspec.structs.replace(params.constraint or Constraint(), grammar=grammar)
    return msgspec.structs.replace(params, constraint=constraint)


def _per_prompt(params: GenerationParams | Sequence[GenerationParams], num: int) -> list[GenerationParams]:
    if isinstance(params, GenerationParams):
        return [params] * num
    if len(params) != num:
        raise UserError(f"{len(params)} params for {num} prompts; give one for all, or one for each", "params")
    return list(params)
