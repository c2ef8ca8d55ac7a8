from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest

from pagedray.engine.errors import ConfigError, Overloaded, PromptTooLong, UserError
from pagedray.engine.messages import (
    PromptLogprobs,
    Request,
    RequestUpdate,
    RunnerOutput,
    SamplingParams,
    SchedulerOutput,
    TokenLogprobs,
)
from pagedray.engine.scheduler import Scheduler, SchedulerLimits

EOS = 99


def make_scheduler(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    windows: tuple[int | None, ...] = (None,),
    policy: str = "fcfs",
    caching: bool = True,
    **limits: Any,
) -> Scheduler:
    defaults = {
        "max_num_seqs": 8,
        "max_tokens_per_step": 64,
        "max_model_len": 1000,
        "prefill_chunk_tokens": None,
        "max_queued_requests": 100,
        "max_queued_tokens": 10_000,
    }
    return Scheduler(
        SchedulerLimits(**defaults | limits),
        block_size=block_size,
        num_blocks=num_blocks,
        windows=windows,
        eos_ids=(EOS,),
        policy=policy,
        enable_prefix_caching=caching,
    )


def request(name: str, prompt: int | tuple[int, ...] = 4, **fields: Any) -> Request:
    """`prompt`: ids, or how many; prompts given by length share no block with those of other names."""
    ids = prompt if isinstance(prompt, tuple) else tuple(1000 + sum(map(ord, name)) for _ in range(prompt))
    params = {"max_tokens": 20, "seed": 0}
    params |= {key: fields.pop(key) for key in list(fields) if key in SamplingParams.__struct_fields__}
    return Request(id=name, client_id="c", prompt_ids=ids, params=SamplingParams(**params), **fields)


def add(sched: Scheduler, *requests: Request, now_s: float = 0.0) -> None:
    for one in requests:
        sched.add((one,), now_s)


def result(out: SchedulerOutput, tokens: dict[str, int] | None = None) -> RunnerOutput:
    """Each sampled token is 7, or what `tokens` says."""
    return RunnerOutput(out.step, tuple((tokens or {}).get(s.seq_id, 7) if s.samples else -1 for s in out.scheduled))


def step(sched: Scheduler, tokens: dict[str, int] | None = None) -> tuple[SchedulerOutput, list[RequestUpdate]]:
    """Plan a step and commit it at once."""
    out = sched.schedule(0.0)
    assert out is not None
    updates = sched.commit(result(out, tokens), 0.0)
    sched.check_invariants()
    return out, updates


def tokens_by_id(out: SchedulerOutput) -> dict[str, int]:
    return {seq.seq_id: seq.num_tokens for seq in out.scheduled}


def ends(updates: list[RequestUpdate]) -> dict[str, str]:
    return {u.request_id: u.finish_reason for u in updates if u.finish_reason}


def drain(sched: Scheduler) -> dict[str, str]:
    """Run until nothing is left; finish reasons by id."""
    ended: dict[str, str] = {}
    while sched.has_work():
        ended |= ends(step(sched)[1])
    assert sched.stats().num_used_blocks == 0
    return ended


# Budget and chunks


def test_a_long_prompt_leaves_room_for_running_sequences():
    sched = make_scheduler(max_tokens_per_step=8)
    add(sched, request("a"))
    step(sched)
    add(sched, request("b", 100))
    assert tokens_by_id(sched.schedule(0.0)) == {"a": 1, "b": 7}


def test_a_prompt_is_computed_in_chunks_and_only_the_last_one_samples():
    sched = make_scheduler(prefill_chunk_tokens=4)
    add(sched, request("a", 10))
    plans = [step(sched) for _ in range(4)]
    assert [(s.start, s.num_tokens, s.samples) for out, _ in plans for s in out.scheduled] == [
        (0, 4, False),
        (4, 4, False),
        (8, 2, True),
        (10, 1, True),
    ]
    assert [[u.token_ids for u in updates] for _, updates in plans] == [[], [], [(7,)], [(7,)]]


def test_several_prompts_share_a_step():
    sched = make_scheduler(max_tokens_per_step=20)
    add(sched, request("a", 8), request("b", 8), request("c", 30))
    assert tokens_by_id(step(sched)[0]) == {"a": 8, "b": 8, "c": 4}
    assert tokens_by_id(step(sched)[0]) == {"a": 1, "b": 1, "c": 18}


def test_single_tokens_come_first_in_a_step():
    sched = make_scheduler(policy="priority")
    add(sched, request("low", priority=5))
    step(sched)
    add(sched, request("high", 8))
    out, _ = step(sched)
    assert [seq.seq_id for seq in out.scheduled] == ["low", "high"]


def test_a_sequence_needs_a_row_and_gets_the_same_one_for_life():
    sched = make_scheduler(max_num_seqs=2)
    add(sched, request("a", max_tokens=2), request("b"), request("c"))
    first, _ = step(sched)
    second, updates = step(sched)
    assert [new.row for new in first.added] == [seq.row for seq in second.scheduled] == [0, 1]
    assert ends(updates) == {"a": "length"}
    third, _ = step(sched)
    assert third.freed_rows == (0,) and [(new.seq_id, new.row) for new in third.added] == [("c", 0)]


