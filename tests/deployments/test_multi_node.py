"""Several nodes: where engines are placed, what the death of a node costs, and how one leaves in peace."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray

from pagedray.deployments.build import APP
from pagedray.deployments.proxy import free_port
from tests.deployments.cluster_files import ROOT, env, groups, pre_stop, ray_service
from tests.deployments.requests import expected
from tests.deployments.serve_on_nodes import NODE_GROUP, order
from tests.deployments.served import REBUILD_S, Served, wait_for

pytestmark = pytest.mark.ray
MANIFEST = ray_service(ROOT / "deployments/kuberay/rayservice-autoscaling.yaml")
NUM_TOKENS = 150  # of a stream: 3 s at 20 ms a step
FROZEN_S = 10.0  # of a stream whose node has frozen: 3 s, and what a busy machine adds
PAUSE_S = 2.0  # of a stream that nothing has happened to, on a machine that is busy with other things


class Nodes:
    """A cluster whose nodes have room for one engine of two ranks each."""

    def __init__(self, server: Served, url: str):
        self.server, self.url = server, url

    def add(self, name: str) -> None:
        order(self.server.ray_tmpdir, "add", name, 3, 2)

    def id(self, name: str) -> str:
        (found,) = (node["NodeID"] for node in ray.nodes() if node["NodeName"] == name)
        return str(found)

    def kill(self, name: str) -> None:
        order(self.server.ray_tmpdir, "kill", name)

    def freeze(self, name: str) -> None:
        order(self.server.ray_tmpdir, "freeze", name)

    def deploy(self, **settings: Any) -> None:
        """An application with the ingress on the head, whose node no test ends."""
        head = {"num_cpus": 0.25, "label_selector": {NODE_GROUP: "head"}}
        application = {
            "name": APP,
            "route_prefix": "/",
            "import_path": "tests.deployments.serve_on_nodes:build",
            "args": {"device": "cuda", "num_kv_blocks": 1024, **settings},
            "deployments": [{"name": "Ingress", "ray_actor_options": head}],
        }
        order(self.server.ray_tmpdir, "deploy", {"applications": [application]})

    def where(self) -> dict[str, list[str]]:
        """Engine id → nodes of its ranks, by rank, of the engines whose every part lives."""
        from ray._private.state import actors

        names = {node["NodeID"]: node["NodeName"] for node in ray.nodes()}
        found: dict[str, dict[int, str]] = {}
        for actor in actors().values():
            role, _, rest = actor["Name"].partition("-")
            if actor["State"] == "ALIVE" and role == "worker":
                engine_id, _, rank = rest.rpartition("-")
                found.setdefault(engine_id, {})[int(rank)] = names[actor["Address"]["NodeID"]]
        return {engine_id: [ranks[rank] for rank in sorted(ranks)] for engine_id, ranks in found.items()}

    def running(self) -> dict[str, float]:
        """Sequences in each engine's batch, of the engines that the ingress knows."""
        found = {}
        for line in httpx.get(f"{self.url}/metrics", timeout=60).text.splitlines():
            if line.startswith("pagedray:num_requests_running{"):
                found[line.split('engine="')[1].split('"')[0]] = float(line.rpartition(" ")[2])
        return found

    def wait_for_engines(self, num_engines: int, num_ranks: int, without: str = "") -> dict[str, list[str]]:
        """Their places, once so many take requests and nothing else lives."""

        def there() -> dict[str, list[str]]:
            try:
                known = set(self.running())
            except httpx.HTTPError:
                return {}
            places = self.where()
            done = known == set(places) and len(places) == num_engines and without not in places
            return places if done and all(len(ranks) == num_ranks for ranks in places.values()) else {}

        return wait_for(there, f"{num_engines} engines", REBUILD_S, self.details)

    def details(self) -> str:
        status = order(self.server.ray_tmpdir, "status")
        return f"{self.where()} \n{status}\n{self.server.output}"

    def wait_for_groups(self, number: int) -> None:
        """Until no more placement groups exist than engines: a group goes a moment after its replica."""

        def there() -> bool:
            groups = ray.util.placement_group_table().values()
            return sum(group["state"] != "REMOVED" for group in groups) == number

        wait_for(there, f"{number} placement groups", REBUILD_S, self.details)


class Stream(threading.Thread):
    """A completion that streams in the background; `pause_s` is its longest silence behind the first token."""

    def __init__(self, nodes: Nodes, prompt: str):
        super().__init__()
        self.prompt, self.text, self.pause_s = prompt, "", 0.0
        self._url = nodes.url
        self.start()

    def run(self) -> None:
        body = {"model": "fake", "prompt": self.prompt, "max_tokens": NUM_TOKENS, "stream": True}
        with httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=REBUILD_S) as response:
            last_s = 0.0
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                now_s = time.monotonic()
                self.pause_s = max(self.pause_s, now_s - last_s if last_s else 0.0)
                last_s = now_s
                self.text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]

    def check(self) -> None:
        """Every token came, once."""
        self.join(REBUILD_S)
        assert self.text == expected(NUM_TOKENS, self.prompt)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    port = free_port()
    health = {name: value for name, value in env(groups(MANIFEST)[0]).items() if name.startswith("RAY_health_check")}
    assert len(health) == 4
    with Served("-m", "tests.deployments.serve_on_nodes", str(port), env=health) as server:
        server.wait_for(lambda: "nodes at" in server.output, "Ray")
        server.join_ray()
        yield Nodes(server, f"http://127.0.0.1:{port}")
        ray.shutdown()
        server.process.kill()  # Ray's own end takes a quarter of a minute with so many nodes


