import pytest
import torch

from pagedray.engine.worker.threads import one_thread


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_one_thread_inside_and_as_many_as_before_outside(two_threads):
    with one_thread(torch.device("cpu")):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2


def test_an_error_gives_the_threads_back_too(two_threads):
    with pytest.raises(ValueError, match="inside"), one_thread(torch.device("cpu")):
        raise ValueError("inside")
    assert torch.get_num_threads() == 2


def test_other_devices_keep_their_host_threads(two_threads):
    with one_thread(torch.device("cuda")):
        assert torch.get_num_threads() == 2
