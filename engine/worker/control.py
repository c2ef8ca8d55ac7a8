"""Rank 0's connections to the other ranks of its gang: plans go out; results, errors and answers to pings come back.

Plain TCP beside the tensors' transport, so that a rank may wait for its next plan as long as it takes, and is heard at
any time. A process that dies is an end of file at once, a machine that does within seconds. Who connects must know the
listener's token.
"""

from __future__ import annotations

import contextlib
import enum
import hmac
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import msgspec

from pagedray.engine.errors import ConfigError, EngineDead
from pagedray.engine.messages import decode, encode

HELLO_S = 5.0  # for who connects to say who it is
MAX_HELLO_BYTES = 4096
MAX_BODY_BYTES = 2**32 - 1
SEND_S = 10.0  # for a rank that reads nothing to make room for a message
KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3))  # seconds, seconds, probes
PATIENCE_S = 0.5  # for the first cause to be heard once a rank has only lost its peers
KEPT_RESULTS = 100  # more than run_ahead allows to be in flight
CHECK_S = 0.2

_HEAD = struct.Struct("<IB")  # bytes of the body, kind
_STEP = struct.Struct("<q")


class PeersLost(EngineDead):
    """A rank can't go on because another one died or did not come: never the first cause.

    Who waits for several ranks prefers any other one's error to it.
    """


class _Kind(enum.IntEnum):
    HELLO = 0
    SHARE = 1  # a value of rank 0's while the ranks start
    PLAN = 2
    PING = 3
    PONG = 4
    RESULT = 5  # step, then its RunnerOutput
    FAILED = 6
    ARRIVED = 7  # where rank 0 shares a value
    READY = 8  # for steps
    ASK = 9  # for the loads of a rank's experts
    LOADS = 10


class _Hello(msgspec.Struct, frozen=True):
    token: str
    rank: int
    place: str


class _Failed(msgspec.Struct, frozen=True):
    text: str
    is_config: bool  # a ConfigError
    is_cause: bool  # not a PeersLost


class Listener:
    """Rank 0's door.

    Args:
        host: this node's address, on which the other ranks reach it.
    """

    def __init__(self, host: str):
        self.host = host
        self._socket = socket.create_server((host, 0))
        self._token = secrets.token_hex(16)

    @property
    def address(self) -> str:
        """What the other ranks need to join."""
        return f"{self.host} {self._socket.getsockname()[1]} {self._token}"

    def accept(self, size: int, timeout_s: float, check: Callable[[], None] = lambda: None) -> Lead:
        """Wait for all other ranks.

        Args:
            check: called now and then; raises once waiting is of no use.

        Raises:
            EngineDead: names those that have not come in time.
        """
        deadline_s = time.monotonic() + timeout_s
        links: dict[int, _Link] = {}
        try:
            while len(links) < size - 1:
                self._socket.settimeout(CHECK_S)
                try:
                    connection, _ = self._socket.accept()
                except TimeoutError:
                    check()
                    if time.monotonic() < deadline_s:
                        continue
                    missing = ", ".join(str(rank) for rank in range(1, size) if rank not in links)
                    raise EngineDead(f"rank {missing} has not come within {timeout_s:g} s") from None
                hello = self._greet(connection, min(time.monotonic() + HELLO_S, deadline_s))
                if hello is None or not 0 < hello.rank < size or hello.rank in links:
                    connection.close()
                    continue
                links[hello.rank] = _Link(connection, f"rank {hello.rank} on {hello.place}")
        except BaseException:
            for link in links.values():
                link.socket.close()
            raise
        finally:
            self._socket.close()
        return Lead(self.host, dict(sorted(links.items())))

    def close(self) -> None:
        self._socket.close()

    def _greet(self, connection: socket.socket, deadline_s: float) -> _Hello | None:
        """Who connects; None for a stranger, who gets neither much memory nor much time."""
        try:
            kind, body = _receive(connection, MAX_HELLO_BYTES, deadline_s)
            hello = decode(_Hello, body)
        except (OSError, EOFError, msgspec.DecodeError):
            return None
        connection.settimeout(None)
        is_known = hmac.compare_digest(hello.token.encode(), self._token.encode())
        return hello if kind == _Kind.HELLO and is_known else None


