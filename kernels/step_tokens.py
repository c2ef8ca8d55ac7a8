"""What each step begins with on the device.

    begin_step   token_ids[t] = ids[t] >= 0 ? ids[t] : last_token[row[t]];  positions and slots as int64
                 tables[g, row[t], position[t] // B] = slots[g, t] // B      the token's block enters its row's table

Shapes   ids, positions, rows [T] int32; slots [G, T] int32, row stride free: block * B + offset;
         last_token [R + 1] int64; tables [G, R + 1, M] int32; returns token_ids, positions [T], slots [G, T] int64.
         Row R is spare: padding belongs to it.
Writes   tables in place. Safe under CUDA graph capture.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagedray.kernels.case import Case
from pagedray.kernels.jit import launch, tl, triton

_BLOCK = 256


def begin_step_ref(
    ids: Tensor, positions: Tensor, rows: Tensor, slots: Tensor, last_token: Tensor, tables: Tensor, block_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    row, position = rows.long(), positions.long()
    for group in range(len(slots)):
        tables[group][row, position // block_size] = slots[group] // block_size
    return torch.where(ids >= 0, ids.long(), last_token[row]), position, slots.long()


@triton.jit(do_not_specialize=["T", "slot_stride", "made_stride"])
def _begin_step(  # type: ignore[no-untyped-def]
    ids_ptr,
    positions_ptr,
    rows_ptr,
    slots_ptr,
    last_token_ptr,
    tables_ptr,
    made_ptr,
    T,
    slot_stride,
    made_stride,
    table_stride,
    row_stride,
    G: tl.constexpr,
    B: tl.constexpr,
    BLOCK: tl.constexpr,
):
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = t < T
    token_id = tl.load(ids_ptr + t, mask=inside, other=0).to(tl.int64)
    position = tl.load(positions_ptr + t, mask=inside, other=0)
    row = tl.load(rows_ptr + t, mask=inside, other=0).to(tl.int64)
    last = tl.load(last_token_ptr + row, mask=inside & (token_id < 0), other=0)
    tl.store(made_ptr + t, tl.where(token_id < 0, last, token_id), mask=inside)
    tl.store(made_ptr + made_stride + t, position.to(tl.int64), mask=inside)
    for g in tl.static_range(G):
        slot = tl.load(slots_ptr + g * slot_stride + t, mask=inside, other=0)
        entry = tables_ptr + g * table_stride + row * row_stride + position // B
        tl.store(entry, slot // B, mask=inside)
        tl.store(made_ptr + (2 + g) * made_stride + t, slot.to(tl.int64), mask=inside)


def begin_step_triton(
    ids: Tensor, positions: Tensor, rows: Tensor, slots: Tensor, last_token: Tensor, tables: Tensor, block_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    num_groups, num_tokens = slots.shape
    # Rows begin at multiples of 16 bytes, or else kernels that read them would be compiled for each alignment.
    made = torch.empty(2 + num_groups, num_tokens + num_tokens % 2, dtype=torch.int64, device=ids.device)
    launch(
        _begin_step,
        (-(-num_tokens // _BLOCK),),
        (
            *(ids, positions, rows, slots, last_token, tables, made),
            *(num_tokens, slots.stride(0), made.stride(0), tables.stride(0), tables.stride(1)),
        ),
        {"G": num_groups, "B": block_size, "BLOCK": _BLOCK},
    )
    made = made[:, :num_tokens]
    return made[0], made[1], made[2:]


def begin_step(
    ids: Tensor, positions: Tensor, rows: Tensor, slots: Tensor, last_token: Tensor, tables: Tensor, block_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    kernel = begin_step_triton if ids.is_cuda else begin_step_ref
    return kernel(ids, positions, rows, slots, last_token, tables, block_size)


def make_inputs(case: Case) -> tuple[Tensor | int, ...]:
    generator = torch.Generator().manual_seed(7)
    num_rows, num_groups, block_size, width = case["R"], case["G"], case["B"], 6
    rows = torch.arange(case["T"]) % num_rows  # one token a row and turn, at ascending positions
    positions = torch.arange(case["T"]) // num_rows
    blocks = torch.randint(1, 50, (num_groups, num_rows, width), generator=generator)
    slots = (
        torch.stack([table[rows, positions // block_size] * block_size for table in blocks]) + positions % block_size
    )
    ids = torch.randint(-1, 3, (case["T"],), generator=generator)
    last_token = 100 + torch.arange(num_rows)
    tables = torch.zeros(num_groups, num_rows, width, dtype=torch.int32)
    return ids.int(), positions.int(), rows.int(), slots.int(), last_token, tables, block_size


CASES = [
    Case("begin_step", T=1, R=3, G=1, B=16),
    Case("begin_step", T=300, R=90, G=2, B=3),
]
