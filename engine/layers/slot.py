"""Where a tensor of the checkpoint goes, and which part of it."""

from __future__ import annotations

from torch import Tensor

from pagedray.engine.layers.share import Share, all_of


class Slot:
    """
    Args:
        tensor: the destination, maybe rows of a stacked parameter; empty where this rank wants nothing of it.
        shares: per dimension, what part of the checkpoint's tensor goes there; none: all of it does.
    """

    __slots__ = ("shares", "tensor")

    def __init__(self, tensor: Tensor, *shares: Share):
        self.tensor, self.shares = tensor, shares or tuple(map(all_of, tensor.shape))
        assert tuple(tensor.shape) == tuple(share.size for share in self.shares), (tensor.shape, shares)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor in the checkpoint."""
        return tuple(share.whole for share in self.shares)

    @property
    def index(self) -> tuple[slice, ...]:
        """Of the part in the checkpoint's tensor."""
        return tuple(share.index for share in self.shares)

    @property
    def is_whole(self) -> bool:
        return all(share.is_whole for share in self.shares)