def test_blocks_travel_once():
    sched = make_scheduler(windows=(None, None))
    add(sched, request("a", 6))
    plans = [step(sched)[0].scheduled[0] for _ in range(4)]
    assert [[len(blocks) for blocks in seq.new_blocks] for seq in plans] == [[2, 2], [0, 0], [0, 0], [1, 1]]
    blocks = [block for seq in plans for group in seq.new_blocks for block in group]
    assert len(set(blocks)) == len(blocks) and 0 not in blocks


def test_a_step_is_never_empty():
    sched = make_scheduler()
    assert sched.schedule(0.0) is None
    add(sched, request("a", max_tokens=1))
    step(sched)
    assert sched.schedule(0.0) is None, "a freed row alone is not worth a step"
    add(sched, request("b"))
    assert sched.schedule(0.0).freed_rows == (0,)


# Ends


def test_eos_ends_with_stop_and_is_part_of_the_output():
    sched = make_scheduler()
    add(sched, request("a"))
    step(sched)
    _, updates = step(sched, {"a": EOS})
    assert updates == [RequestUpdate("a", 1, (EOS,), "stop", EOS)]
    assert not sched.has_work()


def test_ignore_eos_and_stop_ids():
    sched = make_scheduler()
    add(sched, request("a", ignore_eos=True, stop_token_ids=(5, 5, 6)), request("b", stop_token_ids=(5, EOS)))
    out, updates = step(sched, {"a": EOS, "b": 5})
    assert [new.stop_ids for new in out.added] == [(5, 6), (5, EOS)]
    assert ends(updates) == {"b": "stop"}
    assert ends(step(sched, {"a": 6})[1]) == {"a": "stop"}


def test_max_tokens_and_max_model_len_end_with_length():
    sched = make_scheduler(max_model_len=7)
    add(sched, request("a", max_tokens=2), request("b", max_tokens=20))
    assert ends(step(sched)[1]) == {}
    assert ends(step(sched)[1]) == {"a": "length"}
    assert step(sched)[1] == [RequestUpdate("b", 2, (7,), "length")]


def test_a_stop_id_as_the_last_allowed_token_is_a_stop():
    sched = make_scheduler()
    add(sched, request("a", max_tokens=1))
    assert ends(step(sched, {"a": EOS})[1]) == {"a": "stop"}


# Run-ahead


def test_steps_are_planned_before_their_tokens_are_known():
    sched = make_scheduler()
    add(sched, request("a"))
    plans = [sched.schedule(0.0) for _ in range(4)]
    assert [(out.step, out.scheduled[0].start) for out in plans] == [(0, 0), (1, 4), (2, 5), (3, 6)]
    assert sched.num_steps_in_flight == 4
    updates = [update for out in plans for update in sched.commit(result(out), 0.0)]
    assert [update.first for update in updates] == [0, 1, 2, 3]


def test_a_token_computed_past_the_end_is_dropped():
    sched = make_scheduler()
    add(sched, request("a"))
    plans = [sched.schedule(0.0) for _ in range(3)]
    assert ends(sched.commit(result(plans[0], {"a": EOS}), 0.0)) == {"a": "stop"}
    assert sched.stats().num_used_blocks == 0, "its blocks are free although steps in flight still write them"
    assert [sched.commit(result(out), 0.0) for out in plans[1:]] == [[], []]
    sched.check_invariants()
    assert not sched.has_work()


def test_nothing_is_planned_past_the_length_limit():
    sched = make_scheduler()
    add(sched, request("a", max_tokens=2))
    plans = [sched.schedule(0.0), sched.schedule(0.0)]
    assert sched.schedule(0.0) is None and sched.has_work()
    assert [ends(sched.commit(result(out), 0.0)) for out in plans] == [{}, {"a": "length"}]


def test_a_row_is_reused_while_steps_of_its_former_owner_are_in_flight():
    sched = make_scheduler(max_num_seqs=1)
    add(sched, request("a"), request("b"))
    plans = [sched.schedule(0.0), sched.schedule(0.0)]
    sched.commit(result(plans[0], {"a": EOS}), 0.0)
    third = sched.schedule(0.0)
    assert third.freed_rows == (0,) and third.added[0].row == 0 and tokens_by_id(third) == {"b": 4}
    assert sched.commit(result(plans[1]), 0.0) == []
    assert [update.request_id for update in sched.commit(result(third), 0.0)] == ["b"]


def test_results_are_taken_in_order():
    sched = make_scheduler()
    add(sched, request("a"))
    plans = [sched.schedule(0.0), sched.schedule(0.0)]
    with pytest.raises(AssertionError, match="awaited step 0"):
        sched.commit(result(plans[1]), 0.0)


