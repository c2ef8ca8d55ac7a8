"""Which engines go: by hand with a scheduler of three fields, and by Serve's real one in its own words."""

from __future__ import annotations

import inspect
from collections import OrderedDict, defaultdict
from typing import Any

import pytest
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve._private.deployment_scheduler import DeploymentScheduler

from pagedray.deployments.victims import LOADS_LAST_S, METHOD, LeastLoadedFirst, victim_order

ENGINES, OTHERS = DeploymentID("EngineReplica", "app"), DeploymentID("Other", "app")
A, B, C, D = (ReplicaID(name, ENGINES) for name in "abcd")


class FakeScheduler:
    """Serve's order: what starts, then the newest."""

    def __init__(self, starting: list[ReplicaID], running: list[ReplicaID]):
        self.starting = starting
        self._running_replicas = {ENGINES: OrderedDict.fromkeys(running, "node")}

    def _get_replicas_to_stop(self, deployment_id: Any, number: int, gang_id_by_replica: Any = None) -> set[Any]:
        return set([*self.starting, *reversed(self._running_replicas[ENGINES])][:number])


def order(now_s: list[float] | None = None) -> LeastLoadedFirst:
    now_s = now_s or [100.0]
    return LeastLoadedFirst(FakeScheduler._get_replicas_to_stop, lambda: now_s[0])


@pytest.mark.parametrize(
    ("starting", "running", "number", "gone"),
    [
        ([], [A, B, C], 1, {B}),
        ([], [A, B, C], 2, {B, C}),
        ([], [C, B, A], 2, {B, C}),
        ([D], [A, B, C], 1, {D}),
        ([D], [A, B, C], 2, {D, B}),
        ([], [A, B, C], 3, {A, B, C}),
        ([], [A, C, D], 1, {D}),  # has not reported
    ],
)
def test_starting_then_idle_then_least_loaded(
    starting: list[ReplicaID], running: list[ReplicaID], number: int, gone: set[ReplicaID]
) -> None:
    victims = order()
    victims.hear(ENGINES, {A: 0.9, B: 0.0, C: 0.4})
    assert victims.choose(FakeScheduler(starting, running), ENGINES, number, gang_id_by_replica=None) == gone


def test_of_equal_ones_the_newest_goes() -> None:
    victims = order()
    victims.hear(ENGINES, {A: 0.0, B: 0.0})
    assert victims.choose(FakeScheduler([], [A, B]), ENGINES, 1) == {B}


def test_serve_decides_where_loads_are_unknown_old_or_replicas_are_gangs() -> None:
    now_s = [100.0]
    victims, scheduler = order(now_s), FakeScheduler([], [A, B, C])
    assert victims.choose(scheduler, ENGINES, 1) == {C}
    victims.hear(ENGINES, {A: 0.0, B: 0.5, C: 0.9})
    assert victims.choose(scheduler, ENGINES, 1) == {A}
    assert victims.choose(scheduler, OTHERS, 1) == {C}
    assert victims.choose(scheduler, ENGINES, 1, gang_id_by_replica={A: "g"}) == {C}
    now_s[0] += LOADS_LAST_S
    assert victims.choose(scheduler, ENGINES, 1) == {C}


def test_a_serve_that_looks_otherwise_keeps_its_own_order(caplog: pytest.LogCaptureFixture) -> None:
    class Stranger(FakeScheduler):
        def __init__(self) -> None:
            pass

        def _get_replicas_to_stop(self, deployment_id: Any, number: int, gang_id_by_replica: Any = None) -> set[Any]:
            return {C}

    victims = LeastLoadedFirst(Stranger._get_replicas_to_stop)
    victims.hear(ENGINES, {A: 0.0})
    assert victims.choose(Stranger(), ENGINES, 1) == {C}
    assert victim_order(int) is None
    assert caplog.text.count("own order") == 2


def test_the_order_is_put_in_place_once() -> None:
    class Scheduler(FakeScheduler):
        _get_replicas_to_stop = FakeScheduler._get_replicas_to_stop

    first, second = victim_order(Scheduler), victim_order(Scheduler)
    assert first is not None and first is second
    first.hear(ENGINES, {A: 0.1, B: 0.2, C: 0.0})
    assert Scheduler([], [C, B, A])._get_replicas_to_stop(ENGINES, 1, gang_id_by_replica=None) == {C}


def test_serves_own_scheduler_stops_the_idle_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pinned Serve has what this builds on; its choice alone would be the newest."""
    method = getattr(DeploymentScheduler, METHOD)
    order = getattr(method, "order", None)  # of a policy that another test has made
    monkeypatch.setattr(DeploymentScheduler, METHOD, method if order is None else order._serves_choice)
    assert [*inspect.signature(getattr(DeploymentScheduler, METHOD)).parameters][:3] == [
        "self",
        "deployment_id",
        "max_num_to_stop",
    ]
    scheduler = object.__new__(DeploymentScheduler)
    scheduler._pending_replicas = defaultdict(dict)
    scheduler._launching_replicas = defaultdict(dict)
    scheduler._recovering_replicas = defaultdict(set)
    scheduler._running_replicas = defaultdict(OrderedDict, {ENGINES: OrderedDict.fromkeys([A, B, C], "node")})
    scheduler._head_node_id = "head"

    class Info:
        label_selector = bundle_label_selector = None

    class Nodes:
        def get_node_labels(self, node_id: str) -> dict[str, str]:
            return {}

    scheduler._deployments = {ENGINES: Info()}
    scheduler._cluster_node_info_cache = Nodes()
    choose = getattr(DeploymentScheduler, METHOD)
    assert choose(scheduler, ENGINES, 1) == {C}
    victims = victim_order()
    assert victims is not None
    victims.hear(ENGINES, {A: 0.2, B: 0.0, C: 0.9})
    assert scheduler._get_replicas_to_stop(ENGINES, 1) == {B}
    scheduler._launching_replicas[ENGINES] = {D: None}
    assert scheduler._get_replicas_to_stop(ENGINES, 2) == {B, D}
