"""Patterns as grammars, beside Python's own reading of them."""

from __future__ import annotations

import json
import random
import re

import pytest

from pagedray.engine.errors import UserError
from pagedray.engine.grammar import automaton, number_text, regex
from pagedray.engine.grammar.formats import FORMATS
from tests.engine.grammar.sampling import Sampler, accepts, byte_vocabulary

PATTERNS = {
    "a": (["a"], ["", "aa", "b"]),
    "^a$": (["a"], ["aa"]),
    "": ([""], ["a"]),
    "a|^b$|": (["a", "b", ""], ["ab"]),
    "(^a|b)c$": (["ac", "bc"], ["c"]),
    "[a-c]{2}x?": (["ab", "bcx"], ["a", "abxx"]),
    "[^a-c\\n]+": (["xyz", "é"], ["a", "\n"]),
    "(ab)*?c+": (["c", "ababcc"], ["ab"]),
    "\\d{2,3}": (["12", "123"], ["1", "1234", "٣٣"]),
    "\\w\\W\\s\\S": (["a- b"], ["aa b", "a-  "]),
    "[\\d.-]+": (["1.-2"], ["a"]),
    "[^\\d\\s]": (["x"], ["1", " ", "٣"]),
    "\\D": (["x"], ["1", "٣"]),
    ".": (["x", "é", "😀"], ["\n", "xx", "\u2028"]),
    "\\x41\\u00e9\\t\\.\\/\\]": (["Aé\t./]"], ["A"]),
    "\\ud83d\\ude00": (["😀"], [""]),
    "(?:a(?P<n>b|c)(?<m>d))": (["abd", "acd"], ["ad"]),
    "[a\\]\\-z]": (["]", "-", "z", "a"], ["b"]),
    "a{0}b{1,}": (["b", "bbb"], ["ab", ""]),
    "[a-z]{3,40}": (["abc", "a" * 40], ["ab", "a" * 41]),
    '"[^"]{2,60}"': (['"ab"', '"é' + "x" * 59 + '"'], ['"a"', '"' + "a" * 61 + '"']),
    "(a|b){1,20}c": (["abac"], ["c", "a"]),
}


@pytest.fixture(scope="module")
def sampler() -> Sampler:
    return Sampler(byte_vocabulary())


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_takes_what_it_should(sampler: Sampler, pattern: str) -> None:
    good, bad = PATTERNS[pattern]
    grammar = sampler.compile("regex", pattern)
    found = automaton.from_node(regex.whole(pattern))
    for text in good:
        assert accepts(grammar, text), text
        assert found.matches(text), text
    for text in bad:
        assert not accepts(grammar, text), text
        assert not found.matches(text), text


@pytest.mark.parametrize(
    "pattern", [pattern for pattern in PATTERNS if "(?<" not in pattern and "\\ud83d" not in pattern]
)
def test_outputs_match_as_python_reads_the_pattern(sampler: Sampler, pattern: str) -> None:
    grammar, choose = sampler.compile("regex", pattern), random.Random(pattern)
    for _ in range(5):
        output = sampler.sample(grammar, choose)
        assert output is None or re.fullmatch(pattern, output), output


@pytest.mark.parametrize("name", FORMATS)
def test_outputs_have_their_format(sampler: Sampler, name: str) -> None:
    grammar, choose = (
        sampler.compile("json_schema", json.dumps({"type": "string", "format": name})),
        random.Random(name),
    )
    for _ in range(5):
        output = sampler.sample(grammar, choose)
        assert output is not None
        assert re.fullmatch(FORMATS[name], json.loads(output)), output


@pytest.mark.parametrize("bounds", [(0, 0), (3, 12), (95, 1024), (0, None), (7, None), (100, 99999), (10, 10), (5, 4)])
def test_natural_numbers(bounds: tuple[int, int | None]) -> None:
    low, high = bounds
    found = automaton.from_node(number_text.naturals(low, high))
    for number in {*range(130), 999, 1000, 1024, 1025, 9999, 10_000, 99_999, 100_000}:
        assert found.matches(str(number)) == (low <= number <= (10**18 if high is None else high)), number
    assert not found.matches("007")


def test_automata_combine() -> None:
    short = automaton.lengths(1, 2)
    letters = automaton.from_node(regex.whole("[a-c]*"))
    both = automaton.intersect([short, letters])
    rest = letters.without(automaton.words(["", "a", "abc"]))
    texts = ("", "a", "ab", "abc", "abcc", "d")
    assert [text for text in texts if both.matches(text)] == ["a", "ab"]
    assert [text for text in texts if rest.matches(text)] == ["ab", "abcc"]
    assert automaton.intersect([short, automaton.words(["abc"])]).is_empty
    assert [n for n in range(-30, 60) if automaton.remainders(12).matches(str(n))] == [-24, -12, 0, 12, 24, 36, 48]


def test_too_large_an_automaton_is_refused() -> None:
    with pytest.raises(UserError, match="states"):
        automaton.from_node(regex.whole("(a|b)*a(a|b){20}"))
