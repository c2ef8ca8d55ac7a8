"""Architectures by the class name that checkpoints carry. A model's file registers itself; nothing lists the files."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from pagedray.engine.errors import UnsupportedModel
from pagedray.engine.layers.slot import Slot
from pagedray.engine.models.spec import ModelSpec
from pagedray.engine.worker.parallel import ALONE, Parallel


class Model(Protocol):
    """What the worker asks of a model; every one is an nn.Module too."""

    def __call__(self, inputs: Tensor, positions: Tensor) -> Tensor:
        """Token ids [T] int64, positions [T] int64 → hidden states [T, hidden].

        Between the stages of a pipeline: what a block leaves and the residual, [2, T, hidden], instead of either.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, hidden] → [S, V]; of the last stage alone."""

    def weight_slots(self) -> dict[str, Slot]:
        """Tensor name in the checkpoint → where to put it, or this rank's part of it. Without other stages' layers."""

    def finish_loading(self) -> None:
        """Called once, when all slots are filled."""


C = TypeVar("C", bound=type)
_classes: dict[str, type] = {}


def register_model(*architectures: str) -> Callable[[C], C]:
    def register(cls: C) -> C:
        for name in architectures:
            assert _classes.get(name, cls) is cls, f"{name} is registered twice"
            _classes[name] = cls
        return cls

    return register


def get_model_class(architecture: str) -> Callable[[ModelSpec, Parallel], Model]:
    """The class for a checkpoint's architecture.

    Raises:
        UnsupportedModel: with near names and the list of what there is.
    """
    if architecture not in _classes:
        _import_models()
    if architecture not in _classes:
        known = sorted(_classes)
        near = difflib.get_close_matches(architecture, known, n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise UnsupportedModel(f"architecture {architecture!r} is not supported{hint} (supported: {', '.join(known)})")
    return _classes[architecture]


def build_model(spec: ModelSpec, dtype: torch.dtype, device: torch.device, parallel: Parallel = ALONE) -> Model:
    """This rank's part of the model with uninitialized weights of this type, on this device.

    Args:
        spec: of its stage, see `stage_spec`.

    Raises:
        ConfigError: the model can't be split over so many ranks.
    """
    cls = get_model_class(spec.architecture)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = cls(spec, parallel)
    finally:
        torch.set_default_dtype(before)
    assert isinstance(model, nn.Module)
    return model


def _import_models() -> None:
    package = importlib.import_module("pagedray.engine.models")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
