"""Which hidden states a captured step keeps, in the integers that it is sent."""

from __future__ import annotations

import torch

from pagedray.engine.messages import NewSeq, SamplingParams, ScheduledSeq, SchedulerOutput
from pagedray.engine.worker.attention.step_ints import unpack
from pagedray.engine.worker.attention.triton_backend import TritonAttention
from pagedray.engine.worker.kv_cache import KVCache
from pagedray.engine.worker.row_state import RowState
from pagedray.engine.worker.step_plan import StepPlan
from tests.engine.worker.test_input_batch import tiny_spec

NUM_TOKENS = 16


def wanted(*samples: bool) -> list[int]:
    """Of a step of three tokens a sequence, in a layout of more tokens."""
    cpu = torch.device("cpu")
    cache = KVCache(tiny_spec(), 30, 4, torch.float32, cpu)
    rows = RowState(num_rows=8, num_groups=1, max_blocks=16, device=cpu)
    attention = TritonAttention(cache, rows, 2, torch.float32, 1.0, 4)
    params = SamplingParams(max_tokens=9, seed=0)
    added = tuple(NewSeq(f"s{i}", i, tuple(range(3 + (not s))), 3, params, ()) for i, s in enumerate(samples))
    parts = tuple(ScheduledSeq(f"s{i}", i, 0, 3, s, ((1 + i,),)) for i, s in enumerate(samples))
    out = SchedulerOutput(0, added, parts, ())
    rows.apply(out)
    step = StepPlan.of(rows, out, by_length=False)
    layout = attention.prompt_layout(NUM_TOKENS)
    assert attention.fits(step, layout)
    ints = torch.zeros(attention.num_ints(layout), dtype=torch.int32)
    attention.fill(step, layout, ints.numpy())
    return unpack(ints, attention._sizes(layout))[-1].tolist()


def test_places_that_nobody_wants_find_a_real_token_and_say_so() -> None:
    places = wanted(True, False, True)
    assert places[:2] == [2, 8]
    assert set(places[2:]) == {-NUM_TOKENS}
    assert torch.arange(NUM_TOKENS)[torch.tensor(places)].tolist() == [2, 8] + [0] * (len(places) - 2)


def test_a_chunk_that_samples_nothing_wants_nothing() -> None:
    assert set(wanted(False)) == {-NUM_TOKENS}
