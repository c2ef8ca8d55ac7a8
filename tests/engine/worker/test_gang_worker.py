"""Rank 0's part in a gang, over a worker whose steps need the other ranks."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from pagedray.engine.config import FailureConfig
from pagedray.engine.errors import EngineDead
from pagedray.engine.messages import RunnerOutput, SchedulerOutput, decode, encode
from pagedray.engine.worker import gang_worker
from pagedray.engine.worker.control import Listener, Member
from pagedray.engine.worker.gang_worker import Follower, LeadWorker

HOST = "127.0.0.1"
LIMIT_S = 30.0


class Waiting:
    """A worker whose steps end when they are aborted, as on a GPU that waits for one that is gone."""

    def __init__(self) -> None:
        self._aborted = threading.Event()

    def submit(self, out: SchedulerOutput) -> None:
        pass

    def result(self, step: int) -> Any:
        assert self._aborted.wait(LIMIT_S), "the step was never aborted"
        raise EngineDead("aborted")

    def abort(self) -> None:
        self._aborted.set()

    def close(self) -> None:
        pass


def test_closing_with_steps_in_flight_waits_for_nobody_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gang_worker, "LAST_STEPS_S", 0.1)
    listener = Listener(HOST)
    member = Member(listener.address, 1, "place 1", HOST, LIMIT_S)
    lead: Any = LeadWorker(Waiting(), listener.accept(2, LIMIT_S), 0, "rank 0", FailureConfig())  # type: ignore[arg-type]
    for step in range(2):
        lead.submit(SchedulerOutput(step, (), (), ()))
    closing = threading.Thread(target=lead.close, daemon=True)
    closing.start()
    closing.join(LIMIT_S / 2)
    assert not closing.is_alive()
    member.close()


class Loading(Waiting):
    def load(self, on_phase: Any = None) -> Any:
        return None


def test_a_start_without_an_end_names_who_is_silent() -> None:
    listener = Listener(HOST)
    member = Member(listener.address, 1, "place 1", HOST, LIMIT_S)  # which never gets ready, nor answers
    lead: Any = LeadWorker(Loading(), listener.accept(2, LIMIT_S), 0, "rank 0", FailureConfig(start_timeout_s=0.2))
    with pytest.raises(EngineDead, match=r"not ready within start_timeout_s \(0\.2 s\): rank 1 on place 1 does not"):
        lead.load()
    lead.close()
    member.close()


class Late(Waiting):
    """Keeps few results, as workers do, and is slow to give the first."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[int] = []

    def submit(self, out: SchedulerOutput) -> None:
        self.kept = [*self.kept, out.step][-4:]

    def result(self, step: int) -> Any:
        if step == 0:
            time.sleep(0.3)
        assert step in self.kept, f"step {step} is not among those kept"
        return RunnerOutput(step, ())


def test_a_late_report_holds_plans_back() -> None:
    listener = Listener(HOST)
    member = Member(listener.address, 1, "place 1", HOST, LIMIT_S)
    lead = listener.accept(2, LIMIT_S)
    follower: Any = Follower(Late(), member, sends_results=True, run_ahead=2)
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(follower.follow)
        for step in range(30):
            lead.plan(step, encode(SchedulerOutput(step, (), (), ())))
        assert decode(RunnerOutput, lead.result(29).result(LIMIT_S)).step == 29
        lead.close()
        with pytest.raises(EngineDead, match="lost rank 0"):
            following.result(LIMIT_S)
    member.close()


class Counting(Waiting):
    """Tells its loads when a test says so."""

    def __init__(self, loads: dict[int, tuple[int, ...]]) -> None:
        super().__init__()
        self._loads, self.may_tell = loads, threading.Event()

    def load(self, on_phase: Any = None) -> Any:
        return None

    def expert_loads(self) -> dict[int, tuple[int, ...]]:
        assert self.may_tell.wait(LIMIT_S)
        return dict(self._loads)


def test_loads_of_experts_are_of_all_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage that is busy with a step is late, and no more: it still takes plans and answers pings."""
    monkeypatch.setattr(gang_worker, "LOADS_S", 0.2)
    monkeypatch.setattr(gang_worker, "LAST_STEPS_S", 0.1)
    listener = Listener(HOST)
    mine, others = Counting({0: (1, 2)}), Counting({3: (4, 5)})
    mine.may_tell.set()
    member = Member(listener.address, 1, "place 1", HOST, LIMIT_S)
    follower: Any = Follower(others, member, True, 2)  # type: ignore[arg-type]
    meeting = listener.accept(2, LIMIT_S)
    lead: Any = LeadWorker(mine, meeting, 1, "rank 0", FailureConfig(), other_stages=(1,))  # type: ignore[arg-type]
    following = ThreadPoolExecutor(1).submit(follower.follow)
    with pytest.raises(EngineDead, match=r"no word of expert loads within 0\.2 s from rank 1 on place 1"):
        lead.expert_loads()
    assert meeting.silent_ranks(LIMIT_S) == []
    lead.submit(SchedulerOutput(0, (), (), ()))
    others.may_tell.set()
    monkeypatch.setattr(gang_worker, "LOADS_S", LIMIT_S)
    assert lead.expert_loads() == {0: (1, 2), 3: (4, 5)}
    lead.close()
    with pytest.raises(EngineDead, match="lost rank 0"):
        following.result(LIMIT_S)
    member.close()
