"""Which clusters have room for which applications, and what is said of those that don't."""

from __future__ import annotations

from typing import Any

import pytest

from pagedray.deployments import placement
from pagedray.deployments.placement import Node, PlacementWatch, shortfall
from pagedray.engine.config import Config, load_config


def settings(**given: Any) -> Config:
    return load_config({"device": "cuda", **given})


def nodes(*gpus: float, cpus: float = 16) -> list[Node]:
    return [Node(f"10.0.0.{i}", {"CPU": cpus, "GPU": count, "memory": 1e9}) for i, count in enumerate(gpus)]


@pytest.mark.parametrize(
    ("given", "gpus", "fits"),
    [
        ({}, (1,), True),
        ({}, (0,), False),
        ({"device": "cpu"}, (0,), True),
        ({"tensor_parallel_size": 4}, (4,), True),
        ({"tensor_parallel_size": 4}, (2, 2), False),  # all ranks of a stage on one node
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, (2, 2), True),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, (4,), True),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, (3, 1), False),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, (3, 3), True),
        ({"pipeline_parallel_size": 3}, (1, 1, 1), True),
        ({"num_engine_replicas": 3}, (2, 1), True),
        ({"num_engine_replicas": 3, "tensor_parallel_size": 2}, (4, 3), True),
        ({"num_engine_replicas": 4, "tensor_parallel_size": 2}, (5, 3), False),
    ],
)
def test_what_fits(given: dict[str, Any], gpus: tuple[float, ...], fits: bool) -> None:
    assert (shortfall(settings(**given), nodes(*gpus)) is None) == fits


def test_the_text_has_what_is_needed_what_is_there_and_what_is_missing() -> None:
    text = shortfall(settings(tensor_parallel_size=4), nodes(2, 3))
    assert text == (
        "no room for an engine: each needs 4 GPU + 4.5 CPU, all on one node; the cluster has 10.0.0.0: 2 GPU + 16 CPU; "
        "10.0.0.1: 3 GPU + 16 CPU; 1 GPU more on one node would do; add nodes, or lower tensor_parallel_size (4)"
    )
    text = shortfall(settings(tensor_parallel_size=2, pipeline_parallel_size=2, num_engine_replicas=2), nodes(4, 1))
    assert text is not None
    assert text.startswith("room for 1 of 2 engines: each needs 0.5 CPU and 2 times 2 GPU + 2 CPU, each on one node;")
    assert "1 GPU more" in text
    assert text.endswith("num_engine_replicas (2) or tensor_parallel_size (2) or pipeline_parallel_size (2)")
    assert "no nodes; 1 GPU + 1.5 CPU more" in str(shortfall(settings(), []))
    text = shortfall(settings(num_ingress_replicas=3), nodes(1, cpus=2))
    assert text is not None and "num_ingress_replicas (3) of 0.25 CPU beside the engines" in text
    assert "; 2 more nodes; " in str(shortfall(settings(tensor_parallel_size=2), nodes(*[1] * 10)))


def test_trouble_is_said_again_every_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    there = {False: nodes(2), True: nodes(0)}
    monkeypatch.setattr(placement, "_nodes", lambda free_only=False: there[free_only])
    monkeypatch.setattr(placement.time, "monotonic", lambda: now[0])
    watch, placed = (PlacementWatch(settings(tensor_parallel_size=2), has_place) for has_place in (False, True))
    assert watch.look() is None  # it has only begun
    now[0] += placement.SAY_S
    assert str(watch.look()).startswith("waiting for what is in use: no room for an engine")
    assert watch.look() is None
    assert placed.look() is None  # what is in use is its own
    there[True] = nodes(2)
    now[0] += placement.SAY_S
    assert watch.look() is None
    there[False] = nodes(1, 1)
    now[0] += placement.SAY_S
    for either in (watch, placed):
        assert str(either.look()).startswith("no room for an engine")
