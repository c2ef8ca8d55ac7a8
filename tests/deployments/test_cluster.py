"""A whole application on Ray, with fakes for the model: requests over HTTP, and what happens when processes die."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
import ray

from pagedray.deployments.build import APP
from pagedray.deployments.directory import Directory
from pagedray.deployments.place import Place
from pagedray.engine.config import load_config
from pagedray.engine.messages import decode
from tests.deployments.requests import PROMPT, Stream, client, complete, expected, metric
from tests.deployments.served import REBUILD_S, Served, wait_for

pytestmark = [
    pytest.mark.ray,
    pytest.mark.parametrize(
        "served",
        [
            (
                *("--no-haproxy", "--port", "0", "--num-ingress-replicas", "2", "--max-queued-requests", "8"),
                *("--step-timeout-s", "3", "--max-num-seqs", "4", "--log-stats-interval-s", "1"),
                *("--stall-threshold-s", "8"),
            )
        ],
        indirect=True,
        ids=["python-proxy"],
    ),
]
NOTICE_S = 2.0  # the promise
MARGIN_S = 5.0  # for a machine that is busy with other things


class Cluster:
    """The server's actors, seen as a second driver of its Ray."""

    def __init__(self, served: Served, num_ranks: int = 1):
        served.join_ray()
        self.served, self.num_ranks = served, num_ranks
        self.directory = Directory(APP, load_config().model)

    def engine_id(self) -> str:
        return wait_for(lambda: next(iter(self.directory.find("scheduler")), ""), "engine", REBUILD_S)

    def place(self, role: Any, rank: int = 0) -> Place:
        actor = self.directory.find(role, rank)[self.engine_id()]
        return decode(Place, ray.get(actor.place.remote(), timeout=60))

    def pid(self, role: Any) -> int:
        return self.place(role).pid

    def living(self) -> dict[str, int]:
        """Actors of an engine that live, by class, and placement groups that exist."""
        from ray._private.state import actors

        counts = {"WorkerActor": 0, "SchedulerActor": 0, "ServeReplica:default:EngineReplica": 0}
        for actor in actors().values():
            if actor["State"] != "DEAD" and actor["ActorClassName"] in counts:
                counts[actor["ActorClassName"]] += 1
        groups = ray.util.placement_group_table().values()
        return {**counts, "groups": sum(group["state"] != "REMOVED" for group in groups)}

    def wait_for_successor(self, engine_id: str) -> str:
        """The engine that came after `engine_id`, once nothing but it is there."""
        one_each = {
            "WorkerActor": self.num_ranks,
            "SchedulerActor": 1,
            "ServeReplica:default:EngineReplica": 1,
            "groups": 1,
        }
        wait_for(
            lambda: engine_id not in self.directory.find("scheduler") and self.living() == one_each,
            "successor",
            REBUILD_S,
            lambda: f"{self.living()}\n{self.served.output}",
        )
        return self.engine_id()

    def failure(self, engine_id: str) -> tuple[str, str]:
        """When the replica wrote that this engine failed, and why."""

        def line() -> tuple[str, str] | None:
            files = (self.served.ray_tmpdir / "ray" / "session_latest" / "logs" / "serve").glob("*EngineReplica*.log")
            text = "".join(file.read_text() for file in files)
            found = re.search(rf"ERROR (\S+ \S+) .*engine failed.*engine_id={engine_id} reason=(.*)", text)
            return found and (found[1], found[2])

        return wait_for(line, f"log line about engine {engine_id}", REBUILD_S, lambda: self.served.output)

    def noticed_s(self, engine_id: str) -> float:
        """When the replica wrote that this engine failed, wall clock."""
        seconds, milliseconds = self.failure(engine_id)[0].split(",")
        return time.mktime(time.strptime(seconds, "%Y-%m-%d %H:%M:%S")) + int(milliseconds) / 1000


@pytest.fixture
def cluster(served: Served) -> Cluster:
    return Cluster(served)


def test_it_answers(served: Served) -> None:
    assert complete(served, 12) == expected(12)
    answer = httpx.get(f"{served.url}/health", headers={"X-Request-Id": "mine"}, timeout=60)
    assert answer.json() == {"status": "healthy"}
    assert answer.headers.get_list("x-request-id") == ["mine"]  # from Serve or from the app, not from both


def test_a_header_that_is_no_utf8_harms_nothing(served: Served) -> None:
    for name in (b"X-Request-Id", b"User-Agent", b"Authorization", b"X-Session-Id"):
        answer = httpx.get(f"{served.url}/health", headers=[(name, b"caf\xe9 \xff\xfe")], timeout=60)
        assert answer.json() == {"status": "healthy"}


