"""Rank 0 and the others over their connections, as threads of one process."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from typing import Any

import pytest

from pagedray.engine.errors import ConfigError, EngineDead
from pagedray.engine.worker import control
from pagedray.engine.worker.control import Lead, Listener, Member, PeersLost

HOST = "127.0.0.1"
LIMIT_S = 30.0


def join(listener: Listener, rank: int, address: str = "") -> Member:
    return Member(address or listener.address, rank, f"place {rank}", HOST, LIMIT_S)


@pytest.fixture
def gang() -> Iterator[tuple[Lead, Member, Member]]:
    listener = Listener(HOST)
    members = [join(listener, rank) for rank in (2, 1)]  # in whatever order they come
    lead = listener.accept(3, LIMIT_S)
    yield lead, members[1], members[0]
    lead.close()
    for member in members:
        member.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "pagedray-gang"]


def follow(member: Member) -> tuple[list[bytes], Future[None], ThreadPoolExecutor]:
    plans: list[bytes] = []
    pool = ThreadPoolExecutor(1)
    return plans, pool.submit(lambda: plans.extend(member.plans())), pool


def share(lead: Lead, *members: Member) -> list[bytes]:
    with ThreadPoolExecutor(len(members)) as pool:
        futures = [pool.submit(member.share, None) for member in members]
        return [lead.share(b"a value"), *(future.result(LIMIT_S) for future in futures)]


def cause(lead: Lead) -> BaseException | None:
    return lead.failure.exception(LIMIT_S)


def test_values_are_shared_then_plans_come_in_order(gang: tuple[Lead, Member, Member]) -> None:
    lead, one, two = gang
    assert share(lead, one, two) == [b"a value"] * 3
    one.send_ready()
    with pytest.raises(NotYet):
        lead.all_ready.result(0.05)
    two.send_ready()
    assert lead.all_ready.result(LIMIT_S) is None
    large = bytes(2**20)
    plans, ended, pool = follow(two)
    for step, data in enumerate((b"first", large, b"")):
        lead.plan(step, data)
        two.send_result(step, b"result of %d" % step)
    two.send_result(99, b"nobody asked")
    assert [lead.result(step).result(LIMIT_S) for step in (2, 0, 1)] == [b"result of 2", b"result of 0", b"result of 1"]
    assert lead.silent_ranks(0.2) == ["rank 1 on place 1"]  # nobody reads there
    two.stop()
    ended.result(LIMIT_S)
    assert plans == [b"first", large, b""]
    pool.shutdown()


def test_the_loss_of_a_rank_is_told_by_its_name(gang: tuple[Lead, Member, Member]) -> None:
    lead, one, two = gang
    lead.plan(0, b"plan")
    one.close()
    assert str(cause(lead)) == "rank 1 on place 1 died"
    for step in (0, 1):
        if step:
            lead.plan(step, b"plan")
        with pytest.raises(EngineDead, match="rank 1 on place 1 died"):
            lead.result(step).result(LIMIT_S)
    assert next(two.plans()) == b"plan"


def test_a_rank_that_only_lost_another_is_not_the_cause(gang: tuple[Lead, Member, Member]) -> None:
    lead, one, two = gang
    two.send_failure(PeersLost("lost its peers"))
    one.send_failure(RuntimeError("out of something"))
    assert isinstance(cause(lead), EngineDead)
    assert str(cause(lead)) == "rank 1 on place 1: RuntimeError: out of something"


def test_without_another_cause_it_is(gang: tuple[Lead, Member, Member]) -> None:
    lead, _, two = gang
    two.send_failure(PeersLost("lost its peers"))
    assert str(cause(lead)) == "rank 2 on place 2: lost its peers"


def test_nobody_waits_for_a_rank_that_failed_on_its_way(gang: tuple[Lead, Member, Member]) -> None:
    lead, one, _ = gang
    threading.Timer(0.1, one.send_failure, (ConfigError("no such device"),)).start()
    with pytest.raises(ConfigError, match="rank 1 on place 1: no such device"):
        lead.share(b"a value")


def test_a_wrong_setting_stays_one(gang: tuple[Lead, Member, Member]) -> None:
    lead, one, _ = gang
    one.send_failure(ConfigError("model: too large"))
    assert isinstance(cause(lead), ConfigError)
    assert str(cause(lead)) == "rank 1 on place 1: model: too large"


def test_the_end_of_rank_0_ends_the_others(gang: tuple[Lead, Member, Member]) -> None:
    lead, one, _ = gang
    _, ended, pool = follow(one)
    lead.plan(0, b"last")
    lead.close()
    with pytest.raises(EngineDead, match="lost rank 0"):
        ended.result(LIMIT_S)
    one.send_failure(RuntimeError("nobody hears this"))
    pool.shutdown()


def test_strangers_and_twins_stay_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "HELLO_S", 0.2)
    listener = Listener(HOST)
    host, port, token = listener.address.split()
    silent = socket.create_connection((host, int(port)))
    noisy = socket.create_connection((host, int(port)))
    noisy.sendall(b"GET / HTTP/1.1\r\n\r\n")
    guesser = join(listener, 1, f"{host} {port} {'0' * len(token)}")
    foreigner = join(listener, 1, f"{host} {port} é")
    greedy = socket.create_connection((host, int(port)))
    greedy.sendall(b"\xff\xff\xff\xff\x00")  # the head of a message of 4 GiB
    real, twin, beyond = join(listener, 1), join(listener, 1), join(listener, 3)
    last = join(listener, 2)
    lead = listener.accept(3, LIMIT_S)
    assert share(lead, real, last) == [b"a value"] * 3
    for outsider in (guesser, foreigner, twin, beyond):
        with pytest.raises(EngineDead, match="lost rank 0"):
            outsider.share(None)
        outsider.close()
    lead.close()
    for one in (silent, noisy, greedy, real, last):
        one.close()


def test_ranks_that_do_not_come_are_named() -> None:
    listener = Listener(HOST)
    members = [join(listener, rank) for rank in (1, 3)]
    with pytest.raises(EngineDead, match=r"rank 2, 4 has not come within 0\.3 s"):
        listener.accept(5, 0.3)
    for member in members:
        with pytest.raises(EngineDead):
            member.share(None)
        member.close()
    with pytest.raises(EngineDead, match=r"rank 1 on place 1 can't reach rank 0 at 127\.0\.0\.1:"):
        join(listener, 1, f"{HOST} {_closed_port()} token")


def _closed_port() -> int:
    with socket.create_server((HOST, 0)) as server:
        port: int = server.getsockname()[1]
        return port


def test_waiting_for_ranks_ends_when_it_is_of_no_use() -> None:
    listener = Listener(HOST)

    def check() -> Any:
        raise EngineDead("the process of rank 1 is gone")

    with pytest.raises(EngineDead, match="is gone"):
        listener.accept(2, LIMIT_S, check)


def test_a_stranger_who_says_little_by_little_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "HELLO_S", 0.2)
    listener = Listener(HOST)
    host, port, _ = listener.address.split()
    stranger = socket.create_connection((host, int(port)))
    ended = threading.Event()

    def drip() -> None:
        while not ended.wait(0.05):
            with contextlib.suppress(OSError):
                stranger.send(b"\x00")

    thread = threading.Thread(target=drip)
    thread.start()
    member = join(listener, 1)
    try:
        listener.accept(2, LIMIT_S).close()
    finally:
        ended.set()
        thread.join()
        stranger.close()
        member.close()


def test_a_message_of_no_known_kind_fails_its_sender(gang: tuple[Lead, Member, Member]) -> None:
    lead, one, _ = gang
    one._link.send(control._HEAD.pack(0, 99))
    assert str(cause(lead)).startswith("rank 1 on place 1 sent what can't be read: ValueError")


def test_a_rank_that_takes_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "SEND_S", 1.0)
    listener = Listener(HOST)
    member = join(listener, 1)  # which reads nothing
    lead = listener.accept(2, LIMIT_S)
    lead.plan(0, bytes(64 * 2**20))
    assert str(cause(lead)) == "rank 1 on place 1 has taken no message for 1 s"
    lead.close()
    member.close()
