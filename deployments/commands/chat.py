"""`pagedray chat`: a conversation in the terminal with any server of the OpenAI API."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from typing import Any

import httpx

from pagedray.deployments.commands.api_server import DEFAULT_URL, ApiServer, add_server_flags, api_key
from pagedray.deployments.commands.exit_code import CommandError, ExitCode
from pagedray.deployments.commands.flag_types import seconds
from pagedray.deployments.commands.sampling_flags import add_sampling_flags, request_fields
from pagedray.deployments.commands.terminal import Terminal

ABOUT = """Talk with a model in the terminal.

Ctrl-C stops an answer, Ctrl-D ends the program; /help lists what else can be typed. Without a terminal
each line of the input is one turn of the conversation, and the first error ends it."""

ENDING = """exit status: 0 ok, 1 failed here, 2 wrong flags, 3 no server answers, 4 it refused (key, model, field),
5 it failed or its answer broke off, 130 Ctrl-C"""

COMMANDS = {
    "/help": "show this",
    "/reset": "forget the conversation; the system text stays",
    "/system [TEXT]": "show the system text, or set it; `/system -` removes it",
    "/exit": "end, as Ctrl-D does",
}

MAX_TOKENS = 1024  # of an answer, unless a flag says otherwise: small models may not end one by themselves


def add_chat(commands: Any) -> None:
    """Args: `commands` is what `ArgumentParser.add_subparsers` gave."""
    parser = commands.add_parser(
        "chat",
        help="talk with a served model in the terminal",
        description=ABOUT,
        epilog=ENDING,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "prompt", nargs="?", metavar="PROMPT", help="answer this and end; - reads all of the input as one prompt"
    )
    parser.add_argument("--system", metavar="TEXT", help="what the conversation begins with, as the system's message")
    parser.add_argument("--model", help="name of the model. Default: the first one that the server lists")
    add_server_flags(parser, httpx.URL(DEFAULT_URL))
    add_timeout_flag(parser)
    add_sampling_flags(parser)
    parser.set_defaults(max_tokens=MAX_TOKENS)


def add_timeout_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--timeout-s",
        type=seconds,
        default=600.0,
        metavar="SECONDS",
        help="longest wait for the next piece of an answer. Default: 600",
    )


def run_chat(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Raises: CommandError, which ends the program."""
    terminal = Terminal(sys.stdin, sys.stdout, sys.stderr, environ)
    with ApiServer(args.url, api_key(args.api_key, environ), args.timeout_s) as server:
        model = args.model or server.first_model()
        chat = Chat(server, terminal, {"model": model, **request_fields(args)}, args.system)
        if args.prompt is not None:
            chat.say(terminal.everything() if args.prompt == "-" else args.prompt)
            terminal.end_line()
        elif terminal.is_typed:
            terminal.note(f"{model}; Ctrl-C stops an answer, Ctrl-D ends, /help lists more")
            with terminal.history():
                chat.converse()
        else:
            while (line := terminal.ask()) is not None and chat.take(line):
                terminal.end_line()
    return ExitCode.OK


class Chat:
    """One conversation.

    Args:
        fields: of every request, beside the messages.
        system: what the conversation begins with.
    """

    def __init__(self, server: ApiServer, terminal: Terminal, fields: dict[str, Any], system: str | None):
        self._server, self._terminal, self._fields = server, terminal, fields
        self._system = system
        self._turns: list[dict[str, str]] = []

    def converse(self) -> None:
        """Take what is typed until its end. Errors and Ctrl-C end an answer, not the conversation."""
        while True:
            try:
                line = self._terminal.ask()
                if line is None or not self.take(line):
                    break
            except KeyboardInterrupt:
                self._terminal.note("stopped; Ctrl-D ends")
            except CommandError as error:
                self._terminal.note(f"pagedray: {error}")
        self._terminal.end_line()

    def take(self, line: str) -> bool:
        """A line that was typed: a prompt or a command. False if it ends the conversation."""
        text = line.strip()
        if not text.startswith("/"):
            if text:
                self.say(line)
            return True
        name, _, rest = text.partition(" ")
        actions: dict[str, Callable[[str], None]] = {
            "/help": self._help,
            "/reset": self._reset,
            "/system": self._set_system,
        }
        if name in ("/exit", "/quit"):
            return False
        if name in actions:
            actions[name](rest.strip())
        else:
            self._terminal.note(f"{name} is no command; /help lists them. A space before it makes it a prompt")
        return True

    def say(self, prompt: str) -> None:
        """Have a prompt answered. An answer that is stopped counts as far as it came, one that fails not at all.

        Raises:
            CommandError, KeyboardInterrupt: the conversation can go on.
        """
        turn = {"role": "user", "content": prompt}
        system = [{"role": "system", "content": self._system}] if self._system else []
        pieces: list[str] = []
        try:
            self._answer([*system, *self._turns, turn], pieces)
        except KeyboardInterrupt:
            if pieces:
                self._keep(turn, pieces)
            raise
        self._keep(turn, pieces)

    def _answer(self, messages: list[dict[str, str]], pieces: list[str]) -> None:
        """Show an answer while it comes, and gather it in `pieces`."""
        body = {**self._fields, "messages": messages, "stream": True}
        reasons, finish_reason = False, None
        with self._server.stream("/chat/completions", body) as chunks:
            for chunk in chunks:
                for choice in chunk.get("choices") or ():
                    delta = choice.get("delta") or {}
                    if thought := delta.get("reasoning_content") or delta.get("reasoning"):
                        self._terminal.reason(thought)
                        reasons = True
                    if text := delta.get("content") or delta.get("refusal"):
                        if reasons and not pieces:
                            self._terminal.gap()
                        self._terminal.answer(text)
                        pieces.append(text)
                    finish_reason = choice.get("finish_reason") or finish_reason
        if finish_reason not in (None, "stop"):
            self._terminal.note(f"(the answer ended by: {finish_reason})")

    def _keep(self, turn: dict[str, str], pieces: list[str]) -> None:
        self._turns += [turn, {"role": "assistant", "content": "".join(pieces)}]

    def _help(self, rest: str) -> None:
        width = max(map(len, COMMANDS))
        lines = [f"{name:<{width}}  {text}" for name, text in COMMANDS.items()]
        self._terminal.note("\n".join([*lines, "A backslash at a line's end: the prompt goes on in the next line."]))

    def _reset(self, rest: str) -> None:
        self._turns.clear()
        self._terminal.note("the conversation begins anew")

    def _set_system(self, text: str) -> None:
        if text:
            self._system = None if text == "-" else text
        self._terminal.note(f"system: {self._system}" if self._system else "there is no system text")
