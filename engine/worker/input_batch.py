"""The tensors of one step, made from its plan and the rows it names."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagedray.engine.messages import SchedulerOutput
from pagedray.engine.worker.kv_cache import KVCache
from pagedray.engine.worker.row_state import RowState
from pagedray.kernels.paged_attention import AttentionPlan, PagedBatch


@dataclasses.dataclass(frozen=True)
class PromptRows:
    """Where to find the log-probabilities of a sequence's prompt tokens start … start + len(targets) - 1."""

    index: int  # in SchedulerOutput.scheduled
    start: int
    tokens: slice  # of the batch: their logits are about the targets
    targets: Tensor  # [N] int64
    num_top: int


@dataclasses.dataclass(frozen=True)
class InputBatch:
    """Sequences with one token come first, by length, whatever their order in the plan: attention wants them so."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    plans: tuple[AttentionPlan, ...]  # per block group
    sampled: tuple[int, ...]  # [S] index in SchedulerOutput.scheduled of each sequence that samples, in that order
    sampling_rows: tuple[int, ...]  # [S]
    sampling_positions: tuple[int, ...]  # [S]: of the token to be sampled
    sampling_tokens: Tensor  # [S] int64: the token of the batch that each samples after
    prompt_rows: tuple[PromptRows, ...]

    @staticmethod
    def gather(rows: RowState, out: SchedulerOutput, cache: KVCache) -> InputBatch:
        plan = np.array([(seq.row, seq.start, seq.num_tokens, seq.samples) for seq in out.scheduled], dtype=np.int64)
        order = np.argsort(np.where(plan[:, 2] == 1, plan[:, 1], np.iinfo(np.int64).max), kind="stable")
        row, start, num_tokens, _ = plan[order].T
        query_start = np.concatenate([[0], np.cumsum(num_tokens)])
        last_token = np.empty(len(order), dtype=np.int64)
        last_token[order] = query_start[1:] - 1
        num_all = int(query_start[-1])
        positions = np.arange(num_all) + np.repeat(start - query_start[:-1], num_tokens)
        lengths = start + num_tokens
        width = -(-int(lengths.max()) // cache.block_size)
        samples = np.flatnonzero(plan[:, 3])
        device = rows.last_token.device
        return InputBatch(
            token_ids=_token_ids(rows, row, start, query_start),
            positions=torch.from_numpy(positions).to(device),
            plans=tuple(
                cache.plan(group, PagedBatch(rows.block_tables_cpu[group][row, :width], query_start, lengths, window))
                for group, window in enumerate(cache.windows)
            ),
            sampled=tuple(samples.tolist()),
            sampling_rows=tuple(plan[samples, 0].tolist()),
            sampling_positions=tuple((plan[samples, 1] + plan[samples, 2]).tolist()),
            sampling_tokens=torch.from_numpy(last_token[samples]).to(device),
            prompt_rows=_prompt_rows(rows, out, last_token, device) if rows.num_prompt_logprobs else (),
        )


def _token_ids(
    rows: RowState, row: NDArray[np.int64], start: NDArray[np.int64], query_start: NDArray[np.int64]
) -> Tensor:
    """Known tokens from the host; one beyond them is the row's last sample, which the device alone may know."""
    is_sampled = start >= rows.num_known_cpu[row]
    token_ids = np.zeros(int(query_start[-1]), dtype=np.int64)
    for i in np.flatnonzero(~is_sampled):
        first, last = query_start[i : i + 2]
        token_ids[first:last] = rows.token_ids_cpu[row[i]][start[i] : start[i] + last - first]
    device = rows.last_token.device
    found = torch.from_numpy(token_ids).to(device)
    if is_sampled.any():
        at = torch.from_numpy(query_start[:-1][is_sampled]).to(device)
        found[at] = rows.last_token[torch.from_numpy(row[is_sampled]).to(device)]
    return found


def _prompt_rows(
    rows: RowState, out: SchedulerOutput, last_token: NDArray[np.int64], device: torch.device
) -> tuple[PromptRows, ...]:
    """The logits at position p are about the token at p + 1; what follows the prompt is sampled, not scored."""
    found = []
    for index, seq in enumerate(out.scheduled):
        num_top = rows.num_prompt_logprobs.get(seq.row)
        end = min(seq.start + seq.num_tokens, int(rows.num_prompt_cpu[seq.row]) - 1)
        if num_top is not None and seq.start < end:
            first = int(last_token[index]) - seq.num_tokens + 1
            targets = torch.from_numpy(rows.token_ids_cpu[seq.row][seq.start + 1 : end + 1]).to(device)
            found.append(PromptRows(index, seq.start + 1, slice(first, first + end - seq.start), targets, num_top))
    return tuple(found)
