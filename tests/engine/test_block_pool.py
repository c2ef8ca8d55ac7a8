from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedray.engine.block_pool import BlockPool, capacity_tokens, peak_blocks
from pagedray.engine.prefix_cache import PrefixCache


def make_pool(num_blocks: int) -> tuple[BlockPool, PrefixCache]:
    cache = PrefixCache(block_size=4, windows=(None,))
    return BlockPool(num_blocks, cache), cache


def test_the_null_block_is_never_given_out():
    pool, _ = make_pool(3)
    assert sorted(pool.take(3)) == [1, 2, 3]
    assert pool.num_free == 0 and pool.num_used == 3


def test_a_block_is_free_when_the_last_table_lets_go():
    pool, _ = make_pool(1)
    (block,) = pool.take(1)
    pool.share(block)
    pool.release([block])
    assert pool.num_free == 0
    pool.release([block])
    assert pool.num_free == 1


def test_findable_blocks_are_given_out_last_the_one_freed_longest_ago_first():
    pool, cache = make_pool(4)
    a, b, c, d = pool.take(4)
    for block in (a, b, c):
        cache.insert(0, b"%d" % block, block)
    pool.release([b, d, a, c])
    assert pool.take(1) == (d,)
    assert pool.take(2) == (b, a)
    assert not cache.knows(b) and not cache.knows(a) and cache.knows(c)


def test_sharing_a_freed_block_takes_it_out_of_the_free_list():
    pool, cache = make_pool(2)
    a, b = pool.take(2)
    cache.insert(0, b"a", a)
    pool.release([a, b])
    pool.share(a)
    assert pool.take(1) == (b,)
    assert pool.num_free == 0 and cache.knows(a)


def test_a_block_given_out_again_is_blank_until_it_is_registered_again():
    pool, cache = make_pool(1)
    (a,) = pool.take(1)
    cache.insert(0, b"a", a)
    pool.release([a])
    pool.take(1)
    pool.release([a])
    assert cache.hit_length([b"a"], 1) == 0
    pool.check_invariants({})


def test_the_check_finds_wrong_reference_counts_and_lost_blocks():
    pool, _ = make_pool(2)
    (a,) = pool.take(1)
    pool.check_invariants({a: 1})
    for holders in ({}, {a: 2}):
        with pytest.raises(AssertionError):
            pool.check_invariants(holders)
    pool.refs[a] = 0
    with pytest.raises(AssertionError, match="total"):
        pool.check_invariants({})


@given(st.lists(st.tuples(st.sampled_from(("take", "share", "release", "register")), st.integers(0, 7)), max_size=60))
@settings(deadline=None, derandomize=True, database=None)
def test_any_sequence_of_calls_keeps_the_books(calls: list[tuple[str, int]]):
    pool, cache = make_pool(6)
    held: Counter[int] = Counter()
    for number, (call, pick) in enumerate(calls):
        if call == "take" and pool.num_free:
            held[pool.take(1)[0]] += 1
        elif held:
            block = sorted(held)[pick % len(held)]
            if call == "share":
                pool.share(block)
                held[block] += 1
            elif call == "register" and not cache.knows(block):
                cache.insert(0, b"%d" % number, block)
            elif call == "release":
                pool.release([block])
                held -= Counter([block])
        pool.check_invariants(dict(held))
        cache.check_invariants()


@pytest.mark.parametrize("block_size", (1, 2, 3, 4, 8))
@pytest.mark.parametrize("window", (None, 1, 2, 3, 4, 5, 9))
@pytest.mark.parametrize("chunk", (1, 2, 3, 7, 100))
def test_peak_blocks_is_what_a_growing_sequence_holds_at_most(block_size: int, window: int | None, chunk: int):
    """Against blocks counted one by one, for every alignment of the first chunk: prefix hits start anywhere."""
    for num_tokens in range(1, 40):
        most = 0
        for start in range(num_tokens):
            end = min(start + chunk, num_tokens)
            first = 0 if window is None else max(0, start - window + 1)
            most = max(most, len({position // block_size for position in range(first, end)}))
        assert peak_blocks(num_tokens, block_size, window, chunk) >= most
        if window is None or num_tokens > 2 * (window + chunk + block_size):
            assert peak_blocks(num_tokens, block_size, window, chunk) == most


def test_capacity_is_the_most_tokens_whose_peak_fits():
    assert capacity_tokens(5, 4, (None,), 16, limit=100) == 20
    assert capacity_tokens(5, 4, (None, None), 16, limit=100) == 8
    assert capacity_tokens(5, 4, (None,), 16, limit=7) == 7
    assert capacity_tokens(1, 4, (None, None), 16, limit=100) == 0
    # window 4 and chunk 1 hold two blocks at most, wherever they are
    assert capacity_tokens(2, 4, (4,), 1, limit=100) == 100
    assert capacity_tokens(1, 4, (4,), 1, limit=100) == 4
    assert capacity_tokens(10, 4, (None, 4), 1, limit=100) == 32