# Preemption


def test_the_latest_arrival_is_preempted_and_resumes_from_its_own_blocks():
    sched = make_scheduler(num_blocks=5)
    add(sched, request("a", 7, max_tokens=10), request("b", 7, max_tokens=10))
    step(sched)
    add(sched, request("c", 3, max_tokens=2))
    step(sched)
    assert tokens_by_id(step(sched)[0]) == {"a": 1}, "a took the last block, b waits with what it has"
    for _ in range(3):
        step(sched)
    out, _ = step(sched)
    assert tokens_by_id(out) == {"a": 1} and out.freed_rows == (1,) and sched.stats().num_preemptions == 1
    while not out.added:
        out, updates = step(sched)
    (resumed,) = (new for new in out.added if new.seq_id == "b")
    assert resumed.token_ids == (*request("b", 7).prompt_ids, 7, 7) and resumed.num_prompt_tokens == 7
    assert drain(sched) == {"b": "length", "c": "length"} and ends(updates) == {}


def test_a_resumed_sequence_computes_only_what_is_no_longer_cached():
    sched = make_scheduler(num_blocks=9, policy="priority", max_num_seqs=1)
    add(sched, request("low", 15, priority=1))
    step(sched)
    step(sched)
    add(sched, request("high", 17, priority=0, max_tokens=1))
    assert tokens_by_id(step(sched)[0]) == {"high": 17}
    out, updates = step(sched)
    assert out.added[0].token_ids[-2:] == (7, 7)
    assert [(s.start, s.num_tokens) for s in out.scheduled] == [(16, 1)]
    assert [(u.first, u.num_cached_tokens) for u in updates] == [(2, 0)], (
        "cached tokens are those of its first admission"
    )


def test_a_preempted_sequence_keeps_the_tokens_in_flight_and_waits_for_them():
    sched = make_scheduler(num_blocks=4, policy="priority", max_num_seqs=1)
    add(sched, request("low", 4, priority=1, max_tokens=5))
    plans = [sched.schedule(0.0), sched.schedule(0.0)]
    add(sched, request("high", 4, priority=0, max_tokens=1))
    plans.append(sched.schedule(0.0))
    assert tokens_by_id(plans[2]) == {"high": 4} and plans[2].freed_rows == (0,)
    assert sched.schedule(0.0) is None
    assert [u.token_ids for u in sched.commit(result(plans[0], {"low": 11}), 0.0)] == [(11,)]
    sched.check_invariants()
    assert [u.token_ids for u in sched.commit(result(plans[1], {"low": 12}), 0.0)] == [(12,)]
    assert ends(sched.commit(result(plans[2]), 0.0)) == {"high": "length"}
    out, updates = step(sched)
    assert out.added[0].token_ids[4:] == (11, 12) and [u.first for u in updates] == [2]


def test_a_preempted_sequence_may_end_by_a_token_that_was_in_flight():
    sched = make_scheduler(num_blocks=4, policy="priority", max_num_seqs=1)
    add(sched, request("low", 4, priority=1, max_tokens=5))
    first = sched.schedule(0.0)
    add(sched, request("high", 4, priority=0, max_tokens=1))
    second = sched.schedule(0.0)
    assert sched.commit(result(first, {"low": EOS}), 0.0) == [RequestUpdate("low", 0, (EOS,), "stop", EOS)]
    assert sched.num_waiting == 0
    assert ends(sched.commit(result(second), 0.0)) == {"high": "length"}
    sched.check_invariants()


def test_the_first_sequence_advances_even_if_later_ones_could_use_the_blocks():
    """Decode rows must not eat the blocks that an older, still prefilling sequence needs."""
    sched = make_scheduler(num_blocks=12, prefill_chunk_tokens=4, max_tokens_per_step=64)
    add(sched, request("old", 24, max_tokens=20))
    step(sched)
    add(sched, *(request(f"new{i}", 1, max_tokens=40) for i in range(3)))
    ended: list[str] = []
    while sched.has_work():
        ended += ends(step(sched)[1])
    assert ended[0] == "old" and len(ended) == 4


def test_a_newcomer_is_not_admitted_into_the_last_blocks():
    """Each running sequence could need a block soon; a newcomer in them would be preempted at once."""
    sched = make_scheduler(num_blocks=6, max_tokens_per_step=32)
    add(sched, request("a", 8, max_tokens=8), request("b", 4, max_tokens=8))
    step(sched)
    add(sched, request("c", 8, max_tokens=8))
    assert tokens_by_id(step(sched)[0]) == {"a": 1, "b": 1}
    assert sched.num_waiting == 1 and sched.stats().num_preemptions == 0


def test_blocks_are_kept_back_for_the_chunks_of_prompts_already_begun():
    sched = make_scheduler(num_blocks=10, prefill_chunk_tokens=4)
    add(sched, request("a", 32, max_tokens=1), request("b", 20, max_tokens=1))
    admitted = [[new.seq_id for new in step(sched)[0].added] for _ in range(9)]
    assert admitted == [["a"], *[[]] * 7, ["b"]]


