"""`pagedray complete`: a text goes on, on any server of the OpenAI API."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Any

import httpx

from pagedray.deployments.commands.api_server import DEFAULT_URL, ApiServer, add_server_flags, api_key
from pagedray.deployments.commands.chat import ENDING, add_timeout_flag
from pagedray.deployments.commands.exit_code import ExitCode
from pagedray.deployments.commands.sampling_flags import add_sampling_flags, request_fields
from pagedray.deployments.commands.terminal import Terminal


def add_complete(commands: Any) -> None:
    """Args: `commands` is what `ArgumentParser.add_subparsers` gave."""
    parser = commands.add_parser(
        "complete",
        help="have a served model go on with a text",
        description="Write what a model goes on with after a text, as it comes; into a pipe exactly that.",
        epilog=ENDING,
        allow_abbrev=False,
    )
    parser.add_argument("prompt", metavar="PROMPT", help="the text; - reads it from the input")
    parser.add_argument("--model", help="name of the model. Default: the first one that the server lists")
    add_server_flags(parser, httpx.URL(DEFAULT_URL))
    add_timeout_flag(parser)
    add_sampling_flags(parser)


def run_complete(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Raises: CommandError."""
    terminal = Terminal(sys.stdin, sys.stdout, sys.stderr, environ)
    prompt = terminal.everything() if args.prompt == "-" else args.prompt
    with ApiServer(args.url, api_key(args.api_key, environ), args.timeout_s) as server:
        fields = {"model": args.model or server.first_model(), **request_fields(args)}
        try:
            with server.stream("/completions", {**fields, "prompt": prompt, "stream": True}) as chunks:
                for chunk in chunks:
                    for choice in chunk.get("choices") or ():
                        terminal.answer(choice.get("text") or "")
        finally:
            if terminal.is_watched:
                terminal.end_line()
    return ExitCode.OK