def test_it_streams_chats(served: Served) -> None:
    stream = client(served).chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "hi"}], max_tokens=9, stream=True
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == expected(9, "user:hi\nassistant:")


def test_errors_keep_their_class(served: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="limit"):
        complete(served, 1, "x" * 5000)
    with pytest.raises(openai.NotFoundError):
        client(served).completions.create(model="other", prompt="x")


def test_a_full_queue_refuses(served: Served) -> None:
    """4 run and 8 wait; admission is the engine's, so the bound holds over both ingresses together."""

    async def flood() -> list[int]:
        async with httpx.AsyncClient(timeout=120) as http:
            body = {"model": "fake", "prompt": PROMPT, "max_tokens": 40}
            posts = [http.post(f"{served.url}/v1/completions", json=body) for _ in range(40)]
            answers = await asyncio.gather(*posts)
        assert all("retry-after" in answer.headers for answer in answers if answer.status_code == 429)
        return [answer.status_code for answer in answers]

    statuses = asyncio.run(flood())
    assert set(statuses) == {200, 429}
    assert statuses.count(200) >= 12
    assert metric(served, "num_requests_running") == 0


def test_a_client_that_leaves_frees_its_blocks(served: Served) -> None:
    with httpx.stream(
        "POST",
        f"{served.url}/v1/completions",
        json={"model": "fake", "prompt": PROMPT, "max_tokens": 1900, "stream": True},
        timeout=60,
    ) as response:
        chunks = response.iter_text()  # dropping it would close the connection
        next(chunks)
        wait_for(lambda: metric(served, "kv_cache_usage_perc") > 0, "used blocks", 30)
    wait_for(lambda: metric(served, "kv_cache_usage_perc") == 0, "freed blocks", 30)


def test_it_logs_throughput_while_it_works(served: Served) -> None:
    complete(served, 150)
    lines = served.wait_for(lambda: re.findall(r"throughput .* engine_id=\w+", served.output), "a throughput line", 30)
    assert "generation=" in lines[0]


@pytest.mark.parametrize("role", ["worker", "scheduler"])
def test_a_killed_actor_costs_a_pause(served: Served, cluster: Cluster, role: str) -> None:
    stream = Stream(served, 150)
    stream.wait_for_text()
    engine_id = cluster.engine_id()
    actor = cluster.directory.find(role)[engine_id]  # type: ignore[arg-type]
    killed_s = time.time()
    ray.kill(actor)
    assert cluster.noticed_s(engine_id) - killed_s < NOTICE_S + MARGIN_S
    successor = cluster.wait_for_successor(engine_id)
    stream.check()
    assert successor != engine_id
    assert complete(served, 12) == expected(12)
    assert metric(served, "kv_cache_usage_perc") == 0


def test_a_frozen_worker_is_replaced(served: Served, cluster: Cluster) -> None:
    stream = Stream(served, 150)
    stream.wait_for_text()
    engine_id, pid = cluster.engine_id(), cluster.pid("worker")
    os.kill(pid, signal.SIGSTOP)
    cluster.wait_for_successor(engine_id)
    stream.check()
    assert pid not in [process.pid for process in served.left_over()]


def test_a_frozen_scheduler_is_unhealthy_and_replaced(served: Served, cluster: Cluster) -> None:
    stream = Stream(served, 150)
    stream.wait_for_text()
    engine_id, pid = cluster.engine_id(), cluster.pid("scheduler")
    os.kill(pid, signal.SIGSTOP)
    assert httpx.get(f"{served.url}/health", timeout=60).status_code == 503
    cluster.wait_for_successor(engine_id)
    stream.check()
    assert pid not in [process.pid for process in served.left_over()]
    assert httpx.get(f"{served.url}/health", timeout=60).status_code == 200


def test_a_killed_engine_replica_is_replaced(served: Served, cluster: Cluster) -> None:
    stream = Stream(served, 150)
    stream.wait_for_text()
    engine_id = cluster.engine_id()
    (replica,) = [p for p in served.left_over() if "EngineReplica" in p.command]
    replica.kill()
    cluster.wait_for_successor(engine_id)
    stream.check()


def test_a_killed_ingress_leaves_the_other(served: Served, cluster: Cluster) -> None:
    ingresses = [p for p in served.left_over() if "Ingress" in p.command]
    assert len(ingresses) == 2
    ingresses[0].kill()
    wait_for(lambda: succeeds(lambda: complete(served, 5) == expected(5)), "an answer", 60)


def succeeds(action: Callable[[], bool]) -> bool:
    try:
        return action()
    except openai.APIError:
        return False
