"""The sampler on a GPU: the tokens of sampler.py with few launches, and without waiting for the device.

All rows go through one kernel whatever their method; those whose logits are edited first, through it as well, from a
float32 copy. What a step needs from the host travels in one copy: a captured step's with its other integers (`fill`),
an eager step's by itself (`gather`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagedray.engine.messages import NewSeq
from pagedray.engine.worker.sampler import HUGE, SampledTokens, Sampler, ScoredTokens
from pagedray.engine.worker.sampling_state import (
    PENALTIES,
    Edits,
    Masked,
    Penalised,
    SamplingBatch,
    SamplingState,
    TokenMasks,
    max_rows,
)
from pagedray.engine.worker.token_history import Slots
from pagedray.engine.worker.upload import upload_all
from pagedray.kernels import sample_rows as fields
from pagedray.kernels.logit_edits import edit_logits
from pagedray.kernels.logprobs import token_logprobs
from pagedray.kernels.sample_rows import sample_rows
from pagedray.kernels.token_bitmask import mask_tokens

ALWAYS = 1 << 62  # beyond every position
FREE, NOT_ASKED = -2, -1  # in GpuSamplingState.num_logprobs


@dataclass(frozen=True)
class GpuRows:
    """Rows that read their logits from one tensor; those with filters are last."""

    fields: Tensor  # [9, n] int64, see kernels/sample_rows.py
    num_filtered: int
    is_greedy: bool  # all of them


@dataclass(frozen=True)
class EditedRows:
    """Rows whose logits are copied and changed before."""

    rows: Tensor  # [E] int64 of the batch's logits
    chosen: GpuRows  # sources: 0 … E - 1
    masked: Masked | None
    edits: Edits | None
    penalised: Penalised | None
    penalties: Tensor  # [P, 3] float32 of the penalised ones


@dataclass(frozen=True)
class GpuBatch(SamplingBatch):
    plain: GpuRows
    edited: tuple[EditedRows, ...]  # a few rows at a time, which bounds the copies
    asked: dict[int, int]  # rows that asked for logprobs → how many
    asked_rows: Tensor | None  # the same rows [A] int64; None: all rows of the batch, or none


class GpuSamplingState(SamplingState):
    def __init__(self, num_rows: int, vocab_size: int, device: torch.device):
        super().__init__(num_rows, vocab_size, device)
        assert vocab_size <= fields.MAX_VOCAB, f"a vocabulary of {vocab_size}, the kernel takes {fields.MAX_VOCAB}"
        self.spare_row = num_rows  # of padding: greedy, and nobody reads its token
        self.fields_cpu = np.zeros((len(fields.FIELDS), num_rows + 1), dtype=np.int64)
        self.fields_cpu[fields.TARGET] = np.arange(num_rows + 1)
        self.is_filtered_cpu = np.zeros(num_rows, dtype=np.bool_)
        self.edited_until_cpu = np.zeros(num_rows, dtype=np.int64)  # logits of tokens at lower positions are edited
        self.num_logprobs_cpu = np.full(num_rows, FREE, dtype=np.int64)

    def add(self, seq: NewSeq) -> None:
        super().add(seq)
        row = self._row(seq.row)
        temperature, top_p, min_p, *_ = self.floats[seq.row].tolist()
        temperature = 0.0 if row.method == "greedy" else min(temperature, fields.MAX_TEMPERATURE)
        column = self.fields_cpu[:, seq.row]
        column[fields.SEED], column[fields.TOP_K] = row.seed, self.top_k[seq.row]
        column[fields.TEMPERATURE :] = np.array((temperature, top_p, min_p)).view(np.int64)
        # As the kernel sees it: a min_p that is nothing in float32 is no filter.
        self.is_filtered_cpu[seq.row] = temperature > 0 and (column[fields.TOP_K] > 0 or top_p < 1 or min_p > 0)
        is_always, is_early = row.is_edited(ALWAYS), row.is_edited(seq.num_prompt_tokens)
        until = seq.num_prompt_tokens + row.min_tokens if is_early else 0
        self.edited_until_cpu[seq.row] = ALWAYS if is_always else until
        self.num_logprobs_cpu[seq.row] = NOT_ASKED if row.num_logprobs is None else row.num_logprobs

    def free(self, row: int) -> None:
        super().free(row)
        self.num_logprobs_cpu[row] = FREE

    def is_plain(self, row: NDArray[np.int64], position: NDArray[np.int64]) -> bool:
        """Whether `fields` say all about how rows sample: no parameter edits logits, and nobody asked for logprobs.

        Args:
            row, position: [S], as in `gather`.
        """
        return bool((self.num_logprobs_cpu[row] == NOT_ASKED).all() and (position >= self.edited_until_cpu[row]).all())

    def fill(
        self, row: NDArray[np.int64], position: NDArray[np.int64], first_result: int, into: NDArray[np.int64]
    ) -> bool:
        """Write the fields of a captured step: plain rows, whose tokens go to `last_token` and to the host.

        Args:
            first_result: where the first row's token goes in the results.
            into: [9, n], n >= S. Padding belongs to the spare row.

        Returns:
            Whether all rows are greedy.
        """
        at = np.full(into.shape[1], self.spare_row)
        at[: len(row)] = row
        self.fields_cpu.take(at, axis=1, out=into, mode="clip")  # any other mode makes a copy first
        into[fields.SOURCE] = np.arange(len(at))
        into[fields.RESULT] = np.arange(first_result, first_result + len(at))
        into[fields.POSITION, : len(row)] = position
        return not into[fields.TEMPERATURE].any()

    @torch.inference_mode()
    def gather(self, rows: Sequence[int], positions: Sequence[int], masks: TokenMasks | None = None) -> GpuBatch:
        """Inputs of one step on a GPU; arguments as on a CPU."""
        row, position = np.array(rows, dtype=np.int64), np.array(positions, dtype=np.int64)
        columns = self.fields_cpu.take(row, axis=1)
        columns[fields.SOURCE] = columns[fields.TARGET] = np.arange(len(row))
        columns[fields.POSITION] = position
        is_filtered, is_edited = self.is_filtered_cpu[row], position < self.edited_until_cpu[row]
        if masks is not None:
            masks = self._with_row_ids(masks, [self._row(row) for row in rows], positions)
            is_edited[masks.at] = True
        plain, edited = columns, np.arange(0)
        if is_filtered.any() or is_edited.any():
            order = np.lexsort((is_filtered, is_edited))
            plain_rows, edited = np.split(order, [len(row) - np.count_nonzero(is_edited)])
            plain = columns.take(plain_rows, axis=1)
        step = max_rows(self.vocab_size, self.device)
        parts = [edited[first : first + step] for first in range(0, len(edited), step)]
        hosts = [self._edited(at, columns, row, position, masks) for at in parts]
        asked = self._asked(row)
        asked_rows = [np.array([*asked])] if 0 < len(asked) < len(row) else []

        sent = iter(upload_all([plain, *(array for host in hosts for array in host.arrays), *asked_rows], self.device))
        return GpuBatch(
            groups=(),
            num_logprobs=(),
            plain=GpuRows(
                next(sent), int(np.count_nonzero(is_filtered & ~is_edited)), not plain[fields.TEMPERATURE].any()
            ),
            edited=tuple(host.sent([next(sent) for _ in host.arrays]) for host in hosts),
            asked=asked,
            asked_rows=next(sent, None),
        )

    def _asked(self, row: NDArray[np.int64]) -> dict[int, int]:
        num_logprobs = self.num_logprobs_cpu[row]
        if not len(row) or (num_logprobs.min() == num_logprobs.max() == NOT_ASKED):
            return {}
        assert num_logprobs.min() > FREE, f"row {row[num_logprobs == FREE][0]} samples without a sequence"
        return {i: k for i, k in enumerate(num_logprobs.tolist()) if k != NOT_ASKED}

    def _edited(
        self,
        at: NDArray[np.int64],
        columns: NDArray[np.int64],
        row: NDArray[np.int64],
        position: NDArray[np.int64],
        masks: TokenMasks | None,
    ) -> _HostRows:
        """Of rows `at` of the batch; the other arguments are about all of its rows."""
        columns, rows = columns.take(at, axis=1), row[at].tolist()
        columns[fields.SOURCE] = np.arange(len(at))
        none = np.arange(0)
        masked, words = (none, none) if masks is None else masks.of(at)
        edits = self._edits([self._row(row) for row in rows], position[at].tolist(), masked)
        penalised = np.flatnonzero([self._row(row).has_penalties for row in rows])
        slots = self.history.slot_numbers([rows[i] for i in penalised])
        penalties = self.floats.numpy()[[rows[i] for i in penalised], PENALTIES]
        return _HostRows(
            num_filtered=int(np.count_nonzero(self.is_filtered_cpu[rows])),
            is_greedy=not columns[fields.TEMPERATURE].any(),
            is_masked=len(masked) > 0,
            is_edited=edits is not None,
            slots=slots,
            arrays=[
                columns,
                at,
                masked,
                words,
                *([x.numpy() for x in vars(edits).values()] if edits else [none] * 5),
                penalised,
                np.array(slots, dtype=np.int64),
                penalties,
            ],
        )


@dataclass(frozen=True)
class _HostRows:
    """What becomes EditedRows on the device."""

    num_filtered: int
    is_greedy: bool
    is_masked: bool
    is_edited: bool
    slots: list[int]
    arrays: list[NDArray[Any]]

    def sent(self, tensors: list[Tensor]) -> EditedRows:
        columns, rows, masked, words, *edits, penalised, slots, penalties = tensors
        return EditedRows(
            rows=rows,
            chosen=GpuRows(columns, self.num_filtered, self.is_greedy),
            masked=Masked(masked, words) if self.is_masked else None,
            edits=Edits(*edits) if self.is_edited else None,
            penalised=Penalised(penalised, Slots(self.slots, slots)) if self.slots else None,
            penalties=penalties,
        )


class GpuSampler(Sampler):
    @torch.inference_mode()
    def sample(self, logits: Tensor, batch: SamplingBatch) -> SampledTokens:
        """Choose a token for each row and count it in the row's history; logits [S, V] are left as they are."""
        assert isinstance(batch, GpuBatch)
        num_logits = logits.shape[1]
        assert num_logits == self.state.vocab_size, f"{num_logits} logits, the vocabulary has {self.state.vocab_size}"
        tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        self._choose(logits, batch.plain, tokens)
        for part in batch.edited:
            self._choose(self._copied_and_edited(logits, part), part.chosen, tokens)
            if part.penalised is not None:
                self.state.history.count(part.penalised.slots, tokens[part.rows[part.penalised.at]])
        scores = None
        if batch.asked:
            rows = batch.asked_rows
            scored, targets = (logits, tokens) if rows is None else (logits[rows], tokens[rows])
            num_top = list(batch.asked.values())
            scores = ScoredTokens(targets, num_top, token_logprobs(scored, targets, max(num_top)))
        return SampledTokens(tokens, list(batch.asked), scores)

    def _choose(self, logits: Tensor, rows: GpuRows, tokens: Tensor) -> None:
        sample_rows(logits, rows.fields, rows.num_filtered, tokens, rows.is_greedy)

    def _copied_and_edited(self, logits: Tensor, part: EditedRows) -> Tensor:
        z = logits[part.rows].float()
        # -inf will only mean forbidden, as on a CPU: what is allowed stays possible
        z = torch.nan_to_num(z, nan=-HUGE, posinf=HUGE, neginf=-HUGE).clamp_(min=-HUGE)
        if part.masked is not None:
            mask_tokens(z, part.masked.at, part.masked.words)
        if part.edits is not None:
            e = part.edits
            edit_logits(z, e.keep_rows, e.keep, e.forbid, e.biased, e.bias)
        if part.penalised is not None:
            self.state.history.penalise(z, part.penalised.at, part.penalised.slots, part.penalties)
            z.clamp_(max=HUGE)  # a repetition penalty near 0 may overflow
        return z
