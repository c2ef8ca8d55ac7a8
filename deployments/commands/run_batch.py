"""`pagedray run-batch`: a file of requests in, a file of results out, on a server or on an engine of its own."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import httpx
import msgspec

from pagedray.deployments.commands.api_server import (
    CONNECT_S,
    add_server_flags,
    api_key,
    http_settings,
    refusal,
    unreachable,
)
from pagedray.deployments.commands.batch_line import URLS, Result, read_batch
from pagedray.deployments.commands.batch_output import BatchOutput
from pagedray.deployments.commands.batch_progress import BatchProgress
from pagedray.deployments.commands.batch_sender import BatchSender
from pagedray.deployments.commands.exit_code import CommandError, ExitCode
from pagedray.deployments.commands.flag_types import count, seconds
from pagedray.deployments.commands.settings import ORDER, add_settings, given_settings, read_config
from pagedray.engine.config import Config
from pagedray.engine.errors import ConfigError
from pagedray.engine.executor import RankWorker
from pagedray.engine.local_worker import local_tokenizer, local_worker
from pagedray.engine.text.tokenizer import Tokenizer
from pagedray.serving.parsers.registry import choose_parsers

STDIN = "-"
CONCURRENCY = 64  # on a server
ANSWER_S = 3600.0  # of a server

ABOUT = f"""Answer a file of requests, as OpenAI's Batch API has them: one JSON object a line, with custom_id,
method (POST), url and body. Urls: {", ".join(URLS)}.

Results are appended to the output as they come, in no order: one line each with id, custom_id, response (status_code,
request_id, body) and error. error is null, or says in code and message why there is no answer; line is the number of
an input line that couldn't be read or that repeats a custom_id. Such lines hurt no others.

What the output holds already is kept and not asked for again, so a run that was stopped goes on when it is started
again. Runs on the server at --url, or without it on an engine in this process, without Ray."""

ENDING = f"""{ORDER}
exit status: 0 all results are written, also if requests failed; 1 failed here, 2 wrong flags or files, 3 the server is
gone and some lines have no result yet, 130 Ctrl-C"""


def add_run_batch(commands: Any) -> None:
    """Args: `commands` is what `ArgumentParser.add_subparsers` gave."""
    parser = commands.add_parser(
        "run-batch",
        help="answer a file of requests",
        description=ABOUT,
        epilog=ENDING,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("-i", "--input", required=True, metavar="FILE", help="requests, JSON lines; - is the input")
    parser.add_argument(
        "-o",
        "--output",
        required=True,
        metavar="FILE",
        help="results, JSON lines; - is the output, which keeps nothing",
    )
    parser.add_argument(
        "--concurrency",
        type=count,
        metavar="N",
        help=f"most requests at once. Default: {CONCURRENCY} with --url, else twice max_num_seqs",
    )
    parser.add_argument(
        "--retry-s",
        type=seconds,
        default=600.0,
        metavar="SECONDS",
        help="how long a request is sent again while the server is busy (429, 502, 503) or can't be reached; "
        "Retry-After is heeded. Default: 600",
    )
    parser.add_argument(
        "--timeout-s",
        type=seconds,
        metavar="SECONDS",
        help=f"longest wait for one answer of the server at --url. Default: {ANSWER_S:g}",
    )
    parser.add_argument(
        "--progress", action=argparse.BooleanOptionalAction, default=True, help="show a bar on stderr. Default: on"
    )
    add_server_flags(parser, None)
    add_settings(parser, without=("server",))


def run_batch(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Raises: PagedrayError when results are missing."""
    serve = _on_server(args, environ) if args.url is not None else _in_process(args, environ)
    with contextlib.suppress(OSError):  # one of them is not there, or not a file
        if os.path.samefile(args.input, args.output):
            raise CommandError(f"{args.input} is the input and the output", ExitCode.USAGE)
    with _input(args.input) as lines, contextlib.closing(BatchOutput(args.output)) as output:
        is_there = [output.has(number, line) for number, line in read_batch(lines)]
        lines.seek(0)
        progress = BatchProgress(len(is_there), sum(is_there), args.progress)
        if not all(is_there):
            try:
                asyncio.run(BatchRun(lines, output, progress).all(serve()))
            except KeyboardInterrupt:
                _say(f"stopped: {progress.summary}; the same command goes on from here")
                return ExitCode.INTERRUPTED
            except BaseException:
                _say(f"ended early: {progress.summary}")
                raise
    _say(progress.summary)
    return ExitCode.OK


class Backend(msgspec.Struct, frozen=True):
    """Who answers."""

    http: httpx.AsyncClient
    concurrency: int
    patience_s: float  # how long a request is sent again
    running: asyncio.Task[None] | None = None  # ends when nobody will answer any more


Backends = contextlib.AbstractAsyncContextManager[Backend]


