"""The four messages between layers, and what they carry.

    Request          ingress   → scheduler     what a client asked, in token ids
    SchedulerOutput  scheduler → every rank    one step's work, by sequence
    RunnerOutput     rank 0    → scheduler     the tokens of one step
    RequestUpdate    scheduler → ingress       new tokens of one request, or its end

A message is complete when built and never edited. Order is explicit everywhere (tuples, never sets): every rank must
read the same plan. On the wire they are msgpack (`encode`, `decode`), which costs a twentieth of pickle. Those that
come by the hundred each step are left out of garbage collection (gc=False): they hold no cycles.
"""

from __future__ import annotations

from typing import Literal, TypeVar

import msgspec

from pagedray.engine.cache_log import CacheChanges

FinishReason = Literal["stop", "length", "abort", "error"]

M = TypeVar("M")


class CompiledGrammar(msgspec.Struct, frozen=True):
    """What the text of an output may be, ready for the worker's matcher. Made by `engine.grammar`."""

    key: bytes  # digest of the grammar and the vocabulary: equal keys, equal grammars
    data: bytes  # xgrammar's serialization, compressed by zlib


class ReasoningSpan(msgspec.Struct, frozen=True):
    """Where a model thinks before it answers. A grammar holds for what comes after it."""

    begin: bytes  # text that opens it, e.g. b"<think>"
    end: bytes  # text that closes it
    end_ids: tuple[int, ...]  # tokens that are forced when the budget is spent; their text ends with `end`
    is_open: bool  # the prompt ends within it
    max_tokens: int | None = None  # output tokens in it, None: no budget


class Constraint(msgspec.Struct, frozen=True):
    """Rules for an output that depend on the output so far. The worker follows them beside the sampler."""

    grammar: CompiledGrammar | None = None
    reasoning: ReasoningSpan | None = None
    bad_sequences: tuple[tuple[int, ...], ...] = ()  # must not be in the output; they yield to grammar and budget


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens of one sequence are chosen. Ids were checked against the vocabulary before this was built.

    Presence and frequency penalties count output tokens; the repetition penalty counts prompt and output.
    `seed` is always set (the ingress draws one when the client gave none): token i is a function of (seed, i) alone.
    """

    max_tokens: int
    seed: int  # 0 <= seed < 2**63
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()  # empty: all
    bad_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0  # until then neither eos nor a stop id can be chosen
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None  # None: none; 0: the chosen token's; k: and the k most likely
    prompt_logprobs: int | None = None
    constraint: Constraint | None = None


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate. A client's request with n choices is n of these, submitted together."""

    id: str  # unique in the cluster, made by the ingress; a client's own id never gets here
    client_id: str  # the ingress (its outbox) that wants the updates
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    output_ids: tuple[int, ...] = ()  # tokens generated before, when a request is resubmitted after a failure
    block_hashes: tuple[bytes, ...] = ()  # chained hashes of the prompt's full blocks, see prefix_cache.hash_blocks
    cache_salt: str = ""  # part of every block hash of this request
    priority: int = 0  # lower goes first
    arrival_s: float = 0.0  # wall clock of the ingress
    deadline_s: float | None = None  # wall clock; past it the request ends with "abort"

    @property
    def num_tokens(self) -> int:
        """Tokens that it comes with."""
        return len(self.prompt_ids) + len(self.output_ids)


class NewSeq(msgspec.Struct, frozen=True):
    """A sequence that takes a row in this step: the only time its ids and parameters travel."""

    seq_id: str
    row: int
    token_ids: tuple[int, ...]  # all known tokens: prompt, then output so far
    num_prompt_tokens: int
    params: SamplingParams
    stop_ids: tuple[int, ...]  # ids that min_tokens forbids: stop_token_ids, and eos unless ignore_eos


class ScheduledSeq(msgspec.Struct, frozen=True, gc=False):
    """Positions start … start + num_tokens of one row are computed in this step.

    The row samples a token when the last of them is its last known token (`samples`); where that token is one that an
    earlier step in flight samples, only the worker's row state knows it.
    """

    seq_id: str
    row: int
    start: int
    num_tokens: int
    samples: bool
    new_blocks: tuple[tuple[int, ...], ...]  # per block group: ids to append to this row's block table of that group


class SchedulerOutput(msgspec.Struct, frozen=True):
    step: int
    added: tuple[NewSeq, ...]
    scheduled: tuple[ScheduledSeq, ...]
    freed_rows: tuple[int, ...]  # rows given up since the last step; applied before `added`

    @property
    def num_tokens(self) -> int:
        return sum(seq.num_tokens for seq in self.scheduled)


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False):
    """Natural-log probabilities at one position, of the model's raw distribution (before penalties and temperature)."""

    token_id: int
    logprob: float
    rank: int  # 1 is the most likely
    top_ids: tuple[int, ...]  # most likely first
    top_logprobs: tuple[float, ...]


class PromptLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of prompt tokens start … start + len(entries); position 0 has none, so start >= 1."""

    start: int
    entries: tuple[TokenLogprobs, ...]


class RunnerOutput(msgspec.Struct, frozen=True):
    """Result of step `step`; each tuple is aligned with `SchedulerOutput.scheduled` of that step."""

    step: int
    token_ids: tuple[int, ...]  # -1 where the row did not sample
    logprobs: tuple[TokenLogprobs | None, ...] = ()  # empty when nobody asked
    prompt_logprobs: tuple[PromptLogprobs | None, ...] = ()  # empty when nobody asked
    failed: tuple[tuple[str, str], ...] = ()  # sequence id and reason: ends with an error, others go on


class RequestUpdate(msgspec.Struct, frozen=True, gc=False):
    """What is new about one request. `first` numbers its first token, so that a receiver can drop repeats."""

    request_id: str
    first: int  # index in the output of token_ids[0]
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_id: int | None = None  # the eos or stop id that ended it (that id is the last of token_ids)
    error: str | None = None  # with finish_reason "error" or "abort": what happened, for the client
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token when asked
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    num_cached_tokens: int = 0  # prompt tokens taken from the prefix cache at first admission


class EngineNews(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine is doing, as far as it matters to the client that is told: for its choice among engines."""

    is_draining: bool  # it takes no more requests
    other_requests: int  # unfinished requests of other clients; its own are the client's to count
    other_tokens: int  # tokens that those came with
    num_running: int
    num_waiting: int
    kv_usage: float  # share of the KV blocks that are held
    cache: CacheChanges


class UpdateBatch(msgspec.Struct, frozen=True):
    """Answer of one poll. The next poll acknowledges `seq`; a repeated poll gets the same batch again."""

    seq: int
    updates: tuple[RequestUpdate, ...]
    news: EngineNews | None = None


def encode(message: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(message)


def decode(kind: type[M], data: bytes) -> M:
    return msgspec.msgpack.decode(data, type=kind)
