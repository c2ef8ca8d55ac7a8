"""Token ids to vectors, and vectors to scores over the vocabulary."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pagedray.engine.layers.layer import Layer
from pagedray.engine.layers.linear import Linear
from pagedray.engine.models.spec import ModelSpec


class Embedding(Layer):
    """Rows of a table, times `scale` rounded to the table's type."""

    def __init__(self, spec: ModelSpec):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(spec.vocab_size, spec.hidden), requires_grad=False)
        self.scale = float(torch.tensor(spec.embedding_scale, dtype=self.weight.dtype))

    def forward(self, token_ids: Tensor) -> Tensor:
        x = F.embedding(token_ids, self.weight)
        return x if self.scale == 1.0 else x.mul_(self.scale)

    def slots(self, name: str) -> dict[str, Tensor]:
        return {f"{name}.weight": self.weight.data}


class Head(Linear):
    """Scores over the vocabulary; a tied one shares the embedding's table."""

    def __init__(self, spec: ModelSpec, embedding: Embedding):
        super().__init__(spec.hidden, spec.vocab_size)
        self.softcap = spec.logits_softcap
        self.is_tied = spec.tie_embeddings
        if self.is_tied:
            self.weight = embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        return logits if self.softcap is None else (logits / self.softcap).tanh_().mul_(self.softcap)

    def slots(self, *names: str) -> dict[str, Tensor]:
        return {} if self.is_tied else super().slots(*names)
