"""Several ranks on this machine without Ray, with workers that compute nothing: the words, the order, the ends."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pagedray.engine import LLM, GenerationParams
from pagedray.engine.config import Config, EngineFacts, load_config
from pagedray.engine.errors import ConfigError, EngineDead
from pagedray.engine.messages import RunnerOutput, SchedulerOutput
from pagedray.engine.worker.spawned_gang import SpawnedGang
from tests.fakes import ByteTokenizer, FakeWorker, greedy

PROMPT = list(b"once upon a time")
LIMIT_S = 60.0


def settings(**more: Any) -> Config:
    return load_config({"tensor_parallel_size": 3, "num_kv_blocks": 64, **more})


def plan(step: int) -> SchedulerOutput:
    return SchedulerOutput(step, (), (), ())


def wait_for(condition: Callable[[], Any]) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class Saying(FakeWorker):
    """Its results say which rank they are from; step 5 fails on rank 2, step 6 never ends on rank 1."""

    def result(self, step: int) -> RunnerOutput:
        if step == 5 and self.rank == 2:
            raise RuntimeError("out of something")
        if step == 6 and self.rank == 1:
            threading.Event().wait()
        return RunnerOutput(step, (self.rank,))


class BadConfig(FakeWorker):
    def load(self, *args: Any) -> EngineFacts:
        if self.rank == 2:
            raise ConfigError("model: has no such share")
        if self.rank == 0:
            threading.Event().wait(LIMIT_S)  # as in a collective that never comes about
        return super().load(*args)


class Dying(FakeWorker):
    def load(self, *args: Any) -> EngineFacts:
        if self.rank == 1:
            os._exit(7)
        threading.Event().wait(LIMIT_S)
        return super().load(*args)


class Unborn(FakeWorker):
    """Not known under this name to other processes."""


Unborn.__qualname__ = "Nameless"


@pytest.fixture
def gang() -> Iterator[SpawnedGang]:
    gang = SpawnedGang(settings(tensor_parallel_size=1, pipeline_parallel_size=3, step_timeout_s=1.0), Saying)
    gang.load()
    yield gang
    pids = [process.pid for process in gang._processes.values()]
    assert len(pids) == 2
    gang.close()
    gang.close()
    assert not [pid for pid in pids if is_alive(pid)]
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("pagedray")]


def test_results_come_from_the_last_stage_and_errors_name_the_rank(gang: SpawnedGang) -> None:
    for step in range(5):
        gang.submit(plan(step))
        gang.submit(plan(step))  # a repeated call does nothing
    assert [gang.result(step) for step in (4, 0, 3)] == [RunnerOutput(step, (2,)) for step in (4, 0, 3)]
    pid = gang._processes[2].pid
    gang.submit(plan(5))
    for step in (5, 6):
        with pytest.raises(EngineDead, match=rf"^rank 2 on process {pid}: RuntimeError: out of something$"):
            gang.result(step)
        gang.submit(plan(step + 1))


def test_a_killed_rank_is_named(gang: SpawnedGang) -> None:
    gang.submit(plan(0))
    assert gang.result(0).step == 0
    pid = gang._processes[1].pid
    os.kill(pid, signal.SIGKILL)
    assert gang._lead is not None
    wait_for(gang._lead._lead.failure.done)  # though nothing runs
    gang.submit(plan(1))
    with pytest.raises(EngineDead, match=rf"^rank 1 on process {pid} died$"):
        gang.result(1)


def test_a_stopped_rank_is_named(gang: SpawnedGang) -> None:
    pid = gang._processes[2].pid
    os.kill(pid, signal.SIGSTOP)
    gang.submit(plan(0))
    with pytest.raises(EngineDead, match=rf"step 0 takes longer than .*1 s.*rank 2 on process {pid} does not answer"):
        gang.result(0)
    os.kill(pid, signal.SIGCONT)


def test_a_step_without_an_end_is_late_though_all_answer() -> None:
    gang = SpawnedGang(settings(tensor_parallel_size=1, pipeline_parallel_size=2, step_timeout_s=0.5), Saying)
    gang.load()
    for step in range(7):
        gang.submit(plan(step))
    assert gang.result(5).token_ids == (1,)
    with pytest.raises(EngineDead, match=r"step 6 takes longer.*all ranks answer"):
        gang.result(6)
    process = gang._processes[1]
    gang.close()
    assert process.returncode >= 0  # nobody had to kill it


def test_the_cause_of_a_failed_start_is_told() -> None:
    for worker_class, error, message in [
        (BadConfig, ConfigError, r"^rank 2 on process \d+: model: has no such share$"),
        (Dying, EngineDead, r"^rank 1 on process \d+ died$"),
        (Unborn, EngineDead, r"^rank [12] on process \d+: AttributeError: .*Nameless"),
    ]:
        gang = SpawnedGang(settings(), worker_class)
        with pytest.raises(error, match=message):
            gang.load()
        assert not gang._processes


def test_offline_generation_with_several_ranks() -> None:
    with LLM(
        "fake",
        worker_class=FakeWorker,
        tokenizer=ByteTokenizer(),  # type: ignore[arg-type]
        tensor_parallel_size=2,
        pipeline_parallel_size=2,
    ) as llm:
        assert llm.config.scheduler.run_ahead == 3
        params = GenerationParams(max_tokens=20, temperature=0)
        results = llm.generate([PROMPT] * 5, params, progress=False)
        assert [list(result.choices[0].token_ids) for result in results] == [greedy(PROMPT, 20)] * 5


def test_ranks_end_with_the_process_that_started_them() -> None:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:  # a process that dies without a word
        gang = SpawnedGang(settings(), FakeWorker)
        gang.load()
        os.write(write, " ".join(str(process.pid) for process in gang._processes.values()).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    ranks = [int(text) for text in os.read(read, 1000).split()]
    os.close(read)
    os.close(write)
    assert len(ranks) == 2
    wait_for(lambda: not any(map(is_alive, ranks)))
