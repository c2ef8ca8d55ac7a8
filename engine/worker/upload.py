"""From the host to the device without waiting for it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 16  # bytes


def upload(array: NDArray[Any] | Sequence[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Copy to the device. On a GPU through pinned memory, which torch keeps until the copy is done: nothing waits."""
    host = torch.from_numpy(array) if isinstance(array, np.ndarray) else torch.tensor(array, dtype=dtype)
    if dtype is not None:
        host = host.to(dtype)
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True) if host.numel() else host.to(device)


def upload_all(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """The same for several arrays in one copy; they arrive contiguous."""
    arrays = [np.ascontiguousarray(array) for array in arrays]
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    if len(arrays) == 1:
        return [upload(arrays[0], device)]
    return _views(_packed(arrays, pin_memory=True).to(device, non_blocking=True), arrays)


def _starts(arrays: Sequence[NDArray[Any]]) -> list[int]:
    """Where each array begins in a buffer, and where the buffer ends."""
    return [0, *itertools.accumulate(-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays)]


def _packed(arrays: Sequence[NDArray[Any]], pin_memory: bool) -> Tensor:
    starts = _starts(arrays)
    buffer = torch.empty(max(1, starts[-1]), dtype=torch.uint8, pin_memory=pin_memory)
    target = buffer.numpy()
    for array, start in zip(arrays, starts, strict=False):
        target[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
    return buffer


def _views(buffer: Tensor, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
    views = []
    for array, start in zip(arrays, _starts(arrays), strict=False):
        dtype = torch.from_numpy(array[:0]).dtype
        views.append(buffer[start : start + array.nbytes].view(dtype).view(array.shape))
    return views
