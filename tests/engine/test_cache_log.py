from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pagedray.engine.cache_log import CacheChanges, CacheLog, short_hashes, snapshot
from pagedray.engine.prefix_cache import PrefixCache, hash_blocks

HASHES = hash_blocks(range(64), 4)


def test_the_net_effect_counts() -> None:
    log = CacheLog()
    a, b = HASHES[:2]
    log.added(a)
    seen = log.end
    log.added(b)
    log.evicted(b)
    log.evicted(a)
    log.added(a)
    assert log.since(seen) == CacheChanges(a[:8], b[:8], False)
    assert log.since(log.end) == CacheChanges(b"", b"", False)


def test_a_reader_that_fell_behind_is_told_so() -> None:
    log = CacheLog(capacity=4)
    for number in range(100):
        log.added(HASHES[number % 16])
        assert log.since(max(0, log.end - 4)) is not None
        assert log.since(log.end - 5) is None or log.end <= 4
    assert len(log._changes) <= 8


def test_a_snapshot_is_bounded_and_begins_with_the_oldest() -> None:
    assert list(short_hashes(snapshot(HASHES, 3).added)) == [h[:8] for h in HASHES[:3]]
    assert snapshot(HASHES, 3).starts_over


def test_one_group_speaks_for_all() -> None:
    cache = PrefixCache(4, (8, None))
    cache.insert(0, HASHES[0], 1)
    cache.insert(1, HASHES[1], 2)
    cache.insert(1, HASHES[1], 3)  # the same content again
    assert cache.changes_since(0).added == HASHES[1][:8]
    cache.forget(1)
    assert cache.changes_since(None) == CacheChanges(HASHES[1][:8], b"", True)
    cache.forget(2)
    assert cache.changes_since(1) == CacheChanges(b"", HASHES[1][:8], False)


@given(st.lists(st.tuples(st.integers(0, 7), st.booleans()), max_size=60), st.integers(1, 10), st.data())
def test_readers_end_with_what_the_cache_holds(
    steps: list[tuple[int, bool]], capacity: int, data: st.DataObject
) -> None:
    """However seldom they read, and whatever was forgotten meanwhile."""
    cache = PrefixCache(4, (None,))
    cache.log = CacheLog(capacity)
    held: set[bytes] = set()
    told: int | None = None

    def read() -> None:
        nonlocal told
        changes = cache.changes_since(told)
        told = cache.log.end
        if changes.starts_over:
            held.clear()
        held.update(short_hashes(changes.added))
        held.difference_update(short_hashes(changes.evicted))

    for number, is_in in steps:
        if is_in and not cache.knows(number):
            cache.insert(0, HASHES[number], number)
        elif not is_in and cache.knows(number):
            cache.forget(number)
        if data.draw(st.integers(0, 3)) == 0:
            read()
    read()
    assert held == {HASHES[n][:8] for n in range(8) if cache.knows(n)}
