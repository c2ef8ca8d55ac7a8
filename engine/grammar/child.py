"""The process that compiles grammars: it loads xgrammar once and forks workers, of which it kills those that misbehave.

    compiler ──Setup, Jobs──► this process ──Job──► worker          forked, so that a new one is there within 20 ms
             ◄──Results─────               ◄─Result─

Nothing of a client's is looked at in this process. A worker has a limit of memory, which the kernel keeps, and one of
time, which this process keeps. NUM_FAST workers take jobs in their order. A job that computes for longer than most is
set aside, to go on beside the next ones with what they leave of the processor; there is room for a few of those, and
others that turn out slow wait for it and begin again. So a slow source takes no more than FAST_S from others.

A job that comes has an answer within the limit of time, whatever it waited for.

The process ends when its parent does (its standard input does), and workers end with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import selectors
import signal
import socket
import time
import warnings
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, Protocol

from pagedray.engine.errors import UserError
from pagedray.engine.grammar.vocabulary import Vocabulary
from pagedray.engine.grammar.wire import HEADER, Frames, Job, Result, Setup, frame

NUM_FAST = 2  # jobs that run in turn
FAST_S = 0.15  # processor time after which a job is set aside
FAST_WALL_S = 1.0  # or this, on a clock: one may sleep, or have no processor
MAX_SLOW = 2  # jobs that are set aside and run
MAX_SLOW_WAITING = 64
NICE, SLOW_NICE = 5, 19
MAX_GROWTH_BYTES = 2**30  # of a worker's address space
MAX_JOBS = 500  # of one worker: what a library leaks goes with it
CHECK_PARENT_S = 5.0
CHECK_TIMES_S = 0.02
READ_BYTES = 2**16
PR_SET_PDEATHSIG = 1


class Build(Protocol):
    def __call__(self, job: Job) -> bytes:
        """The compiled grammar. Raises: UserError when the source can't be used."""


class _Task:
    """A job and how long it has been here."""

    def __init__(self, job: Job):
        self.job = job
        self.came_s = self.started_s = time.monotonic()


