"""From what a caller asks for to requests: defaults, limits and id checks, the same for HTTP and for `LLM`."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence as Seq

import msgspec

from pagedray.engine.config import EngineFacts
from pagedray.engine.errors import PromptTooLong, UserError
from pagedray.engine.messages import Constraint, Request, SamplingParams
from pagedray.engine.prefix_cache import hash_blocks

MAX_LOGPROBS = 20
MAX_CHOICES = 128
MAX_STOP_STRINGS = 64
MAX_IDS = 4096  # in each list of ids: every choice carries them to the engine
MAX_PROMPT_TOKENS_SENT = 2**22  # choices times prompt tokens of one call
MAX_GRAMMAR_BYTES_SENT = 2**26  # choices times bytes of the compiled grammar: each choice carries its own
SEED_MASK = 2**63 - 1


class GenerationParams(msgspec.Struct, frozen=True, kw_only=True):
    """What a caller may ask for one prompt. Text settings (`stop` …) are applied where tokens become text.

    Penalties, seeds and ids mean what `SamplingParams` says. `max_tokens` None: up to the model's limit.
    """

    max_tokens: int | None = None
    n: int = 1
    seed: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    constraint: Constraint | None = None


def check_params(params: GenerationParams, vocab_size: int) -> None:
    """Raise UserError, naming the field, for anything out of range."""

    def in_range(name: str, low: float, high: float, open_low: bool = False) -> None:
        value = getattr(params, name)
        if not (low < value <= high if open_low else low <= value <= high):  # NaN fails both
            raise UserError(
                f"{name} must be {'above' if open_low else 'at least'} {low:g} and at most {high:g}, got {value}", name
            )

    in_range("temperature", 0.0, 100.0)
    in_range("top_p", 0.0, 1.0, open_low=True)
    in_range("min_p", 0.0, 1.0)
    in_range("presence_penalty", -2.0, 2.0)
    in_range("frequency_penalty", -2.0, 2.0)
    in_range("repetition_penalty", 0.0, 100.0, open_low=True)
    in_range("n", 1, MAX_CHOICES)
    if params.top_k < -1:
        raise UserError(f"top_k must be -1 or 0 (off) or positive, got {params.top_k}", "top_k")
    if params.max_tokens is not None and params.max_tokens < 1:
        raise UserError(f"max_tokens must be at least 1, got {params.max_tokens}", "max_tokens")
    if params.min_tokens < 0:
        raise UserError(f"min_tokens must be at least 0, got {params.min_tokens}", "min_tokens")
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise UserError(f"min_tokens ({params.min_tokens}) is more than max_tokens ({params.max_tokens})", "min_tokens")
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        if value is not None and not 0 <= value <= MAX_LOGPROBS:
            raise UserError(f"{name} must be from 0 to {MAX_LOGPROBS}, got {value}", name)
    if params.seed is not None and not -(2**63) <= params.seed < 2**64:
        raise UserError(f"seed must fit 64 bits, got {params.seed}", "seed")
    if len(params.stop) > MAX_STOP_STRINGS:
        raise UserError(f"at most {MAX_STOP_STRINGS} stop strings, got {len(params.stop)}", "stop")
    if any(not s for s in params.stop):
        raise UserError("a stop string can't be empty", "stop")
    for name in ("allowed_token_ids", "bad_token_ids", "stop_token_ids", "logit_bias"):
        if len(getattr(params, name)) > MAX_IDS:
            raise UserError(f"{name} may have {MAX_IDS} entries, got {len(getattr(params, name))}", name)
    for name in ("allowed_token_ids", "bad_token_ids", "stop_token_ids"):
        check_ids(getattr(params, name), vocab_size, name)
    check_ids([i for i, _ in params.logit_bias], vocab_size, "logit_bias")
    for token_id, bias in params.logit_bias:
        if not -100 <= bias <= 100:
            raise UserError(f"logit_bias of token {token_id} must be from -100 to 100, got {bias}", "logit_bias")
    if params.allowed_token_ids and set(params.allowed_token_ids) <= set(params.bad_token_ids):
        raise UserError("bad_token_ids forbids every id that allowed_token_ids allows", "bad_token_ids")
    if len(set(params.bad_token_ids)) >= vocab_size:
        raise UserError("bad_token_ids forbids the whole vocabulary", "bad_token_ids")
    if params.constraint is not None:
        _check_constraint(params, params.constraint, vocab_size)


def _check_constraint(params: GenerationParams, constraint: Constraint, vocab_size: int) -> None:
    if sum(map(len, constraint.bad_sequences)) > MAX_IDS:
        raise UserError(f"bad_words may have {MAX_IDS} tokens in all", "bad_words")
    for sequence in constraint.bad_sequences:
        check_ids(sequence, vocab_size, "bad_words")
    if constraint.reasoning is not None:
        check_ids(constraint.reasoning.end_ids, vocab_size, "end_ids")
    if constraint.grammar is None:
        return
    if params.ignore_eos:
        raise UserError("ignore_eos can't be used with a grammar, which says where an output ends", "ignore_eos")
    num_bytes = len(constraint.grammar.data)
    if params.n * num_bytes > MAX_GRAMMAR_BYTES_SENT:
        raise UserError(
            f"{params.n} choices with a compiled grammar of {num_bytes} bytes exceed {MAX_GRAMMAR_BYTES_SENT} in all; "
            "ask for fewer choices at once, or make the schema or grammar smaller",
            "n",
        )


def check_ids(ids: Seq[int], vocab_size: int, name: str) -> None:
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise UserError(f"{name}: token id {token_id} is outside the vocabulary (0 to {vocab_size - 1})", name)


def choice_seed(seed: int, choice: int) -> int:
    """Seed of choice `choice`; choice 0 keeps the caller's seed."""
    if choice == 0:
        return seed & SEED_MASK
    digest = hashlib.blake2b(f"{seed & SEED_MASK}:{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & SEED_MASK


def make_requests(
    prompt_ids: Seq[int],
    params: GenerationParams,
    facts: EngineFacts,
    *,
    request_id: str,
    client_id: str,
    priority: int = 0,
    cache_salt: str = "",
    arrival_s: float = 0.0,
    deadline_s: float | None = None,
) -> tuple[Request, ...]:
    """One `Request` per choice, checked against the engine's vocabulary and limits.

    Raises:
        UserError: a parameter or an id is out of range.
        PromptTooLong: the prompt leaves no room for a token.
    """
    check_params(params, facts.vocab_size)
    check_ids(prompt_ids, facts.vocab_size, "prompt")
    if not prompt_ids:
        raise UserError("the prompt is empty; give at least one token", "prompt")
    limit = min(facts.max_model_len, facts.kv_capacity_tokens)
    limited_by = "max_model_len" if limit == facts.max_model_len else "KV cache size; raise kv_cache_memory_bytes"
    room = limit - len(prompt_ids)
    if room < 1:
        raise PromptTooLong(len(prompt_ids), limit - 1, limited_by)
    if params.max_tokens is not None and params.max_tokens > room:
        raise UserError(
            f"the prompt's {len(prompt_ids)} tokens and max_tokens {params.max_tokens} exceed the limit of {limit} "
            f"tokens ({limited_by}); shorten the prompt or ask for at most {room}",
            "max_tokens",
        )
    if params.n * len(prompt_ids) > MAX_PROMPT_TOKENS_SENT:
        raise UserError(
            f"{params.n} choices of a prompt of {len(prompt_ids)} tokens exceed {MAX_PROMPT_TOKENS_SENT} in all; "
            "ask for fewer choices at once",
            "n",
        )
    seed = secrets.randbits(63) if params.seed is None else params.seed
    ids = tuple(prompt_ids)
    hashes = hash_blocks(ids, facts.block_size, cache_salt) if facts.enable_prefix_caching else ()
    max_tokens = params.max_tokens or room
    return tuple(
        Request(
            id=f"{request_id}-{choice}",
            client_id=client_id,
            prompt_ids=ids,
            params=SamplingParams(
                max_tokens=max_tokens,
                seed=choice_seed(seed, choice),
                temperature=params.temperature,
                top_p=params.top_p,
                top_k=max(params.top_k, 0),
                min_p=params.min_p,
                presence_penalty=params.presence_penalty,
                frequency_penalty=params.frequency_penalty,
                repetition_penalty=params.repetition_penalty,
                logit_bias=params.logit_bias,
                allowed_token_ids=params.allowed_token_ids,
                bad_token_ids=params.bad_token_ids,
                min_tokens=min(params.min_tokens, max_tokens),
                ignore_eos=params.ignore_eos,
                stop_token_ids=params.stop_token_ids,
                logprobs=params.logprobs,
                prompt_logprobs=params.prompt_logprobs,
                constraint=params.constraint,
            ),
            block_hashes=hashes,
            cache_salt=cache_salt,
            priority=priority,
            arrival_s=arrival_s,
            deadline_s=deadline_s,
        )
        for choice in range(params.n)
    )
