"""The machine that a worker runs on: what it has, and how much of a GPU's memory is left for the KV cache."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib.util
from collections.abc import Callable, Iterator

import torch

from pagedray.engine.errors import ConfigError
from pagedray.engine.worker.backend import Machine
from pagedray.kernels.cpu.library import compiled_kernels

_GIB = 2**30
_GRAPHS_BYTES = 512 * 2**20  # the driver's share of captured graphs


def find_machine() -> Machine:
    num_gpus = torch.cuda.device_count()
    if num_gpus == 0:
        return Machine(0)
    return Machine(
        num_gpus=num_gpus,
        gpu_name=torch.cuda.get_device_name(),
        capability=torch.cuda.get_device_capability(),
        has_triton=importlib.util.find_spec("triton") is not None,
        flashinfer_trouble=None if importlib.util.find_spec("flashinfer") else "it is not installed",
    )


def with_compiled_kernels(machine: Machine) -> tuple[Machine, bool]:
    """The machine with what is known of compiled kernels on its CPU, and whether they had to be compiled."""
    kernels = compiled_kernels()
    trouble = None if kernels.library is not None else kernels.reason
    machine = dataclasses.replace(machine, compiled_trouble=trouble, compiled_by=kernels.reason)
    return machine, kernels.was_compiled


@contextlib.contextmanager
def memory_for(what: str, remedy: str) -> Iterator[None]:
    """Say what to change when a GPU's memory runs out. Raises: ConfigError then."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info()
        room = f"{free / _GIB:.1f} of {total / _GIB:.1f} GiB are free"
        raise ConfigError(f"{what} found no room in the GPU's memory ({room}); {remedy}") from error


def free_for_cache(device: torch.device, utilization: float, run_widest: Callable[[], None], will_capture: bool) -> int:
    """Bytes that the KV cache may take.

    Args:
        utilization: share of the GPU's memory that this process may use, with what others use of it counted in.
        run_widest: computes the widest steps; leaves nothing behind.
        will_capture: whether graphs will be captured, whose activations take memory of their own.

    Raises:
        ConfigError: nothing is left.
    """
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    weights = torch.cuda.memory_allocated(device)
    run_widest()
    torch.cuda.synchronize(device)
    activations = torch.cuda.max_memory_allocated(device) - weights
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)  # the driver's, libraries' and other processes'
    graphs = activations // 2 + _GRAPHS_BYTES if will_capture else 0
    found = int(total * utilization) - others - weights - activations - graphs
    if found <= 0:
        parts = {"weights": weights, "activations": activations, "graphs": graphs, "the rest": others}
        used = ", ".join(f"{name} {size / _GIB:.1f}" for name, size in parts.items())
        raise ConfigError(
            f"nothing is left for the KV cache of {utilization:g} x {total / _GIB:.1f} GiB (GiB: {used}); raise "
            "gpu_memory_utilization, lower max_num_batched_tokens or max_num_seqs, or use a larger GPU"
        )
    return found