def test_a_prompt_that_waits_for_blocks_is_not_robbed_of_the_free_ones():
    sched = make_scheduler(num_blocks=34, prefill_chunk_tokens=16)
    add(sched, request("a", 1, max_tokens=100))
    step(sched)
    add(sched, request("big", 128, max_tokens=1), request("small", 1, max_tokens=1))
    plans = [tokens_by_id(step(sched)[0]) for _ in range(8)]
    assert plans == [{"a": 1, "big": 16}] * 7 + [{"a": 1}]
    assert sched.stats().num_used_blocks == 31, "of four blocks for its last chunk there were three"


# Order


def test_a_big_request_at_the_head_is_not_overtaken():
    sched = make_scheduler(num_blocks=10, max_tokens_per_step=100)
    add(sched, request("a", 20, max_tokens=4))
    step(sched)
    add(sched, request("big", 30, max_tokens=4), request("small", 1, max_tokens=1))
    order = [new.seq_id for _ in range(5) for new in step(sched)[0].added]
    assert order == ["big", "small"]


def test_priority_goes_first_and_preempts_only_lower_ones():
    sched = make_scheduler(policy="priority", max_num_seqs=2, num_blocks=8)
    add(sched, request("p1", priority=1), request("p2", priority=2))
    step(sched)
    add(sched, request("q2", priority=2), request("q1", priority=1))
    assert tokens_by_id(step(sched)[0]) == {"p1": 1, "q1": 4}, "p2 made room for q1"
    assert tokens_by_id(step(sched)[0]) == {"p1": 1, "q1": 1}
    assert [seq.id for seq in sched.waiting] == ["p2", "q2"]


def test_a_victim_without_tokens_in_the_step_makes_no_room_in_it():
    sched = make_scheduler(policy="priority", num_blocks=200, max_tokens_per_step=4)
    add(sched, request("low", 100, priority=2))
    step(sched)
    add(sched, request("top", 100, priority=0))
    assert tokens_by_id(step(sched)[0]) == {"top": 4}
    add(sched, request("mid", 100, priority=1))
    assert tokens_by_id(step(sched)[0]) == {"top": 4}
    assert (sched.num_running, sched.num_waiting, sched.stats().num_preemptions) == (2, 1, 0)


def test_a_victim_gives_its_token_of_the_step_as_well():
    sched = make_scheduler(policy="priority", max_num_seqs=3, max_tokens_per_step=2)
    add(sched, request("a", 1, priority=1), request("b", 1, priority=1))
    assert tokens_by_id(step(sched)[0]) == {"a": 1, "b": 1}
    add(sched, request("top", 1, priority=0))
    assert tokens_by_id(step(sched)[0]) == {"a": 1, "top": 1}


def test_fcfs_preempts_nobody_for_a_newcomer():
    sched = make_scheduler(max_num_seqs=1)
    add(sched, request("a", priority=9))
    step(sched)
    add(sched, request("b", priority=0))
    assert tokens_by_id(step(sched)[0]) == {"a": 1}


def test_nobody_is_preempted_in_vain():
    sched = make_scheduler(policy="priority", num_blocks=10, max_tokens_per_step=100)
    add(sched, request("top", 16, priority=0, max_tokens=4), request("low", 4, priority=2))
    step(sched)
    add(sched, request("big", 35, priority=1, max_tokens=1))
    assert tokens_by_id(step(sched)[0]) == {"top": 1, "low": 1}
    assert sched.stats().num_preemptions == 0
    assert drain(sched) == {"top": "length", "big": "length", "low": "length"}


# Refusals


def test_what_can_never_fit_is_refused_with_both_numbers():
    sched = make_scheduler(num_blocks=4)
    with pytest.raises(PromptTooLong, match=r"17 tokens.* 16 .*KV cache"):
        add(sched, request("a", 17, max_tokens=1))
    with pytest.raises(UserError, match=r"10 tokens and max_tokens 8 .* 17 tokens .* at most 7"):
        add(sched, request("a", 10, max_tokens=8))
    with pytest.raises(PromptTooLong, match=r"1000 tokens.* 999 .*max_model_len"):
        add(sched, request("a", 1000))
    assert not sched.has_work()
    add(sched, request("a", 16, max_tokens=1))
    assert drain(sched) == {"a": "length"}
    add(sched, request("b", 10, max_tokens=7))
    assert drain(sched) == {"b": "length"}


@pytest.mark.parametrize(
    "limits", [{"prefill_chunk_tokens": 8}, {"max_tokens_per_step": 8, "prefill_chunk_tokens": 99}]
)
def test_a_window_group_counts_window_and_chunk(limits: dict[str, int]):
    with pytest.raises(UserError):
        add(make_scheduler(num_blocks=4, windows=(8,), **limits), request("a", 40))
    sched = make_scheduler(num_blocks=5, windows=(8,), **limits)
    add(sched, request("a", 40))
    most = 0
    while sched.has_work():
        out = sched.schedule(0.0)
        most = max(most, sched.stats().num_used_blocks)
        sched.commit(result(out), 0.0)
    assert most <= 5


