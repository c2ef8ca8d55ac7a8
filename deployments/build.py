"""From settings to a Serve application: an ingress deployment in front of an engine deployment.

`serve run pagedray.deployments:build model=DIR`, `serve deploy deployments/serve.yaml` and `pagedray serve` end here.
Nothing heavy is imported before a function is called: the command sets Ray's environment first.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from pagedray.deployments.devices import device_of_cluster
from pagedray.engine.config import Config, load_config
from pagedray.engine.errors import ConfigError
from pagedray.serving.parsers.registry import choose_parsers

if TYPE_CHECKING:
    from ray.serve import Application

APP = "default"  # the application's name where its deployer gives none; Serve's own default
ENGINE_CPUS = 0.5  # replica and scheduler
WORKER_CPUS = 1.0
INGRESS_CPUS = 0.25
MAX_ONGOING_REQUESTS = (
    10_000  # admission is the engine's: Serve's count would include requests that are still being routed
)
OF_THE_CLUSTER = {
    "host": "set http_options.host in Serve's config file",
    "port": "set http_options.port in Serve's config file",
    "haproxy": "set RAY_SERVE_ENABLE_HA_PROXY for all Ray processes",
    "ssl_certfile": "set http_options.ssl_certfile in Serve's config file, and leave HAProxy off",
    "ssl_keyfile": "set http_options.ssl_keyfile in Serve's config file, and leave HAProxy off",
}


class Parts(msgspec.Struct, frozen=True):
    """What an application is made of, as `module:name`; tests put fakes in."""

    worker: str = "pagedray.engine.worker.worker:Worker"
    tokenizer: str | None = None  # called without arguments; None: the checkpoint's


def build(args: dict[str, Any]) -> Application:
    """The application for these settings.

    Args:
        args: any field of the configuration tree, flat ({"model": …}) or by leaf ({"model": {"model": …}}). Values may
            be texts, as `serve run` gives them.

    Raises:
        ConfigError: a setting that is unknown, wrong, or not the application's to choose.
    """
    flat = {**args, **args["server"]} if isinstance(args.get("server"), Mapping) else args
    for name, remedy in OF_THE_CLUSTER.items():
        if name in flat:
            raise ConfigError(f"{name} belongs to the cluster, not to one application: {remedy}")
    config = load_config(args, environ=os.environ, auto_device=device_of_cluster)
    choose_parsers(config.api, None)  # names that aren't known fail the deployment before it starts anything
    return application(config)


def application(config: Config, parts: Parts = Parts(), drain_timeout_s: float = 30.0) -> Application:  # noqa: B008 (frozen)
    """The application for a configuration.

    Args:
        parts: what it is made of.
        drain_timeout_s: how long running requests may go on when replicas stop.
    """
    from ray import serve

    from pagedray.deployments.autoscale import autoscaling
    from pagedray.deployments.engine_replica import EngineReplica
    from pagedray.deployments.ingress import Ingress

    shared: dict[str, Any] = {
        "health_check_period_s": 1.0,
        "health_check_timeout_s": 10.0,
        "graceful_shutdown_wait_loop_s": 0.2,
        "max_ongoing_requests": MAX_ONGOING_REQUESTS,
        "logging_config": {"enable_access_log": False},
    }
    scaled: dict[str, Any] = {"num_replicas": config.server.fewest_engines}
    if config.server.scales:
        scaled = {"autoscaling_config": autoscaling(config.server)}
    engines = serve.deployment(
        **shared,
        **scaled,
        graceful_shutdown_timeout_s=drain_timeout_s + 10.0,
        ray_actor_options={"num_cpus": ENGINE_CPUS},
        placement_group_bundles=bundles(config),
        placement_group_strategy=strategy(config),
    )(EngineReplica)
    ingress = serve.deployment(
        **shared,
        graceful_shutdown_timeout_s=drain_timeout_s + 1.0,  # no engine answers its streams for longer
        name="Ingress",
        num_replicas=config.server.num_ingress_replicas,
        ray_actor_options={"num_cpus": INGRESS_CPUS},
    )(serve.ingress()(Ingress))
    bound: Application = ingress.bind(
        config, parts.tokenizer, engines.bind(config.without_keys(), drain_timeout_s, parts.worker)
    )
    return bound


def bundles(config: Config) -> list[dict[str, float]]:
    """Resources of one engine: the replica with its scheduler, then the workers of each pipeline stage.

    A bundle lies on one node, so the ranks that share a stage's layers always do.
    """
    num_ranks, num_stages = float(config.worker.tensor_parallel_size), config.worker.pipeline_parallel_size
    stage = {"CPU": num_ranks * WORKER_CPUS} | ({"GPU": num_ranks} if config.worker.device == "cuda" else {})
    return [{"CPU": ENGINE_CPUS}, *(dict(stage) for _ in range(num_stages))]


def strategy(config: Config) -> Literal["STRICT_PACK", "PACK"]:
    """How the bundles lie: one stage beside its scheduler; several on as few nodes as can be."""
    return "STRICT_PACK" if config.worker.pipeline_parallel_size == 1 else "PACK"


def num_gpus(config: Config) -> float:
    """GPUs that the application reserves at most."""
    return config.server.most_engines * sum(bundle.get("GPU", 0.0) for bundle in bundles(config))


def num_cpus(config: Config) -> float:
    """CPUs, in Ray's sense, that the application reserves at most."""
    server = config.server
    engine = sum(bundle["CPU"] for bundle in bundles(config))
    return server.most_engines * engine + server.num_ingress_replicas * INGRESS_CPUS
