"""An actor that an engine replica owns, together with its process, which runs on the replica's node."""

from __future__ import annotations

import asyncio
import os
import select
import signal
from typing import Any

import ray
from ray import ObjectRef

from pagedray.deployments.calls import Actor, answer
from pagedray.engine.errors import EngineDead

KILL_GRACE_S = 1.0  # for a process that follows Ray's order to exit
EXIT_TIMEOUT_S = 30.0  # for the kernel to take down a killed one; unmapping a large model takes seconds


class Child:
    """
    Args:
        name: for messages.
        handle: the actor, which has a method `pid`.
        life: object ref of a call that ends only when the actor dies or gives up; None before that call is made.
    """

    def __init__(self, name: str, handle: Actor, life: ObjectRef[Any] | None = None):
        self.name, self.handle, self.life = name, handle, life
        self._process: int | None = None  # a descriptor: unlike a pid it never comes to mean another process

    async def attach(self) -> None:
        """Get hold of the process, once its constructor is done.

        Raises:
            EngineDead: it died while starting.
        """
        pid = await answer(self.handle.pid.remote(), None, self.name)
        try:
            self._process = os.pidfd_open(pid)
        except ProcessLookupError:
            raise EngineDead(f"{self.name} died while starting") from None

    async def kill(self) -> None:
        """End the process, however stuck it is, and wait until it is gone with all its memory."""
        # Ray's order leaves no complaint about an unexpected death, but a stopped process doesn't follow it.
        await asyncio.to_thread(ray.kill, self.handle)
        if self._process is None:
            return
        if not await self._ended(KILL_GRACE_S):
            signal.pidfd_send_signal(self._process, signal.SIGKILL)
            await self._ended(EXIT_TIMEOUT_S)
        os.close(self._process)
        self._process = None

    async def _ended(self, timeout_s: float) -> bool:
        assert self._process is not None
        poll = select.poll()
        poll.register(self._process, select.POLLIN)
        return bool(await asyncio.to_thread(poll.poll, 1000 * timeout_s))
