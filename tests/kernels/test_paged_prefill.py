"""What tests/kernels/test_cases.py does not say about paged_prefill: plans, what is left alone, small tiles."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from pagedray.kernels import paged_prefill
from pagedray.kernels.case import Case
from pagedray.kernels.paged_prefill import (
    PrefillPlan,
    make_inputs,
    paged_prefill_ref,
    paged_prefill_triton,
    pick_tile,
    plan_prefill,
    queries_per_tile,
)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's numpy, in masked lanes


def plan(rows, query_start, lengths, block_m_tokens):
    return plan_prefill(np.array(rows), np.array(query_start), np.array(lengths), block_m_tokens)


def triton_of(inputs, **changes):
    names = ["q", "pages", "block_tables", "plan", "scale", "window", "softcap", "k_scale", "v_scale", "out", "kv"]
    return paged_prefill_triton(**dict(zip(names, inputs, strict=True)) | changes)


def test_a_plan_by_hand():
    # row, first query, how many, its position, cached
    assert plan([7, 3, 5], [0, 3, 8, 9], [3, 105, 1], 2).reshape(-1, 5).tolist() == [
        [7, 2, 1, 2, 0],
        [7, 0, 2, 0, 0],
        [5, 8, 1, 0, 0],
        [3, 7, 1, 104, 100],
        [3, 5, 2, 102, 100],
        [3, 3, 2, 100, 100],
    ]


def test_every_query_is_in_one_tile():
    rng = np.random.default_rng(0)
    num_queries = rng.integers(1, 70, 50)
    lengths = num_queries + rng.integers(0, 3, 50) * 40
    query_start = np.concatenate([[0], np.cumsum(num_queries)])
    tiles = plan(np.arange(50), query_start, lengths, 16).reshape(-1, 5)
    covered = np.concatenate([np.arange(first, first + size) for _, first, size, _, _ in tiles])
    assert sorted(covered) == list(range(query_start[-1]))
    for row, first, _, position, cached in tiles:
        assert cached == lengths[row] - num_queries[row]
        assert position == cached + first - query_start[row]


def test_no_sequences_no_tiles():
    planned = plan([], [0], [], 16)
    assert planned.dtype == np.int32 and len(planned) == 0
    assert PrefillPlan.of(planned, torch.from_numpy(planned), 16).num_tiles == 0


def test_a_tile_holds_at_least_one_query_of_all_heads():
    assert queries_per_tile(71, 1, 64, torch.bfloat16) >= 1
    assert pick_tile(71, 64, torch.float32).block_m == 128
    with pytest.raises(ValueError, match="head dim 512"):
        pick_tile(4, 512, torch.bfloat16)


def test_out_is_written_for_the_planned_tokens_alone():
    q, *rest = make_inputs(Case("paged_prefill", P=2, T=20, L=30, H=4, K=2, D=16, B=4))
    tiles = rest[2].tiles.clone()
    tiles[1::5] += 3  # three tokens of other sequences come first
    padded = torch.cat((tiles, torch.zeros(5, dtype=torch.int32)))  # and a tile of no queries last
    rest[2] = dataclasses.replace(rest[2], tiles=padded, num_tiles=rest[2].num_tiles + 1)
    q = torch.cat((q[:3], q, q[:2]))
    out = torch.full((len(q), 4 * 16), 7.0)
    expected = paged_prefill_ref(q, *rest[:2], dataclasses.replace(rest[2], tiles=tiles), *rest[3:])[3:-2]
    assert triton_of((q, *rest), out=out) is out
    torch.testing.assert_close(out[3:-2], expected, rtol=2e-5, atol=2e-5)
    assert (out[:3] == 7).all() and (out[-2:] == 7).all()


@pytest.mark.parametrize("window", [None, 9])
def test_values_of_others_are_not_touched(window):
    """Infinities in blocks, tokens and ends of blocks that a sequence doesn't own would make its output NaN.

    So they would in blocks that it owned until they fell out of the window.
    """
    case = Case("paged_prefill", P=4, T=40, L=50, W=window or 0, H=4, K=2, D=16, B=16, kv=1)
    inputs = make_inputs(case)
    expected = paged_prefill_ref(*inputs)
    q, pages, tables, one_plan, *rest, kv = inputs
    for seq in range(case["P"]):
        tiles = one_plan.tiles.view(-1, 5)
        length = dict.fromkeys(tiles[:, 0].tolist(), 0)
        first, last, cached = {}, {}, {}
        for row, begin, size, position, cached[row] in tiles.tolist():
            length[row] = max(length[row], position + size)
            first[row] = min(first.get(row, begin), begin)
            last[row] = max(last.get(row, 0), begin + size)
        row = sorted(length)[seq]
        poisoned, poisoned_kv = torch.full_like(pages, torch.inf), torch.full_like(kv, torch.inf)
        key = torch.arange(max(cached[row] - window + 1, 0) if window else 0, length[row])
        where = tables[row, key // 16].long(), slice(None), slice(None), key % 16
        poisoned[where] = pages[where]
        own = slice(first[row], last[row])
        poisoned_kv[own] = kv[own]
        mine = tiles[tiles[:, 0] == row]
        own_plan = PrefillPlan.of(mine.numpy().ravel(), mine.ravel(), one_plan.block_m_tokens)
        got = paged_prefill_triton(q, poisoned, tables, own_plan, *rest, poisoned_kv)
        torch.testing.assert_close(got[own], expected[own], rtol=2e-5, atol=2e-5)


def test_queries_of_equal_tokens_do_not_depend_on_the_cut():
    """One chunk of 50 tokens and its last 20 alone, after 30 cached: the same rows."""
    case = Case("paged_prefill", P=1, T=90, L=0, H=4, K=2, D=32, B=16)
    q, pages, tables, whole, *rest = make_inputs(case)
    row, length = int(whole.tiles[0]), len(q)
    planned = plan([row], [30, length], [length], whole.block_m_tokens)
    tail = PrefillPlan.of(planned, torch.from_numpy(planned), whole.block_m_tokens)
    got = paged_prefill_triton(q, pages, tables, tail, *rest)[30:]
    torch.testing.assert_close(got, paged_prefill_ref(q, pages, tables, whole, *rest)[30:], rtol=2e-5, atol=2e-5)


def test_small_tiles(monkeypatch):
    """Whatever tiles are picked for the cases, loops are right over no, one and many tiles of keys."""
    monkeypatch.setitem(paged_prefill.TILES_32BIT, 16, paged_prefill.Tile(32, 16, 4, 2))
    for cached, block_size, window in ((0, 16, 0), (70, 16, 20), (7, 24, 50), (70, 8, 1)):
        case = Case("paged_prefill", P=2, T=40, L=cached, H=3, K=1, D=16, B=block_size, W=window, kv=1)
        inputs = make_inputs(case)
        torch.testing.assert_close(
            paged_prefill_triton(*inputs), paged_prefill_ref(*inputs), rtol=2e-5, atol=2e-5, msg=str(case)
        )