def test_a_pool_that_holds_no_token_is_a_config_error():
    with pytest.raises(ConfigError, match="num_kv_blocks"):
        make_scheduler(num_blocks=1, windows=(None, 4))


def test_empty_prompts_and_max_tokens_are_checked():
    with pytest.raises(UserError, match="empty"):
        add(make_scheduler(), request("a", ()))
    with pytest.raises(UserError, match="max_tokens"):
        add(make_scheduler(), request("a", max_tokens=0))


def test_a_full_queue_refuses_all_choices_or_none():
    sched = make_scheduler(max_queued_requests=3, max_num_seqs=1)
    add(sched, request("a"), request("b"))
    with pytest.raises(Overloaded, match=r"2 sequences .* 2 more .* 3 .*max_queued_requests"):
        sched.add((request("c-0"), request("c-1")), 0.0)
    assert sched.num_waiting == 2
    step(sched)
    sched.add((request("c-0"), request("c-1")), 0.0)
    assert sched.num_waiting == 3


def test_queued_prompt_tokens_are_bounded():
    sched = make_scheduler(max_queued_tokens=10, max_num_seqs=1)
    add(sched, request("a", 8))
    with pytest.raises(Overloaded, match=r"8 prompt tokens .* 3 more .* 10 .*max_queued_tokens"):
        add(sched, request("b", 3))
    add(sched, request("b", 2))
    sched.abort("b", "")
    step(sched)
    add(sched, request("c", 10))


def test_one_bad_choice_keeps_all_out():
    sched = make_scheduler(num_blocks=4)
    with pytest.raises(PromptTooLong):
        sched.add((request("a", max_tokens=5), request("b", 17)), 0.0)
    assert not sched.has_work()


def test_a_repeated_submission_is_ignored():
    sched = make_scheduler()
    add(sched, request("a", max_tokens=2), request("a", max_tokens=2))
    step(sched)
    add(sched, request("a", max_tokens=2))
    assert sched.num_running == 1 and drain(sched) == {"a": "length"}


# Aborts and deadlines


@pytest.mark.parametrize("state", ["queued", "prefilling", "decoding", "in flight", "preempted"])
def test_abort_frees_everything_in_every_state(state: str):
    sched = make_scheduler(prefill_chunk_tokens=4, max_num_seqs=1, policy="priority")
    in_flight = []
    add(sched, request("a", 8, priority=1))
    if state != "queued":
        step(sched)
    if state in ("decoding", "preempted"):
        step(sched)
    if state == "in flight":
        in_flight = [sched.schedule(0.0), sched.schedule(0.0)]
    if state == "preempted":
        add(sched, request("b", priority=0, max_tokens=1))
        in_flight = [sched.schedule(0.0)]
        assert tokens_by_id(in_flight[0]) == {"b": 4}
    num_output = 1 if state in ("decoding", "preempted") else 0
    assert sched.abort("a", "client left") == RequestUpdate("a", num_output, (), "abort", None, "client left")
    sched.check_invariants()
    assert sched.abort("a", "client left") is None
    for out in in_flight:
        assert all(update.request_id != "a" for update in sched.commit(result(out), 0.0))
        sched.check_invariants()
    assert not sched.has_work()
    stats = sched.stats()
    assert (stats.num_used_blocks, stats.num_running, stats.num_waiting) == (0, 0, 0)


def test_an_id_may_come_back_while_steps_of_its_former_life_are_in_flight():
    sched = make_scheduler()
    add(sched, request("a"))
    plans = [sched.schedule(0.0), sched.schedule(0.0)]
    sched.abort("a", "moved away")
    add(sched, request("a"))
    plans.append(sched.schedule(0.0))
    assert [len(sched.commit(result(out), 0.0)) for out in plans] == [0, 0, 1]
    assert sched.running[0].token_ids[4:] == [7]


def test_deadlines_end_queued_and_running_requests():
    sched = make_scheduler(max_num_seqs=1)
    add(sched, request("a", deadline_s=10.0), request("b", deadline_s=5.0), request("c"), now_s=2.0)
    out = sched.schedule(4.9)
    assert tokens_by_id(out) == {"a": 4} and sched.take_updates() == []
    updates = sched.commit(result(out), 5.0)
    assert ends(updates) == {"b": "abort"}
    assert "3.0 s" in next(u.error for u in updates if u.request_id == "b")
    out = sched.schedule(10.0)
    assert tokens_by_id(out) == {"c": 4} and out.freed_rows == (0,)
    assert ends(sched.take_updates()) == {"a": "abort"} and sched.take_updates() == []


# Failures of single requests


