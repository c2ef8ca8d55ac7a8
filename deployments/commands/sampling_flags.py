"""Flags of `chat` and `complete` that become fields of the request. Only those given are sent."""

from __future__ import annotations

import argparse
from typing import Any

import msgspec

# Field → its type and help. Flags are named after the fields.
FIELDS: dict[str, tuple[type[int] | type[float], str]] = {
    "max_tokens": (int, "most tokens of an answer. Default: 1024 in chat, else the server's"),
    "temperature": (float, "0 is greedy. Default: the server's, mostly 1"),
    "top_p": (float, "sample from the likeliest tokens of this total probability"),
    "top_k": (int, "sample from this many of the likeliest tokens"),
    "min_p": (float, "sample from tokens of this probability times the likeliest one's, or more"),
    "presence_penalty": (float, "subtracted from the logits of tokens that were generated"),
    "frequency_penalty": (float, "subtracted from the logits of a token each time it was generated"),
    "repetition_penalty": (float, "divides the logits of tokens that are there already; 1 changes nothing"),
    "seed": (int, "makes the answer repeatable"),
}


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling", "What is not given is left to the server.")
    for name, (kind, text) in FIELDS.items():
        metavar = "N" if kind is int else "X"
        group.add_argument("--" + name.replace("_", "-"), dest=name, type=kind, metavar=metavar, help=text)
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="end the answer before this text; may be repeated"
    )
    group.add_argument(
        "--body", type=_json_object, default={}, metavar="JSON", help="an object with more fields of the request"
    )


def request_fields(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of the flags that were given; --body has the last word."""
    given: dict[str, Any] = {name: getattr(args, name) for name in (*FIELDS, "stop") if getattr(args, name) is not None}
    return {**given, **args.body}


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not an object, like '{{\"min_tokens\": 5}}'")
    if fixed := {"model", "messages", "prompt", "stream", "n"} & value.keys():
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(fixed))} can't be changed here")
    return value
