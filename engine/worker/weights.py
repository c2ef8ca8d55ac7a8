"""Fills a model's parameters from its checkpoint, one memory-mapped tensor at a time, or this rank's part of it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import re
import sys
import time
import zlib
from collections.abc import Callable, Container, Mapping
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from pagedray.engine.checkpoint import Checkpoint
from pagedray.engine.errors import ConfigError, UnsupportedModel
from pagedray.engine.gguf_model import GgufModel
from pagedray.engine.layers.slot import Slot

log = logging.getLogger(__name__)


class LoadableModel(Protocol):
    def weight_slots(self) -> Mapping[str, Slot]: ...


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LAYER = re.compile(r"\.layers\.(\d+)\.")


@dataclasses.dataclass(frozen=True)
class _Stored:
    """A tensor in the checkpoint. `read` may return a view of the mapped file: copy from it, don't keep it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    num_bytes: int
    read: Callable[[Slot], Tensor]  # the slot's part, and nothing else of the file

    def num_bytes_for(self, slot: Slot) -> int:
        return self.num_bytes * slot.tensor.numel() // max(math.prod(self.shape), 1)


@torch.inference_mode()
def load_weights(
    model: LoadableModel, checkpoint: Checkpoint, device: torch.device, other_layers: Container[int] = ()
) -> None:
    """Copy every tensor of the checkpoint into its slot, or the slot's part of it, converting to the slot's dtype.

    Args:
        device: where the slots are, for the log line.
        other_layers: numbers of the layers that other stages of a pipeline load.

    Raises:
        UnsupportedModel: naming the tensors that are missing, unexpected, or have another shape or type.
        ConfigError: a file can't be read.
    """
    slots = model.weight_slots()
    started_s = time.monotonic()
    with contextlib.ExitStack() as files:
        stored = _gguf_tensors(checkpoint.gguf) if checkpoint.gguf else _safetensors(checkpoint, files)
        _check(stored, slots, checkpoint.name, other_layers)
        wanted = {name: stored[name] for name in stored if name in slots and slots[name].tensor.numel()}
        total_gib = sum(tensor.num_bytes_for(slots[name]) for name, tensor in wanted.items()) / 2**30
        with tqdm(
            total=total_gib,
            desc=f"loading {checkpoint.name}",
            bar_format="{desc} {percentage:3.0f}%|{bar:30}| {n:.2f}/{total:.2f} GiB in {elapsed_s:.1f} s",
            disable=not sys.stderr.isatty(),
        ) as bar:
            for name, tensor in wanted.items():
                slots[name].tensor.copy_(tensor.read(slots[name]))
                bar.update(tensor.num_bytes_for(slots[name]) / 2**30)
    seconds = time.monotonic() - started_s
    log.info("weights loaded tensors=%d gib=%.2f seconds=%.1f device=%s", len(wanted), total_gib, seconds, device)


def _gguf_tensors(gguf: GgufModel) -> dict[str, _Stored]:
    def read(name: str, slot: Slot) -> Tensor:
        return torch.from_numpy(gguf.read(name, () if slot.is_whole else slot.index))

    return {
        name: _Stored(gguf.shape(name), torch.float32, gguf.num_bytes(name), functools.partial(read, name))
        for name in gguf.names
    }


def _safetensors(checkpoint: Checkpoint, files: contextlib.ExitStack) -> dict[str, _Stored]:
    stored = {}
    for path in checkpoint.weight_files():
        try:
            file = files.enter_context(safe_open(path, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{path} can't be read as safetensors, is it complete? ({error})") from error
        for name in file.keys():  # noqa: SIM118 - it is no dict
            mapped = file.get_tensor(name)  # a view of the mapped file: nothing is read yet
            stored[name] = _Stored(tuple(mapped.shape), mapped.dtype, mapped.nbytes, functools.partial(_part, mapped))
    return stored


def _part(tensor: Tensor, slot: Slot) -> Tensor:
    return tensor[slot.index]


def _check(stored: dict[str, _Stored], slots: Mapping[str, Slot], name: str, other_layers: Container[int]) -> None:
    # a tied head may be stored beside the embedding; inverse frequencies are computed from the config
    unexpected = [
        n
        for n in stored
        if n not in slots
        and n != "lm_head.weight"
        and not n.endswith(".inv_freq")
        and not ((layer := _LAYER.search(n)) and int(layer[1]) in other_layers)
    ]
    both = [(n, stored[n], slots[n]) for n in slots if n in stored]
    problems = {
        "missing": [n for n in slots if n not in stored],
        "unexpected": unexpected,
        "wrong shape": [
            f"{n} is {t.shape}, the config says {slot.shape}" for n, t, slot in both if t.shape != slot.shape
        ],
        "quantized": [f"{n} is {t.dtype}" for n, t, _ in both if t.dtype not in _DTYPES],
    }
    found = [f"{what}: {_some(names)}" for what, names in problems.items() if names]
    if found:
        raise UnsupportedModel(f"the tensors of {name} don't fit its config; {'; '.join(found)}")


def _some(names: list[str], limit: int = 8) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


@torch.inference_mode()
def fill_with_noise(model: LoadableModel, device: torch.device) -> None:
    """Random weights of the model's shapes: matrices normal with a deviation of 0.02, vectors ones.

    For benchmarks: speed depends on shapes, and on values only in that zeros would be too fast. A tensor's numbers
    depend on its name and shape, so that ranks together have the model that one rank alone has.
    """
    started_s = time.monotonic()
    slots = model.weight_slots()
    for name, slot in slots.items():
        if slot.tensor.dim() == 1:
            slot.tensor.fill_(1)
        elif slot.tensor.numel():
            generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
            whole = slot.tensor if slot.is_whole else slot.tensor.new_empty(slot.shape)
            whole.normal_(0, 0.02, generator=generator)
            if not slot.is_whole:
                slot.tensor.copy_(whole[slot.index])
    gib = sum(slot.tensor.nbytes for slot in slots.values()) / 2**30
    seconds = time.monotonic() - started_s
    log.info("weights made up tensors=%d gib=%.2f seconds=%.1f device=%s", len(slots), gib, seconds, device)
