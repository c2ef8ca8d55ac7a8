"""Rank 0's part in a gang, over a worker whose steps need the other ranks."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from pagedray.engine.errors import EngineDead
from pagedray.engine.messages import SchedulerOutput
from pagedray.engine.worker import gang_worker
from pagedray.engine.worker.control import Listener, Member
from pagedray.engine.worker.gang_worker import LeadWorker

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
    lead: Any = LeadWorker(Waiting(), listener.accept(2, LIMIT_S), 0, "rank 0", LIMIT_S)  # type: ignore[arg-type]
    for step in range(2):
        lead.submit(SchedulerOutput(step, (), (), ()))
    closing = threading.Thread(target=lead.close, daemon=True)
    closing.start()
    closing.join(LIMIT_S / 2)
    assert not closing.is_alive()
    member.close()
