"""Gangs of two stages on Ray, with fakes for the model: steps, and what happens when one of their processes dies."""

from __future__ import annotations

import os
import re
import signal
import time
from typing import Any

import pytest
import ray

from pagedray.deployments.child import Child
from pagedray.deployments.place import place_of_this_process
from pagedray.engine.messages import encode
from tests.deployments.requests import Stream, complete, expected, metric
from tests.deployments.served import Served, wait_for
from tests.deployments.test_cluster import MARGIN_S, NOTICE_S, Cluster, succeeds

NUM_RANKS = 2
STEP_TIMEOUT_S = 2.0

pytestmark = [
    pytest.mark.ray,
    pytest.mark.parametrize(
        "served",
        [
            (
                *("--no-haproxy", "--port", "0", "--pipeline-parallel-size", str(NUM_RANKS)),
                *("--step-timeout-s", str(STEP_TIMEOUT_S), "--max-num-seqs", "4", "--stall-threshold-s", "8"),
            )
        ],
        indirect=True,
        ids=["two-stages"],
    ),
]


@pytest.fixture
def cluster(served: Served) -> Cluster:
    return Cluster(served, NUM_RANKS)


def test_it_answers_with_what_the_last_stage_says(served: Served, cluster: Cluster) -> None:
    assert complete(served, 12) == expected(12)
    assert cluster.living() == {**dict.fromkeys(cluster.living(), 1), "WorkerActor": NUM_RANKS}


@pytest.mark.parametrize("how", ["kill", "stop"])
@pytest.mark.parametrize("rank", range(NUM_RANKS))
def test_a_lost_rank_costs_a_pause(served: Served, cluster: Cluster, rank: int, how: str) -> None:
    streams = [Stream(served, 150) for _ in range(3)]
    for stream in streams:
        stream.wait_for_text()
    engine_id, place = cluster.engine_id(), cluster.place("worker", rank)
    lost: Any = cluster.directory.find("worker", rank)[engine_id]
    if how == "kill":
        ray.kill(lost)
    else:
        os.kill(place.pid, signal.SIGSTOP)
    _, reason = cluster.failure(engine_id)
    named = rf"rank {rank}\b.* on {re.escape(str(place))}"
    if rank == 0:  # the scheduler may say it first, or rank 1
        named += r"|the worker \(rank 0\) (died|has not answered)|it has lost rank 0"
    assert re.search(named, reason), reason
    assert cluster.wait_for_successor(engine_id) != engine_id
    for stream in streams:
        stream.check()
    assert place.pid not in [process.pid for process in served.left_over()]
    assert complete(served, 12) == expected(12)
    assert metric(served, "kv_cache_usage_perc") == 0


def test_a_dead_rank_is_noticed_while_nothing_runs(served: Served, cluster: Cluster) -> None:
    engine_id = cluster.engine_id()
    killed_s = time.time()
    ray.kill(cluster.directory.find("worker", 1)[engine_id])
    assert cluster.noticed_s(engine_id) - killed_s < NOTICE_S + MARGIN_S
    cluster.wait_for_successor(engine_id)
    wait_for(lambda: succeeds(lambda: complete(served, 12) == expected(12)), "an answer", 60)


class Sleeper:
    """An actor that does nothing."""

    def place(self) -> bytes:
        return encode(place_of_this_process())


async def test_a_stopped_process_of_another_node_is_killed_there(served: Served, cluster: Cluster) -> None:
    handle: Any = ray.remote(Sleeper).options(num_cpus=0).remote()  # type: ignore[attr-defined]
    child = Child("the sleeper", handle)
    await child.attach("a node that it is not on")
    assert child.place is not None
    os.kill(child.place.pid, signal.SIGSTOP)
    await child.kill()
    assert child.place.pid not in [process.pid for process in served.left_over()]
    await child.kill()
