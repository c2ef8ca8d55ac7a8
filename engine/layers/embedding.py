"""Token ids to vectors, and vectors to scores over the vocabulary, whose rows the ranks of a group share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pagedray.engine.layers.layer import Block
from pagedray.engine.layers.linear import Linear
from pagedray.engine.layers.share import Share, all_of, none_of, vocab_rows, vocab_share
from pagedray.engine.layers.slot import Slot
from pagedray.engine.models.spec import ModelSpec
from pagedray.kernels.embedding import embedding
from pagedray.kernels.gather_logits import gather_logits

if TYPE_CHECKING:
    from pagedray.engine.worker.parallel import Group


class Embedding(Block):
    """Begins the stack: rows of a table, times `scale` rounded to the table's type, and a residual of zeros.

    A tied head's stage holds the table too. Behind the first stage the stack begins with what the one before left.
    """

    def __init__(self, spec: ModelSpec, tp: Group):
        super().__init__()
        self.tp, self.is_first_stage = tp, spec.is_first_stage
        is_here = spec.is_first_stage or (spec.tie_embeddings and spec.is_last_stage)
        self.share = _share(spec, tp, is_here)
        self.weight = nn.Parameter(_table(spec, tp, is_here), requires_grad=False)
        self.scale = float(torch.tensor(spec.embedding_scale, dtype=self.weight.dtype))

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """inputs [T] token ids; behind the first stage [2, T, hidden] → x and what to add it to, [T, hidden] each."""
        if not self.is_first_stage:
            return inputs[0], inputs[1]
        if self.tp.size == 1:
            x = F.embedding(inputs, self.weight)
            x = x if self.scale == 1.0 else x.mul_(self.scale)
        else:
            x = self.tp.all_reduce(embedding(inputs, self.weight, self.scale, self.share.first))
        return x, torch.zeros_like(x)

    def slots(self, name: str) -> dict[str, Slot]:
        return {f"{name}.weight": _slot(self.weight, self.share)}


class Head(Linear):
    """Scores over the vocabulary; a tied one shares the embedding's table. The last stage alone has it."""

    def __init__(self, spec: ModelSpec, embed: Embedding, tp: Group):
        super().__init__(spec.hidden, 0)
        self.tp, self.vocab_size = tp, spec.vocab_size
        self.softcap = spec.logits_softcap
        self.is_tied = spec.tie_embeddings
        self.share = _share(spec, tp, spec.is_last_stage)
        if self.is_tied and spec.is_last_stage:
            self.weight = embed.weight
        else:
            self.weight = nn.Parameter(_table(spec, tp, spec.is_last_stage), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        if self.softcap is not None:
            logits = (logits / self.softcap).tanh_().mul_(self.softcap)
        if self.tp.size == 1:
            return logits
        return gather_logits(self.tp.all_gather(logits[None], 0), self.vocab_size)

    def slots(self, *names: str) -> dict[str, Slot]:
        if self.is_tied:
            return {}
        assert self.weight is not None, "the weight was packed already"
        return {f"{name}.weight": _slot(self.weight, self.share) for name in names}


def _share(spec: ModelSpec, tp: Group, is_here: bool) -> Share:
    return vocab_share(spec.vocab_size, tp.rank, tp.size) if is_here else none_of(spec.vocab_size)


def _table(spec: ModelSpec, tp: Group, is_here: bool) -> Tensor:
    """[rows of a rank, hidden]; zeros where no id belongs to a row."""
    table = torch.empty(vocab_rows(spec.vocab_size, tp.size) if is_here else 0, spec.hidden)
    table[_share(spec, tp, is_here).size :] = 0
    return table


def _slot(table: Tensor, share: Share) -> Slot:
    return Slot(table.data[: share.size], share, all_of(table.shape[1]))
