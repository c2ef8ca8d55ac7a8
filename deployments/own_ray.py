"""A Ray of our own on this machine, started so that an application is up soon.

Of an application's start most is processes that begin and import. Ray starts idle workers with its first driver, one
for each CPU that it was told of, and actors take these over. So it is told of as many as there will be processes, and
has them import beforehand what replicas need: they all do that at the same time, and while Serve starts.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
from ray._common.usage import usage_lib
from ray._private import ray_constants
from ray._private.node import Node
from ray._private.thirdparty import pynvml

from pagedray.deployments.build import num_cpus
from pagedray.engine.config import Config

OBJECT_STORE_BYTES = 100 * 2**20  # messages travel inline; nothing large is ever put
PRELOADED = ["pagedray.deployments.preload"]
SERVE_PROCESSES = 2  # controller and proxy
FALLBACK_PROXY_PROCESSES = 1  # beside HAProxy
NOWHERE = b"127.0.0.1:9"
REGISTRATION_S = 10.0
LOOK_S = 0.02


def start(config: Config) -> Path:
    """Start it and join it; the folder of Serve's log files."""
    if config.worker.device == "cuda":
        _keep_gpus_awake()
    num_workers = idle_workers(config, os.cpu_count() or 1)
    with _in_less_time():
        context: Any = ray.init(
            address="local",
            num_cpus=max(num_workers, math.ceil(num_cpus(config))),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=OBJECT_STORE_BYTES,
            _system_config={
                "preload_python_modules": PRELOADED,
                "worker_maximum_startup_concurrency": num_workers,  # else one a core: prestarts beyond are dropped
            },
        )
    return Path(context.address_info["session_dir"], "logs", "serve")


def idle_workers(config: Config, num_cores: int) -> int:
    """Processes to start beforehand: those of the application, and on a machine of many cores those of an engine more.

    The latter wait for an engine that is rebuilt. With Ray's own choice, one a core, large machines start hundreds.
    """
    server, worker = config.server, config.worker
    gang = 1 + worker.num_ranks  # the scheduler and each rank
    proxies = FALLBACK_PROXY_PROCESSES if server.haproxy else 0
    engines = max(1, server.fewest_engines) * (1 + gang)  # each with its replica
    needed = SERVE_PROCESSES + proxies + server.num_ingress_replicas + engines
    return min(max(num_cores, needed), needed + gang)


def _keep_gpus_awake() -> None:
    """Begin a session with NVIDIA's driver that lasts as long as this process; it takes nothing of a GPU.

    Without one, and without the driver's persistence mode, GPUs are set up anew for everyone who asks about them: Ray
    does so three times while it starts, then each worker.
    """
    with contextlib.suppress(pynvml.NVMLError):  # Ray will find no GPU, which is said later
        pynvml.nvmlInit()  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _in_less_time() -> Iterator[None]:
    """Change what Ray does while its processes start, which its settings can't."""
    node_class: Any = Node
    start_dashboard, start_node = node_class.start_api_server, node_class.start_ray_processes

    def start_node_and_import(node: Any) -> None:
        start_node(node)
        importlib.import_module("ray.serve")  # we need it next, and this process has nothing to do but wait
        _wait_for_registration(node)

    if not usage_lib.usage_stats_enabled():
        node_class.start_api_server = _leave_dashboard_out
    node_class.start_ray_processes = start_node_and_import
    try:
        yield
    finally:
        node_class.start_api_server, node_class.start_ray_processes = start_dashboard, start_node


def _leave_dashboard_out(node: Any, **options: Any) -> None:
    """Instead of starting the dashboard's process and waiting for it.

    Ray does that even without a dashboard, to report usage, which is off. What the process would leave in Ray's head is
    an address where nobody listens, for those that look for one.
    """
    node._webui_url = ""
    for key, value in ((ray_constants.DASHBOARD_ADDRESS.encode(), NOWHERE), (b"webui:url", b"")):
        node.get_gcs_client().internal_kv_put(key, value, True, ray_constants.KV_NAMESPACE_DASHBOARD)


def _wait_for_registration(node: Any) -> None:
    """Ray looks once a second whether its node is there; found at the first look, it costs no second."""
    deadline_s = time.monotonic() + REGISTRATION_S
    while not node.get_gcs_client().get_all_node_info(timeout=REGISTRATION_S):
        if time.monotonic() > deadline_s:
            return  # Ray itself waits for longer, and knows what to say
        time.sleep(LOOK_S)