@pytest.mark.parametrize("state", ["prefilling", "decoding", "in flight", "preempted"])
@pytest.mark.parametrize("asked", [{}, {"logprobs": 0}])
def test_a_failed_request_ends_alone_in_every_state(state: str, asked: dict[str, int]):
    sched = make_scheduler(prefill_chunk_tokens=4, max_num_seqs=2, policy="priority")
    add(sched, request("a", 8, priority=2, **asked), request("b", 4, priority=1))
    step(sched)
    if state != "prefilling":
        step(sched)
    plans = [sched.schedule(0.0)]
    if state == "in flight":
        plans += [sched.schedule(0.0), sched.schedule(0.0)]
    if state == "preempted":
        add(sched, request("c", priority=0, max_tokens=1))
        plans.append(sched.schedule(0.0))
        assert tokens_by_id(plans[1]) == {"b": 1, "c": 4}
    found = []
    for number, out in enumerate(plans):
        told = result(out)
        logprobs = tuple(TokenLogprobs(t, -1.0, 1, (), ()) for t in told.token_ids) if asked else ()
        failed = (("a", "no token is left"), ("nobody", "gone")) if number == 0 else ()
        found.append(sched.commit(RunnerOutput(told.step, told.token_ids, logprobs, (), failed), 0.0))
        sched.check_invariants()
    num_output = 0 if state == "prefilling" else 1
    assert [u for u in found[0] if u.request_id == "a"] == [
        RequestUpdate("a", num_output, (), "error", None, "no token is left")
    ]
    assert [u.token_ids for u in found[0] if u.request_id == "b"] == [(7,)]
    assert all(u.request_id != "a" for updates in found[1:] for u in updates)
    if state != "preempted":
        out, _ = step(sched)
        assert out.freed_rows == (1,) and tokens_by_id(out) == {"b": 1}
    assert set(drain(sched)) <= {"b", "c"}


# Prefix cache

SHARED = tuple(range(12))


def test_a_finished_prompt_is_found_again_and_one_token_at_least_is_computed():
    sched = make_scheduler()
    add(sched, request("a", SHARED, max_tokens=1))
    step(sched)
    add(sched, request("b", SHARED, max_tokens=1))
    out, updates = step(sched)
    assert [(s.start, s.num_tokens) for s in out.scheduled] == [(8, 4)]
    assert updates[0].num_cached_tokens == 8
    stats = sched.stats()
    assert (stats.prefix_queried_tokens, stats.prefix_hit_tokens) == (24, 8)


def test_running_sequences_share_blocks_even_within_one_step():
    sched = make_scheduler()
    add(sched, request("a", (*SHARED, 50)), request("b", (*SHARED, 60)))
    out, _ = step(sched)
    by_id = {seq.seq_id: seq for seq in out.scheduled}
    assert (by_id["b"].start, by_id["b"].num_tokens) == (12, 1)
    assert by_id["a"].new_blocks[0][:3] == by_id["b"].new_blocks[0][:3]
    assert sched.stats().num_used_blocks == 5


def test_output_is_found_as_well():
    sched = make_scheduler()
    add(sched, request("a", (1, 2, 3), max_tokens=6))
    drain(sched)
    add(sched, request("b", (1, 2, 3, 7, 7, 7, 7, 7, 7, 7)))
    assert step(sched)[0].scheduled[0].start == 8


@pytest.mark.parametrize("logprobs", [None, 0])
def test_output_is_found_while_its_sequence_goes_on(logprobs: int | None):
    sched = make_scheduler()
    add(sched, request("a", (1, 2, 3), logprobs=logprobs))
    for _ in range(7):
        out = sched.schedule(0.0)
        entries = () if logprobs is None else (logprob(7),)
        sched.commit(RunnerOutput(out.step, (7,), entries), 0.0)
    add(sched, request("b", (1, 2, 3, 7, 7, 7, 7, 7, 7, 7)))
    assert step(sched)[0].scheduled[1].start == 8


def test_a_block_filled_by_a_step_in_flight_is_found_when_its_sequence_leaves():
    sched = make_scheduler()
    add(sched, request("a", (1, 2, 3)))
    step(sched)
    in_flight = sched.schedule(0.0)
    sched.abort("a", "")
    add(sched, request("b", (1, 2, 3, 7, 9)))
    out = sched.schedule(0.0)
    assert out.scheduled[0].start == 4
    assert [len(sched.commit(result(o), 0.0)) for o in (in_flight, out)] == [0, 1]


def test_blocks_of_output_are_named_by_tokens_that_are_known():
    """Planned ahead, a block is full before its last tokens are known."""
    sched = make_scheduler()
    add(sched, request("a", (1, 2, 3), max_tokens=9))
    plans = []
    while (out := sched.schedule(0.0)) is not None:
        plans.append(out)
        if len(plans) == 4:
            sched.commit(result(plans.pop(0)), 0.0)
    for out in plans:
        sched.commit(result(out), 0.0)
    add(sched, request("b", (1, 2, 3, 7, 7, 7, 7, 7, 7, 7)))
    assert step(sched)[0].scheduled[0].start == 8


