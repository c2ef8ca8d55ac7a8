"""A gang on this machine without Ray: rank 0 in this process, each other rank in a process of its own.

Not through `multiprocessing`, which would run the user's script once more in each of them. A rank's process ends with
this one, however that ends: then its standard input does.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any, BinaryIO, TextIO

import msgspec

from pagedray.engine.config import Config, EngineFacts
from pagedray.engine.errors import EngineDead
from pagedray.engine.executor import RankWorker
from pagedray.engine.messages import RunnerOutput, SchedulerOutput
from pagedray.engine.metrics import ExpertCounts
from pagedray.engine.worker.control import Listener, Member
from pagedray.engine.worker.gang_worker import Follower, LeadWorker, make_rank

HOST = "127.0.0.1"
END_S = 3.0  # for a rank's process to end by itself, which takes it no time unless it is stuck
_CODE = f"import sys, json; sys.path[:] = json.loads(sys.argv[1]); from {__name__} import main; main()"


class _Task(msgspec.Struct, frozen=True):
    """What a rank's process reads first."""

    config: str  # JSON
    rank: int
    address: str  # of rank 0's listener
    worker_class: str  # module:name


class SpawnedGang:
    """An `executor.StepWorker` of several ranks.

    Args:
        worker_class: see `gang_worker.make_rank`; other processes must be able to import it.
    """

    def __init__(self, config: Config, worker_class: Callable[..., RankWorker]):
        self._config, self._worker_class = config, worker_class
        self._size = config.worker.num_ranks
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._lead: LeadWorker | None = None

    def load(self) -> EngineFacts:
        """Start the other ranks and load the model on all. What can't start leaves no process behind."""
        try:
            return self._load()
        except BaseException:
            self.close()
            raise

    def submit(self, out: SchedulerOutput) -> None:
        assert self._lead is not None
        self._lead.submit(out)

    def result(self, step: int) -> RunnerOutput:
        assert self._lead is not None
        return self._lead.result(step)

    def expert_loads(self) -> ExpertCounts:
        assert self._lead is not None
        return self._lead.expert_loads()

    def close(self) -> None:
        """End the other ranks' processes. Safe to call twice."""
        if self._lead is not None:
            self._lead.close()
        for process in self._processes.values():
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            process.kill()
            process.wait()
        self._processes.clear()

    def _load(self) -> EngineFacts:
        listener = Listener(HOST)
        try:
            for rank in range(1, self._size):
                self._processes[rank] = self._start(rank, listener.address)
            meeting = listener.accept(self._size, self._config.failure.start_timeout_s, self._check)
        finally:
            listener.close()
        lead = make_rank(self._worker_class, self._config, meeting, f"process {os.getpid()}", gpu=0)
        assert isinstance(lead, LeadWorker)
        self._lead = lead
        return lead.load()

    def _start(self, rank: int, address: str) -> subprocess.Popen[bytes]:
        name = f"{self._worker_class.__module__}:{self._worker_class.__qualname__}"
        process = subprocess.Popen(
            [sys.executable, "-c", _CODE, msgspec.json.encode(sys.path).decode()],
            stdin=subprocess.PIPE,
            process_group=0,  # Ctrl-C is this process's to handle
        )
        assert process.stdin is not None
        config = self._config.model_dump_json(exclude_unset=True)  # which fields were given counts too
        process.stdin.write(msgspec.json.encode(_Task(config, rank, address, name)) + b"\n")
        process.stdin.flush()
        return process

    def _check(self) -> None:
        for rank, process in self._processes.items():
            if status := process.poll():  # 0: it has joined and said why it ended
                raise EngineDead(f"rank {rank} (process {process.pid}) ended with status {status} while it started")


def main() -> None:
    """One rank above 0."""
    task = msgspec.json.decode(sys.stdin.buffer.readline(), type=_Task)
    threading.Thread(target=_end_with, args=(sys.stdin.buffer,), daemon=True).start()
    sys.stderr = _NoTerminal(sys.stderr)
    module, _, name = task.worker_class.partition(":")
    config, place = Config.model_validate_json(task.config), f"process {os.getpid()}"
    member = Member(task.address, task.rank, place, HOST, config.failure.start_timeout_s)
    try:
        rank = make_rank(getattr(importlib.import_module(module), name), config, member, place, gpu=task.rank)
        assert isinstance(rank, Follower)
        rank.load()
        rank.follow()
    except Exception as error:
        member.send_failure(error)
    os._exit(0)  # threads may hang in a step whose other ranks are gone


def _end_with(stdin: BinaryIO) -> None:
    """End this process when the one that started it ends."""
    stdin.read()
    os._exit(1)


class _NoTerminal:
    """Stands for stderr: ranks would draw their progress bars over each other."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def isatty(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
