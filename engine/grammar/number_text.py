"""Decimal texts of JSON numbers between bounds, as grammar nodes.

Integers have at most MAX_DIGITS digits and fractions at most MAX_FRACTION, so that no model can count on for ever.
Numbers with bounds have no exponent, and no more digits together than a double tells apart: two texts that differ
from a bound here still do so after a client has parsed them.
"""

from __future__ import annotations

from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal

from pagedray.engine.grammar.rules import (
    EMPTY,
    NOTHING,
    Chars,
    Node,
    Repeat,
    Text,
    chars,
    choice,
    optional,
    sequence,
)

MAX_DIGITS = 18
MAX_FRACTION = 15
DOUBLE_DIGITS = 15

DIGIT = chars("0-9")
NATURAL = choice(Text("0"), sequence(chars("1-9"), Repeat(DIGIT, 0, MAX_DIGITS - 1)))
FRACTION = sequence(Text("."), Repeat(DIGIT, 1, MAX_FRACTION))
EXPONENT = sequence(chars("eE"), optional(chars("+-")), Repeat(DIGIT, 1, 2))
NUMBER = sequence(optional(Text("-")), NATURAL, optional(FRACTION), optional(EXPONENT))
INTEGER = choice(Text("0"), sequence(optional(Text("-")), chars("1-9"), Repeat(DIGIT, 0, MAX_DIGITS - 1)))


class Bounds:
    """What a number lies between. None: no bound."""

    def __init__(self) -> None:
        self.low: Decimal | None = None
        self.high: Decimal | None = None
        self.excludes_low = self.excludes_high = False

    @property
    def is_set(self) -> bool:
        return self.low is not None or self.high is not None

    def at_least(self, value: Decimal, is_exclusive: bool) -> None:
        if self.low is None or (value, is_exclusive) > (self.low, self.excludes_low):
            self.low, self.excludes_low = value, is_exclusive

    def at_most(self, value: Decimal, is_exclusive: bool) -> None:
        if self.high is None or (value, not is_exclusive) < (self.high, not self.excludes_high):
            self.high, self.excludes_high = value, is_exclusive

    def limit(self, most: int) -> None:
        """Set bounds where there are none, so far away that at least so many numbers are left."""
        if self.high is None:
            self.high = max(Decimal(0), self.low or Decimal(0)) + most
        if self.low is None:
            self.low = min(Decimal(0), self.high) - most


def integer(bounds: Bounds) -> Node:
    """Integers within bounds."""
    if not bounds.is_set:
        return INTEGER
    low, high = _scaled(bounds, 0)
    return choice(
        sequence(Text("-"), naturals(1 if high is None else max(1, -high), None if low is None else -low)),
        naturals(0 if low is None else max(0, low), high),
    )


def number(bounds: Bounds) -> Node:
    """Numbers within bounds."""
    if not bounds.is_set:
        return NUMBER
    ends = [abs(end) for end in (bounds.low, bounds.high) if end is not None]
    num_digits = max(len(str(int(end))) for end in ends)
    places = max(0, min(MAX_FRACTION, DOUBLE_DIGITS - num_digits))
    low, high = _scaled(bounds, places)
    return choice(
        sequence(Text("-"), _decimals(1 if high is None else max(1, -high), None if low is None else -low, places)),
        _decimals(0 if low is None else max(0, low), high, places),
    )


def _scaled(bounds: Bounds, places: int) -> tuple[int | None, int | None]:
    """Both ends, inclusive, in units of the last decimal place."""
    low = high = None
    if bounds.low is not None:
        low = int(bounds.low.scaleb(places).to_integral_value(ROUND_CEILING))
        low += bounds.excludes_low and low == bounds.low.scaleb(places)
    if bounds.high is not None:
        high = int(bounds.high.scaleb(places).to_integral_value(ROUND_FLOOR))
        high -= bounds.excludes_high and high == bounds.high.scaleb(places)
    return low, high


