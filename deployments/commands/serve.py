"""`pagedray serve`: the server, on a Ray of our own or on one that runs."""

from __future__ import annotations

import argparse
import functools
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from pagedray.deployments.commands.exit_code import ExitCode
from pagedray.deployments.commands.settings import ORDER, add_settings, read_config
from pagedray.deployments.devices import device_here, device_of_cluster
from pagedray.deployments.phases import Phases
from pagedray.deployments.process_start import began_at_s
from pagedray.deployments.proxy import Listener, end_haproxy, listener
from pagedray.engine.checkpoint import open_checkpoint
from pagedray.engine.config import Config
from pagedray.engine.models.parse import model_spec
from pagedray.engine.models.stages import check_ranks
from pagedray.serving.parsers.registry import choose_parsers


def add_serve(commands: Any) -> None:
    """Args: `commands` is what `ArgumentParser.add_subparsers` gave."""
    parser = commands.add_parser(
        "serve", help="serve a model over HTTP", description=f"Serve a model over HTTP. {ORDER}", allow_abbrev=False
    )
    parser.add_argument(
        "--print-config", action="store_true", help="print all settings as they would be used, and exit"
    )
    parser.add_argument(
        "--ray-address", metavar="ADDRESS", help="join this Ray cluster (default: RAY_ADDRESS, or a Ray of our own)"
    )
    add_settings(parser)


def run_serve(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Raises: PagedrayError when the server can't start."""
    ray_address = args.ray_address or address(environ)
    find_device = functools.partial(device_of_cluster, ray_address) if ray_address else device_here
    config = read_config(args, environ, find_device)
    if args.print_config:
        settings = config.model_dump(mode="json")
        if {config.server.min_replicas, config.server.max_replicas} != {None}:
            del settings["server"]["num_engine_replicas"]  # it excludes those: what is printed can be read again
        print(yaml.safe_dump(settings, sort_keys=False), end="")
    else:
        serve(config, ray_address, began_at_s(os.getpid()))
    return ExitCode.OK


def address(environ: Mapping[str, str]) -> str | None:
    """The cluster to join, by Ray's own variable."""
    return environ.get("RAY_ADDRESS")


def serve(config: Config, ray_address: str | None, begun_s: float) -> None:
    """Serve until a signal comes, on a Ray of our own or on the one at `ray_address`.

    Args:
        begun_s: wall clock of the process's beginning: Python's own start and the imports are waited for too.
    """
    choose_parsers(config.api, None)  # names that aren't known are found before all else
    phases = Phases(sys.stdout, begun_s)
    with tempfile.TemporaryDirectory(prefix="pr-", dir="/tmp") as folder:
        if ray_address is None:
            leaf = config.model
            checkpoint = open_checkpoint(leaf.model, leaf.revision, leaf.needs_weights)
            if config.worker.num_ranks > 1:  # so are ranks that can't share the model
                check_ranks(model_spec(checkpoint), config.worker)
            listen, trouble = listener(config.server, Path(folder))
            if trouble is not None:
                phases.say(f"HAProxy can't run here, so Serve's slower proxy in Python serves HTTP: {trouble}")
            os.environ.update(listen.environment)
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's own choice, 15, is for batch work
        else:
            listen = Listener(config.server.host, config.server.port, "the cluster's proxy")
        from pagedray.deployments.launch import Launch  # Serve reads the environment while it is imported

        phases.end("Python and imports")
        launch = Launch(config, listen, ray_address, phases)
        try:
            launch.run()
        finally:
            end_haproxy(Path(folder))
    if launch.ray_is_gone:
        sys.stdout.flush()
        os._exit(0)  # Ray's exit handlers would look for it for a minute