def test_the_end_of_a_freed_prompt_is_given_away_before_its_beginning():
    sched = make_scheduler(num_blocks=4)
    add(sched, request("a", SHARED, max_tokens=1))
    step(sched)
    add(sched, request("other", 8, max_tokens=1))
    step(sched)
    add(sched, request("b", SHARED, max_tokens=1))
    assert step(sched)[0].scheduled[0].start == 8


def test_a_block_may_fall_out_of_its_window_before_its_token_is_known():
    sched = make_scheduler(windows=(None, 2), block_size=1)
    add(sched, request("a", 1, max_tokens=20))
    plans = [sched.schedule(0.0) for _ in range(4)]
    while plans:
        sched.commit(result(plans.pop(0)), 0.0)
        sched.check_invariants()
        if (out := sched.schedule(0.0)) is not None:
            plans.append(out)
        sched.check_invariants()
    assert not sched.has_work()


def test_salt_and_switch_keep_prompts_apart():
    for sched, salt in ((make_scheduler(), "x"), (make_scheduler(caching=False), "")):
        add(sched, request("a", SHARED, max_tokens=6), request("b", SHARED, cache_salt=salt, max_tokens=6))
        assert tokens_by_id(step(sched)[0]) == {"a": 12, "b": 12}
        stats = sched.stats()
        assert (stats.prefix_queried_tokens, stats.prefix_hit_tokens) == (24 if salt else 0, 0)
        drain(sched)


def test_a_window_group_drops_blocks_and_still_hits():
    sched = make_scheduler(windows=(None, 5), block_size=4)
    add(sched, request("a", tuple(range(16)), max_tokens=3))
    step(sched)
    step(sched)
    assert sched.stats().num_used_blocks == 5 + 2, "positions 12 … 16 are all that the window group still needs"
    add(sched, request("b", (*range(16), 50)))
    out, _ = step(sched)
    (seq,) = (s for s in out.scheduled if s.seq_id == "b")
    assert seq.start == 16 and seq.new_blocks[1][:3] == (0, 0, 0) and 0 not in seq.new_blocks[1][3:]
    assert 0 not in seq.new_blocks[0]


def test_hashes_of_another_block_size_are_not_trusted():
    sched = make_scheduler()
    add(sched, request("a", SHARED, block_hashes=(b"h",) * 6, max_tokens=1))
    step(sched)
    add(sched, request("b", SHARED, max_tokens=1))
    assert step(sched)[0].scheduled[0].start == 8


# Log-probabilities, resubmission


def logprob(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, -1.0, 1, (), ())


def test_logprobs_pass_through():
    sched = make_scheduler()
    add(sched, request("a", (1, 2, 3), logprobs=0, prompt_logprobs=0), request("b"))
    out = sched.schedule(0.0)
    found = PromptLogprobs(1, (logprob(2), logprob(3)))
    updates = sched.commit(RunnerOutput(out.step, (7, 8), (logprob(7), None), (found, None)), 0.0)
    assert updates == [
        RequestUpdate("a", 0, (7,), logprobs=(logprob(7),), prompt_logprobs=(found,)),
        RequestUpdate("b", 0, (8,)),
    ]


def test_prompt_logprobs_are_computed_in_spite_of_hits_and_delivered_once():
    sched = make_scheduler(policy="priority", max_num_seqs=1, prefill_chunk_tokens=5)
    add(sched, request("warm", SHARED, max_tokens=1))
    drain_first = drain(sched)
    add(sched, request("a", SHARED, prompt_logprobs=0, priority=1))
    out = sched.schedule(0.0)
    assert [(s.start, s.num_tokens) for s in out.scheduled] == [(0, 5)] and drain_first == {"warm": "length"}
    first = PromptLogprobs(1, tuple(logprob(t) for t in SHARED[1:6]))
    updates = sched.commit(RunnerOutput(out.step, (-1,), (), (first,)), 0.0)
    assert updates == [RequestUpdate("a", 0, (), prompt_logprobs=(first,))]
    add(sched, request("b", priority=0, max_tokens=1))
    step(sched)
    out = sched.schedule(0.0)
    assert [(s.start, s.num_tokens) for s in out.scheduled] == [(0, 5)]
    assert sched.commit(RunnerOutput(out.step, (-1,), (), (first,)), 0.0) == []
    out = sched.schedule(0.0)  # had it been cut elsewhere, known and new ones would come together
    overlap = PromptLogprobs(4, tuple(logprob(t) for t in SHARED[4:10]))
    rest = PromptLogprobs(6, overlap.entries[2:])
    assert sched.commit(RunnerOutput(out.step, (-1,), (), (overlap,)), 0.0)[0].prompt_logprobs == (rest,)
    out = sched.schedule(0.0)
    last = PromptLogprobs(10, tuple(logprob(t) for t in SHARED[10:]))
    assert sched.commit(RunnerOutput(out.step, (7,), (), (last,)), 0.0)[0].prompt_logprobs == (last,)
    assert sched.stats().prefix_queried_tokens == 12 + 4, "a was never looked up"


