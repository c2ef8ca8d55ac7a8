"""Remote calls with a deadline, and what their failures mean."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from ray.exceptions import RayError, RayTaskError, TaskCancelledError

from pagedray.engine.errors import EngineDead, PagedrayError

Actor = Any  # an ActorHandle; Ray's types lose the results of its methods

MAX_DETAIL = 300  # characters of Ray's account


async def answer(ref: Awaitable[Any], timeout_s: float | None, callee: str) -> Any:
    """What a remote call returns.

    Args:
        ref: its object ref.
        timeout_s: longest wait; None only where another call tells of the callee's death.
        callee: who is asked, for messages.

    Raises:
        PagedrayError: the callee raised it.
        EngineDead: the callee died, raised anything else, or took too long.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await ref
    except TimeoutError:
        raise EngineDead(f"{callee} has not answered within {timeout_s:g} s") from None
    except RayError as error:
        raise _meaning(error, callee) from None


def _meaning(error: RayError, callee: str) -> PagedrayError:
    """The error under Ray's wrapping: callers catch pagedray's own classes, never a dual class made by Ray."""
    cause = error.cause if isinstance(error, RayTaskError) else None
    if isinstance(cause, PagedrayError):
        return cause
    if cause is not None:
        return EngineDead(f"{callee} failed: {type(cause).__name__}: {cause}")
    if isinstance(error, TaskCancelledError):
        return EngineDead(f"a call to {callee} was cancelled")
    last_line = (str(error).strip().splitlines() or [""])[-1]  # Ray puts what it knows about a dead process there
    return EngineDead(f"{callee} died: {type(error).__name__}: {last_line[:MAX_DETAIL]}")
