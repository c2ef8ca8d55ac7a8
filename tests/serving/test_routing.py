import random

from pagedray.serving.routing import least_loaded


def test_the_least_loaded_is_chosen() -> None:
    assert [least_loaded([3, 1, 2], turn) for turn in range(5)] == [1] * 5


def test_equals_take_turns() -> None:
    assert [least_loaded([1, 5, 1, 1], turn) for turn in range(6)] == [0, 2, 3, 0, 2, 3]


def test_a_burst_spreads_evenly_from_the_first_request_on() -> None:
    loads = [0, 0, 0]
    rng = random.Random(1)
    for turn in range(500):
        loads[least_loaded(loads, turn)] += 1
        assert max(loads) - min(loads) <= 1
        if turn % 3 == 0:
            ends = rng.choice([i for i in range(3) if loads[i] == max(loads)])
            loads[ends] -= 1
