import pytest
import torch

from pagedray.engine.worker.host_copies import HostCopies


def test_on_a_cpu_results_are_the_copies() -> None:
    tensor, copies = torch.arange(3), HostCopies(None)
    assert copies.add(tensor) is tensor
    copies.finish().wait()


@pytest.mark.gpu
def test_copies_hold_what_was_there_when_they_were_started() -> None:
    """Work that is queued later doesn't reach them, though it may run before anybody waits."""
    device = torch.device("cuda")
    tensor = torch.full((1 << 20,), 7, device=device)
    copies = HostCopies(torch.cuda.Stream(device))
    copy = copies.add(tensor + 1)
    copies.finish()
    del tensor
    for _ in range(20):
        torch.full((1 << 20,), 9, device=device)  # takes memory that was given back
    copies.wait()
    assert copy.device.type == "cpu"
    assert (copy == 8).all()
