"""The tools that a request offers, whatever the protocol."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class Tool(msgspec.Struct, frozen=True):
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}  # JSON schema of the arguments; empty: any object
    strict: bool = False  # a call follows the schema, even where the model may choose whether to call


class NamedTool(msgspec.Struct, frozen=True):
    """The choice of one tool: it must be called, once."""

    name: str


ToolChoice = Literal["none", "auto", "required"] | NamedTool
