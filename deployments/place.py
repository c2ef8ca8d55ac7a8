"""Where an actor's process runs, and the end of a process there, however stuck it is."""

from __future__ import annotations

import os
import select
import signal

import msgspec
import ray
from ray.util import get_node_ip_address

from pagedray.deployments.process_start import began_ticks

EXIT_TIMEOUT_S = 30.0  # for the kernel to take down a killed one; unmapping a large model takes seconds


class Place(msgspec.Struct, frozen=True):
    node_id: str
    host: str  # the node's address
    pid: int
    began: int  # when the process did, in the kernel's ticks: a pid is used again, the pair isn't

    def __str__(self) -> str:
        return f"{self.host} (node {self.node_id[:8]})"


def place_of_this_process() -> Place:
    pid = os.getpid()
    return Place(ray.get_runtime_context().get_node_id(), address_of_this_node(), pid, began_ticks(pid))


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
            if began_ticks(place.pid) != place.began:
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
