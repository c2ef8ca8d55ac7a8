"""Where an actor's process runs, and the end of a process there, however stuck it is."""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path

import msgspec
import ray
from ray.util import get_node_ip_address

EXIT_TIMEOUT_S = 30.0  # for the kernel to take down a killed one; unmapping a large model takes seconds


class Place(msgspec.Struct, frozen=True):
    node_id: str
    host: str  # the node's address
    pid: int
    began: str  # when the process did, in the kernel's ticks: a pid is used again, the pair isn't

    def __str__(self) -> str:
        return f"{self.host} (node {self.node_id[:8]})"


def place_of_this_process() -> Place:
    pid = os.getpid()
    return Place(ray.get_runtime_context().get_node_id(), address_of_this_node(), pid, _began(pid))


def address_of_this_node() -> str:
    """On which other nodes reach it."""
    address: str = get_node_ip_address()  # type: ignore[no-untyped-call]
    return address


class LocalProcess:
    """A process of this node, by descriptor: unlike a pid it never comes to mean another one.

    Raises:
        ProcessLookupError: it is gone.
    """

    def __init__(self, place: Place):
        self._descriptor = os.pidfd_open(place.pid)
        try:
            if _began(place.pid) != place.began:
                raise ProcessLookupError(place.pid)
        except BaseException:
            os.close(self._descriptor)
            raise

    def ends_within(self, timeout_s: float) -> bool:
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return bool(poll.poll(1000 * timeout_s))

    def kill(self) -> None:
        """End it, and wait until it is gone with all its memory."""
        signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)
        self.ends_within(EXIT_TIMEOUT_S)

    def close(self) -> None:
        os.close(self._descriptor)


def kill_process(place: Place, grace_s: float) -> None:
    """As a task on the process's node: give it `grace_s` to end by itself, then end it."""
    try:
        process = LocalProcess(place)
    except ProcessLookupError:
        return
    try:
        if not process.ends_within(grace_s):
            process.kill()
    finally:
        process.close()


def _began(pid: int) -> str:
    """Field 22 of the kernel's account of a process. Raises: ProcessLookupError, it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except FileNotFoundError:
        raise ProcessLookupError(pid) from None
