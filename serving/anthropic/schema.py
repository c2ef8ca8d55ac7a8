"""Request bodies of the Messages API. Every field of it is applied (a class here has it), ignored, or refused by name.

A field that has a class's check and stands in `IGNORED` too is checked and then ignored. A null means: not given.
Paths in messages are written as Anthropic writes them: messages.0.content.1.text.
"""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from pagedray.engine.errors import Unsupported, UserError
from pagedray.engine.generation import MAX_STOP_STRINGS
from pagedray.serving.limits import json_type
from pagedray.serving.openai.schema import Whole

IGNORED = {
    "metadata": "names the end user for abuse reports; nothing here depends on it",
    "service_tier": "there is one tier",
    "speed": "there is one speed",
    "billing_policy": "nothing is billed",
    "fallback_credit_token": "nothing is billed",
    "user_profile_id": "a header of Anthropic's platform; nothing here depends on it",
    "workspace_id": "a header of Anthropic's platform; nothing here depends on it",
    "anthropic_version": "a header, or a field on other clouds; there is one version",
    "anthropic_beta": "a header, or a field on other clouds; fields of betas are known or refused by name",
    "betas": "the SDK's name of the anthropic-beta header; fields of betas are known or refused by name",
}

# name → (why, values that ask for nothing and are accepted)
REFUSED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "container": ("is not implemented: no code runs here", ()),
    "mcp_servers": ("is not implemented; connect in the client and pass the servers' tools as tools", ([],)),
    "inference_geo": ("can't be promised: the server doesn't know where it stands", ("global", "not_available")),
    "thread": ("is not implemented: no conversation is stored; send all messages", ()),
    "compaction": ("is not implemented", ()),
    "fallbacks": ("is not implemented: another model is another request", ([],)),
}

EFFORTS = Literal["low", "medium", "high", "xhigh", "max"]
MIN_THINKING_TOKENS = 1024
TOOL_NAME = r"^[a-zA-Z0-9_-]{1,128}$"

Int32 = Annotated[Whole, Field(ge=0, lt=2**31)]


class Wire(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)


W = TypeVar("W", bound=Wire)


