"""What the cases of test_cases.py don't show: the plan, memory that must not be read, several launches."""

from __future__ import annotations

import dataclasses
import itertools
import os

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagedray.kernels.case import Case
from pagedray.kernels.paged_decode import (
    GRANULE,
    DecodePlan,
    DecodeScratch,
    choose_tile,
    decode_plan_views,
    kernel_inputs,
    make_inputs,
    num_decode_items,
    paged_decode,
    paged_decode_ref,
    paged_decode_triton,
    plan_decode,
    plan_size,
)

SPLIT = Case("paged_decode", S=4, L=150, P=1, H=4, K=2, D=16, B=16, items=13)


@pytest.fixture
def device():
    """Where the kernel runs: the interpreter's CPU, or a GPU."""
    pytest.importorskip("triton", reason="triton is not installed")
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "cpu"
    return "cuda" if torch.cuda.is_available() else pytest.skip("Triton neither interprets nor has a GPU")


def planned(lengths, window=None, num_items=None):
    rows = np.arange(len(lengths), dtype=np.int32)
    num_items = num_items or num_decode_items(len(lengths), 8)
    buffer = plan_decode(rows, np.array(lengths, np.int32), window, num_items)
    assert buffer.dtype == np.int32 and len(buffer) == plan_size(len(lengths), num_items)
    return decode_plan_views(torch.from_numpy(buffer), len(lengths), num_items, window)


def used(plan):
    return [item for item in plan.items.tolist() if item[1] >= 0]


def to_kernel(inputs, device):
    """The kernel's arguments on `device`; q keeps its strides."""
    q, pages, tables, plan, *rest = inputs
    strided = torch.empty_strided(q.shape, q.stride(), dtype=q.dtype, device=device).copy_(q)
    plan = dataclasses.replace(plan, **{name: getattr(plan, name).to(device) for name in ("items", "rows", "lengths")})
    return kernel_inputs("paged_decode_triton", (strided, pages.to(device), tables.to(device), plan, *rest))


@given(
    st.lists(st.integers(0, 5000) | st.integers(0, 70), min_size=1, max_size=20),
    st.none() | st.integers(1, 300),
    st.integers(0, 30),
)
def test_items_cover_each_visible_position_once(lengths, window, spare):
    plan = planned(lengths, window, len(lengths) + spare)
    items = used(plan)
    assert plan.rows.tolist() == list(range(len(lengths))) and plan.lengths.tolist() == lengths
    assert sorted(item[6] for item in items) == list(range(len(items)))
    sizes = [end - first for _, _, first, end, *_ in items]
    assert sizes == sorted(sizes, reverse=True)
    for seq, length in enumerate(lengths):
        own = sorted((item for item in items if item[1] == seq), key=lambda item: item[6])
        assert all(item[0] == seq and item[4] == len(own) for item in own)
        assert [item[6] - item[5] for item in own] == list(range(len(own)))
        assert own[0][2] == max(0, length - (window or length)) and own[-1][3] == length
        assert all(a[3] == b[2] for a, b in itertools.pairwise(own))
        assert all((item[3] - item[2]) % GRANULE == 0 for item in own[:-1])
        assert length == 0 or all(item[2] < item[3] for item in own)


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=20), st.integers(0, 30))
def test_pieces_are_no_longer_than_an_even_share_for_each_spare_item(lengths, spare):
    longest = max(end - first for _, _, first, end, *_ in used(planned(lengths, None, len(lengths) + spare)))
    assert longest <= (sum(lengths) / spare + GRANULE if spare else max(lengths))


def test_a_long_sequence_among_short_ones_is_cut_like_them():
    items = used(planned([576] * 255 + [131072]))
    longest = max(end - first for _, _, first, end, *_ in items)
    assert longest < 0.3 * (255 * 576 + 131072) * 8 / 132  # a program's part of a multiprocessor's work
    assert len(items) == 255 + 32  # the short ones stay whole


@pytest.mark.parametrize(
    ("lengths", "pieces"), [([576], 9), ([131072], 64), ([576] * 64, 64), ([576] * 32, 64), ([100, 0], 3)]
)
def test_few_sequences_fill_the_gpu_and_many_stay_whole(lengths, pieces):
    assert len(used(planned(lengths))) == pieces


def test_a_plan_needs_an_item_for_each_sequence():
    with pytest.raises(AssertionError, match="2 items can't hold 3 sequences"):
        planned([5, 5, 5], None, 2)


def test_a_plan_depends_on_the_numbers_alone_in_its_size():
    assert {plan_size(plan.num_seqs, plan.num_items) for plan in (planned([0] * 8), planned([900] * 8))} == {
        plan_size(8, num_decode_items(8, 8))
    }


