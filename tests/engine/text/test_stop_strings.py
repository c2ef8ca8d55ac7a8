from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedray.engine.text.stop_strings import StopMatcher

WORDS = st.text("ab\n]^", min_size=1, max_size=6)


def first_stop(text: str, stops: list[str]) -> tuple[str, int] | None:
    """By definition: the match that ends first, of these the longest."""
    ends = [(text.index(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    return (min(ends)[2], min(ends)[0]) if ends else None


def may_become_stop(text: str, stops: list[str]) -> int:
    """Length of the longest end of text that is the beginning of a stop string."""
    return max(n for n in range(len(text) + 1) if any(s.startswith(text[len(text) - n :]) for s in stops))


@given(text=st.text("ab\n]^", max_size=60), stops=st.lists(WORDS, min_size=1, max_size=4), cuts=st.randoms())
def test_the_first_match_is_found_however_the_text_is_cut(text, stops, cuts):
    matcher, at = StopMatcher(stops), 0
    while at < len(text):
        size = cuts.randint(1, 7)
        found = matcher.find(text[at : at + size])
        if found is not None:
            assert (found[0], at + found[1]) == first_stop(text, stops)
            return
        at = min(at + size, len(text))
        assert matcher.num_held == may_become_stop(text[:at], stops)
    assert first_stop(text, stops) is None


@given(
    head=st.text("ab", max_size=20),
    text=st.text("ab", max_size=40),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_matches_that_end_in_skipped_text_do_not_count(head, text, stops):
    matcher = StopMatcher(stops)
    matcher.skip(head)
    whole = head + text
    ends = [(end, len(s), s) for s in stops for end in range(len(head) + 1, len(whole) + 1) if whole[:end].endswith(s)]
    found = matcher.find(text)
    if not ends:
        assert found is None
    else:
        end = min(ends)[0]
        assert found == (max(e for e in ends if e[0] == end)[2], end - len(head))


@pytest.mark.parametrize("stops", [["ab", "b"], ["b", "ab"]])
def test_of_matches_that_end_together_the_longest_counts(stops):
    assert StopMatcher(stops).find("xab") == ("ab", 3)


def test_a_long_stop_string_costs_nothing_until_text_resembles_it():
    matcher = StopMatcher(["a" * 10**8])
    assert matcher.find("b" * 10**6 + "aaa") is None
    assert matcher.num_held == 3
    assert len(matcher._failures[0]) <= 3


def test_an_empty_stop_string_is_a_bug_of_the_caller():
    with pytest.raises(AssertionError):
        StopMatcher(["a", ""])
