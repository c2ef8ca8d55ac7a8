"""What would complete a sequence that an output must not contain, against a plain look at all of the output."""

from __future__ import annotations

import random

import numpy as np
import pytest

from pagedray.engine.worker.bad_sequences import BadSequences
from pagedray.kernels.token_bitmask import pack_ids
from tests.engine.worker.grammars import allowed

VOCAB = 37  # not a multiple of 32: the bits past it mean nothing


def would_complete(sequences: list[tuple[int, ...]], output: list[int]) -> set[int]:
    return {s[-1] for s in sequences if len(s) - 1 <= len(output) and [*s[:-1]] == output[len(output) - len(s) + 1 :]}


@pytest.mark.parametrize("seed", range(8))
def test_no_output_contains_one(seed: int) -> None:
    draw = random.Random(seed)
    sequences = [tuple(draw.choices(range(4), k=draw.randint(1, 4))) for _ in range(5)]
    bad, output = BadSequences(sequences, VOCAB), []
    for _ in range(200):
        words = np.full(2, -1, dtype=np.int32)
        expected = would_complete(sequences, output)
        assert bad.forbid(words) == bool(expected)
        may = set(allowed(words, VOCAB))
        assert may == set(range(VOCAB)) - expected
        output.append(draw.choice([i for i in range(5) if i in may]))
        bad.feed(output[-1])
    text = bytes(output)
    assert not any(bytes(sequence) in text for sequence in sequences)


def test_it_yields_where_nothing_else_is_left() -> None:
    bad = BadSequences([(1, 2)], VOCAB)
    bad.feed(1)
    words = pack_ids([2], VOCAB)
    words[-1] |= 1 << 20  # as a matcher may leave them
    before = words.copy()
    assert not bad.forbid(words) and (words == before).all()
    words = pack_ids([2, 3], VOCAB)
    assert bad.forbid(words) and allowed(words, VOCAB) == [3]
