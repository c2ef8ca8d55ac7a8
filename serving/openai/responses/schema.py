"""Request bodies of the Responses API. Every field is applied or echoed (a class here has it), ignored, or refused
by name; so are some of chat completions, under the same names.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, field_validator, model_validator

from pagedray.engine.errors import Unsupported, UserError
from pagedray.engine.generation import MAX_LOGPROBS, GenerationParams
from pagedray.serving.openai.schema import MAX_TEMPERATURE, Effort, Ids, Int32, Stops, Whole, Wire, parse, token_id

IGNORED = {
    "image": "options for images, of which there are none",
    "prompt_cache_options": "the prefix cache finds equal beginnings by itself; see cache_salt",
    "request_id": "ids are made here; an X-Request-Id header is echoed",
}

# Fields of the class below that are checked and come back in the response, and have no other effect.
ECHOED = {
    "max_tool_calls": "counts calls of tools that the server runs, of which there are none",
    "service_tier": "there is one tier, default, and so says the response; see priority",
    "user": "names the end user for abuse reports",
    "safety_identifier": "names the end user for abuse reports",
    "prompt_cache_key": "the prefix cache finds equal beginnings by itself; see cache_salt",
    "prompt_cache_retention": "cached blocks stay until their memory is needed",
}

_NOT_YET = "is not implemented"

# name → (why, values that ask for nothing and are accepted)
REFUSED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "conversation": ("is not implemented: conversations are not stored; use previous_response_id", ()),
    "prompt": ("is not implemented: no prompt templates are stored; use instructions and input", ()),
    "context_management": (_NOT_YET, ([],)),
    "moderation": (_NOT_YET, ()),
    "access_programs": (_NOT_YET, ({},)),
    "background_options": ("other than soonest is not implemented", ({}, {"completion_window": "soonest"})),
}

Include = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
]
LOGPROBS: Include = "message.output_text.logprobs"  # the one that adds something: there are no such tools or images,
# and reasoning items have their text in the clear

Tier = Literal["auto", "default", "flex", "scale", "priority", "fast", "ultrafast"]

MAX_PAIRS, MAX_KEY, MAX_VALUE = 16, 64, 512  # of metadata


class StreamOptions(Wire):
    include_obfuscation: bool | None = Field(None, description="Accepted and ignored: events carry no padding.")


class Reasoning(Wire):
    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="Accepted and ignored: reasoning comes whole, nobody sums it up."
    )
    generate_summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="Accepted and ignored: see summary."
    )
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    mode: str | None = None

    @model_validator(mode="after")
    def _check(self) -> Reasoning:
        if self.context == "all_turns":
            raise Unsupported(
                "reasoning.context all_turns is not implemented: the chat template decides which reasoning it shows; "
                "use auto",
                "reasoning.context",
            )
        if self.mode not in (None, "standard"):
            raise Unsupported("reasoning.mode other than standard is not implemented", "reasoning.mode")
        return self


class TextConfig(Wire):
    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description="For the chat template.")


class InputFields(Wire):
    """What decides the prompt."""

    input: Any = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    truncation: Literal["auto", "disabled"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_input(self) -> InputFields:
        if self.input is None and self.previous_response_id is None:
            raise UserError("input is required, unless previous_response_id is given", "input")
        return self


class CountRequest(InputFields):
    """POST /v1/responses/input_tokens."""

    model: str | None = None
    personality: str | None = Field(None, max_length=64)

    @model_validator(mode="after")
    def _check(self) -> CountRequest:
        if self.personality is not None:
            raise Unsupported("personality is not implemented; say it in instructions", "personality")
        return self


class ResponseRequest(InputFields):
    """POST /v1/responses. Ranges that aren't here are checked in engine/generation.py."""

    model: str
    background: bool | None = None
    include: list[Include] | None = None
    max_output_tokens: Int32 | None = None
    max_tool_calls: int | None = Field(None, ge=0, lt=2**31)
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = Field(None, max_length=1024)
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    safety_identifier: str | None = Field(None, max_length=1024)
    service_tier: Tier | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=MAX_TEMPERATURE)
    top_logprobs: Whole | None = Field(None, ge=0, le=MAX_LOGPROBS)
    top_p: float | None = None
    user: str | None = Field(None, max_length=1024)
    # As in chat completions, beyond the API:
    seed: Whole | None = None
    stop: Stops | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    allowed_token_ids: Ids | None = None
    bad_token_ids: Ids | None = None
    min_tokens: Int32 | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Ids | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    max_reasoning_tokens: Int32 | None = Field(None, ge=0, description="Then the model must answer.")
    bad_words: Annotated[list[str], Field(fail_fast=True)] | None = None
    structured_outputs: dict[str, Any] | None = Field(
        None, description="One of json, regex, choice, grammar, json_object, structural_tag."
    )
    priority: Int32 | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)

    @model_validator(mode="after")
    def _check(self) -> ResponseRequest:
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            raise UserError(f"max_output_tokens must be at least 1, got {self.max_output_tokens}", "max_output_tokens")
        if self.stream_options is not None and not self.stream:
            raise UserError("stream_options needs stream: true", "stream_options")
        if self.background and self.store is False:
            raise UserError("background needs store: true: the response is read from the store", "background")
        _check_metadata(self.metadata or {})
        return self

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop_string(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    def params(self) -> GenerationParams:
        """What the engine is asked for; fields that were not given keep GenerationParams' defaults."""
        given = {name: getattr(self, name) for name in _SAME_NAME if getattr(self, name) is not None}
        for name in ("stop", "allowed_token_ids", "bad_token_ids", "stop_token_ids"):
            if name in given:
                given[name] = tuple(given[name])
        if self.logit_bias:
            given["logit_bias"] = tuple((token_id(key), bias) for key, bias in self.logit_bias.items())
        return GenerationParams(
            **given,
            max_tokens=self.max_output_tokens,
            logprobs=(self.top_logprobs or 0) if self.wants_logprobs else None,
        )


_SAME_NAME = [
    name for name in GenerationParams.__struct_fields__ if name in ResponseRequest.model_fields and name != "logit_bias"
]

R = TypeVar("R", bound=InputFields)


def parse_request(kind: type[R], body: dict[str, Any]) -> R:
    """Check a decoded body. Raises UserError."""
    return parse(kind, body, IGNORED, REFUSED)


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > MAX_PAIRS:
        raise UserError(f"metadata has {len(metadata)} pairs, the limit is {MAX_PAIRS}", "metadata")
    for key, value in metadata.items():
        if len(key) > MAX_KEY:
            raise UserError(f"metadata: a key has {len(key)} characters, the limit is {MAX_KEY}", "metadata")
        if len(value) > MAX_VALUE:
            raise UserError(
                f"metadata.{key}: the value has {len(value)} characters, the limit is {MAX_VALUE}", f"metadata.{key}"
            )
