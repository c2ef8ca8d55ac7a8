from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedray.engine.prefix_cache import PrefixCache, hash_block, hash_blocks, root_hash


def test_only_full_blocks_have_a_hash():
    assert hash_blocks((1, 2, 3), 4) == ()
    assert len(hash_blocks((1, 2, 3, 4), 4)) == 1
    assert len(hash_blocks(range(11), 4)) == 2


def test_a_hash_names_all_tokens_before_it():
    a, b = hash_blocks((1, 2, 3, 4), 2), hash_blocks((9, 2, 3, 4), 2)
    assert a[0] != b[0] and a[1] != b[1]
    assert hash_blocks((1, 2, 3, 5), 2)[0] == a[0]


def test_blocks_with_equal_tokens_at_different_places_differ():
    assert len(set(hash_blocks((7, 7) * 5, 2))) == 5


def test_the_salt_separates_everything():
    assert not set(hash_blocks(range(8), 4)) & set(hash_blocks(range(8), 4, "tenant"))


def test_a_chain_can_be_continued_block_by_block():
    first = hash_block(root_hash("s"), (1, 2))
    assert hash_blocks((1, 2, 3, 4), 2, "s") == (first, hash_block(first, (3, 4)))


def test_hashes_are_16_bytes_and_the_same_in_every_process():
    code = (
        "from pagedray.engine.prefix_cache import hash_blocks; print([h.hex() for h in hash_blocks(range(8), 4, 'x')])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout.decode()
        for seed in ("1", "2")
    }
    here = hash_blocks(range(8), 4, "x")
    assert outputs == {f"{[h.hex() for h in here]}\n"}
    assert {len(h) for h in here} == {16}


def cached(
    windows: tuple[int | None, ...], present: list[set[int]], num_blocks: int = 8
) -> tuple[PrefixCache, list[bytes]]:
    """A cache of block size 4 in which group g holds the blocks of index present[g] of one prompt."""
    cache, hashes = PrefixCache(4, windows), [b"%d" % i for i in range(num_blocks)]
    for group, indices in enumerate(present):
        for i in indices:
            cache.insert(group, hashes[i], 100 * (group + 1) + i)
    return cache, hashes


def test_full_attention_needs_every_block():
    cache, hashes = cached((None,), [{0, 1, 3}])
    assert cache.hit_length(hashes, 8) == 2
    assert cache.hit_length(hashes, 1) == 1
    assert cache.hit_blocks(0, hashes, 2) == [100, 101]


def test_a_window_needs_only_what_the_next_position_sees():
    cache, hashes = cached((5,), [{2, 3}])
    assert cache.hit_length(hashes, 8) == 4  # position 16 sees 12 … 16
    assert cache.hit_blocks(0, hashes, 4) == [0, 0, 0, 103]
    cache, hashes = cached((6,), [{2, 3}])
    assert cache.hit_blocks(0, hashes, 4) == [0, 0, 102, 103]  # position 16 sees 11 … 16
    cache, hashes = cached((10,), [{2, 3}])
    assert cache.hit_length(hashes, 8) == 0  # block 1 is missing, and with it every shorter hit lacks more


def test_a_hit_is_one_length_for_all_groups():
    cache, hashes = cached((None, 5), [{0, 1, 2, 3, 4}, {1, 4}])
    assert cache.hit_length(hashes, 8) == 5
    assert cache.hit_length(hashes, 4) == 2
    assert cache.hit_blocks(0, hashes, 2) == [100, 101]
    assert cache.hit_blocks(1, hashes, 2) == [0, 201]


def test_a_window_of_one_token_needs_no_block():
    cache, hashes = cached((None, 1), [{0, 1}, set()])
    assert cache.hit_length(hashes, 8) == 2
    assert cache.hit_blocks(1, hashes, 2) == [0, 0]


def test_the_check_finds_a_block_with_two_hashes():
    cache, _ = cached((None,), [{0, 1}])
    cache.check_invariants()
    cache.insert(0, b"other", 100)
    with pytest.raises(AssertionError, match="two hashes"):
        cache.check_invariants()


def test_the_first_of_two_equal_blocks_stays_the_one_that_is_found():
    cache = PrefixCache(4, (None,))
    cache.insert(0, b"h", 1)
    cache.insert(0, b"h", 2)
    assert cache.hit_blocks(0, [b"h"], 1) == [1]
    assert not cache.knows(2)
    cache.forget(1)
    assert cache.hit_length([b"h"], 1) == 0


@given(
    st.lists(st.sampled_from((None, 1, 3, 4, 5, 8, 9, 13)), min_size=1, max_size=3),
    st.data(),
)
@settings(deadline=None, derandomize=True, database=None)
def test_the_hit_is_the_longest_whose_visible_blocks_are_all_there(windows: list[int | None], data: st.DataObject):
    present = [data.draw(st.sets(st.integers(0, 7))) for _ in windows]
    limit = data.draw(st.integers(0, 8))
    cache, hashes = cached(tuple(windows), present)

    def visible(window: int | None, length: int) -> set[int]:
        first = 0 if window is None else max(0, 4 * length - window + 1)
        return {position // 4 for position in range(first, 4 * length)}

    expected = max(
        n for n in range(limit + 1) if all(visible(w, n) <= p for w, p in zip(windows, present, strict=True))
    )
    assert cache.hit_length(hashes, limit) == expected
    for group, window in enumerate(windows):
        blocks = cache.hit_blocks(group, hashes, expected)
        assert len(blocks) == expected
        assert {i for i, block in enumerate(blocks) if block} == visible(window, expected)