class Lead:
    """Rank 0's side. One thread reads what the others say.

    Attributes:
        failure: of a rank; an EngineDead (or ConfigError) that names the rank and its place. Never has a result.
        all_ready: done once every other rank has loaded.
    """

    rank = 0

    def __init__(self, host: str, links: dict[int, _Link]):
        self.host = host
        self.failure: Future[None] = Future()
        self.all_ready: Future[None] = Future()
        self._links = links
        self._results: dict[int, Future[bytes]] = {}
        self._pongs: set[int] = set()
        self._ready: set[int] = set()
        self._loads: dict[int, bytes] = {}
        self._arrived: set[int] = set()
        self._heard = threading.Condition()
        self._asking, self._asking_loads = threading.Lock(), threading.Lock()
        self._closed = False
        self._reader = threading.Thread(target=self._read, name="pagedray-gang", daemon=True)
        self._reader.start()

    def share(self, value: bytes | None) -> bytes:
        """Give the other ranks a value, once all have come to `Member.share`, which returns it there.

        Raises:
            EngineDead, ConfigError: a rank failed on its way.
        """
        assert value is not None, "rank 0 gives the value"
        with self._heard:
            self._heard.wait_for(lambda: len(self._arrived) == len(self._links) or self.failure.done())
            self._arrived.clear()
        if self.failure.done():
            self.failure.result()
        self._tell_all(_Kind.SHARE, value)
        return value

    def plan(self, step: int, data: bytes) -> None:
        """Hand a step's plan to every rank. Plans arrive in order."""
        with self._heard:
            self._results[step] = Future()
            self._results.pop(step - KEPT_RESULTS, None)
            if self.failure.done():
                self._results[step].set_exception(self.failure.exception())
        self._tell_all(_Kind.PLAN, data)

    def result(self, step: int) -> Future[bytes]:
        """Of a planned step: what the rank that has results sends. It never comes once `failure` is set."""
        with self._heard:
            return self._results[step]

    def silent_ranks(self, timeout_s: float) -> list[str]:
        """Ask all ranks whether they live; names of those that don't answer."""
        with self._asking:
            with self._heard:
                self._pongs.clear()
            self._tell_all(_Kind.PING, b"")
            with self._heard:
                self._heard.wait_for(lambda: len(self._pongs) == len(self._links), timeout_s)
                return [link.name for rank, link in self._links.items() if rank not in self._pongs]

    def expert_loads(self, ranks: tuple[int, ...], timeout_s: float) -> list[bytes]:
        """What each of these ranks sends when asked; perhaps the late answer to the question before.

        Raises:
            EngineDead: a rank failed, or not all have answered in time.
        """
        with self._asking_loads:
            with self._heard:
                self._loads.clear()
            for rank in ranks:
                self._tell(self._links[rank], _HEAD.pack(0, _Kind.ASK))
            with self._heard:
                self._heard.wait_for(lambda: self._loads.keys() >= set(ranks) or self.failure.done(), timeout_s)
                if silent := [self._links[rank].name for rank in ranks if rank not in self._loads]:
                    raise EngineDead(f"no word of expert loads within {timeout_s:g} s from {', '.join(silent)}")
                return [self._loads[rank] for rank in ranks]

    def close(self) -> None:
        """Let the other ranks go: their next plan is an end of file."""
        self._closed = True
        self._drop_results(EngineDead("the worker was closed"))
        for link in self._links.values():
            link.close()
        if threading.current_thread() is not self._reader:
            self._reader.join()

    def _tell_all(self, kind: _Kind, body: bytes) -> None:
        frame = _HEAD.pack(len(body), kind) + body
        for link in self._links.values():
            self._tell(link, frame)

    def _tell(self, link: _Link, frame: bytes) -> None:
        try:
            link.send(frame)
        except BlockingIOError:  # it may have got half a frame: nothing can be said to it any more
            link.end = f"has taken no message for {SEND_S:g} s"
            link.close()
        except OSError:
            link.close()  # it died; the reader says so

    def _read(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, link in self._links.items():
                selector.register(link.socket, selectors.EVENT_READ, (rank, link))
            while selector.get_map():
                for key, _ in selector.select():
                    rank, link = key.data
                    try:
                        kind, body = _receive(link.socket)
                        self._hear(rank, link, _Kind(kind), body)
                    except (OSError, EOFError):
                        selector.unregister(key.fileobj)
                        if not self._closed:
                            self._fail(EngineDead(f"{link.name} {link.end}"))
                    except Exception as error:
                        selector.unregister(key.fileobj)
                        link.close()
                        what = f"{type(error).__name__}: {error}"
                        self._fail(EngineDead(f"{link.name} sent what can't be read: {what}"))
            for link in self._links.values():
                link.socket.close()

    def _hear(self, rank: int, link: _Link, kind: _Kind, body: bytes) -> None:
        if kind == _Kind.FAILED:
            said = decode(_Failed, body)
            error = (ConfigError if said.is_config else EngineDead)(f"{link.name}: {said.text}")
            if said.is_cause:
                self._fail(error)
            else:
                timer = threading.Timer(PATIENCE_S, self._fail, (error,))
                timer.daemon = True
                timer.start()
            return
        with self._heard:
            if kind == _Kind.PONG:
                self._pongs.add(rank)
                self._heard.notify_all()
            elif kind == _Kind.ARRIVED:
                self._arrived.add(rank)
                self._heard.notify_all()
            elif kind == _Kind.LOADS:
                self._loads[rank] = body
                self._heard.notify_all()
            elif kind == _Kind.READY:
                self._ready.add(rank)
                if len(self._ready) == len(self._links):
                    self.all_ready.set_result(None)
            elif kind == _Kind.RESULT:
                step = _STEP.unpack_from(body)[0]
                if (result := self._results.get(step)) is not None and not result.done():
                    result.set_result(body[_STEP.size :])

    def _fail(self, error: EngineDead | ConfigError) -> None:
        with self._heard:
            if not self.failure.done():
                self.failure.set_exception(error)
                self._heard.notify_all()
        self._drop_results(error)

    def _drop_results(self, error: EngineDead | ConfigError) -> None:
        with self._heard:
            for result in self._results.values():
                if not result.done():
                    result.set_exception(error)


class Member:
    """The side of a rank above 0.

    Args:
        address: rank 0's `Listener.address`.
        place: where this rank runs, for messages.
        host: this node's address, on which the other ranks reach it.

    Raises:
        EngineDead: rank 0 can't be reached.
    """

    def __init__(self, address: str, rank: int, place: str, host: str, timeout_s: float):
        self.rank, self.host = rank, host
        self._on_ask: Callable[[], None] = lambda: None
        lead_host, port, token = address.split()
        try:
            connection = socket.create_connection((lead_host, int(port)), timeout_s)
        except OSError as error:
            raise EngineDead(f"rank {rank} on {place} can't reach rank 0 at {lead_host}:{port}: {error}") from None
        connection.settimeout(None)
        self._link = _Link(connection, "rank 0")
        self._is_stopped = False
        self._tell(_Kind.HELLO, encode(_Hello(token, rank, place)))

    def share(self, value: bytes | None) -> bytes:
        """The next value that rank 0 shares."""
        self._tell(_Kind.ARRIVED, b"")
        return self._next(_Kind.SHARE)

    def plans(self, on_ask: Callable[[], None] = lambda: None) -> Iterator[bytes]:
        """Plans of steps, in order, until `stop`. Raises: EngineDead when rank 0 is gone.

        Args:
            on_ask: called when rank 0 wants `send_loads`; must return at once.
        """
        self._on_ask = on_ask
        with contextlib.suppress(_StoppedError):
            while True:
                yield self._next(_Kind.PLAN)

    def send_ready(self) -> None:
        self._tell(_Kind.READY, b"")

    def send_result(self, step: int, data: bytes) -> None:
        self._tell(_Kind.RESULT, _STEP.pack(step) + data)

    def send_loads(self, data: bytes) -> None:
        self._tell(_Kind.LOADS, data)

    def send_failure(self, error: BaseException) -> None:
        """Tell rank 0, if it still lives, why this rank can't go on."""
        text = str(error) if isinstance(error, (ConfigError, EngineDead)) else f"{type(error).__name__}: {error}"
        with contextlib.suppress(EngineDead):
            self._tell(
                _Kind.FAILED, encode(_Failed(text, isinstance(error, ConfigError), not isinstance(error, PeersLost)))
            )

    def stop(self) -> None:
        """End `plans`. What is sent still arrives."""
        self._is_stopped = True
        with contextlib.suppress(OSError):
            self._link.socket.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        self.stop()
        self._link.close()
        self._link.socket.close()

    def _next(self, wanted: _Kind) -> bytes:
        while True:
            try:
                kind, body = _receive(self._link.socket)
            except (OSError, EOFError):
                if self._is_stopped:
                    raise _StoppedError from None
                raise EngineDead("it has lost rank 0, which died or let go") from None
            if kind == wanted:
                return body
            if kind == _Kind.ASK:
                self._on_ask()
                continue
            if kind != _Kind.PING:
                raise RuntimeError(f"rank 0 sent a {_Kind(kind).name}, rank {self.rank} waited for a {wanted.name}")
            self._tell(_Kind.PONG, b"")

    def _tell(self, kind: _Kind, body: bytes) -> None:
        try:
            self._link.send(_HEAD.pack(len(body), kind) + body)
        except OSError as error:
            raise EngineDead(f"it has lost rank 0: {error}") from None


class _StoppedError(Exception):
    """`Member.stop` was called."""


class _Link:
    """A connection that several threads send on."""

    def __init__(self, connection: socket.socket, name: str):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(SEND_S), 0))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        self.socket, self.name = connection, name
        self.end = "died"  # what happened to the other side, once it is gone
        self._turn = threading.Lock()

    def send(self, frame: bytes) -> None:
        with self._turn:
            self.socket.sendall(frame)

    def close(self) -> None:
        """End it for both sides; who reads closes the socket."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)


def _receive(
    connection: socket.socket, most: int = MAX_BODY_BYTES, deadline_s: float | None = None
) -> tuple[int, bytes]:
    """Kind and body of the next frame.

    Args:
        most: bytes of a body.
        deadline_s: monotonic clock; None: as long as it takes.

    Raises:
        EOFError: the other side is gone, or begins a frame that is too long.
        TimeoutError: the deadline passed.
    """
    size, kind = _HEAD.unpack(_receive_exactly(connection, _HEAD.size, deadline_s))
    if size > most:
        raise EOFError
    return kind, bytes(_receive_exactly(connection, size, deadline_s))


def _receive_exactly(connection: socket.socket, size: int, deadline_s: float | None) -> bytearray:
    data = bytearray(size)
    view, got = memoryview(data), 0
    while got < size:
        if deadline_s is not None:
            connection.settimeout(max(deadline_s - time.monotonic(), 1e-3))
        count = connection.recv_into(view[got:])
        if count == 0:
            raise EOFError
        got += count
        if deadline_s is not None and time.monotonic() > deadline_s:
            raise TimeoutError
    return data
