"""A Ray of our own, and what an actor finds in its process: python -m tests.deployments.own_ray_probe, prints JSON."""

from __future__ import annotations

import json
import os
import sys
import time

import ray

from pagedray.deployments import own_ray
from pagedray.engine.config import load_config


class Probe:
    def process(self) -> tuple[int, list[str]]:
        return os.getpid(), sorted(sys.modules)


def main() -> None:
    config = load_config()
    logs = own_ray.start(config)
    started_s = time.time()
    probes = [ray.remote(num_cpus=0)(Probe).remote() for _ in range(own_ray.idle_workers(config, 1))]
    processes = ray.get([probe.process.remote() for probe in probes])
    found = {
        "logs": str(logs),
        "num_asked": len(probes),
        "num_beforehand": sum(os.stat(f"/proc/{pid}").st_ctime < started_s for pid, _ in processes),
        "modules": sorted(set.intersection(*(set(modules) for _, modules in processes))),
    }
    ray.shutdown()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