@pytest.mark.parametrize("page_bytes", [1, 2, 4])
@pytest.mark.parametrize("num_seqs", [1, 100])
@pytest.mark.parametrize("head_dim", [8, 64, 80, 128, 256])
def test_tiles_fit_the_shared_memory(head_dim, page_bytes, num_seqs):
    pytest.importorskip("triton", reason="triton is not installed")
    block_n, num_warps, num_stages = choose_tile(head_dim, page_bytes, num_seqs)
    assert block_n in (16, 32, 64, 128) and num_warps in (1, 2, 4, 8)
    assert block_n * head_dim * page_bytes * 2 * num_stages < 227 * 1024


# numpy warns of NaN in lanes that are masked later.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("window", [0, 40])
def test_what_no_sequence_holds_is_never_read(device, window):
    case = Case("paged_decode", S=4, L=150, P=2, W=window, H=4, K=2, D=16, B=16, items=13)
    q, pages, tables, plan, *rest = make_inputs(case)
    expected = paged_decode_ref(q, pages, tables, plan, *rest)
    held = torch.zeros(len(pages), 16, dtype=torch.bool)
    for row, length in zip(plan.rows.tolist(), plan.lengths.tolist(), strict=True):
        for position in range(max(0, length - (window or length)), length):
            held[tables[row, position // 16], position % 16] = True
    poisoned = pages.where(held[:, None, None, :, None], torch.nan)
    q = q.where((plan.lengths > 0)[:, None, None], torch.nan)  # a padding row's query is anything
    got = paged_decode_triton(*to_kernel((q, poisoned, tables, plan, *rest), device))
    torch.testing.assert_close(got.cpu(), expected, rtol=2e-5, atol=2e-5)
    assert (got[(plan.lengths == 0).to(device)] == 0).all() and (plan.lengths == 0).sum() == 2


def test_a_scratch_serves_launch_after_launch(device):
    arguments = to_kernel(make_inputs(SPLIT), device)
    plan = arguments[3]
    assert isinstance(plan, DecodePlan) and plan.scratch is not None and (plan.items[:, 4] > 1).any()
    first = paged_decode_triton(*arguments)
    assert not plan.scratch.arrived.any()
    plan.scratch.sums.fill_(torch.nan)
    plan.scratch.stats.fill_(torch.nan)
    assert torch.equal(paged_decode_triton(*arguments), first)
    assert not plan.scratch.arrived.any()


def test_the_output_may_be_given(device):
    inputs = make_inputs(SPLIT)
    for op, arguments in ((paged_decode, inputs), (paged_decode_triton, to_kernel(inputs, device))):
        out = torch.full((5, 64), torch.nan, device=arguments[0].device)
        assert op(*arguments[:5], out=out) is out
        torch.testing.assert_close(out.cpu(), paged_decode_ref(*inputs), rtol=2e-5, atol=2e-5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # exp2 of numbers far below zero underflows, as it should
@pytest.mark.parametrize("sign", [1, -1])
def test_large_scores_of_either_sign_stay_exact(device, sign):
    q, pages, tables, plan, scale, *rest = make_inputs(SPLIT)
    pages[:, 0] = pages[:, 0].abs() * sign
    inputs = q.abs() + 1, pages, tables, plan, scale * 300, *rest
    got = paged_decode_triton(*to_kernel(inputs, device))
    torch.testing.assert_close(got.cpu(), paged_decode_ref(*inputs), rtol=2e-3, atol=2e-3)


def test_a_launch_without_scratch_is_our_bug():
    with pytest.raises(AssertionError, match="need a scratch"):
        paged_decode_triton(*make_inputs(SPLIT))


@pytest.mark.gpu
def test_a_captured_graph_follows_the_plan_in_its_buffer():
    q, pages, tables, plan, scale, *_ = to_kernel(make_inputs(SPLIT), "cuda")
    lengths = plan.lengths.cpu().numpy()
    rows = plan.rows.cpu().numpy()
    buffer = torch.zeros(plan_size(5, 13), dtype=torch.int32, device="cuda")
    scratch = DecodeScratch(13, 4, 16, buffer.device)
    static = decode_plan_views(buffer, 5, 13, None, scratch)
    buffer.copy_(torch.from_numpy(plan_decode(rows, lengths, None, 13)))
    paged_decode(q, pages, tables, static, scale)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [paged_decode(q, pages, tables, static, scale) for _ in range(3)]
    for now in (lengths, lengths // 2, np.where(lengths > 100, lengths, 0).astype(np.int32)):
        buffer.copy_(torch.from_numpy(plan_decode(rows, now, None, 13)))
        for _ in range(20):
            graph.replay()
        expected = paged_decode_ref(q, pages, tables, static, scale)
        for y in outputs:
            torch.testing.assert_close(y, expected, rtol=2e-5, atol=2e-5)
    assert not scratch.arrived.any()
