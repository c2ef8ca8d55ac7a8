"""What attention layers read during one forward, so that it needn't pass through every layer's arguments."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from pagedray.engine.worker.input_batch import AttentionPlan


@dataclasses.dataclass(frozen=True)
class ForwardContext:
    pages: Sequence[Tensor]  # per slot of a page: [num_blocks, 2, K, block_size, D]
    plans: Sequence[AttentionPlan]  # per block group
    # int64: tokens that go on behind the last attention; negative ones are nobody's and hold a place. None: all
    wanted: Tensor | None = None
    padded_slots: Tensor | None = None  # [T] int64: those in block 0 belong to padding; None: no token does


# A context variable and not a global: several workers may run in threads of one process.
_current: contextvars.ContextVar[ForwardContext] = contextvars.ContextVar("forward_context")


@contextlib.contextmanager
def forward_context(context: ForwardContext) -> Iterator[None]:
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)


def current_forward() -> ForwardContext:
    return _current.get()
