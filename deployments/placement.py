"""Whether a cluster's nodes have room for an application, and what they lack."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping

import msgspec
import ray

from pagedray.deployments.build import INGRESS_CPUS, bundles, strategy
from pagedray.engine.config import Config

log = logging.getLogger(__name__)

SAY_S = 5.0  # between reports of the same trouble
SHOWN_NODES = 8
KINDS = ("GPU", "CPU")  # the scarcer first

Resources = dict[str, float]


class Node(msgspec.Struct, frozen=True):
    name: str
    resources: Mapping[str, float]


def shortfall(config: Config, nodes: Iterable[Node], num_engines: int | None = None) -> str | None:
    """What keeps these nodes from taking the application; None: nothing does.

    Args:
        num_engines: that must find room; None: all that there always are, and all ingresses.
    """
    nodes = list(nodes)
    free = [{kind: node.resources.get(kind, 0.0) for kind in KINDS} for node in nodes]
    parts = bundles(config)
    if strategy(config) == "STRICT_PACK":
        parts = [{kind: sum(part.get(kind, 0.0) for part in parts) for kind in KINDS}]
    wanted = config.server.fewest_engines if num_engines is None else num_engines
    for number in range(wanted):
        lacking = _place(parts, free)
        if lacking is not None:
            found = f"room for {number} of {wanted} engines" if number else "no room for an engine"
            return (
                f"{found}: each needs {_needs(parts)}; the cluster has {_has(nodes)}; "
                f"{_text(lacking)} more on one node would do; {_remedy(config)}"
            )
    if num_engines is None and _place([{"CPU": INGRESS_CPUS}] * config.server.num_ingress_replicas, free) is not None:
        return (
            f"no room for num_ingress_replicas ({config.server.num_ingress_replicas}) of {INGRESS_CPUS:g} CPU beside "
            f"the engines; the cluster has {_has(nodes)}; add nodes, or lower it"
        )
    return None


class PlacementWatch:
    """Says what an application waits for while an engine has not begun to load.

    Nodes may yet come, so it is for the caller to go on waiting.

    Args:
        has_place: the application has a placement group already, of which a node may have gone.
    """

    def __init__(self, config: Config, has_place: bool = False):
        self._config, self._has_place = config, has_place
        self._said_s = time.monotonic()  # a start takes some seconds anyway

    def look(self) -> str | None:
        """The trouble, if there is any that was not said in the last seconds."""
        now = time.monotonic()
        if now - self._said_s < SAY_S:
            return None
        self._said_s = now
        if (trouble := shortfall(self._config, _nodes())) is not None or self._has_place:
            return trouble
        trouble = shortfall(self._config, _nodes(free_only=True), num_engines=1)
        return trouble and f"waiting for what is in use: {trouble}"

    async def log_troubles(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(SAY_S)
            if (trouble := await asyncio.to_thread(self.look)) is not None:
                log.warning("an engine is not placed yet: %s", trouble)


def _nodes(free_only: bool = False) -> list[Node]:
    free = ray._private.state.available_resources_per_node() if free_only else {}  # type: ignore[no-untyped-call]
    return [
        Node(node["NodeManagerAddress"], free.get(node["NodeID"], {}) if free_only else node["Resources"])
        for node in ray.nodes()  # type: ignore[no-untyped-call]
        if node["Alive"]
    ]


def _place(parts: list[Resources], free: list[Resources]) -> Resources | None:
    """Take the parts out of `free`, large ones first and each where least is left; what one of them lacks, or None."""
    for part in sorted(parts, key=lambda part: [-part.get(kind, 0.0) for kind in KINDS]):
        lacks = [
            {kind: part.get(kind, 0.0) - node[kind] for kind in KINDS if part.get(kind, 0.0) > node[kind]}
            for node in free
        ]
        fitting = [node for node, lack in zip(free, lacks, strict=True) if not lack]
        if not fitting:
            return min(lacks, key=lambda lack: [lack.get(kind, 0.0) for kind in KINDS], default=part)
        node = min(fitting, key=lambda node: [node[kind] for kind in KINDS])
        for kind in KINDS:
            node[kind] -= part.get(kind, 0.0)
    return None


def _needs(parts: list[Resources]) -> str:
    texts = [_text(part) for part in parts]
    counted = [f"{texts.count(text)} times {text}" if texts.count(text) > 1 else text for text in dict.fromkeys(texts)]
    return f"{' and '.join(counted)}, {'all' if len(parts) == 1 else 'each'} on one node"


def _has(nodes: list[Node]) -> str:
    shown = [f"{node.name}: {_text(node.resources)}" for node in nodes[:SHOWN_NODES]]
    more = [f"{len(nodes) - SHOWN_NODES} more nodes"] if len(nodes) > SHOWN_NODES else []
    return "; ".join(shown + more) or "no nodes"


def _text(resources: Mapping[str, float]) -> str:
    return " + ".join(f"{resources[kind]:g} {kind}" for kind in KINDS if resources.get(kind)) or "nothing"


def _remedy(config: Config) -> str:
    worker, server = config.worker, config.server
    sizes = {
        "num_engine_replicas": server.num_engine_replicas,
        "tensor_parallel_size": worker.tensor_parallel_size,
        "pipeline_parallel_size": worker.pipeline_parallel_size,
    }
    larger = [f"{name} ({size})" for name, size in sizes.items() if size > 1]
    return f"add nodes, or lower {' or '.join(larger)}" if larger else "add nodes"
