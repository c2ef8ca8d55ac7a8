"""Logits as finite numbers, for kernels: a GPU must not stop to ask whether a row is broken.

NaN and -inf count as the lowest number of bfloat16, +inf as the highest. So in a row with a usable logit the first two
have probability 0, a row without any has equal ones, and +inf is the most likely. Rows whose maximum is finite keep
their meaning; the others get the tokens that the CPU's sampler gives them.
"""

from __future__ import annotations

from pagedray.kernels.jit import tl, triton

LOWEST = -3.3895313892515355e38  # as float32 it ends in 16 zero bits, as bfloat16's numbers do


@triton.jit
def finite_logits(z, inside):  # type: ignore[no-untyped-def]
    """As float32; -inf past the row's end alone."""
    lowest: tl.constexpr = -3.3895313892515355e38
    y = z.to(tl.float32)
    y = tl.where(y == y, y, lowest)
    y = tl.where(y > lowest, y, lowest)
    y = tl.where(y < -lowest, y, -lowest)
    return tl.where(inside, y, float("-inf"))


@triton.jit
def load_logits(logits_ptr, at, count):  # type: ignore[no-untyped-def]
    """Of a row, or of a list of candidates, with `count` of them."""
    inside = at < count
    return finite_logits(tl.load(logits_ptr + at, mask=inside, other=0.0), inside)
