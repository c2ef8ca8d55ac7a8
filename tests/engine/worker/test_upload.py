import numpy as np
import pytest
import torch

from pagedray.engine.worker.upload import _packed, _views, upload, upload_all

ARRAYS = [
    np.arange(5, dtype=np.int64),
    np.array([[1.5, 2.5, 3.5]], dtype=np.float32),
    np.arange(0),
    np.arange(3, dtype=np.int32),
    np.arange(12, dtype=np.int64).reshape(3, 4)[:, ::2],
    np.array([True, False]),
]


def assert_equal(tensors: list[torch.Tensor]) -> None:
    for tensor, array in zip(tensors, ARRAYS, strict=True):
        expected = torch.from_numpy(array)
        assert tensor.dtype == expected.dtype and tensor.is_contiguous()
        assert torch.equal(tensor.cpu(), expected)


def test_several_arrays_share_a_buffer():
    contiguous = [np.ascontiguousarray(array) for array in ARRAYS]
    buffer = _packed(contiguous, pin_memory=False)
    assert_equal(_views(buffer, contiguous))
    assert all((view.data_ptr() - buffer.data_ptr()) % 16 == 0 for view in _views(buffer, contiguous) if view.numel())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_arrives(device):
    device = torch.device(device)
    assert_equal(upload_all(ARRAYS, device))
    assert torch.equal(upload_all(ARRAYS[:1], device)[0].cpu(), torch.arange(5))
    assert upload_all([], device) == []
    assert upload([1, 2], device, torch.int32).tolist() == [1, 2] and upload((), device, torch.int64).shape == (0,)
    assert upload(np.array([1, 2]), device, torch.float32).dtype == torch.float32
