"""What becomes of workers that are slow, greedy or dead, and of the jobs beside them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from pagedray.engine.grammar import child
from pagedray.engine.grammar.source import GrammarSource
from pagedray.engine.grammar.wire import Frames, Job, Result, Setup, frame
from tests.engine.grammar.sampling import byte_vocabulary

TIMEOUT_S = 3.0
COMMAND = [sys.executable, "-c", "from tests.engine.grammar.fake_child import main; main()"]


class Process:
    """The process under test, spoken to as the compiler does."""

    def __init__(self, timeout_s: float = TIMEOUT_S):
        self.process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._frames = Frames()
        self._results: dict[int, Result] = {}
        self._num_jobs = 0
        self._write(frame(Setup(byte_vocabulary(), timeout_s)))

    def _write(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def send(self, order: str) -> int:
        self._num_jobs += 1
        self._write(frame(Job(self._num_jobs, GrammarSource("ebnf", order, "p"))))
        return self._num_jobs

    def result(self, job_id: int) -> Result:
        assert self.process.stdout is not None
        while job_id not in self._results:
            data = os.read(self.process.stdout.fileno(), 2**16)
            assert data, "the process ended"
            for result in self._frames.feed(data, Result):
                assert result.id not in self._results
                self._results[result.id] = result
        return self._results[job_id]

    def has_result(self, job_ids: list[int]) -> bool:
        """Whether one of them has been answered so far."""
        return not self._results.keys().isdisjoint(job_ids)

    def do(self, order: str) -> Result:
        return self.result(self.send(order))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


@pytest.fixture
def process() -> Iterator[Process]:
    process = Process()
    yield process
    process.close()


def test_answers_and_refusals(process: Process) -> None:
    assert process.do("hello").data == b"hello"
    assert process.do("refuse because").refusal == "because"
    assert process.do("large 5000000").data == bytes(5_000_000)


def test_a_worker_serves_many_jobs(process: Process) -> None:
    assert len({process.do("pid").data for _ in range(20)}) <= 2


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        ("eat", "memory"),
        ("signal SIGABRT", "memory"),
        ("signal SIGSEGV", "crashes"),
        ("signal SIGKILL", "crashes"),
        ("exit 0", "crashes"),
        ("recurse", "nested too deeply"),
        ("sleep 60", "takes more than 3 s"),
        ("spin 60", "takes more than 3 s"),
    ],
)
def test_a_job_that_misbehaves_is_refused_and_others_are_served(process: Process, order: str, reason: str) -> None:
    bad = process.send(order)
    assert process.do("beside").data == b"beside"
    assert reason in process.result(bad).refusal
    assert not process.result(bad).is_overload
    assert process.do("behind").data == b"behind"


def test_slow_jobs_leave_room_for_others(process: Process) -> None:
    """More than may run at once, before a good one: it still comes first, and each slow one has its answer in time."""
    slow = [process.send("spin 60") for _ in range(6)]
    assert process.do("good").data == b"good"
    assert not process.has_result(slow)
    results = [process.result(job_id) for job_id in slow]
    assert all(result.refusal for result in results)
    assert any(not result.is_overload for result in results)


def test_jobs_of_some_length_end_well(process: Process) -> None:
    jobs = [process.send(f"spin {2 * child.FAST_S}") for _ in range(4)]
    assert all(process.result(job_id).data for job_id in jobs)


def test_no_answer_comes_later_than_the_limit_of_time() -> None:
    process = Process(timeout_s=1.0)
    try:
        jobs = [process.send("sleep 60") for _ in range(20)]
        start_s = time.monotonic()
        results = [process.result(job_id) for job_id in jobs]
        assert time.monotonic() - start_s < 20.0  # one after the other would take 20 s with nothing else to do
        assert {result.is_overload for result in results} == {True, False}
    finally:
        process.close()


def test_workers_end_with_the_process(process: Process) -> None:
    worker = int(process.do("pid").data)
    process.send("spin 60")
    process.do("beside")
    process.process.kill()
    process.process.wait()
    _wait_for_end(worker)


def test_the_process_ends_with_its_parent() -> None:
    process = Process()
    worker = int(process.do("pid").data)
    assert process.process.stdin is not None
    process.process.stdin.close()
    assert process.process.wait(30) == 0
    _wait_for_end(worker)
    assert process.process.stdout is not None
    process.process.stdout.close()


def _wait_for_end(pid: int) -> None:
    end_s = time.monotonic() + 30
    while os.path.exists(f"/proc/{pid}"):
        with open(f"/proc/{pid}/stat") as file:
            if file.read().rpartition(")")[2].split()[0] == "Z":  # nobody in this container may collect it
                return
        assert time.monotonic() < end_s, "the worker lives on"
        time.sleep(0.05)