def test_engines_come_with_the_nodes_they_need(nodes: Nodes) -> None:
    """Each gang has one node to itself; an engine that finds none waits without harm to the others."""
    nodes.deploy(data_parallel_size=2, tensor_parallel_size=2)
    nodes.add("n1")
    (place,) = nodes.wait_for_engines(1, 2).values()
    assert place == ["n1", "n1"]
    nodes.add("n2")
    places = nodes.wait_for_engines(2, 2)
    assert sorted(places.values()) == [["n1", "n1"], ["n2", "n2"]]
    nodes.wait_for_groups(2)


def test_the_death_of_a_node_leaves_other_streams_alone(nodes: Nodes) -> None:
    before = nodes.wait_for_engines(2, 2)
    streams = [Stream(nodes, f"{number} is where this prompt begins") for number in range(6)]
    wait_for(lambda: all(stream.text for stream in streams), "streamed text", 60, nodes.details)
    busy = nodes.running()
    assert min(busy.values()) > 0, busy
    (victim,) = (engine_id for engine_id, place in before.items() if place[0] == "n1")
    (survivor,) = set(before) - {victim}
    nodes.kill("n1")
    for stream in streams:
        stream.check()  # those of the dead node went on at the other
    unharmed = sum(stream.pause_s < PAUSE_S for stream in streams)
    assert unharmed >= busy[survivor], [stream.pause_s for stream in streams]
    assert nodes.wait_for_engines(1, 2, without=victim) == {survivor: ["n2", "n2"]}
    nodes.add("n3")
    after = nodes.wait_for_engines(2, 2)
    assert after.pop(survivor) == ["n2", "n2"]
    assert list(after.values()) == [["n3", "n3"]]
    nodes.wait_for_groups(2)


def test_a_node_that_is_to_stop_hands_its_engine_over(nodes: Nodes) -> None:
    """By the command that a pod of deployments/kuberay runs before it stops."""
    before = nodes.wait_for_engines(2, 2)
    nodes.add("n4")
    streams = [Stream(nodes, f"{number} is where another prompt begins") for number in range(4)]
    wait_for(lambda: all(stream.text for stream in streams), "streamed text", 60, nodes.details)
    (leaving,) = (engine_id for engine_id, place in before.items() if place[0] == "n2")
    words = shlex.split(pre_stop(groups(MANIFEST)[1]).split(";")[0])
    words[0] = str(Path(sys.executable).with_name("ray"))
    address = nodes.server.output.split("nodes at ")[1].split()[0]
    done = subprocess.run(
        [*words, "--address", address, "--node-id", nodes.id("n2")],
        env=nodes.server.env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    counts = []
    while leaving in (places := nodes.where()):
        counts.append(len(places))
        time.sleep(0.1)
    assert min(counts) == 2, "it went before its successor was there"
    after = nodes.wait_for_engines(2, 2, without=leaving)
    assert sorted(after.values()) == [["n3", "n3"], ["n4", "n4"]]
    for stream in streams:
        stream.check()
    nodes.wait_for_groups(2)
    nodes.kill("n2")


def test_a_frozen_node_counts_as_dead(nodes: Nodes) -> None:
    before = nodes.wait_for_engines(2, 2)
    streams = [Stream(nodes, f"{number} is where the next prompt begins") for number in range(4)]
    wait_for(lambda: all(stream.text for stream in streams), "streamed text", 60, nodes.details)
    assert min(nodes.running().values()) > 0
    (survivor,) = (engine_id for engine_id, place in before.items() if place[0] == "n4")
    nodes.freeze("n3")
    for stream in streams:
        stream.check()
    assert max(stream.pause_s for stream in streams) < FROZEN_S
    nodes.kill("n3")
    nodes.add("n5")
    after = nodes.wait_for_engines(2, 2)
    assert after.pop(survivor) == ["n4", "n4"]
    assert list(after.values()) == [["n5", "n5"]]
    nodes.wait_for_groups(2)


def test_a_pipeline_spans_nodes_and_a_stage_does_not(nodes: Nodes) -> None:
    nodes.deploy(data_parallel_size=1, tensor_parallel_size=2, pipeline_parallel_size=2)
    ((engine_id, place),) = nodes.wait_for_engines(1, 4).items()
    assert Counter(place) == {"n4": 2, "n5": 2}
    assert place[0] == place[1]
    assert place[2] == place[3]
    stream = Stream(nodes, "a pipeline")
    wait_for(lambda: bool(stream.text), "streamed text", 60, nodes.details)
    nodes.add("n6")
    nodes.kill(place[3])  # the stage that has neither the scheduler nor rank 0
    stream.check()
    ((successor, moved),) = nodes.wait_for_engines(1, 4, without=engine_id).items()
    assert place[3] not in moved
    assert "n6" in moved
    assert successor != engine_id
    nodes.wait_for_groups(1)
