"""What every layer is made of: nn.Module with types, and without hooks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, TypeVar, cast

from torch import Tensor, nn


class Layer(nn.Module):
    """A module whose call is its forward and nothing else: a decode step makes hundreds of such calls."""

    def __call__(self, *args: Any) -> Tensor:
        y: Tensor = self.forward(*args)
        return y


class Block(nn.Module):
    """One layer of a decoder's stack: maps what the stack carries, a tensor to add and the residual."""

    def __call__(self, *args: Any) -> tuple[Tensor, Tensor]:
        y: tuple[Tensor, Tensor] = self.forward(*args)
        return y


B = TypeVar("B", bound=nn.Module)


class Stack(nn.ModuleList, Generic[B]):
    """Blocks of one type, in order."""

    def __iter__(self) -> Iterator[B]:
        return cast("Iterator[B]", super().__iter__())
