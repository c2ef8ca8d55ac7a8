"""How an ingress finds engines that come and go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from pagedray.deployments import engine_finder
from pagedray.deployments.engine_finder import EngineFinder
from pagedray.engine.errors import EngineDead
from pagedray.engine.messages import encode
from tests.deployments.test_gang import Steps


class Scheduler:
    """Handle of a scheduler that answers `facts` once it is ready; None: it is dead."""

    def __init__(self, engine_id: str):
        self.ready: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        facts = msgspec.structs.replace(Steps(None, 0).load(lambda *args: None), engine_id=engine_id)

        class Facts:
            @staticmethod
            async def remote() -> bytes:
                if not await self.ready:
                    raise EngineDead("gone")
                return encode(facts)

        self.facts = Facts


class World:
    """A directory and a client in one."""

    def __init__(self) -> None:
        self.actors: dict[str, Scheduler] = {}
        self.links: list[Any] = []
        self.failing = False
        self.held: set[str] = set()  # engines that the client has a link to

    def find(self, role: str) -> dict[str, Scheduler]:
        assert role == "scheduler"
        if self.failing:
            raise ConnectionError("the head is down")
        return dict(self.actors)

    def has_link(self, engine_id: str) -> bool:
        return engine_id in self.held

    def add_link(self, link: Any) -> None:
        self.links.append(link)

    @property
    def linked(self) -> list[str]:
        return [link.facts.engine_id for link in self.links]


async def until(condition: Any) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.fixture
async def running(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[World, EngineFinder]]:
    monkeypatch.setattr(engine_finder, "LOOK_S", 0.01)
    world = World()
    finder = EngineFinder(world, 1)  # type: ignore[arg-type]
    task = asyncio.create_task(finder.run(world))  # type: ignore[arg-type]
    yield world, finder
    task.cancel()


async def test_an_engine_is_linked_once_it_is_ready(running: tuple[World, EngineFinder]) -> None:
    world, _ = running
    world.actors["a"] = Scheduler("a")
    await asyncio.sleep(0.05)
    assert world.linked == []
    world.actors["a"].ready.set_result(True)
    await until(lambda: world.linked)
    await asyncio.sleep(0.05)
    assert world.linked == ["a"]


async def test_a_dead_engines_successor_is_found(running: tuple[World, EngineFinder]) -> None:
    world, finder = running
    world.actors["a"] = Scheduler("a")
    world.actors["a"].ready.set_result(True)
    await until(lambda: world.linked == ["a"])
    world.actors = {"b": Scheduler("b")}
    world.actors["b"].ready.set_result(True)
    finder.on_link_dead(world.links[0])
    await until(lambda: world.linked == ["a", "b"])


async def test_an_engine_that_died_while_starting_is_forgotten(running: tuple[World, EngineFinder]) -> None:
    world, _ = running
    world.actors["a"] = Scheduler("a")
    world.actors["a"].ready.set_result(False)
    await asyncio.sleep(0.05)
    world.actors["a"].ready = asyncio.get_running_loop().create_future()
    world.actors["a"].ready.set_result(True)  # it is asked again, as long as it is listed
    await until(lambda: world.linked == ["a"])


async def test_an_engine_that_was_stopped_is_missed(
    running: tuple[World, EngineFinder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client let go of it without a death; the look for its successor is as quick as for the first."""
    monkeypatch.setattr(engine_finder, "LOOK_AGAIN_S", 0.01)
    world, finder = running
    world.actors["a"] = Scheduler("a")
    world.actors["a"].ready.set_result(True)
    await until(lambda: world.linked == ["a"])
    world.held.add("a")
    world.actors.clear()
    await asyncio.sleep(0.1)
    assert finder._known, "the list of actors may be short for a moment; a second link would take the first one's polls"
    world.held.clear()
    await until(lambda: not finder._known)


async def test_it_looks_at_once_when_hurried(
    running: tuple[World, EngineFinder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_finder, "LOOK_AGAIN_S", 60.0)
    world, finder = running
    for name in "ab":
        world.actors[name] = Scheduler(name)
        world.actors[name].ready.set_result(True)
        finder.hurry()
        await until(lambda name=name: name in world.linked)
        await asyncio.sleep(0.05)


async def test_it_goes_on_while_the_head_is_down(running: tuple[World, EngineFinder]) -> None:
    world, _ = running
    world.failing = True
    await asyncio.sleep(0.05)
    world.actors["a"] = Scheduler("a")
    world.actors["a"].ready.set_result(True)
    world.failing = False
    await until(lambda: world.linked == ["a"])
