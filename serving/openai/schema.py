"""Request bodies of the OpenAI API. Every field of it is applied (a class here has it), ignored, or refused by name.

Fields that OpenAI doesn't have are named as vLLM names them. A null means: not given.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from pagedray.engine.errors import Unsupported, UserError
from pagedray.engine.generation import MAX_CHOICES, MAX_LOGPROBS, GenerationParams
from pagedray.engine.grammar.source import GrammarSource
from pagedray.serving.openai.formats import OLD_NAMES, read_grammar
from pagedray.serving.openai.tools import Offer, read_functions, read_tools

IGNORED = {
    "user": "names the end user for abuse reports; nothing here depends on it",
    "safety_identifier": "names the end user for abuse reports; nothing here depends on it",
    "metadata": "labels for stored completions; nothing is stored",
    "store": "nothing is stored",
    "service_tier": "there is one tier; see priority",
    "prompt_cache_key": "the prefix cache finds equal beginnings by itself; see cache_salt",
    "prompt_cache_options": "the prefix cache finds equal beginnings by itself; see cache_salt",
    "prompt_cache_retention": "cached blocks stay until their memory is needed",
    "prediction": "a hint about speed that doesn't change the answer",
    "request_id": "ids are made here; an X-Request-Id header is echoed",
    "spaces_between_special_tokens": "special tokens that are shown stand as the model wrote them",
    "guided_decoding_backend": "there is one",
    "stream_interval": "chunks are sent as tokens come",
    "session_id": "a session is named by the header X-Session-Id",
    "return_mm_kwargs": "says something of images alone",
}

_NOT_YET = "is not implemented"

# name → (why, values that ask for nothing and are accepted)
REFUSED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "audio": (_NOT_YET, ()),
    "modalities": ("other than text is not implemented", (["text"],)),
    "moderation": (_NOT_YET, ()),
    "web_search_options": (_NOT_YET, ()),
    "suffix": ("is not implemented; a model that can fill gaps has tokens for it, which belong into the prompt", ("",)),
    "use_beam_search": (_NOT_YET, (False,)),
    "length_penalty": ("belongs to beam search, which is not implemented", (1, 1.0)),
    "logits_processors": (_NOT_YET, ([],)),
    "guided_whitespace_pattern": ("is not implemented; structured_outputs.grammar takes any whitespace", ()),
    "prompt_embeds": (_NOT_YET, ()),
    "chat_template": ("of a request is not implemented; it is a setting of the server", ()),
    "mm_processor_kwargs": (_NOT_YET, ({},)),
    "media_io_kwargs": (_NOT_YET, ({},)),
    "vllm_xargs": ("belongs to plugins of vLLM", ({},)),
    "kv_transfer_params": (_NOT_YET, ({},)),
    "ec_transfer_params": (_NOT_YET, ({},)),
    "early_stopping": ("belongs to beam search, which is not implemented", (False,)),
    "watermarking": (_NOT_YET, (False,)),
    "repetition_detection": ("is not implemented; see frequency_penalty and repetition_penalty", ()),
    "logprob_token_ids": ("is not implemented; see top_logprobs", ()),
    "return_prompt_text": ("is not implemented; see return_token_ids and /detokenize", (False,)),
    "return_token_offsets": ("is not implemented", (False,)),
    "routed_experts_prompt_start": (_NOT_YET, (0,)),
}

MAX_TEMPERATURE = 2.0  # OpenAI's
MAX_STOPS = 4  # OpenAI's, and vLLM's


def _whole(value: Any) -> Any:
    """5.0 is an integer of JSON."""
    return int(value) if type(value) is float and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole)]
Int32 = Annotated[Whole, Field(ge=-(2**31), lt=2**31)]
Ids = Annotated[list[int], Field(fail_fast=True)]
Stops = Annotated[list[str], Field(fail_fast=True, max_length=MAX_STOPS)]


class Wire(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)


class StreamOptions(Wire):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = Field(None, description="Accepted and ignored: chunks carry no padding.")


class GenerationRequest(Wire):
    """What completions and chat completions share. Ranges that aren't here are checked in engine/generation.py."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Whole | None = Field(None, ge=1, le=MAX_CHOICES)
    max_tokens: Int32 | None = None
    seed: Whole | None = None
    stop: Stops | None = None
    temperature: float | None = Field(None, ge=0, le=MAX_TEMPERATURE)
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    allowed_token_ids: Annotated[Ids, Field(min_length=1)] | None = None
    bad_token_ids: Ids | None = None
    min_tokens: Int32 | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Ids | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    prompt_logprobs: Int32 | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = Field(None, description="Log-probabilities name tokens token_id:ID.")
    truncate_prompt_tokens: Int32 | None = Field(None, ge=-1, description="Keeps the last so many; -1: all that fit.")
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="What truncate_prompt_tokens cuts off; left if not given."
    )
    bad_words: Annotated[list[str], Field(fail_fast=True)] | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = Field(
        None, description="One of json, regex, choice, grammar, json_object, structural_tag."
    )
    guided_json: Any = Field(None, description="The earlier name of structured_outputs.json.")
    guided_regex: str | None = Field(None, description="The earlier name of structured_outputs.regex.")
    guided_choice: list[Any] | None = Field(None, description="The earlier name of structured_outputs.choice.")
    guided_grammar: str | None = Field(None, description="The earlier name of structured_outputs.grammar.")
    priority: Int32 | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)
    # Of IGNORED:
    user: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    prediction: dict[str, Any] | None = None
    request_id: str | None = None
    spaces_between_special_tokens: bool | None = None
    guided_decoding_backend: str | None = None
    stream_interval: Int32 | None = Field(None, ge=1)
    session_id: str | None = None
    return_mm_kwargs: bool | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop_string(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_streaming(self) -> GenerationRequest:
        if not self.stream:
            if self.stream_options is not None:
                raise UserError("stream_options needs stream: true", "stream_options")
        elif (
            self.stream_options and self.stream_options.continuous_usage_stats and not self.stream_options.include_usage
        ):
            raise UserError("continuous_usage_stats needs include_usage: true", "stream_options.continuous_usage_stats")
        elif self.prompt_logprobs is not None:
            raise Unsupported("prompt_logprobs is not available with stream: true", "prompt_logprobs")
        return self

    @property
    def grammar(self) -> GrammarSource | None:
        """What the answer must look like. Raises UserError."""
        return read_grammar(
            self.response_format, self.structured_outputs, {name: getattr(self, name) for name in OLD_NAMES}
        )

    @property
    def wants_usage(self) -> bool:
        """A stream ends with a chunk that has the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_usage_with_each(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    def params(self, **overrides: Any) -> GenerationParams:
        """What the engine is asked for; fields that were not given keep GenerationParams' defaults."""
        given = {name: getattr(self, name) for name in _SAME_NAME if getattr(self, name) is not None}
        for name in ("stop", "allowed_token_ids", "bad_token_ids", "stop_token_ids"):
            if name in given:
                given[name] = tuple(given[name])
        if self.logit_bias:
            given["logit_bias"] = tuple((token_id(key), bias) for key, bias in self.logit_bias.items())
        return GenerationParams(**{**given, **overrides})


_SAME_NAME = [
    name for name in GenerationParams.__struct_fields__ if name not in ("logprobs", "logit_bias", "constraint")
]


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatRequest(GenerationRequest):
    messages: list[Any]
    max_completion_tokens: Int32 | None = None
    logprobs: bool | None = None
    top_logprobs: Whole | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = Field(None, description="The earlier form of tools.")
    function_call: Any = Field(None, description="The earlier form of tool_choice.")
    reasoning_effort: Effort | None = Field(
        None, description="For the chat template; none switches reasoning off where the template can."
    )
    max_reasoning_tokens: Int32 | None = Field(None, ge=0, description="Then the model must answer.")
    thinking_token_budget: Int32 | None = Field(
        None, ge=-1, description="vLLM's name of max_reasoning_tokens; -1: no limit."
    )
    include_reasoning: bool | None = Field(None, description="false leaves the reasoning out of the answer.")
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description="For the chat template.")
    documents: list[dict[str, Any]] | None = Field(None, description="For the chat template.")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: bool | None = Field(
        None, description="Content begins with that of the last message, if that is of the assistant."
    )
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def reasoning_budget(self) -> int | None:
        """Tokens; None: no limit."""
        budget = self.thinking_token_budget if self.max_reasoning_tokens is None else self.max_reasoning_tokens
        return None if budget == -1 else budget

    @property
    def offer(self) -> Offer:
        """What the model may call. Raises UserError."""
        for new, old in (("tools", "functions"), ("tool_choice", "function_call")):
            if getattr(self, old) is not None and (self.tools is not None or self.tool_choice is not None):
                raise UserError(f"{old} is the earlier form of {new}; give one of them", old)
        if self.functions is not None or self.function_call is not None:
            return read_functions(self.functions, self.function_call)
        return read_tools(self.tools, self.tool_choice)

    @model_validator(mode="after")
    def _check(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise UserError("top_logprobs needs logprobs: true", "top_logprobs")
        if self.thinking_token_budget is not None and self.max_reasoning_tokens is not None:
            raise UserError(
                "thinking_token_budget is another name of max_reasoning_tokens; give one of them",
                "thinking_token_budget",
            )
        for name in ("tools", "functions"):
            if getattr(self, name) == []:
                raise UserError(f"{name} must have one at least, or be left out", name)
        check_prompt_ends(self)
        return self


class CompletionRequest(GenerationRequest):
    prompt: Any
    best_of: Int32 | None = None
    echo: bool | None = None
    logprobs: Int32 | None = None

    @model_validator(mode="after")
    def _check(self) -> CompletionRequest:
        if self.best_of is not None:
            if not (self.n or 1) <= self.best_of <= MAX_CHOICES:
                raise UserError(
                    f"best_of must be from n ({self.n or 1}) to {MAX_CHOICES}, got {self.best_of}", "best_of"
                )
            if self.stream and self.best_of > (self.n or 1):
                raise UserError("best_of above n can't be streamed: the best are known at the end", "best_of")
        return self


class TokenizeRequest(Wire):
    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    tools: list[Any] | None = None
    reasoning_effort: Effort | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise UserError("give either prompt or messages", "prompt")
        if self.prompt is not None:
            for name in (
                "add_generation_prompt",
                "continue_final_message",
                "chat_template_kwargs",
                "tools",
                "reasoning_effort",
            ):
                if getattr(self, name) is not None:
                    raise UserError(f"{name} needs messages", name)
        check_prompt_ends(self)
        return self


class DetokenizeRequest(Wire):
    model: str | None = None
    tokens: Ids


def check_prompt_ends(request: ChatRequest | TokenizeRequest) -> None:
    if request.continue_final_message and request.add_generation_prompt:
        raise UserError(
            "add_generation_prompt begins a new message, continue_final_message continues the last one: choose one",
            "add_generation_prompt",
        )


R = TypeVar("R", bound=Wire)


def parse(
    kind: type[R],
    body: dict[str, Any],
    ignored: Mapping[str, str] = IGNORED,
    refused: Mapping[str, tuple[str, tuple[Any, ...]]] = REFUSED,
) -> R:
    """Check a decoded body.

    Args:
        ignored, refused: fields of its API besides those of `kind`.

    Raises:
        UserError: a field is unknown, missing or wrong; `param` is its path.
        Unsupported: a field is known and not implemented.
    """
    known = kind.model_fields
    given = {}
    for name, value in body.items():
        if name in known:
            given[name] = value
        elif name in refused:
            reason, neutral = refused[name]
            if value is not None and not any(type(value) is type(v) and value == v for v in neutral):
                raise Unsupported(f"{name} {reason}", name)
        elif name not in ignored:
            raise UserError(_unknown(name, [*known, *ignored]), name[:64])
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        param = _path(first["loc"])
        message = "is required" if first["type"] == "missing" else first["msg"]
        raise UserError(f"{param}: {message}", param) from None


def _unknown(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name[:64], known, n=2)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    return f"unknown field {name[:64]!r}{hint}"


def _path(loc: tuple[int | str, ...]) -> str:
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part[:64]}" if path else part[:64]
    return path


def token_id(key: str) -> int:
    digits = key.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 18):
        raise UserError(f"logit_bias: {key[:32]!r} is not a token id", "logit_bias")
    return int(key)