def naturals(low: int, high: int | None) -> Node:
    """Natural numbers from low to high without leading zeros."""
    if high is not None and high < low:
        return NOTHING
    parts: list[Node] = []
    if high is None:
        high = 10 ** max(MAX_DIGITS, len(str(low))) - 1
    first, last = len(str(low)), len(str(high))
    for length in {first, last}:
        start, end = max(low, 10 ** (length - 1) if length > 1 else 0), min(high, 10**length - 1)
        if length == last > first + 1 and end == 10**length - 1:
            last += 1  # all of that length too
        else:
            parts.append(_same_length(str(start), str(end)))
    if last > first + 1:
        parts.append(sequence(chars("1-9"), Repeat(DIGIT, first, last - 2)))
    return choice(*parts)


def _same_length(low: str, high: str) -> Node:
    """Digits from low to high, which have equally many."""
    if not low:
        return EMPTY
    if set(low) == {"0"} and set(high) == {"9"}:
        return Repeat(DIGIT, len(low), len(low)) if len(low) > 1 else DIGIT
    a, b, rest = low[0], high[0], len(low) - 1
    if a == b:
        return sequence(Text(a), _same_length(low[1:], high[1:]))
    parts: list[Node] = []
    first, last = int(a), int(b)
    if low[1:] != "0" * rest:
        parts.append(sequence(Text(a), _same_length(low[1:], "9" * rest)))
        first += 1
    if high[1:] != "9" * rest:
        parts.append(sequence(Text(b), _same_length("0" * rest, high[1:])))
        last -= 1
    if first <= last:
        parts.append(sequence(_digit(first, last), _same_length("0" * rest, "9" * rest)))
    return choice(*parts)


def _digit(low: int, high: int) -> Chars:
    return Chars(((48 + low, 48 + high),))


def _decimals(low: int, high: int | None, places: int) -> Node:
    """Numbers from low to high in units of the last of so many decimal places."""
    if high is not None and high < low:
        return NOTHING
    unit: int = 10**places
    first, low_rest = divmod(low, unit)
    if high is None:
        above = sequence(naturals(first + 1, None), _any_fraction(places))
        return choice(sequence(Text(str(first)), _fraction(low_rest, unit - 1, places)), above)
    last, high_rest = divmod(high, unit)
    if first == last:
        return sequence(Text(str(first)), _fraction(low_rest, high_rest, places))
    return choice(
        sequence(Text(str(first)), _fraction(low_rest, unit - 1, places)),
        sequence(naturals(first + 1, last - 1), _any_fraction(places)),
        sequence(Text(str(last)), _fraction(0, high_rest, places)),
    )


def _any_fraction(places: int) -> Node:
    return optional(sequence(Text("."), Repeat(DIGIT, 1, places))) if places else EMPTY


def _fraction(low: int, high: int, places: int) -> Node:
    """A point and decimals from low to high in units of the last place; nothing, where that means zero."""
    if not places:
        return EMPTY
    some = sequence(Text("."), _places(str(low).rjust(places, "0"), str(high).rjust(places, "0"), False))
    return optional(some) if low == 0 else some


def _places(low: str, high: str, may_end: bool) -> Node:
    """Decimals that, filled up with zeros, lie from low to high."""
    if not low:
        return EMPTY
    ending = [EMPTY] if may_end and set(low) == {"0"} else []
    if set(low) == {"0"} and set(high) == {"9"}:
        return Repeat(DIGIT, 0 if may_end else 1, len(low))
    if set(high) == {"0"}:
        return Repeat(Text("0"), 0 if may_end else 1, len(low))
    a, b, rest = low[0], high[0], len(low) - 1
    if a == b:
        return choice(sequence(Text(a), _places(low[1:], high[1:], True)), *ending)
    parts = [
        sequence(Text(a), _places(low[1:], "9" * rest, True)),
        sequence(Text(b), _places("0" * rest, high[1:], True)),
    ]
    if int(a) + 1 <= int(b) - 1:
        parts.append(sequence(_digit(int(a) + 1, int(b) - 1), _places("0" * rest, "9" * rest, True)))
    return choice(*parts, *ending)
