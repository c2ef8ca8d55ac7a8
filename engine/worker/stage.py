"""A rank's place in a pipeline: what it gets from the stage before, gives to the next, and how sampled ids come back.

Every stage computes every step, in order. Hidden states go from stage to stage. The last stage samples and sends the
ids to the first, which takes them when a step embeds one of them, or else as late as it can: before it hands on the
step that would let the last stage run a whole pipeline ahead of what was taken. Until then both may compute. With
transports that hold a sender until its peer receives, no order of these exchanges can make stages wait in a circle.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagedray.engine.worker.parallel import Parallel
from pagedray.engine.worker.step_plan import LAST_SAMPLE, StepPlan
from pagedray.engine.worker.upload import upload


class OnlyStage:
    """All layers are here: nothing is exchanged."""

    is_last = True

    def begin(self, number: int, step: StepPlan) -> None:
        """Before the tensors of step `number` are gathered: what it embeds must be in `RowState.last_token`."""

    def empty_inputs(self, num_tokens: int) -> Tensor | None:
        """Where hidden states of the stage before go; None: the model begins with token ids."""
        return None

    def receive(self, inputs: Tensor) -> None:
        """Fill what `empty_inputs` made."""

    def give(self, hidden: Tensor, step: StepPlan) -> None:
        """Hand on what this stage's layers made of the step."""

    def send_ids(self, step: StepPlan) -> None:
        """Those that the step sampled are in `RowState.last_token`: let the first stage have them."""

    def catch_up(self) -> None:
        """Take all ids that are on their way: the device must come to rest, or this object's life ends."""


class PipelineStage(OnlyStage):
    """
    Args:
        last_token: of `RowState`.
        hidden: size of a hidden state; `dtype`: its type.
    """

    def __init__(self, parallel: Parallel, last_token: Tensor, hidden: int, dtype: torch.dtype):
        self.is_last = parallel.is_last_stage
        self._pp, self._pp_ids = parallel.pp, parallel.pp_ids
        self._last_token, self._hidden, self._dtype = last_token, hidden, dtype
        self._number = 0
        self._awaited: deque[tuple[int, NDArray[np.int64]]] = deque()  # on the first stage: step, rows it sampled

    def begin(self, number: int, step: StepPlan) -> None:
        self._number = number
        if self._awaited:
            rows = step.token_rows[step.token_ids == LAST_SAMPLE]
            needed = [sampled for sampled, of_rows in self._awaited if np.isin(of_rows, rows).any()]
            self._take_ids(max(needed, default=number - self._pp.size))

    def empty_inputs(self, num_tokens: int) -> Tensor | None:
        if self._pp.rank == 0:
            return None
        return torch.empty(2, num_tokens, self._hidden, dtype=self._dtype, device=self._last_token.device)

    def receive(self, inputs: Tensor) -> None:
        self._pp.receive(inputs, self._pp.rank - 1)

    def give(self, hidden: Tensor, step: StepPlan) -> None:
        if self._pp.rank == 0:
            self._take_ids(self._number - self._pp.size + 1)
            if step.sampled:
                self._awaited.append((self._number, step.sampling_row))
        self._pp.send(hidden, self._pp.rank + 1)

    def send_ids(self, step: StepPlan) -> None:
        if step.sampled:
            self._pp_ids.send(self._last_token[upload(step.sampling_row, self._last_token.device)], 0)

    def catch_up(self) -> None:
        self._take_ids(self._number)

    def _take_ids(self, last: int) -> None:
        """Of all steps up to `last`."""
        while self._awaited and self._awaited[0][0] <= last:
            _, rows = self._awaited.popleft()
            ids = torch.empty(len(rows), dtype=torch.int64, device=self._last_token.device)
            self._pp_ids.receive(ids, self._pp.size - 1)
            self._last_token.index_copy_(0, upload(rows, ids.device), ids)