class _Worker:
    """A forked process, as this one sees it."""

    def __init__(self, pid: int, connection: socket.socket):
        self.pid = pid
        self.connection = connection
        self.frames = Frames()
        self.task: _Task | None = None
        self.is_slow = False
        self.num_jobs = 0
        self._cpu_before_s = 0.0

    def begin(self, task: _Task, is_slow: bool) -> None:
        self.task = task
        task.started_s = time.monotonic()
        self.num_jobs += 1
        self._cpu_before_s = self._cpu_s()
        if is_slow:
            self.set_aside()
        with contextlib.suppress(OSError):  # it is dead, which its end of file tells as well
            self.connection.sendall(frame(task.job))

    def set_aside(self) -> None:
        self.is_slow = True
        os.setpriority(os.PRIO_PROCESS, self.pid, SLOW_NICE)

    def is_fast(self, now_s: float) -> bool:
        assert self.task is not None
        return now_s - self.task.started_s < FAST_WALL_S and self._cpu_s() - self._cpu_before_s < FAST_S

    def _cpu_s(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.reap()

    def reap(self) -> int:
        self.connection.close()
        return os.waitpid(self.pid, 0)[1]


class Pool:
    """Runs jobs in workers and writes their results.

    Args:
        build: compiles a job; runs in workers only.
        timeout_s: longest time until a job's answer.
        requests, results: file descriptors.
    """

    def __init__(self, build: Build, timeout_s: float, requests: int, results: int):
        self._build = build
        self._timeout_s = timeout_s
        self._requests, self._results = requests, results
        self._frames = Frames()
        self._waiting: deque[_Task] = deque()
        self._slow_waiting: deque[_Task] = deque()
        self._busy: list[_Worker] = []
        self._idle: list[_Worker] = []
        self._selector = selectors.EpollSelector()
        self._selector.register(requests, selectors.EVENT_READ)
        self._parent = os.getppid()

    def run(self) -> None:
        """Work until the parent is gone."""
        while os.getppid() == self._parent:
            self._assign()
            for key, _ in self._selector.select(CHECK_TIMES_S if self._busy else CHECK_PARENT_S):
                if key.fd == self._requests:
                    data = os.read(self._requests, READ_BYTES)
                    if not data:
                        return
                    self._waiting.extend(map(_Task, self._frames.feed(data, Job)))
                elif key.data in self._busy or key.data in self._idle:
                    self._hear(key.data)
            self._check_times()

    @property
    def _num_slow(self) -> int:
        return sum(worker.is_slow for worker in self._busy)

    def _assign(self) -> None:
        """Give jobs to workers, and have one that is ready for the next job."""
        while self._waiting and len(self._busy) - self._num_slow < NUM_FAST:
            self._begin(self._idle.pop() if self._idle else self._fork(), self._waiting.popleft(), False)
        while self._slow_waiting and self._num_slow < MAX_SLOW:
            self._begin(self._fork(), self._slow_waiting.popleft(), True)
        if not self._idle and not self._waiting:
            self._idle.append(self._fork())

    def _begin(self, worker: _Worker, task: _Task, is_slow: bool) -> None:
        self._busy.append(worker)
        worker.begin(task, is_slow)

    def _hear(self, worker: _Worker) -> None:
        """A worker has answered, or ended."""
        try:
            data = worker.connection.recv(READ_BYTES)
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(worker.connection)
            status = worker.reap()
            if worker in self._idle:
                self._idle.remove(worker)
                return
            self._busy.remove(worker)
            assert worker.task is not None
            self._answer(Result(worker.task.job.id, refusal=_why_it_ended(status)))
            return
        for result in worker.frames.feed(data, Result):
            self._busy.remove(worker)
            self._answer(result)
            if worker.is_slow or len(self._idle) >= NUM_FAST or worker.num_jobs >= MAX_JOBS:
                self._end(worker)
            else:
                self._idle.append(worker)

    def _check_times(self) -> None:
        now_s = time.monotonic()
        for worker in list(self._busy):
            task = worker.task
            assert task is not None
            if now_s - task.came_s >= self._timeout_s:
                self._busy.remove(worker)
                self._end(worker)
                ran_s = now_s - task.started_s
                if ran_s > self._timeout_s / 2:
                    self._answer(Result(task.job.id, refusal=_too_slow(self._timeout_s), is_lasting=False))
                else:
                    self._answer(_overload(task.job.id))
            elif not worker.is_slow and not worker.is_fast(now_s):
                if self._num_slow < MAX_SLOW:
                    worker.set_aside()
                    continue
                self._busy.remove(worker)
                self._end(worker)
                if len(self._slow_waiting) < MAX_SLOW_WAITING:
                    self._slow_waiting.append(task)
                else:
                    self._answer(_overload(task.job.id))
        for queue in (self._waiting, self._slow_waiting):
            while queue and now_s - queue[0].came_s >= self._timeout_s:
                self._answer(_overload(queue.popleft().job.id))

    def _end(self, worker: _Worker) -> None:
        self._selector.unregister(worker.connection)
        worker.kill()

    def _answer(self, result: Result) -> None:
        data = memoryview(frame(result))
        while data:
            data = data[os.write(self._results, data) :]

    def _fork(self) -> _Worker:
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            try:
                for fd in (self._requests, self._results, ours.fileno(), self._selector.fileno()):
                    os.close(fd)
                for other in [*self._busy, *self._idle]:
                    other.connection.close()
                _work(theirs, self._build)
            finally:
                os._exit(1)
        theirs.close()
        worker = _Worker(pid, ours)
        self._selector.register(ours, selectors.EVENT_READ, worker)
        return worker


def _work(connection: socket.socket, build: Build) -> NoReturn:
    """A worker's life: one job after the other, until it is killed or has no parent."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 2)  # the library's warnings quote what clients sent
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MAX_GROWTH_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    frames = Frames()
    while data := connection.recv(READ_BYTES):
        for job in frames.feed(data, Job):
            connection.sendall(frame(_result(job, build)))
    os._exit(0)


def _result(job: Job, build: Build) -> Result:
    try:
        return Result(job.id, data=build(job))
    except UserError as error:
        return Result(job.id, refusal=error.message)
    except MemoryError:
        return Result(job.id, refusal=TOO_BIG)
    except RecursionError:
        return Result(job.id, refusal="it is nested too deeply")


TOO_BIG = f"compiling it takes more than {MAX_GROWTH_BYTES >> 20} MiB of memory; make it smaller"


def _too_slow(timeout_s: float) -> str:
    return f"compiling it takes more than {timeout_s:g} s; make it smaller, or raise api.grammar_timeout_s"


def _overload(job_id: int) -> Result:
    return Result(job_id, refusal="too many grammars that take long are being compiled; try again", is_overload=True)


def _why_it_ended(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGABRT:  # how C++ ends when memory can't be had
        return TOO_BIG
    return f"compiling it crashes the compiler (exit code {code}); make it smaller or less deep"


def _read_setup(fd: int) -> Setup | None:
    """The first message; None when the parent is gone before it."""
    data = bytearray()
    while len(data) < HEADER.size or len(data) < HEADER.size + HEADER.unpack_from(data)[0]:
        missing = HEADER.size if len(data) < HEADER.size else HEADER.size + HEADER.unpack_from(data)[0]
        part = os.read(fd, missing - len(data))
        if not part:
            return None
        data += part
    (setup,) = Frames().feed(bytes(data), Setup)
    return setup


def serve(make_build: Callable[[Vocabulary], Build]) -> None:
    """Body of the process: answers what comes over standard input until that ends.

    Args:
        make_build: called once, with the vocabulary; what it loads, all workers have.
    """
    requests, results = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what libraries print is no result
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the parent decides when this ends
    os.nice(NICE)
    setup = _read_setup(requests)
    if setup is not None:
        # Libraries have threads, which sleep; and what a fork does about it is Python's advice from 3.12 on.
        warnings.filterwarnings("ignore", message=".*multi-threaded", category=DeprecationWarning)
        Pool(make_build(setup.vocabulary), setup.timeout_s, requests, results).run()


def main() -> None:
    """The process of `GrammarCompiler`."""
    from pagedray.engine.grammar.build import Builder

    serve(Builder)
