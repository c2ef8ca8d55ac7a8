"""The response store that several ingresses share: what its failures mean, and the whole over two ingresses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import msgspec
import pytest
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from pagedray.deployments.build import APP
from pagedray.deployments.directory import Directory
from pagedray.deployments.response_store import NAME, SharedStore
from pagedray.engine.config import ApiConfig, load_config
from pagedray.engine.errors import EngineUnavailable
from pagedray.serving.openai.responses.store import MemoryStore, Record
from tests.deployments.served import Served

RECORD = Record("resp_1", b'{"status": "completed", "output": []}')


class LocalActor:
    """A store whose methods are called as an actor's are. `fault` is raised by, or delays, the next calls."""

    def __init__(self, fault: Callable[[], Any] | None = None):
        self.store = MemoryStore(ApiConfig())
        self.fault = fault

    def __getattr__(self, verb: str) -> Any:
        async def call(*args: Any) -> Any:
            if self.fault is not None:
                await self.fault()
            return await getattr(self.store, verb)(*args)

        class Method:
            remote = staticmethod(call)

        return Method


class LocalStore(SharedStore):
    """Finds these actors, one after the other."""

    def __init__(self, *actors: LocalActor):
        super().__init__("namespace", ApiConfig(), timeout_s=0.1)
        self.actors = list(actors)

    def _get_or_make(self) -> LocalActor:
        return self.actors.pop(0)


async def dead() -> None:
    raise ActorDiedError()


async def unreachable() -> None:
    raise ActorUnavailableError("unreachable", None)


async def broken() -> None:
    raise RayTaskError("put", "a traceback", ValueError("odd")).as_instanceof_cause()


async def silent() -> None:
    await asyncio.sleep(60)


async def test_every_call_reaches_the_actor() -> None:
    store = LocalStore(LocalActor())
    running = Record("resp_2", b'{"status": "queued", "output": []}', is_final=False, is_background=True)
    await store.put(RECORD)
    await store.put(running)
    await store.update(msgspec.structs.replace(running, body=b'{"status": "in_progress", "output": []}'))
    assert await store.get("resp_1") == RECORD
    assert await store.chain("resp_1") == [RECORD]
    assert await store.item("msg_1") is None
    await store.append("resp_2", (b"0",))
    page = await store.events("resp_2", 0, 0.01)
    assert page is not None and page.events == (b"0",)
    assert await store.is_wanted("resp_2", 0.01)
    cancelled = await store.cancel("resp_2")
    assert cancelled is not None and cancelled.is_final and cancelled.response()["status"] == "cancelled"
    assert await store.delete("resp_1") and not await store.delete("resp_1")


@pytest.mark.parametrize("fault", [dead, unreachable])
async def test_a_lost_store_is_followed_by_an_empty_one(fault: Any) -> None:
    store = LocalStore(first := LocalActor(), LocalActor())
    await store.put(RECORD)
    first.fault = fault
    assert await store.get("resp_1") is None
    await store.put(RECORD)
    assert await store.get("resp_1") == RECORD


async def test_events_are_not_appended_twice() -> None:
    store = LocalStore(first := LocalActor(), LocalActor())
    await store.put(RECORD)
    first.fault = unreachable
    with pytest.raises(EngineUnavailable, match="can't be reached"):
        await store.append("resp_1", (b"0",))


@pytest.mark.parametrize("fault", [silent, broken])
async def test_a_store_that_fails_is_unavailable(fault: Any) -> None:
    store = LocalStore(LocalActor(fault))
    started = time.monotonic()
    with pytest.raises(EngineUnavailable, match="response store"):
        await store.get("resp_1")
    assert time.monotonic() - started < 5


async def test_a_store_that_dies_again_and_again_is_unavailable() -> None:
    store = LocalStore(LocalActor(dead), LocalActor(dead), LocalActor())
    with pytest.raises(EngineUnavailable, match="successor"):
        await store.put(RECORD)
    await store.put(RECORD)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served("-m", "tests.deployments.serve_fakes", "--port", "0", "--num-ingress-replicas", "2") as server:
        server.wait_until_ready()
        yield server


def ask(served: Served, method: str, path: str = "", **body: Any) -> httpx.Response:
    """Over a connection of its own, so that either ingress may get it."""
    given = {"json": {"model": "fake", "input": "hi", **body}} if method == "POST" else {}
    return httpx.request(method, f"{served.url}/v1/responses{path}", timeout=60, **given)  # type: ignore[arg-type]


@pytest.mark.ray
def test_ingresses_share_what_they_keep(served: Served) -> None:
    first = ask(served, "POST", max_output_tokens=2).json()
    for _ in range(12):
        assert ask(served, "GET", f"/{first['id']}").json() == first
        turn = ask(served, "POST", max_output_tokens=1, previous_response_id=first["id"])
        assert turn.status_code == 200, turn.text
    running = [ask(served, "POST", background=True, max_output_tokens=400).json()["id"] for _ in range(6)]
    assert {ask(served, "POST", f"/{name}/cancel").json()["status"] for name in running} == {"cancelled"}
    streamed = ask(served, "POST", background=True, stream=True, max_output_tokens=5)
    last = streamed.text.rstrip().rpartition("\n\n")[2]
    assert last.startswith("event: response.incomplete")
    name = last.partition('"id":"')[2].partition('"')[0]
    for _ in range(6):
        assert ask(served, "GET", f"/{name}?stream=true").text == streamed.text
    assert ask(served, "DELETE", f"/{first['id']}").status_code == 200
    assert {ask(served, "GET", f"/{first['id']}").status_code for _ in range(6)} == {404}


@pytest.mark.ray
def test_a_lost_store_costs_what_it_kept_and_no_more(served: Served) -> None:
    first = ask(served, "POST", max_output_tokens=2).json()
    served.join_ray()
    ray.kill(ray.get_actor(NAME, Directory(APP, load_config().model).namespace))
    ray.shutdown()  # a driver must not outlive its Ray
    assert {ask(served, "GET", f"/{first['id']}").status_code for _ in range(6)} == {404}
    second = ask(served, "POST", max_output_tokens=2).json()
    assert {ask(served, "GET", f"/{second['id']}").status_code for _ in range(6)} == {200}
