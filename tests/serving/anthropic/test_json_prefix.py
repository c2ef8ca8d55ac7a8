"""What is let through parses in part at every cut, as clients do it, and complete JSON is let through as it is."""

from __future__ import annotations

import json
from typing import Any

import pydantic_core
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedray.serving.anthropic.json_prefix import MAX_DEPTH, JsonPrefix

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def passed(pieces: Any) -> str:
    prefix = JsonPrefix()
    return "".join(map(prefix.feed, pieces))


@given(st.dictionaries(st.text(), VALUES, max_size=4), st.booleans(), st.sampled_from([None, 1]))
def test_objects_pass_as_they_are(value: dict[str, Any], ascii_only: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    assert passed([text]) == passed(text) == text


@given(
    st.dictionaries(st.text(), VALUES, max_size=3),
    st.data(),
    st.text(alphabet='{}[]",:\\ \nu0d8c1.-+eEtrufalsn\x01é', max_size=12),
)
def test_whatever_comes_can_be_read_at_every_cut(value: dict[str, Any], data: st.DataObject, noise: str) -> None:
    text = json.dumps(value, ensure_ascii=data.draw(st.booleans()))
    at = data.draw(st.integers(0, len(text)))
    written = text[:at] + noise + text[at:]
    prefix, read = JsonPrefix(), ""
    for char in written:
        read += prefix.feed(char)
        assert not read or isinstance(pydantic_core.from_json(read, allow_partial=True), dict)
    assert read == passed([written])
    assert written.lstrip(" \t\n\r").startswith(read)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("", ""),
        (" \n", ""),
        (' {"a": 1} ', '{"a": 1}'),
        ('{"a": 1}}', '{"a": 1}'),
        ('{"a": 1,}', '{"a": 1,'),
        ("[1]", ""),
        ('"a"', ""),
        ("{a: 1}", "{"),
        ('{"a": "line\nline"}', '{"a": "line'),
        (r'{"a": "\ud83d\ude00"}', r'{"a": "\ud83d\ude00"}'),
        (r'{"a": "\ud83d!!!!!"}', r'{"a": "'),
        (r'{"a": "\ude00"}', r'{"a": "'),
        (r'{"a": "\q"}', r'{"a": "'),
        ('{"a": 01}', '{"a": 0'),
        ('{"a": 1.}', '{"a": 1.'),
        ('{"a": -1.5e+3, "b": [true, false, null, []]}', '{"a": -1.5e+3, "b": [true, false, null, []]}'),
        ('{"a": NaN}', '{"a": '),
        ('{"a": True}', '{"a": '),
        ('{"a": truth}', '{"a": tru'),
        ('{"a" 1}', '{"a" '),
        ('{"a": [1}', '{"a": [1'),
    ],
)
def test_where_it_ends(written: str, expected: str) -> None:
    assert passed([written]) == passed(written) == expected


def test_bounds() -> None:
    assert passed(['{"a": ' + "[" * 500]) == '{"a": ' + "[" * (MAX_DEPTH - 1)
    assert len(passed(['{"a": ' + "9" * 5000])) == len('{"a": ') + 1000
