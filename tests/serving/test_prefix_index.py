from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pagedray.engine.cache_log import CacheChanges
from pagedray.serving.prefix_index import PrefixIndex, shorten


def names(*numbers: int) -> list[bytes]:
    return [number.to_bytes(8, "big") for number in numbers]


def changes(added: list[bytes] = [], evicted: list[bytes] = [], starts_over: bool = False) -> CacheChanges:  # noqa: B006
    return CacheChanges(b"".join(added), b"".join(evicted), starts_over)


def test_a_match_is_the_leading_blocks_that_an_engine_holds() -> None:
    index = PrefixIndex()
    one, two, three = index.open(), index.open(), index.open()
    index.add(one, names(1, 2, 3))
    index.add(two, names(1))
    index.add(three, names(2, 3))
    assert index.matches(names(1, 2, 3, 4)) == {one: 3, two: 1}
    assert index.matches(names(9, 1)) == {}
    assert index.matches([]) == {}


def test_what_an_engine_tells_is_believed() -> None:
    index = PrefixIndex()
    one = index.open()
    index.add(one, names(1, 2))
    index.apply(one, changes(added=names(3), evicted=names(2, 99)))
    assert index.matches(names(1, 2, 3)) == {one: 1}
    index.apply(one, changes(added=names(2)))
    assert index.matches(names(1, 2, 3)) == {one: 3}
    index.apply(one, changes(added=names(7), starts_over=True))
    assert index.matches(names(1, 2, 3)) == {}
    assert index.matches(names(7)) == {one: 1}


def test_a_closed_slot_is_forgotten_and_used_again() -> None:
    index = PrefixIndex()
    one, two = index.open(), index.open()
    for slot in (one, two):
        index.add(slot, names(1, 2))
    index.close(one)
    assert index.matches(names(1, 2)) == {two: 2}
    assert index.open() == one
    assert index.matches(names(1, 2)) == {two: 2}


def test_it_is_bounded_and_keeps_the_beginnings() -> None:
    index = PrefixIndex(max_entries=8)
    one = index.open()
    index.add(one, names(*range(20)))
    assert len(index) == 8
    assert index.matches(names(*range(20))) == {one: 8}
    two = index.open()
    index.add(two, names(*range(100, 120)))
    assert index.matches(names(*range(100, 120))) == {two: 4}
    for prompt in range(200, 210):
        index.add(one, names(prompt))
    assert len(index) == 8, "the first engine has made room"


def test_what_is_used_again_stays() -> None:
    index = PrefixIndex(max_entries=4)
    one = index.open()
    index.add(one, names(1))
    for other in range(10, 30):
        index.add(one, names(other))
        index.add(one, names(1))
    assert index.matches(names(1)) == {one: 1}


def test_hashes_are_cut_as_engines_cut_them() -> None:
    assert shorten([bytes(range(16))]) == [bytes(range(8))]


STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "evict", "restart", "close"]), st.integers(0, 3), st.lists(st.integers(0, 9))),
    max_size=40,
)


@given(STEPS, st.lists(st.integers(0, 9), max_size=6))
def test_it_answers_like_a_set_per_engine(steps: list[tuple[str, int, list[int]]], prompt: list[int]) -> None:
    index, model = PrefixIndex(), {slot: set[int]() for slot in range(4)}
    for slot in model:
        assert index.open() == slot
    for kind, slot, numbers in steps:
        if kind == "add":
            index.add(slot, names(*numbers))
            model[slot] |= set(numbers)
        elif kind == "evict":
            index.apply(slot, changes(evicted=names(*numbers)))
            model[slot] -= set(numbers)
        elif kind == "restart":
            index.apply(slot, changes(added=names(*numbers), starts_over=True))
            model[slot] = set(numbers)
        else:
            index.close(slot)
            assert index.open() == slot
            model[slot] = set()
    expected = {}
    for slot, held in model.items():
        length = next((i for i, number in enumerate(prompt) if number not in held), len(prompt))
        if length:
            expected[slot] = length
    assert index.matches(names(*prompt)) == expected
    assert len(index) == sum(map(len, model.values()))
