from __future__ import annotations

from pagedray.engine.config import SchedulerConfig
from pagedray.engine.messages import Request, SamplingParams
from pagedray.engine.policy import POLICIES


def request(priority: int) -> Request:
    return Request(
        id="r",
        client_id="c",
        prompt_ids=(1,),
        params=SamplingParams(max_tokens=1, seed=0),
        priority=priority,
        arrival_s=9.0,
    )


def order(policy: str, priorities: list[int]) -> list[int]:
    """Indices of requests accepted in that order, sorted by their keys."""
    keys = [POLICIES[policy](request(priority), number) for number, priority in enumerate(priorities)]
    return sorted(range(len(keys)), key=keys.__getitem__)


def test_fcfs_is_the_order_of_acceptance_whatever_the_priority():
    assert order("fcfs", [3, -1, 2, -1]) == [0, 1, 2, 3]


def test_priority_puts_lower_numbers_first_and_keeps_the_order_among_equals():
    assert order("priority", [3, -1, 2, -1]) == [1, 3, 2, 0]


def test_fcfs_has_one_class_so_that_nobody_is_preempted_for_a_newcomer():
    assert {POLICIES["fcfs"](request(priority), number)[0] for number, priority in enumerate((0, 5, -5))} == {0}


def test_every_configurable_policy_exists():
    names = SchedulerConfig.model_fields["scheduling_policy"].annotation
    assert set(names.__args__) == set(POLICIES)