class BatchRun:
    """One run of the command.

    Args:
        lines: the input, at its beginning.
    """

    def __init__(self, lines: BinaryIO, output: BatchOutput, progress: BatchProgress):
        self._work, self._output, self._progress = read_batch(lines), output, progress

    async def all(self, backends: Backends) -> None:
        """Write a result for every line that has none.

        Raises:
            PagedrayError: the server is gone, the engine died, or the output can't be written.
        """
        try:
            async with backends as backend:
                self._progress.begin()
                sender = BatchSender(backend.http, backend.patience_s, self._progress.waits)
                workers = [asyncio.create_task(self._send_some(sender)) for _ in range(backend.concurrency)]
                try:
                    await _all_done(workers, backend.running)
                finally:
                    for worker in workers:
                        worker.cancel()
                    await asyncio.gather(*workers, return_exceptions=True)
        finally:
            self._progress.end()

    async def _send_some(self, sender: BatchSender) -> None:
        """One of several that take lines off the input in turn, until there are no more."""
        for number, line in self._work:
            if not self._output.has(number, line):
                result = line if isinstance(line, Result) else await sender.send(line)
                self._output.write(result)
                self._progress.wrote(result)


async def _all_done(workers: list[asyncio.Task[None]], running: asyncio.Task[None] | None) -> None:
    """Until all workers have ended, or something failed, whose error it raises."""
    left: set[asyncio.Task[None]] = set(workers)
    while left:
        done, _ = await asyncio.wait(left if running is None else left | {running}, return_when=asyncio.FIRST_COMPLETED)
        for task in sorted(done, key=lambda task: task is not running):  # an engine's death comes first
            task.result()
        left -= done


def _on_server(args: argparse.Namespace, environ: Mapping[str, str]) -> Callable[[], Backends]:
    """What makes the backend of these flags, once they were found right. Raises: CommandError."""
    if given := sorted(given_settings(args)) + ["config"] * (args.config is not None):
        names = ", ".join("--" + name.replace("_", "-") for name in given)
        raise CommandError(f"{names}: settings of an engine here, and --url runs on a server", ExitCode.USAGE)
    key = api_key(args.api_key, environ)
    settings = http_settings(args.url, key, ANSWER_S if args.timeout_s is None else args.timeout_s)
    concurrency = args.concurrency or CONCURRENCY

    @contextlib.asynccontextmanager
    async def backends() -> AsyncIterator[Backend]:
        limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
        async with httpx.AsyncClient(**settings, limits=limits) as http:
            await _check(http, key)
            yield Backend(http, concurrency, args.retry_s)

    return backends


async def _check(http: httpx.AsyncClient, key: str | None) -> None:
    """Raises: CommandError: nothing answers there, or it doesn't know the key. What is wrong now needs no patience."""
    try:
        response = await http.get("/models", timeout=CONNECT_S)
    except httpx.TransportError as error:
        raise unreachable(http.base_url, error) from None
    if response.status_code in (401, 403):
        raise refusal(response, key)


def _in_process(args: argparse.Namespace, environ: Mapping[str, str]) -> Callable[[], Backends]:
    """As `_on_server`; what it gives loads the model. Raises: ConfigError, CommandError."""
    for name in ("api_key", "timeout_s"):
        if getattr(args, name) is not None:
            raise CommandError(f"--{name.replace('_', '-')} is for the server at --url", ExitCode.USAGE)
    config = read_config(args, environ)
    choose_parsers(config.api, None)  # names that aren't known are found before the model is loaded
    if config.server.fewest_engines > 1:
        raise ConfigError(
            f"run-batch has one engine, and num_engine_replicas is {config.server.fewest_engines}; "
            "start `pagedray serve` for several and give its --url"
        )
    return lambda: local_backend(config, local_tokenizer(config), args.concurrency, args.retry_s)


def local_backend(
    config: Config,
    tokenizer: Tokenizer,
    concurrency: int | None,
    patience_s: float,
    worker_class: Callable[..., RankWorker] | None = None,
) -> Backends:
    """An engine in this process, whose model is loaded at once. Raises: ConfigError, EngineDead.

    Args:
        concurrency: None: so many that the engine's batch is always full.
    """
    from pagedray.deployments.commands.local_link import LocalServer

    worker = local_worker(config, worker_class)
    try:
        facts = worker.load()
    except BaseException:
        worker.close()
        raise

    @contextlib.asynccontextmanager
    async def backends() -> AsyncIterator[Backend]:
        async with LocalServer(config, tokenizer, worker, facts) as server:
            yield Backend(server.http, concurrency or 2 * config.scheduler.max_num_seqs, patience_s, server.running)

    return backends()


@contextlib.contextmanager
def _input(name: str) -> Iterator[BinaryIO]:
    """Raises: CommandError."""
    with contextlib.ExitStack() as stack:
        try:
            file = sys.stdin.buffer if name == STDIN else stack.enter_context(Path(name).open("rb"))
            # What can be read once only is kept, to be counted first.
            yield file if name != STDIN and file.seekable() else io.BytesIO(file.read())
        except OSError as error:
            raise CommandError(f"-i: {error}", ExitCode.USAGE) from None


def _say(text: str) -> None:
    print(f"pagedray: {text}", file=sys.stderr)
