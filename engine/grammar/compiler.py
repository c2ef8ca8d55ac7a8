"""`GrammarCompiler`: grammars as clients write them, checked and compiled in a process of their own.

Clients' grammars are hostile input to a large library: one may take minutes, all of the memory, or the process. So they
are read, checked, compiled and tried out by `engine.grammar.child`, which ends whatever takes too long; this side keeps
what came of it. Nothing here loads xgrammar or torch, and nothing blocks the event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import sys
from collections import OrderedDict

import msgspec

from pagedray.engine.errors import EngineUnavailable, Overloaded, UserError
from pagedray.engine.grammar.source import GrammarSource
from pagedray.engine.grammar.vocabulary import Vocabulary
from pagedray.engine.grammar.wire import Frames, Job, Result, Setup, frame
from pagedray.engine.messages import CompiledGrammar

log = logging.getLogger(__name__)

MAX_SOURCE_CHARS = 2**19
MAX_WAITING = 256  # jobs that the child has, running ones included
MAX_CACHE_BYTES = 64 * 2**20
ENTRY_BYTES = 512  # what a cache entry takes beside its data
MAX_STARTS = 2  # of the child for one job
READ_BYTES = 2**16
# The child finds the package where this process does, wherever that came from.
CHILD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from pagedray.engine.grammar.child import main; main()"
)


class _Refusal(msgspec.Struct, frozen=True):
    reason: str


class GrammarCompiler:
    """Compiles grammars for one vocabulary. Belongs to the event loop that it is used in.

    Results and refusals are cached, least recently used out first; equal sources are compiled once, however many wait.
    A caller that is cancelled disturbs nobody: the compilation goes on and its result is cached.

    Args:
        timeout_s: longest run of one compilation (`api.grammar_timeout_s`).
    """

    def __init__(self, vocabulary: Vocabulary, timeout_s: float):
        self._setup = Setup(vocabulary, timeout_s)
        self._digest = vocabulary.digest
        self._cache: OrderedDict[bytes, CompiledGrammar | _Refusal] = OrderedDict()
        self._cache_bytes = 0
        self._jobs: dict[int, _Pending] = {}
        self._by_key: dict[bytes, _Pending] = {}
        self._next_id = 0
        self._process: asyncio.subprocess.Process | None = None
        self._runner: asyncio.Task[None] | None = None
        self._is_closed = False

    def start(self) -> None:
        """Begin the child, which takes a second or two, so that the first grammar needn't wait for it."""
        if self._runner is None or self._runner.done():
            self._runner = asyncio.create_task(self._run())

    async def compile(self, source: GrammarSource) -> CompiledGrammar:
        """The grammar, ready for `Constraint.grammar`.

        Raises:
            UserError: the source is broken, not supported, too big, or too slow to compile; says what and where.
            Overloaded: too many others wait.
            EngineUnavailable: the child can't be started.
        """
        if len(source.text) > MAX_SOURCE_CHARS:
            raise UserError(f"it has {len(source.text)} characters, the limit is {MAX_SOURCE_CHARS}", source.param)
        try:
            key = self._key(source)
        except UnicodeEncodeError as error:
            raise UserError(f"it holds half a surrogate pair at character {error.start}", source.param) from error
        found = self._cache.get(key)
        if found is not None:
            self._cache.move_to_end(key)
        else:
            found = await asyncio.shield(self._submit(key, source))
        if isinstance(found, _Refusal):
            raise UserError(found.reason, source.param)
        return found

    async def close(self) -> None:
        """End the child. Callers that wait get EngineUnavailable. Safe to call twice."""
        self._is_closed = True
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.gather(self._runner, return_exceptions=True)
        self._fail_all("the grammar compiler is closed")

    def _key(self, source: GrammarSource) -> bytes:
        text = f"{source.kind}\0{source.text}".encode()
        return hashlib.blake2b(text, key=self._digest, digest_size=16).digest()

    def _submit(self, key: bytes, source: GrammarSource) -> asyncio.Future[CompiledGrammar | _Refusal]:
        pending = self._by_key.get(key)
        if pending is None:
            if self._is_closed:
                raise EngineUnavailable("the grammar compiler is closed")
            if len(self._jobs) >= MAX_WAITING:
                raise Overloaded(f"{len(self._jobs)} grammars wait to be compiled, the limit is {MAX_WAITING}")
            pending = _Pending(key, Job(self._next_id, source))
            self._next_id += 1
            self._jobs[pending.job.id] = self._by_key[key] = pending
            self.start()
            self._send(pending)
        return pending.future

    def _send(self, pending: _Pending) -> None:
        """Hand a job to the child, if there is one; a child that starts gets all of them."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(frame(pending.job))
            pending.num_starts += not pending.is_sent
            pending.is_sent = True

    async def _run(self) -> None:
        """Run children until one ends with nothing left to do."""
        try:
            while True:
                await self._run_child()
                for pending in list(self._jobs.values()):
                    if pending.num_starts >= MAX_STARTS:
                        self._finish(pending, EngineUnavailable("the process that compiles grammars ended; try again"))
                    pending.is_sent = False
                if not self._jobs:
                    return
        except OSError as error:
            log.exception("grammar compiler can't start")
            self._fail_all(f"the process that compiles grammars can't be started: {error}")
        except Exception as error:  # whatever it is, nobody may wait for ever
            log.exception("grammar compiler given up")
            self._fail_all(f"the process that compiles grammars can't be used: {error}")

    async def _run_child(self) -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            CHILD,
            json.dumps(sys.path),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdin is not None and process.stdout is not None
        self._process = process
        try:
            process.stdin.write(frame(self._setup))
            for pending in self._jobs.values():
                self._send(pending)
            frames = Frames()
            while data := await process.stdout.read(READ_BYTES):
                for result in frames.feed(data, Result):
                    self._take(result)
            log.warning("grammar compiler ended code=%s jobs=%d", await process.wait(), len(self._jobs))
        finally:
            self._process = None
            process.stdin.close()
            if process.returncode is None:
                process.kill()
                await process.wait()

    def _take(self, result: Result) -> None:
        pending = self._jobs.get(result.id)
        if pending is None:
            return
        if result.is_overload:
            self._finish(pending, Overloaded(result.refusal))
            return
        found = _Refusal(result.refusal) if result.refusal else CompiledGrammar(pending.key, result.data)
        if result.is_lasting:
            self._cache[pending.key] = found
            self._cache_bytes += _size(found)
        while self._cache_bytes > MAX_CACHE_BYTES:
            self._cache_bytes -= _size(self._cache.popitem(last=False)[1])
        self._finish(pending, found)

    def _finish(self, pending: _Pending, found: CompiledGrammar | _Refusal | Exception) -> None:
        del self._jobs[pending.job.id], self._by_key[pending.key]
        if isinstance(found, Exception):
            pending.future.set_exception(found)
            pending.future.exception()  # its callers may be gone; then nobody else asks for it
        else:
            pending.future.set_result(found)

    def _fail_all(self, reason: str) -> None:
        for pending in list(self._jobs.values()):
            self._finish(pending, EngineUnavailable(reason))


class _Pending:
    """A job that has no result yet."""

    def __init__(self, key: bytes, job: Job):
        self.key = key
        self.job = job
        self.future: asyncio.Future[CompiledGrammar | _Refusal] = asyncio.get_running_loop().create_future()
        self.is_sent = False  # to the child that runs
        self.num_starts = 0  # children that had it


def _size(found: CompiledGrammar | _Refusal) -> int:
    return ENTRY_BYTES + (len(found.data) if isinstance(found, CompiledGrammar) else len(found.reason))
