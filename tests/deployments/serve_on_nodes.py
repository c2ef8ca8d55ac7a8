"""A Ray cluster of several simulated nodes with a model that is a fake; a socket takes orders from the test.

python -m tests.deployments.serve_on_nodes PORT, with RAY_TMPDIR set. The head has the node group "head" and room for
ingresses; engines need nodes that the test adds, whose GPUs are numbers only.
"""

from __future__ import annotations

import os
import signal
import sys
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

from pagedray.deployments.build import Parts, application
from pagedray.deployments.proxy import PYTHON_PROXY
from pagedray.engine.config import load_config

PARTS = Parts(worker="tests.fakes:SlowFakeWorker", tokenizer="tests.fakes:ByteTokenizer")
STORE = {"object_store_memory": 80 * 2**20}
NODE_GROUP = "ray.io/node-group"


def build(args: dict[str, Any]) -> Any:
    """What `import_path` names: the application with fakes in it."""
    return application(load_config(args), PARTS, drain_timeout_s=10.0)


def door(ray_tmpdir: Path) -> str:
    return str(ray_tmpdir / "orders")


def order(ray_tmpdir: Path, name: str, *args: Any) -> Any:
    """Have a method of `Nodes` called in the process of the cluster; what it returns, or raises RuntimeError."""
    with Client(door(ray_tmpdir), "AF_UNIX") as line:
        line.send((name, args))
        done, value = line.recv()
    if not done:
        raise RuntimeError(value)
    return value


class Nodes:
    """
    Args:
        port: of HTTP.
    """

    def __init__(self, port: int):
        os.environ.update(PYTHON_PROXY)
        import ray
        from ray import serve
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 2, "labels": {NODE_GROUP: "head"}, "include_dashboard": False, **STORE}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self.address = self._cluster.address
        self._nodes: dict[str, Any] = {}
        ray.init(address=self.address, log_to_driver=False, logging_level="ERROR")
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})

    def add(self, name: str, num_cpus: int, num_gpus: int) -> None:
        self._nodes[name] = self._cluster.add_node(
            node_name=name, num_cpus=num_cpus, num_gpus=num_gpus, labels={NODE_GROUP: "engines"}, **STORE
        )

    def kill(self, name: str) -> None:
        """End all of a node's processes at once, as its machine would."""
        self._signal(name, signal.SIGKILL)
        self._cluster.remove_node(self._nodes.pop(name), allow_graceful=False)

    def freeze(self, name: str) -> None:
        """Stop all of a node's processes without an end, as a broken network would."""
        self._signal(name, signal.SIGSTOP)

    def _signal(self, name: str, number: signal.Signals) -> None:
        import psutil  # Ray's own copy

        for info in self._nodes[name].all_processes["raylet"]:
            raylet = psutil.Process(info.process.pid)
            for process in [raylet, *raylet.children(recursive=True)]:
                process.send_signal(number)

    def deploy(self, config: dict[str, Any]) -> None:
        """As `serve deploy` would."""
        from ray.serve.context import _get_global_client
        from ray.serve.schema import ServeDeploySchema

        _get_global_client().deploy_apps(ServeDeploySchema.model_validate(config))

    def status(self) -> str:
        from ray import serve

        return str(serve.status())


def main() -> None:
    nodes = Nodes(int(sys.argv[1]))
    with Listener(door(Path(os.environ["RAY_TMPDIR"])), "AF_UNIX") as listener:
        print("nodes at", nodes.address, flush=True)
        while True:  # until SIGTERM, for which Ray has a handler: it ends the cluster
            with listener.accept() as line:
                name, args = line.recv()
                try:
                    line.send((True, getattr(nodes, name)(*args)))
                except Exception as error:
                    line.send((False, repr(error)))


if __name__ == "__main__":
    main()
