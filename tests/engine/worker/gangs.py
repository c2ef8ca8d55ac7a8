"""Gangs of ranks in processes of their own, over gloo. They are started once and serve one gang after another."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pagedray.engine.config import Config, EngineFacts
from pagedray.engine.messages import RunnerOutput, SchedulerOutput, decode, encode
from pagedray.engine.worker.parallel import Layout, connect
from pagedray.engine.worker.worker import Worker

TIMEOUT_S = 60.0


class Ranks:
    """Processes that wait to be ranks of a gang."""

    def __init__(self, most: int):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])  # they share one import of torch
        self.pipes: list[Connection] = []
        self._processes = []
        for rank in range(most):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self._processes.append(process)

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self._processes:
            process.join(TIMEOUT_S)
            process.kill()


class GangWorker:
    """A worker whose steps are computed by several ranks. All of them get each plan, one has the results."""

    def __init__(self, ranks: Ranks, config: Config):
        self._layout = Layout(config.worker.tensor_parallel_size, config.worker.pipeline_parallel_size)
        self._pipes, self._config = ranks.pipes[: self._layout.size], config
        self.facts: list[EngineFacts] = []  # of each rank

    def load(self) -> EngineFacts:
        with tempfile.TemporaryDirectory() as folder:
            for pipe in self._pipes:
                pipe.send(("load", self._config, self._layout, folder))
            answers = [_answer(pipe) for pipe in self._pipes]
        self.facts = [_or_raise(answer) for answer in answers]
        return self.facts[0]

    def submit(self, out: SchedulerOutput) -> None:
        for pipe in self._pipes:
            pipe.send(("submit", encode(out)))

    def result(self, step: int) -> RunnerOutput:
        pipe = self._pipes[self._layout.result_rank]
        pipe.send(("result", step))
        return decode(RunnerOutput, _or_raise(_answer(pipe)))

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(("close",))
        for pipe in self._pipes:
            _or_raise(_answer(pipe))


@dataclasses.dataclass(frozen=True)
class Folder:
    """Where ranks meet: a file for each value that rank 0 shares."""

    rank: int
    path: Path
    host: str = "127.0.0.1"

    def share(self, value: bytes | None) -> bytes:
        file = self.path / "value"
        if value is not None:
            (self.path / "new").write_bytes(value)
            os.replace(self.path / "new", file)
            return value
        deadline_s = time.monotonic() + TIMEOUT_S
        while not file.exists():
            assert time.monotonic() < deadline_s, "rank 0 shared nothing"
            time.sleep(0.002)
        return file.read_bytes()


def _answer(pipe: Connection) -> Any:
    if not pipe.poll(TIMEOUT_S):
        raise TimeoutError(f"a rank said nothing for {TIMEOUT_S:g} s")
    return pipe.recv()


def _or_raise(answer: Any) -> Any:
    if isinstance(answer, Exception):
        raise answer
    return answer


def _serve(pipe: Connection, rank: int) -> None:
    """A rank's process: every command but "submit" has an answer."""
    worker: Worker | None = None
    while True:
        try:
            command, *args = pipe.recv()
        except EOFError:
            return
        try:
            if command == "load":
                worker = _make_worker(rank, *args)
                pipe.send(worker.load())
            elif command == "submit":
                worker.submit(decode(SchedulerOutput, *args))
            elif command == "result":
                pipe.send(encode(worker.result(*args)))
            elif command == "close":
                worker.close()
                worker = None
                pipe.send(None)
        except Exception as error:
            traceback.print_exc()
            pipe.send(error)


def _make_worker(rank: int, config: Config, layout: Layout, folder: str) -> Worker:
    meeting = Folder(rank, Path(folder))
    return Worker(
        config,
        rank,
        lambda device: connect(
            meeting,
            layout,
            device,
            expert_parallel=config.worker.enable_expert_parallel,
            meet_timeout_s=TIMEOUT_S,
            step_timeout_s=TIMEOUT_S,
        ),
    )


@contextmanager
def running(most: int) -> Iterator[Ranks]:
    ranks = Ranks(most)
    try:
        yield ranks
    finally:
        ranks.close()
