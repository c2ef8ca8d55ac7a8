"""One rank of a gang as a Ray actor: `load`, then `step` and `flush` on rank 0, `follow` on the others.

The work is `engine.worker.worker.Worker`'s, and between ranks `engine.worker.gang_worker`'s.

Methods run in threads of their own (concurrency groups), so that none waits for a step but those that must.
"""

from __future__ import annotations

import gc
import importlib
import sys
import threading
import time
from typing import Any, TextIO

import msgspec
import ray

from pagedray.deployments.logs import log_to_stderr
from pagedray.deployments.place import address_of_this_node, place_of_this_process
from pagedray.engine.config import Config
from pagedray.engine.errors import EngineDead, PagedrayError
from pagedray.engine.executor import RankWorker, StepWorker
from pagedray.engine.messages import SchedulerOutput, decode, encode
from pagedray.engine.worker.control import Lead, Listener, Member
from pagedray.engine.worker.gang_worker import Follower, LeadWorker, make_rank

WORKER_CLASS = "pagedray.engine.worker.worker:Worker"
NO_STEP = -1  # "the step before" an engine's first one
CONCURRENCY_GROUPS = {"load": 1, "steps": 4, "flush": 2, "watch": 1, "follow": 1, "control": 2, "loads": 1}


class Phase(msgspec.Struct, frozen=True):
    name: str
    seconds: float
    bar: str  # the progress bar it drew, "" if it drew none


class LoadProgress(msgspec.Struct, frozen=True):
    """How far a worker is with loading."""

    phases: tuple[Phase, ...]  # finished ones
    bar: str  # what the running one draws
    elapsed_s: float  # since loading began


class WorkerActor:
    """
    Args:
        config: the whole tree.
        rank: this actor's place in the gang.
        worker_class: `module:name` of what does the work; tests give a fake.
    """

    def __init__(self, config: Config, rank: int, worker_class: str = WORKER_CLASS):
        self._config, self._rank, self._worker_class = config, rank, worker_class
        self._worker: StepWorker | Follower
        self._listener: Listener | None = None
        self._begun_s = time.monotonic()
        log_to_stderr()
        self._bar = BarReader(sys.stderr)
        sys.stderr = self._bar
        self._phases: list[Phase] = []
        self._last_step = NO_STEP
        self._failure: Exception | None = None
        self._turn = threading.Condition()

    @ray.method(concurrency_group="load")
    def listen(self) -> str:
        """On rank 0 of several: where the others will find it."""
        self._listener = Listener(address_of_this_node())
        return self._listener.address

    @ray.method(concurrency_group="load")
    def load(self, address: str = "") -> bytes:
        """Build the worker and load its share of the model.

        Args:
            address: what rank 0's `listen` answered, where there are several ranks.
        """
        self._begun_s = begun = time.monotonic()
        worker_class = load_attribute(self._worker_class)  # not in __init__, whose errors Ray doesn't pass on
        self._on_phase("imports", time.monotonic() - begun)
        worker: RankWorker | LeadWorker | Follower
        if self._config.worker.num_ranks == 1:
            worker = worker_class(self._config, self._rank)
        else:
            worker = make_rank(worker_class, self._config, self._meet(address), str(place_of_this_process()))
        facts = worker.load(self._on_phase)
        self._worker = worker
        gc.collect()
        gc.freeze()  # a full collection over all that was imported would stop the steps for a hundred milliseconds
        phases = tuple((phase.name, phase.seconds) for phase in self._phases)
        return encode(msgspec.structs.replace(facts, start_phases=phases))

    @ray.method(concurrency_group="steps")
    def step(self, plan: bytes, after: int) -> bytes:
        """Queue a step behind step `after`, then wait for the result of `after`; b"" when there is none."""
        out = decode(SchedulerOutput, plan)
        with self._turn:
            self._await_step(after)
            if out.step > self._last_step:
                self._submit(out)
        return b"" if after == NO_STEP else encode(self._steps.result(after))

    @ray.method(concurrency_group="flush")
    def flush(self, step: int) -> bytes:
        """Wait for the result of a step behind which nothing is planned yet."""
        with self._turn:
            self._await_step(step)
        return encode(self._steps.result(step))

    @ray.method(concurrency_group="loads")
    def expert_loads(self) -> bytes:
        """Of all ranks; in a thread of its own, since it waits for the steps that were submitted."""
        return msgspec.msgpack.encode(self._steps.expert_loads())

    @ray.method(concurrency_group="follow")
    def follow(self) -> None:
        """On a rank above 0: compute what rank 0 hands on. Its object ref tells of this rank's end, and why."""
        assert isinstance(self._worker, Follower)
        try:
            self._worker.follow()
        except Exception as error:
            text = str(error) if isinstance(error, PagedrayError) else f"{type(error).__name__}: {error}"
            raise EngineDead(f"rank {self._rank} on {place_of_this_process()}: {text}") from error

    @ray.method(concurrency_group="watch")
    def watch(self) -> None:
        """Never returns: its object ref tells of this process's death."""
        threading.Event().wait()

    @ray.method(concurrency_group="control")
    def place(self) -> bytes:
        return encode(place_of_this_process())

    @ray.method(concurrency_group="control")
    def progress(self) -> bytes:
        return encode(LoadProgress(tuple(self._phases), self._bar.drawn, time.monotonic() - self._begun_s))

    @property
    def _steps(self) -> StepWorker:
        assert not isinstance(self._worker, Follower)
        return self._worker

    def _meet(self, address: str) -> Lead | Member:
        """Wait for the other ranks, or go to them."""
        begun, limit_s = time.monotonic(), self._config.failure.start_timeout_s
        if self._listener is None:
            place = place_of_this_process()
            return Member(address, self._rank, str(place), place.host, limit_s)
        lead = self._listener.accept(self._config.worker.num_ranks, limit_s)
        self._on_phase("other ranks", time.monotonic() - begun)
        return lead

    def _on_phase(self, name: str, seconds: float) -> None:
        self._phases.append(Phase(name, seconds, self._bar.drawn))
        self._bar.drawn = ""

    def _await_step(self, step: int) -> None:
        """Wait until `step` was submitted: one caller's calls may overtake each other on their way here."""
        self._turn.wait_for(lambda: self._failure is not None or self._last_step >= step)
        if self._failure is not None:
            raise EngineDead(f"an earlier step failed: {self._failure}")

    def _submit(self, out: SchedulerOutput) -> None:
        try:
            self._steps.submit(out)
            self._last_step = out.step
        except Exception as error:
            self._failure = error  # so that calls which wait for this step end too
            raise
        finally:
            self._turn.notify_all()


class BarReader:
    """Stands for stderr: passes lines on, and keeps what a progress bar draws, for another process to show."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self.drawn = ""

    def write(self, text: str) -> int:
        if text.startswith("\r"):  # a bar redraws its line, all else adds one
            self.drawn = text.strip() or self.drawn
        elif text != "\n" or not self.drawn:  # the end of a bar's line is the bar's as well
            self._stream.write(text)
        return len(text)

    def isatty(self) -> bool:
        return True  # bars are drawn on a terminal, even if it is far away

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def load_attribute(path: str) -> Any:
    """The object that `module:name` names."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
