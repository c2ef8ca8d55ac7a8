"""POST /v1/completions."""

from __future__ import annotations

from typing import Any

import msgspec

from pagedray.engine.errors import PagedrayError, UserError
from pagedray.engine.generation import GenerationParams
from pagedray.engine.messages import Constraint, TokenLogprobs
from pagedray.engine.text.tokenizer import Tokenizer
from pagedray.serving.answer import Delta
from pagedray.serving.openai import sse
from pagedray.serving.openai.bad_words import with_bad_words
from pagedray.serving.openai.logprobs import LegacyLogprobs, LegacyWriter, TokenNames, finite, prompt_logprobs
from pagedray.serving.openai.prompts import parse_prompts, truncated
from pagedray.serving.openai.respond import Context, Head, Job, Usage
from pagedray.serving.openai.schema import CompletionRequest, parse

DEFAULT_MAX_TOKENS = 16  # OpenAI's

encode = msgspec.json.encode


async def prepare(context: Context, body: dict[str, Any]) -> Job:
    """Check a body, tokenize, compile a grammar. Raises UserError."""
    wire = parse(CompletionRequest, body)
    facts = context.facts_for(wire.model)
    max_tokens = DEFAULT_MAX_TOKENS if wire.max_tokens is None else wire.max_tokens
    params = with_bad_words(_params(wire, max_tokens), wire.bad_words, context.tokenizer)
    prompts = parse_prompts(wire.prompt)
    if len(prompts) > context.config.scheduler.max_queued_requests:
        raise UserError(f"{len(prompts)} prompts are more than max_queued_requests", "prompt")
    whole = await context.encoder.encode(prompts, facts, add_special_tokens=wire.add_special_tokens is not False)
    ids = [truncated(item, wire.truncate_prompt_tokens, facts, params, wire.truncation_side) for item in whole]
    if (source := wire.grammar) is not None:
        grammar = await context.grammars.compile(source, facts)
        constraint = msgspec.structs.replace(params.constraint or Constraint(), grammar=grammar)
        params = msgspec.structs.replace(params, constraint=constraint)
    shown = [prompt if len(cut) == len(item) else cut for prompt, item, cut in zip(prompts, whole, ids, strict=True)]
    head = Head.new("cmpl", "text_completion", wire.model, facts)
    return Job(
        prompts=ids,
        params=params,
        form=CompletionForm(wire, params.n, shown, ids, context.tokenizer, head),
        facts=facts,
        stream=bool(wire.stream),
        usage_with_each=wire.wants_usage_with_each,
        priority=wire.priority or 0,
        cache_salt=wire.cache_salt or "",
        names={} if wire.best_of is None else {"n": "best_of"},
        keeps_output=max_tokens > 0,
    )


def _params(wire: CompletionRequest, max_tokens: int) -> GenerationParams:
    asked = [k for k in (wire.prompt_logprobs, wire.logprobs if wire.echo else None) if k is not None]
    num = max(wire.n or 1, wire.best_of or 1)
    return wire.params(
        n=num,
        logprobs=0 if wire.logprobs is None and num > (wire.n or 1) else wire.logprobs,  # to know the best by
        prompt_logprobs=max(asked) if asked else None,
        max_tokens=max_tokens or 1,
    )


class Piece(msgspec.Struct):
    """What one event says of one choice; a whole answer is all its pieces joined."""

    index: int
    text: str
    logprobs: LegacyLogprobs | None
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    is_first: bool = False


class _Choice:
    """One choice while its deltas come."""

    def __init__(self) -> None:
        self.writer: LegacyWriter | None = None
        self.prompt_entries: list[TokenLogprobs] = []
        self.has_begun = False
        self.text: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs = LegacyLogprobs()
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.all_logprobs: list[float] = []

    @property
    def mean_logprob(self) -> float:
        return sum(self.all_logprobs) / max(1, len(self.all_logprobs))


