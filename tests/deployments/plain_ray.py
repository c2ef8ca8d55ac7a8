"""A Ray with its dashboard, as `ray start` would make one, until a signal comes: python -m … DASHBOARD_PORT."""

from __future__ import annotations

import signal
import sys

import ray


def main() -> None:
    context = ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=True,
        dashboard_port=int(sys.argv[1]),
        log_to_driver=False,
        object_store_memory=100 * 2**20,
    )
    print("up at", context.address_info["gcs_address"], flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    main()
