"""Counter-based uniform numbers: Philox-4x32, ten rounds.

    uniform(seed, position) = floor((w0 * 2^32 + w1) / 2^11) / 2^53       w0 … w3 = philox(key=seed, counter=position)

Layout   key words (seed low, seed high), counter words (position low, position high, 0, 0): what Triton's
         `tl.randint4x(seed, offset)` uses for 64-bit seeds and offsets, so a GPU kernel gets the same words.
Numbers  53 bits; integer → float64 is exact on every device. 24 bits would be too few: with 262,144 tokens many have
         a probability below 2^-24, and a grid that coarse would make some of them impossible.
Shapes   seeds, positions [S] int64, not negative; returns [S] float64 in [0, 1). On the host: both are known there
         when a step is planned, and eighty launches for a handful of numbers would cost more than the numbers.
Source   Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3" (SC11).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

NUM_ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
MASK = 0xFFFFFFFF

# uint64 scalars, because numpy would turn uint64 mixed with a Python int of another type into float64
_LOW, _SHIFT, _DROPPED_BITS, _KEPT_OF_W0 = np.uint64(MASK), np.uint64(32), np.uint64(11), np.uint64(21)
_FEW = 8  # rows for which plain integers are faster than eighty numpy calls
_MULTIPLIERS = np.array(MULTIPLIERS, dtype=np.uint64).reshape(2, 1)
_ROUND_KEYS = np.array([[(r * step) & MASK for step in KEY_STEPS] for r in range(NUM_ROUNDS)], dtype=np.uint64)


def philox_ref(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """The four output words for one key and counter, in plain integers: this is the definition."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(NUM_ROUNDS):
        a, b = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & MASK, (a >> 32) ^ c3 ^ k1, a & MASK
        k0, k1 = (k0 + KEY_STEPS[0]) & MASK, (k1 + KEY_STEPS[1]) & MASK
    return c0, c1, c2, c3


def uniform_ref(seed: int, position: int) -> float:
    w0, w1, _, _ = philox_ref((seed & MASK, seed >> 32), (position & MASK, position >> 32, 0, 0))
    return float((w0 << 32 | w1) >> 11) * 2.0**-53


def philox(seeds: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Output words w0 … w3 as [4, S], each below 2^32."""
    key, counter = seeds.astype(np.uint64), positions.astype(np.uint64)
    zero = np.zeros_like(counter)
    round_keys = (np.stack((key & _LOW, key >> _SHIFT)) + _ROUND_KEYS[:, :, None]) & _LOW  # [10, 2, S]
    even, odd = np.stack((counter & _LOW, zero)), np.stack((counter >> _SHIFT, zero))  # (c0, c2), (c1, c3)
    for round_key in round_keys:
        product = (even * _MULTIPLIERS)[::-1]
        even, odd = (product >> _SHIFT) ^ odd ^ round_key, product & _LOW
    return np.stack((even[0], odd[0], even[1], odd[1]))


def uniform(seeds: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in [0, 1) per row, a function of that row's seed and position alone."""
    if len(seeds) <= _FEW:
        pairs = zip(seeds.tolist(), positions.tolist(), strict=True)
        return np.array([uniform_ref(seed, position) for seed, position in pairs])
    w0, w1, _, _ = philox(seeds, positions)
    numbers: NDArray[np.float64] = ((w0 << _KEPT_OF_W0) | (w1 >> _DROPPED_BITS)).astype(np.float64) * 2.0**-53
    return numbers
