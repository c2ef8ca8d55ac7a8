"""Prometheus metrics of an ingress and of the engines it sees. Names follow vLLM's where the meaning is the same.

Engine figures (`engine` label) are read when scraped, so every ingress reports the same ones. The others are this
ingress's own: counts of finished choices, latencies, HTTP answers, and its choices of engines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from pagedray.engine.metrics import EngineStats
from pagedray.serving.client import EngineClient

SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
    900.0,
)

Reading = Callable[[EngineStats], float]

ENGINE_GAUGES: dict[str, tuple[str, Reading]] = {
    "num_requests_running": ("Sequences in the running batch.", lambda s: s.scheduler.num_running),
    "num_requests_waiting": ("Sequences waiting to be admitted.", lambda s: s.scheduler.num_waiting),
    "kv_cache_usage_perc": ("Share of KV blocks in use; 1 is all.", lambda s: s.scheduler.kv_usage),
}
ENGINE_COUNTERS: dict[str, tuple[str, Reading]] = {
    "prefix_cache_queries": (
        "Prompt tokens looked up in the prefix cache.",
        lambda s: s.scheduler.prefix_queried_tokens,
    ),
    "prefix_cache_hits": ("Prompt tokens found in the prefix cache.", lambda s: s.scheduler.prefix_hit_tokens),
    "num_preemptions": ("Sequences preempted.", lambda s: s.scheduler.num_preemptions),
    "prompt_tokens": ("Prompt tokens of accepted requests.", lambda s: s.prompt_tokens),
    "generation_tokens": ("Tokens generated.", lambda s: s.generated_tokens),
    "requests_rejected": ("Sequences refused because the queue was full.", lambda s: s.rejected),
    "engine_steps": ("Steps computed.", lambda s: s.num_steps),
    "engine_step_seconds": ("Seconds from submitting a step to its result, summed.", lambda s: s.step_seconds),
}


class RequestMetrics:
    """What an ingress counts. One registry per instance, so that several apps can live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._success = Counter(
            "pagedray:request_success",
            "Choices that ended, by finish reason.",
            ["finished_reason"],
            registry=self.registry,
        )
        self._http = Counter(
            "pagedray:http_responses", "HTTP answers, by status code.", ["code"], registry=self.registry
        )
        self._ttft = self._histogram("time_to_first_token_seconds", "From acceptance to the first token.")
        self._itl = self._histogram("inter_token_latency_seconds", "Between deliveries of one request's tokens.")
        self._e2e = self._histogram("e2e_request_latency_seconds", "From acceptance to the end of a choice.")
        for reason in ("stop", "length"):
            self._success.labels(reason)

    def first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def next_tokens(self, seconds: float) -> None:
        self._itl.observe(seconds)

    def finished(self, reason: str, seconds: float) -> None:
        self._success.labels(reason).inc()
        self._e2e.observe(seconds)

    def answered(self, code: int) -> None:
        self._http.labels(str(code)).inc()

    def render(self, engines: Iterable[EngineStats], client: EngineClient) -> bytes:
        """The text of /metrics."""
        scrape = CollectorRegistry()
        scrape.register(_EngineCollector(list(engines)))
        scrape.register(_RoutingCollector(client))
        return generate_latest(self.registry) + generate_latest(scrape)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"pagedray:{name}", text, buckets=SECONDS, registry=self.registry)


class _EngineCollector:
    """Engine snapshots as metric families."""

    def __init__(self, engines: list[EngineStats]):
        self._engines = engines

    def collect(self) -> Iterable[Metric]:
        for name, (text, value) in ENGINE_GAUGES.items():
            gauge = GaugeMetricFamily(f"pagedray:{name}", text, labels=["engine"])
            for stats in self._engines:
                gauge.add_metric([stats.engine_id], value(stats))
            yield gauge
        for name, (text, value) in ENGINE_COUNTERS.items():
            counter = CounterMetricFamily(f"pagedray:{name}", text, labels=["engine"])
            for stats in self._engines:
                counter.add_metric([stats.engine_id], value(stats))
            yield counter
        yield from _expert_counters(self._engines)


def _expert_counters(engines: list[EngineStats]) -> Iterable[Metric]:
    """How evenly experts are used; nothing of models that have none. Two series a layer, one an expert."""
    engines = [stats for stats in engines if stats.experts is not None]
    if not engines:
        return
    most = CounterMetricFamily(
        "pagedray:moe_layer_tokens_max",
        "Tokens of the expert of this layer that got most of them.",
        labels=["engine", "layer"],
    )
    mean = CounterMetricFamily(
        "pagedray:moe_layer_tokens_mean", "Tokens of an expert of this layer, on average.", labels=["engine", "layer"]
    )
    of_expert = CounterMetricFamily(
        "pagedray:moe_expert_tokens", "Tokens of this expert, summed over all layers.", labels=["engine", "expert"]
    )
    for stats in engines:
        assert stats.experts is not None
        for load in stats.experts.layers:
            most.add_metric([stats.engine_id, str(load.layer)], load.most)
            mean.add_metric([stats.engine_id, str(load.layer)], load.mean)
        for expert, count in enumerate(stats.experts.experts):
            of_expert.add_metric([stats.engine_id, str(expert)], count)
    yield from (most, mean, of_expert)


class _RoutingCollector:
    """This ingress's choices of engines so far, and the loads that it would choose by now."""

    def __init__(self, client: EngineClient):
        self._client = client

    def collect(self) -> Iterable[Metric]:
        decisions = CounterMetricFamily(
            "pagedray:routing_decisions",
            "Choices of an engine. affinity: by prefix or session; overflow: it was too loaded; balance: by load.",
            labels=["policy", "outcome"],
        )
        for (policy, outcome), count in sorted(self._client.router.decisions.items()):
            decisions.add_metric([policy, outcome], count)
        yield decisions
        load = GaugeMetricFamily(
            "pagedray:routing_load",
            "Load of an engine as this ingress sees it, in requests: its own and those of others that it was told of.",
            labels=["engine"],
        )
        for engine in self._client.router.engines:
            load.add_metric([engine.engine_id], engine.load)
        yield load
        yield GaugeMetricFamily(
            "pagedray:num_requests_without_engine",
            "Requests of this ingress that wait for an engine to start, or to move from a dead one.",
            self._client.num_homeless,
        )