class CompletionForm:
    """Writes completions. Choices are numbered prompt by prompt. With echo, a choice's text begins with its prompt.

    Of `num` choices for each prompt the answer has the n whose tokens are the most likely, by the mean of their
    log-probabilities.
    """

    def __init__(
        self,
        wire: CompletionRequest,
        num: int,
        prompts: list[str | list[int]],
        prompt_ids: list[list[int]],
        tokenizer: Tokenizer,
        head: Head,
    ):
        self._wire = wire
        self._num = num
        self._prompts = prompts
        self._prompt_ids = prompt_ids
        self._tokenizer = tokenizer
        self._head = head
        self._names = TokenNames(tokenizer, bool(wire.return_tokens_as_token_ids))
        self._choices = [_Choice() for _ in range(num * len(prompts))]
        self._frame = sse.ChunkFrame(msgspec.to_builtins(head), wire.wants_usage)

    def begin(self, num_prompt_tokens: int) -> bytes:
        return b""

    def chunks(self, deltas: list[Delta], usage: Usage | None) -> bytes:
        out = []
        for delta in deltas:
            for piece in self._pieces(delta):
                fields = b""
                if self._wire.return_token_ids:
                    fields = b',"token_ids":%b' % encode(piece.token_ids)
                    if piece.is_first:
                        fields += b',"prompt_token_ids":%b' % encode(self._prompt_ids[piece.index // self._num])
                if piece.finish_reason is not None:
                    fields += b',"stop_reason":%b' % encode(piece.stop_reason)
                choice = b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b%b}' % (
                    piece.index,
                    encode(piece.text),
                    b"null" if piece.logprobs is None else encode(piece.logprobs),
                    encode(piece.finish_reason),
                    fields,
                )
                out.append(self._frame.chunk(choice, usage=usage))
        return b"".join(out)

    def end(self, usage: Usage) -> bytes:
        return (self._frame.chunk(b"", usage=usage) if self._wire.wants_usage else b"") + sse.DONE

    def failed(self, error: PagedrayError | None) -> bytes:
        return sse.failure(error)

    def add(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            choice = self._choices[delta.index]
            choice.all_logprobs += [finite(entry.logprob) for entry in delta.logprobs]
            for piece in self._pieces(delta):
                choice.text.append(piece.text)
                choice.token_ids += piece.token_ids
                if piece.logprobs is not None:
                    choice.logprobs.extend(piece.logprobs)
                choice.finish_reason, choice.stop_reason = piece.finish_reason, piece.stop_reason

    def body(self, usage: Usage) -> dict[str, Any]:
        return {
            **msgspec.to_builtins(self._head),
            "choices": [self._whole(new, index) for new, index in enumerate(self._best())],
            "usage": usage,
        }

    def _best(self) -> list[int]:
        """Indices of the choices that the answer has."""
        n, num = self._wire.n or 1, self._num
        if n == num:
            return list(range(len(self._choices)))
        return [
            index
            for start in range(0, len(self._choices), num)
            for index in sorted(range(start, start + num), key=lambda i: -self._choices[i].mean_logprob)[:n]
        ]

    def _pieces(self, delta: Delta) -> list[Piece]:
        """What a delta adds to the text that the client sees; nothing while it would be an empty event."""
        choice, pieces = self._choices[delta.index], []
        for part in delta.prompt_logprobs:
            choice.prompt_entries += part.entries
        if not (delta.token_ids or delta.finish_reason):
            return []  # a part of the prompt was computed
        is_first, choice.has_begun = not choice.has_begun, True
        if is_first and self._wire.echo:
            pieces.append(self._echo(delta.index))
        piece = Piece(delta.index, delta.text, None, delta.token_ids, delta.finish_reason, delta.stop_reason)
        if self._wire.max_tokens == 0:  # the engine makes at least one token
            piece = Piece(delta.index, "", None, finish_reason=delta.finish_reason and "length")
        if self._wire.logprobs is not None:
            if choice.writer is None:
                offset = len(pieces[0].text) if pieces else 0
                choice.writer = LegacyWriter(self._tokenizer, self._names, self._skips_special_tokens, offset)
            entries = delta.logprobs[: len(piece.token_ids)]
            piece.logprobs = choice.writer.write(entries, self._wire.logprobs) if entries else None
        if piece.text or piece.logprobs or piece.finish_reason or (self._wire.return_token_ids and piece.token_ids):
            pieces.append(piece)
        if pieces:
            pieces[0].is_first = is_first
        return pieces

    def _echo(self, index: int) -> Piece:
        prompt, ids = self._prompts[index // self._num], self._prompt_ids[index // self._num]
        if isinstance(prompt, str):
            text, skips = prompt, True  # special tokens that encoding put around it are not in it
        else:
            skips = self._skips_special_tokens
            text = self._tokenizer.decode(ids, skips)
        if self._wire.logprobs is None:
            return Piece(index, text, None)
        writer = LegacyWriter(self._tokenizer, self._names, skips)
        logprobs = writer.first(ids[0])
        logprobs.extend(writer.write(self._choices[index].prompt_entries, self._wire.logprobs))
        return Piece(index, text, logprobs)

    @property
    def _skips_special_tokens(self) -> bool:
        return self._wire.skip_special_tokens is not False

    def _whole(self, new_index: int, index: int) -> dict[str, Any]:
        wire, choice = self._wire, self._choices[index]
        out: dict[str, Any] = {
            "index": new_index,
            "text": "".join(choice.text),
            "logprobs": None if wire.logprobs is None else choice.logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if wire.prompt_logprobs is not None:
            out["prompt_logprobs"] = prompt_logprobs(choice.prompt_entries, self._tokenizer, wire.prompt_logprobs)
        if wire.return_token_ids:
            out["token_ids"] = choice.token_ids
            out["prompt_token_ids"] = self._prompt_ids[index // self._num]
        return out
