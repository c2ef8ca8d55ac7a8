"""Flags that are the fields of the configuration tree."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from pagedray.deployments.commands.exit_code import CommandError, ExitCode
from pagedray.deployments.devices import device_here
from pagedray.engine.config import Config, Device, leaves, load_config

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
ORDER = "Settings, weakest first: defaults, --config, PAGEDRAY_* variables, flags."


def add_settings(parser: argparse.ArgumentParser, without: Collection[str] = ()) -> None:
    """MODEL, --config, and a flag for each setting.

    Args:
        without: leaves of the tree that get no flags.
    """
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help="same as --model")
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file with any of the settings below")
    shown = {leaf: cls for leaf, cls in leaves().items() if leaf not in without}
    parser.set_defaults(settings=[name for cls in shown.values() for name in cls.model_fields])
    for leaf, cls in shown.items():
        group = parser.add_argument_group(TITLES[leaf])
        for name, field in cls.model_fields.items():
            names = [*SHORT.get(name, ()), "--" + name.replace("_", "-")]
            group.add_argument(*names, dest=name, default=None, **_how(name, field))


def given_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Field → value, of the flags that were given. Raises: CommandError when MODEL and --model differ."""
    flags = {name: value for name in args.settings if (value := getattr(args, name)) is not None}
    if args.positional_model is not None:
        if flags.get("model") not in (None, args.positional_model):
            text = f"MODEL {args.positional_model} and --model {flags['model']} differ; give one"
            raise CommandError(text, ExitCode.USAGE)
        flags["model"] = args.positional_model
    return flags


def read_config(
    args: argparse.Namespace, environ: Mapping[str, str], auto_device: Callable[[], Device] = device_here
) -> Config:
    """The configuration that these arguments, their file and these variables make.

    Args:
        auto_device: what `device: auto` stands for.

    Raises:
        ConfigError: a setting is unknown or wrong.
        CommandError: the file can't be read, or MODEL and --model differ.
    """
    flags = given_settings(args)
    try:
        text = args.config.read_text() if args.config else None
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"--config: {error}", ExitCode.USAGE) from None
    return load_config(text, flags, environ, auto_device)


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
