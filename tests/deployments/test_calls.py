"""What a failed remote call means to its caller."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from pagedray.deployments.calls import answer
from pagedray.engine.errors import EngineDead, Overloaded, PromptTooLong


async def failing(error: Exception) -> Any:
    raise error


def from_task(cause: Exception) -> Exception:
    return RayTaskError("step", "a traceback", cause).as_instanceof_cause()


@pytest.mark.parametrize("error", [PromptTooLong(9, 5, "max_model_len"), Overloaded("full", 3.0), EngineDead("gone")])
async def test_our_own_errors_arrive_as_they_were(error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        await answer(failing(from_task(error)), 5, "x")
    assert type(caught.value) is type(error)
    assert caught.value.args == error.args


async def test_any_other_error_is_a_dead_engine() -> None:
    with pytest.raises(EngineDead, match="the worker failed: ValueError: odd"):
        await answer(failing(from_task(ValueError("odd"))), 5, "the worker")


@pytest.mark.parametrize("error", [ActorDiedError(), ActorUnavailableError("unreachable", None)])
async def test_a_dead_actor_is_a_dead_engine(error: Exception) -> None:
    with pytest.raises(EngineDead, match=rf"the worker died: {type(error).__name__}: "):
        await answer(failing(error), 5, "the worker")


async def test_silence_is_a_dead_engine() -> None:
    with pytest.raises(EngineDead, match=r"the worker has not answered within 0\.01 s"):
        await answer(asyncio.sleep(60), 0.01, "the worker")
