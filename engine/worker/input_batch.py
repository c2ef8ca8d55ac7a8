"""The tensors of one step's forward."""

from __future__ import annotations

import dataclasses
from typing import Protocol

from torch import Tensor

from pagedray.engine.layers.norm import HeadNorm
from pagedray.engine.layers.rotary import Rotation


class AttentionPlan(Protocol):
    """One step's attention for the layers of one block group."""

    def attend(
        self,
        qkv: Tensor,
        pages: Tensor,
        rotation: Rotation,
        norm: HeadNorm | None,
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        """Norm, rotate and write this step's keys and values to the pages, then attend.

        Args:
            qkv: [T, H + 2K, D], may be changed in place.
            pages: of the layer, [num_blocks, 2, K, block_size, D].

        Returns:
            [T, H * D]
        """


@dataclasses.dataclass(frozen=True)
class InputBatch:
    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    plans: tuple[AttentionPlan, ...]  # per block group
    wanted: Tensor | None  # int64: tokens whose hidden states are wanted, negative ones by nobody; None: all
    padded_slots: Tensor | None = None  # [T] int64: those in block 0 belong to padding; None: no token does
