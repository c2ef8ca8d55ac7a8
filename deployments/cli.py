"""The command `pagedray`: its flags are the fields of the configuration tree."""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo

from pagedray.deployments.devices import device_here, device_of_cluster
from pagedray.deployments.phases import Phases
from pagedray.deployments.process_start import began_at_s
from pagedray.deployments.proxy import Listener, end_haproxy, listener
from pagedray.engine.checkpoint import open_checkpoint
from pagedray.engine.config import Config, Device, leaves, load_config
from pagedray.engine.errors import PagedrayError
from pagedray.engine.models.parse import model_spec
from pagedray.engine.models.stages import check_ranks

TITLES = {
    "model": "model",
    "cache": "KV cache",
    "scheduler": "scheduler",
    "worker": "worker",
    "failure": "failures",
    "server": "server",
    "api": "API",
}
SHORT = {"optimization_level": ("-O",)}


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.command == "version":
        print(importlib.metadata.version("pagedray"))
        return 0
    try:
        ray_address = args.ray_address or address(os.environ)
        find_device = functools.partial(device_of_cluster, ray_address) if ray_address else device_here
        config = read_config(args, os.environ, find_device)
        if args.print_config:
            settings = config.model_dump(mode="json")
            if {config.server.min_replicas, config.server.max_replicas} != {None}:
                del settings["server"]["num_engine_replicas"]  # it excludes those: what is printed can be read again
            print(yaml.safe_dump(settings, sort_keys=False), end="")
            return 0
        serve(config, ray_address, began_at_s(os.getpid()))
        return 0
    except PagedrayError as error:
        print(f"pagedray: {error}", file=sys.stderr)
        return 1


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="pagedray", description="Serve large language models with Ray.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("version", help="print the version")
    serve = commands.add_parser(
        "serve",
        help="serve a model over HTTP",
        description="Serve a model over HTTP. Weakest first: defaults, --config, PAGEDRAY_* variables, flags.",
    )
    serve.add_argument("positional_model", nargs="?", metavar="MODEL", help="same as --model")
    serve.add_argument("--config", type=Path, metavar="FILE", help="YAML file with any of the settings below")
    serve.add_argument("--print-config", action="store_true", help="print all settings as they would be used, and exit")
    serve.add_argument(
        "--ray-address", metavar="ADDRESS", help="join this Ray cluster (default: RAY_ADDRESS, or a Ray of our own)"
    )
    for leaf, cls in leaves().items():
        group = serve.add_argument_group(TITLES[leaf])
        for name, field in cls.model_fields.items():
            names = [*SHORT.get(name, ()), "--" + name.replace("_", "-")]
            group.add_argument(*names, dest=name, default=None, **_how(name, field))
    return top


def read_config(
    args: argparse.Namespace, environ: Mapping[str, str], auto_device: Callable[[], Device] = device_here
) -> Config:
    """The configuration that these arguments, their file and these variables make.

    Args:
        auto_device: what `device: auto` stands for.

    Raises:
        ConfigError: a setting is unknown or wrong.
    """
    flags = {name: getattr(args, name) for cls in leaves().values() for name in cls.model_fields}
    if args.positional_model is not None:
        if flags["model"] not in (None, args.positional_model):
            parser().error(f"MODEL {args.positional_model} and --model {flags['model']} differ; give one")
        flags["model"] = args.positional_model
    try:
        text = args.config.read_text() if args.config else None
    except (OSError, UnicodeDecodeError) as error:
        parser().error(f"--config: {error}")
    return load_config(text, flags, environ, auto_device)


def address(environ: Mapping[str, str]) -> str | None:
    """The cluster to join, by Ray's own variable."""
    return environ.get("RAY_ADDRESS")


def serve(config: Config, ray_address: str | None, begun_s: float) -> None:
    """Serve until a signal comes, on a Ray of our own or on the one at `ray_address`.

    Args:
        begun_s: wall clock of the process's beginning: Python's own start and the imports are waited for too.
    """
    phases = Phases(sys.stdout, begun_s)
    with tempfile.TemporaryDirectory(prefix="pr-", dir="/tmp") as folder:
        if ray_address is None:
            leaf = config.model
            checkpoint = open_checkpoint(leaf.model, leaf.revision, leaf.needs_weights)
            if config.worker.num_ranks > 1:  # what can't be is found before all else
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


def _how(name: str, field: FieldInfo) -> dict[str, Any]:
    """How argparse treats a field."""
    default = field.default
    shown = "on" if default is True else "off" if default is False else default
    text = field.description or ""
    if default not in (None, ()):
        text += f" Default: {shown}."
    how: dict[str, Any] = {"help": text.replace("%", "%%")}
    annotation = field.annotation
    if annotation is bool:
        how["action"] = argparse.BooleanOptionalAction
    elif get_origin(annotation) is Literal:
        how["choices"] = get_args(annotation)
    else:
        how["metavar"] = "A,B" if get_origin(annotation) is tuple else _unit(name)
    return how


def _unit(name: str) -> str:
    suffixes = {
        "_s": "SECONDS",
        "_bytes": "BYTES",
        "_tokens": "TOKENS",
        "model": "MODEL",
        "port": "PORT",
        "host": "HOST",
    }
    return next((unit for suffix, unit in suffixes.items() if name.endswith(suffix)), "VALUE")


if __name__ == "__main__":
    sys.exit(main())
