"""Policies: pure functions of loads, matches and ranks."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from pagedray.serving.routing import POLICIES, Situation, least_loaded, load, prefix, round_robin, session, session_rank

COUNTS = st.lists(st.integers(0, 50), min_size=1, max_size=12)
FACTORS = st.sampled_from([1.0, 1.25, 2.0, 3.0])


def test_the_least_loaded_engine_is_chosen() -> None:
    assert {least_loaded(Situation((3, 1, 2), 1, 2, turn)).engine for turn in range(5)} == {1}


def test_ties_go_round_by_every_policy() -> None:
    """A burst on idle engines must not pile up on the first one."""
    for policy in POLICIES.values():
        chosen = [policy(Situation([0] * 4, 1, 2, turn, matches=[5] * 4)).engine for turn in range(8)]
        assert chosen == [0, 1, 2, 3] * 2


def test_round_robin_heeds_nothing_else() -> None:
    assert [round_robin(Situation((9, 0), 1, 2, turn, matches=(0, 9))).engine for turn in range(4)] == [0, 1, 0, 1]


def test_the_longest_match_wins_and_load_breaks_ties() -> None:
    assert prefix(Situation((1, 1, 1), 1, 2, 0, matches=(2, 7, 3))) == (1, "affinity")
    assert prefix(Situation((2, 1, 2), 1, 2, 0, matches=(7, 7, 7))) == (1, "affinity")


def test_an_engine_beyond_the_bound_gets_nothing_by_affinity() -> None:
    # With the request: 4 against 2 x (1 + 1) is within, 5 is not.
    assert prefix(Situation((3, 1), 1, 2, 0, matches=(9, 0))) == (0, "affinity")
    assert prefix(Situation((4, 1), 1, 2, 0, matches=(9, 0))) == (1, "overflow")
    assert prefix(Situation((4, 1, 2), 1, 2, 0, matches=(9, 0, 1))) == (2, "affinity")


def test_without_a_match_load_decides() -> None:
    assert prefix(Situation((4, 1), 1, 2, 0, matches=(0, 0))) == (1, "balance")
    assert prefix(Situation((4, 1), 1, 2, 0)) == (1, "balance")


def test_long_prompts_weigh_more() -> None:
    assert load(2, 0) < load(1, 10_000) < load(10, 10_000)


def place(policy: str, prompts: list[int], num_engines: int, factor: float) -> list[list[int]]:
    """Loads after each of a series of requests, none of which ends. A prompt's engine knows it from then on."""
    loads, known, history = [0] * num_engines, set[tuple[int, int]](), []
    for turn, prompt in enumerate(prompts):
        matches = [int((engine, prompt) in known) for engine in range(num_engines)]
        index = POLICIES[policy](Situation(tuple(loads), 1, factor, turn, matches=matches)).engine
        loads[index] += 1
        known.add((index, prompt))
        history.append(list(loads))
    return history


@given(st.lists(st.integers(0, 3), min_size=1, max_size=120), st.integers(1, 8), FACTORS)
def test_the_bound_holds_from_the_first_request_on(prompts: list[int], num_engines: int, factor: float) -> None:
    for loads in place("prefix", prompts, num_engines, factor):
        assert max(loads) <= factor * (min(loads) + 1)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 8))
def test_other_policies_spread_evenly(prompts: list[int], num_engines: int) -> None:
    for policy in ("least_loaded", "round_robin"):
        assert all(max(loads) - min(loads) <= 1 for loads in place(policy, prompts, num_engines, 2.0))


@given(COUNTS, st.data(), FACTORS, st.integers(0, 1000))
def test_choices_keep_to_bound_and_affinity(loads: list[int], data: st.DataObject, factor: float, turn: int) -> None:
    numbers = st.lists(st.integers(0, 5), min_size=len(loads), max_size=len(loads))
    matches = data.draw(numbers)
    situation = Situation(loads, 1, factor, turn, matches=matches)
    choice = prefix(situation)
    assert choice == prefix(situation), "equal situations give equal choices"
    within = [i for i, load in enumerate(loads) if load + 1 <= factor * (min(loads) + 1)]
    if choice.outcome == "affinity":
        assert choice.engine in within
        assert matches[choice.engine] == max(matches[i] for i in within) > 0
    else:
        assert loads[choice.engine] == min(loads)
        assert not any(matches[i] for i in within)
        assert (choice.outcome == "overflow") == any(matches)


@given(COUNTS, st.integers(0, 2**64 - 1), FACTORS)
def test_a_session_keeps_to_the_bound_and_to_its_order(loads: list[int], key: int, factor: float) -> None:
    ranks = [session_rank(key, engine * 7919) for engine in range(len(loads))]
    choice = session(Situation(loads, 1, factor, 0, ranks=ranks))
    within = [i for i, load in enumerate(loads) if load + 1 <= factor * (min(loads) + 1)]
    assert choice.engine == max(within, key=ranks.__getitem__)
    assert (choice.outcome == "affinity") == (ranks[choice.engine] == max(ranks))


def test_sessions_spread_and_only_those_of_a_lost_engine_move() -> None:
    engines = [hash_like(i) for i in range(8)]
    homes = {
        key: max(engines, key=lambda engine, key=key: session_rank(key, engine)) for key in map(hash_like, range(4000))
    }
    counts = sorted(list(homes.values()).count(engine) for engine in engines)
    assert counts[-1] < 1.3 * counts[0], counts
    lost = engines[3]
    for key, home in homes.items():
        now = max((e for e in engines if e != lost), key=lambda engine: session_rank(key, engine))
        assert now == home or home == lost


def hash_like(number: int) -> int:
    """Spread over 64 bits, as the keys of names are."""
    return (number + 1) * 0xA24BAED4963EE407 % 2**64


def test_more_load_elsewhere_never_takes_affinity_away() -> None:
    outcomes = [prefix(Situation((4, other), 1, 2, 0, matches=(9, 0))).outcome for other in range(8)]
    assert all(a == "overflow" or b == "affinity" for a, b in pairwise(outcomes))
    assert outcomes[0] == "overflow" and outcomes[-1] == "affinity"