class CacheControl(Wire):
    """Marks the end of a part to be cached. Caching needs no marks here: they make usage tell cached tokens apart."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Metadata(Wire):
    user_id: str | None = None


class Diagnostics(Wire):
    previous_message_id: str | None = None


class ThinkingEnabled(Wire):
    type: Literal["enabled"]
    budget_tokens: Whole = Field(ge=MIN_THINKING_TOKENS, lt=2**31)
    display: Literal["summarized", "omitted"] | None = None


class ThinkingAdaptive(Wire):
    type: Literal["adaptive"]
    display: Literal["summarized", "omitted"] | None = None


class ThinkingDisabled(Wire):
    type: Literal["disabled"]


class ToolChoiceAuto(Wire):
    type: Literal["auto"]
    disable_parallel_tool_use: bool | None = None


class ToolChoiceAny(Wire):
    type: Literal["any"]
    disable_parallel_tool_use: bool | None = None


class ToolChoiceTool(Wire):
    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = None


class ToolChoiceNone(Wire):
    type: Literal["none"]


class JsonFormat(Wire):
    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(Wire):
    effort: EFFORTS | None = None
    format: JsonFormat | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_budget(cls, value: Any) -> Any:
        if isinstance(value, dict) and "task_budget" in value:
            if value["task_budget"] is not None:
                raise Unsupported("output_config.task_budget is not implemented", "output_config.task_budget")
            value = {name: item for name, item in value.items() if name != "task_budget"}
        return value


class CustomTool(Wire):
    """A tool that the client runs."""

    name: str = Field(pattern=TOOL_NAME)
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None
    input_examples: list[dict[str, Any]] | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = Field(None, description="Accepted and ignored: input is always streamed.")
    allowed_callers: list[Literal["direct"]] | None = Field(None, description="Only the model calls tools here.")
    defer_loading: Literal[False] | None = Field(None, description="There is no tool search that could load a tool.")


Thinking = ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled
ToolChoiceWire = ToolChoiceAuto | ToolChoiceAny | ToolChoiceTool | ToolChoiceNone
_THINKING: dict[str, type[Wire]] = {
    "enabled": ThinkingEnabled,
    "adaptive": ThinkingAdaptive,
    "disabled": ThinkingDisabled,
}
_TOOL_CHOICES: dict[str, type[Wire]] = {
    "auto": ToolChoiceAuto,
    "any": ToolChoiceAny,
    "tool": ToolChoiceTool,
    "none": ToolChoiceNone,
}


class CountTokensRequest(Wire):
    """What makes the prompt. `messages`, `system` and `tools` are read in history.py and tools.py."""

    model: str
    messages: list[Any]
    system: str | list[Any] | None = None
    tools: list[Any] | None = None
    tool_choice: ToolChoiceWire | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = Field(None, description="The earlier name of output_config.format.")
    cache_control: CacheControl | None = Field(
        None, description="Caching needs no marks; where a request has one, usage counts cached tokens apart."
    )
    context_management: dict[str, Any] | None = Field(
        None, description="clear_thinking_20251015 with keep all, which changes nothing; other edits are refused."
    )
    speed: Literal["standard", "fast"] | None = None

    @field_validator("system", mode="before")
    @classmethod
    def _check_system(cls, value: Any) -> Any:
        if value is not None and not isinstance(value, str | list):
            raise UserError(f"system: must be a string or an array of text blocks, not {json_type(value)}", "system")
        return value

    @field_validator("thinking", mode="before")
    @classmethod
    def _choose_thinking(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("type") == "between_tools":
            raise Unsupported("thinking.type: between_tools is not implemented", "thinking.type")
        return _variant(value, "thinking", _THINKING)

    @field_validator("tool_choice", mode="before")
    @classmethod
    def _choose_tool_choice(cls, value: Any) -> Any:
        return _variant(value, "tool_choice", _TOOL_CHOICES)

    @field_validator("context_management", mode="after")
    @classmethod
    def _check_edits(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        path = "context_management.edits"
        edits = (value or {}).get("edits") or []
        if not isinstance(edits, list) or not all(isinstance(edit, dict) for edit in edits):
            raise UserError(f"{path}: must be an array of objects", path)
        for i, edit in enumerate(edits):
            kind = str(edit.get("type"))[:64]
            if kind != "clear_thinking_20251015" or edit.get("keep") not in ("all", {"type": "all"}):
                raise Unsupported(
                    f"{path}.{i}: {kind} is not implemented, except clear_thinking_20251015 with keep all",
                    f"{path}.{i}",
                )
        return value

    @model_validator(mode="after")
    def _check_format(self) -> CountTokensRequest:
        if self.output_format is not None and self.output_config is not None and self.output_config.format is not None:
            raise UserError(
                "output_format: is the earlier name of output_config.format; give one of them", "output_format"
            )
        return self


class MessagesRequest(CountTokensRequest):
    max_tokens: Int32 = Field(description="0 fills the prefix cache and generates nothing.")
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: Int32 | None = None
    diagnostics: Diagnostics | None = Field(None, description="The reason of a cache miss is always unavailable.")
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    @field_validator("stop_sequences", mode="after")
    @classmethod
    def _check_stop(cls, value: list[str] | None) -> list[str] | None:
        if value and len(value) > MAX_STOP_STRINGS:
            raise UserError(f"stop_sequences: at most {MAX_STOP_STRINGS}, got {len(value)}", "stop_sequences")
        for i, text in enumerate(value or ()):
            if not text:
                raise UserError(f"stop_sequences.{i}: must not be empty", f"stop_sequences.{i}")
        return value

    @model_validator(mode="after")
    def _check_budget(self) -> MessagesRequest:
        if isinstance(self.thinking, ThinkingEnabled) and self.thinking.budget_tokens >= self.max_tokens:
            raise UserError(
                f"thinking.budget_tokens: must be less than max_tokens, got {self.thinking.budget_tokens} and "
                f"{self.max_tokens}",
                "thinking.budget_tokens",
            )
        if self.max_tokens == 0 and self.stream:
            raise UserError("stream: max_tokens 0 generates nothing that could be streamed", "stream")
        return self


def parse(kind: type[W], body: dict[str, Any]) -> W:
    """Check a decoded body.

    Raises:
        UserError: a field is unknown, missing or wrong; `param` is its path.
        Unsupported: a field is known and not implemented.
    """
    known = kind.model_fields
    given = {}
    for name, value in body.items():
        if name in known:
            given[name] = value
        elif name in MessagesRequest.model_fields:
            continue  # counts are asked for with the body of a message, too: nothing is generated, so it says nothing
        elif name in REFUSED:
            reason, neutral = REFUSED[name]
            if value is not None and not any(type(value) is type(v) and value == v for v in neutral):
                raise Unsupported(f"{name}: {reason}", name)
        elif name not in IGNORED:
            near = difflib.get_close_matches(name[:64], [*known, *IGNORED], n=2)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise UserError(f"{name[:64]}: unknown field{hint}", name[:64])
    return validated(kind, given)


def validated(kind: type[W], value: Any, path: str = "") -> W:
    """The client's object at `path` as its class. Raises UserError with the path of what is wrong."""
    if not isinstance(value, dict):
        raise UserError(f"{path}: must be an object, not {json_type(value)}", path)
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        at = ".".join([*filter(None, [path]), *(str(part)[:64] for part in first["loc"])])
        message = _MESSAGES.get(first["type"], first["msg"])
        raise UserError(f"{at}: {message}", at) from None


_MESSAGES = {"missing": "is required", "extra_forbidden": "unknown field", "model_type": "must be an object"}


def _variant(value: Any, path: str, kinds: dict[str, type[Wire]]) -> Any:
    """The class that the object's `type` names."""
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(value, dict) and (not isinstance(kind, str) or kind not in kinds):
        found = "is required" if kind is None else f"must be one of {', '.join(kinds)}"
        raise UserError(f"{path}.type: {found}", f"{path}.type")
    return validated(kinds[kind] if isinstance(kind, str) else Wire, value, path)
