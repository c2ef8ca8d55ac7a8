"""Memory of steps in flight is used again, and never while somebody still needs what is in it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagedray.engine.worker.step_slots import NUM_SLOTS, StepSlot, StepSlots

CPU = torch.device("cpu")


class Event:
    """Of a device whose step ends when somebody waits for it."""

    def __init__(self, log: list[str]):
        self.log = log

    def record(self) -> None:
        self.log.append("record")

    def synchronize(self) -> None:
        self.log.append("wait")


def make_slot(log: list[str]) -> tuple[StepSlot, torch.Tensor]:
    tokens = torch.zeros(4, dtype=torch.int64)
    slot = StepSlot(torch.zeros(16, dtype=torch.int32), tokens, 0, Event(log))  # type: ignore[arg-type]
    log.clear()
    return slot, tokens


def test_tokens_that_nobody_read_are_read_before_their_memory_is_used_again() -> None:
    log: list[str] = []
    slot, tokens = make_slot(log)
    pending = slot.end(3)
    tokens[:] = torch.tensor([5, 6, 7, 8])
    assert log == ["record"]
    slot.free()
    assert log == ["record", "wait"]
    tokens[:] = -1
    assert pending.read() == [5, 6, 7]
    assert log == ["record", "wait"]  # the event may be the next step's by now


def test_nobody_waits_for_tokens_that_were_read() -> None:
    log: list[str] = []
    slot, tokens = make_slot(log)
    pending = slot.end(1)
    tokens[0] = 9
    assert pending.to_messages() == ([9], {})
    slot.free()
    slot.free()
    assert log == ["record", "wait"]


def test_slots_come_in_turn_and_share_nothing() -> None:
    slots = StepSlots(num_ints=5, num_tokens=3, device=CPU)
    pending = []
    for step in range(2 * NUM_SLOTS + 3):
        slot = slots.take()
        assert slot.first_result == step % NUM_SLOTS * 3
        slot.ints_cpu[:5] = step + np.arange(5)
        sent = torch.zeros(5, dtype=torch.int32)
        slot.send(sent)
        assert sent.tolist() == [step, step + 1, step + 2, step + 3, step + 4]
        slots.tokens[slot.first_result : slot.first_result + 3] = torch.tensor([step, step, step])
        pending.append(slot.end(2))
    assert [tokens.read() for tokens in pending] == [[step] * 2 for step in range(2 * NUM_SLOTS + 3)]


def test_integers_of_a_slot_can_be_read_in_pairs() -> None:
    slots = StepSlots(num_ints=7, num_tokens=1, device=CPU)
    for _ in range(NUM_SLOTS):
        ints = slots.take().ints_cpu[4:6].view(np.int64)
        assert ints.ctypes.data % 8 == 0
        ints[0] = 3 << 40
        assert ints.tolist() == [3 << 40]


@pytest.mark.gpu
def test_a_slot_waits_for_the_device() -> None:
    device = torch.device("cuda")
    slots = StepSlots(num_ints=1 << 16, num_tokens=1, device=device)
    into = torch.zeros(1 << 16, dtype=torch.int32, device=device)
    found = []
    for step in range(3 * NUM_SLOTS):
        slot = slots.take()
        slot.ints_cpu[:] = step
        torch.cuda._sleep(1_000_000)
        slot.send(into)
        found.append(into.clone())
        slot.end(0)
    for step, ints in enumerate(found):
        assert (ints == step).all()
