"""How much of a GPU is left for the KV cache, with a GPU made of numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pagedray.engine.errors import ConfigError
from pagedray.engine.worker.device import find_machine, free_for_cache, memory_for

GIB = 2**30
DEVICE = torch.device("cuda", 0)


class Gpu:
    """100 GiB, of which others use 5 and this process's weights 40; the widest step takes 8 more for a while."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.allocated = self.peak = 40 * GIB
        fakes: dict[str, Callable[..., object]] = {
            "synchronize": lambda device: None,
            "empty_cache": lambda: None,
            "reset_peak_memory_stats": lambda device: setattr(self, "peak", self.allocated),
            "memory_allocated": lambda device: self.allocated,
            "max_memory_allocated": lambda device: self.peak,
            "memory_reserved": lambda device: self.allocated,
            "mem_get_info": lambda device=None: (100 * GIB - 5 * GIB - self.allocated, 100 * GIB),
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    def run_widest(self) -> None:
        self.peak = self.allocated + 8 * GIB


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def test_what_a_share_of_the_memory_leaves(gpu: Gpu) -> None:
    assert free_for_cache(DEVICE, 0.9, gpu.run_widest, will_capture=False) == (90 - 5 - 40 - 8) * GIB


def test_graphs_get_half_of_a_steps_activations_and_the_drivers_share(gpu: Gpu) -> None:
    with_graphs = free_for_cache(DEVICE, 0.9, gpu.run_widest, will_capture=True)
    assert with_graphs == (90 - 5 - 40 - 8 - 4) * GIB - GIB // 2


def test_when_nothing_is_left_the_message_says_what_takes_it_and_what_to_change(gpu: Gpu) -> None:
    with pytest.raises(ConfigError, match=r"weights 40.0, activations 8.0.*the rest 5.0.*gpu_memory_utilization"):
        free_for_cache(DEVICE, 0.5, gpu.run_widest, will_capture=False)


def test_running_out_of_memory_says_what_to_change(gpu: Gpu) -> None:
    message = r"^the weights found no room.*55.0 of 100.0 GiB are free.*smaller model"
    with pytest.raises(ConfigError, match=message), memory_for("the weights", "use a smaller model"):
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_machine_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert find_machine().num_gpus == 0