def test_a_resubmitted_request_goes_on_after_its_tokens():
    sched = make_scheduler()
    add(sched, request("a", (1, 2), output_ids=(3, 4), max_tokens=4))
    out, updates = step(sched)
    assert out.added[0].token_ids == (1, 2, 3, 4) and out.added[0].num_prompt_tokens == 2
    assert updates == [RequestUpdate("a", 2, (7,))]
    assert step(sched)[1] == [RequestUpdate("a", 3, (7,), "length")]


def test_cached_tokens_of_a_resubmitted_request_are_those_of_its_prompt():
    sched = make_scheduler()
    add(sched, request("a", (1, 2, 3, 4, 5), max_tokens=10))
    drain(sched)
    add(sched, request("b", (1, 2, 3, 4, 5), output_ids=(7,) * 8, max_tokens=10))
    out, updates = step(sched)
    assert out.scheduled[0].start == 12 and updates[0].num_cached_tokens == 5


def test_a_resubmitted_request_with_nothing_left_ends_at_once():
    sched = make_scheduler()
    add(sched, request("a", (1, 2), output_ids=(3, 4), max_tokens=2))
    assert sched.take_updates() == [RequestUpdate("a", 2, (), "length")]
    assert not sched.has_work()


# Books


def test_the_check_notices_a_lost_block_and_a_lost_row():
    sched = make_scheduler()
    add(sched, request("a"))
    step(sched)
    sched.running[0].tables[0].append(sched.running[0].tables[0][0])
    with pytest.raises(AssertionError):
        sched.check_invariants()
    sched.running[0].tables[0].pop()
    sched.check_invariants()
    sched.running[0].row = 3
    with pytest.raises(AssertionError, match="row"):
        sched.check_invariants()


# A pipeline: decoding sequences take turns


def turns(names: str, num_turns: int, num_steps: int) -> list[str]:
    """Who decodes in each step, with one more step in flight than turns."""
    sched = make_scheduler(num_turns=num_turns, num_blocks=500)
    add(sched, *(request(name, max_tokens=100) for name in names))
    in_flight: deque[SchedulerOutput] = deque()
    decoding: list[str] = []
    while len(decoding) < num_steps:
        out = sched.schedule(0.0) if len(in_flight) <= num_turns else None
        if out is None:
            done = in_flight.popleft()
            sched.commit(RunnerOutput(done.step, tuple(7 if seq.samples else -1 for seq in done.scheduled)), 0.0)
            sched.check_invariants()
        else:
            in_flight.append(out)
            decoding.append("".join(seq.seq_id for seq in out.scheduled if seq.start >= 4))
    return decoding[2:]  # the first steps have prompts


@pytest.mark.parametrize(
    ("names", "num_turns", "expected"),
    [
        ("abcd", 1, ["abcd"] * 4),
        ("abcd", 2, ["ab", "cd"] * 2),
        ("abcde", 2, ["abc", "de"] * 2),
        ("abcdef", 3, ["ab", "cd", "ef"] * 2),
        ("a", 3, ["a"] * 4),  # it waits for itself alone
        ("ab", 3, ["a", "b"] * 2),
    ],
)
def test_a_sequence_decodes_in_one_step_of_so_many(names: str, num_turns: int, expected: list[str]) -> None:
    found = turns(names, num_turns, 2 * num_turns + len(expected) + 2)
    begin = next(i for i in range(len(found)) if found[i] == expected[0])
    assert found[begin : begin + len(expected)] == expected, found


def test_prompts_do_not_wait_for_a_turn() -> None:
    sched = make_scheduler(num_turns=2, max_tokens_per_step=8)
    add(sched, request("a"), request("b", 40))
    chunks = [[seq.num_tokens for seq in out.scheduled if seq.seq_id == "b"] for out in iter_plans(sched, 4)]
    assert all(len(chunk) == 1 for chunk in chunks)


def iter_plans(sched: Scheduler, number: int) -> Iterator[SchedulerOutput]:
    for _ in range(number):
        out = sched.schedule(0.0)
        assert out is not None
        yield out


def test_others_go_on_while_those_whose_turn_it_is_lack_blocks() -> None:
    """Two sequences that together need more blocks than there are, and no step in flight to wait for."""
    sched = make_scheduler(num_turns=2, num_blocks=4, block_size=4, caching=False)
    add(sched, request("a", 4, max_tokens=9), request("b", 4, max_tokens=9))
    ended: dict[str, str] = {}
    for _ in range(40):
        out = sched.schedule(0.0)
        assert out is not None, "nothing is in flight, so something must be planned"
        tokens = tuple(7 if seq.samples else -1 for seq in out.scheduled)
        ended |= ends(sched.commit(RunnerOutput(out.step, tokens), 0.0))
        if len(ended) == 2:
            break
    assert ended == {"a": "length", "b": "length"}
