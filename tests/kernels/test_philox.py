import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedray.kernels.philox import MASK, philox, philox_ref, uniform, uniform_ref

WORDS = 2**32 - 1


@pytest.mark.parametrize(
    "key, counter, expected",
    [  # known answers of Random123 for philox4x32-10
        ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((WORDS, WORDS), (WORDS,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0xA4093822, 0x299F31D0),
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_the_definition_gives_the_published_words(key, counter, expected):
    assert philox_ref(key, counter) == expected


seeds = st.integers(0, 2**63 - 1) | st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1])


@given(st.lists(st.tuples(seeds, seeds), min_size=1, max_size=16))
def test_rows_equal_the_definition(pairs):
    keys = np.array([seed for seed, _ in pairs])
    positions = np.array([position for _, position in pairs])
    words = philox(keys, positions)
    for i, (seed, position) in enumerate(pairs):
        expected = philox_ref((seed & MASK, seed >> 32), (position & MASK, position >> 32, 0, 0))
        assert tuple(words[:, i].tolist()) == expected
    assert uniform(keys, positions).tolist() == [uniform_ref(*pair) for pair in pairs]


def test_numbers_have_53_bits_and_stay_below_one():
    assert uniform_ref(0, 0) == ((0x6627E8D5 << 32 | 0xE169C58D) >> 11) / 2**53
    numbers = uniform(np.arange(20_000), np.full(20_000, 77))
    assert numbers.min() >= 0 and numbers.max() < 1
    fractions = numbers * 2**53
    assert (fractions == np.floor(fractions)).all() and (fractions % 2 == 1).any()


@pytest.mark.parametrize("vary", ["seed", "position"])
def test_neighbouring_seeds_and_positions_are_uniform_and_uncorrelated(vary):
    one, many = np.full(100_000, 12345), np.arange(100_000)
    numbers = uniform(many, one) if vary == "seed" else uniform(one, many)
    counts = np.histogram(numbers, bins=100, range=(0, 1))[0]
    chi_square = ((counts - 1000.0) ** 2 / 1000).sum()
    assert 60 < chi_square < 150  # 99 degrees of freedom: outside with probability below 0.001
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.01


TRITON_WORDS = """
import torch, triton, triton.language as tl

@triton.jit
def words(seed_ptr, position_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    w0, w1, w2, w3 = tl.randint4x(tl.load(seed_ptr + i), tl.load(position_ptr + i))
    tl.store(out_ptr + i, w0.to(tl.int32, bitcast=True))
    tl.store(out_ptr + N + i, w1.to(tl.int32, bitcast=True))
    tl.store(out_ptr + 2 * N + i, w2.to(tl.int32, bitcast=True))
    tl.store(out_ptr + 3 * N + i, w3.to(tl.int32, bitcast=True))

seeds = torch.tensor([0, 1, 2**32 + 5, 2**63 - 1])
positions = torch.tensor([0, 7, 2**31, 2**33 + 9])
out = torch.zeros((4, 4), dtype=torch.int32)
words[(1,)](seeds, positions, out, N=4)
print((out.long() & 0xFFFFFFFF).tolist())
"""


def test_triton_makes_the_same_words(tmp_path):
    """The words a GPU kernel will get from `tl.randint4x`, here from Triton's interpreter."""
    pytest.importorskip("triton")
    script = tmp_path / "words.py"  # a file, because Triton reads the source of a kernel
    script.write_text(TRITON_WORDS)
    environ = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, script], env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    expected = philox(np.array([0, 1, 2**32 + 5, 2**63 - 1]), np.array([0, 7, 2**31, 2**33 + 9]))
    assert done.stdout.strip() == str(expected.tolist())
