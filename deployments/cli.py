"""The command `pagedray`: what each of its commands does is in `deployments/commands/`."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
from collections.abc import Callable, Mapping, Sequence

from pagedray.deployments.commands.chat import add_chat, run_chat
from pagedray.deployments.commands.complete import add_complete, run_complete
from pagedray.deployments.commands.exit_code import CommandError, ExitCode
from pagedray.deployments.commands.run_batch import add_run_batch, run_batch
from pagedray.deployments.commands.serve import add_serve, run_serve
from pagedray.engine.errors import PagedrayError

RUN: dict[str, Callable[[argparse.Namespace, Mapping[str, str]], int]] = {
    "serve": run_serve,
    "chat": run_chat,
    "complete": run_complete,
    "run-batch": run_batch,
}


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.command == "version":
        print(version())
        return ExitCode.OK
    try:
        return RUN[args.command](args, os.environ)
    except PagedrayError as error:
        print(f"pagedray: {error}", file=sys.stderr)
        return error.code if isinstance(error, CommandError) else ExitCode.FAILED
    except KeyboardInterrupt:
        print("", file=sys.stderr)  # below the ^C
        return ExitCode.INTERRUPTED
    except BrokenPipeError:  # who reads the output has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains of it at its end
        return ExitCode.FAILED


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="pagedray", description="Serve large language models with Ray, and use them.", allow_abbrev=False
    )
    top.add_argument("-V", "--version", action="version", version=version())
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_serve(commands)
    add_chat(commands)
    add_complete(commands)
    add_run_batch(commands)
    commands.add_parser("version", help="print the version", allow_abbrev=False)
    return top


def version() -> str:
    try:
        return importlib.metadata.version("pagedray")
    except importlib.metadata.PackageNotFoundError:  # run from a tree that isn't installed
        return "unknown"


if __name__ == "__main__":
    sys.exit(main())
