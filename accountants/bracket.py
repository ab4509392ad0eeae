"""A lower and an upper bound of a number.

Every guarantee that Affidavit publishes is a ``Bracket``: ``upper`` is a proved upper bound and
``lower`` a proved lower bound of the tight value (0 if the method has none). Printing never weakens
a bound: ``upper`` is rounded up and ``lower`` down.

>>> Bracket(lower=1.0, upper=1.25).width
0.25
>>> decimal_up(7.98505, digits=4), decimal_down(7.98505, digits=4)
('7.986', '7.985')
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal


@dataclass(frozen=True, kw_only=True, slots=True)
class Bracket:
    """``lower <= value <= upper``; ``upper`` may be infinite, and neither is NaN.

    The unit is that of the value: nats for ε, a probability for δ.
    """

    lower: float
    upper: float

    def __post_init__(self) -> None:
        if not self.lower <= self.upper:
            raise ValueError(f"a bracket needs lower <= upper, got {self.lower}, {self.upper}")

    @property
    def width(self) -> float:
        """``upper - lower``, in the same unit."""
        return self.upper - self.lower

    def intersect(self, other: Bracket) -> Bracket:
        """Return the intersection, which two proved brackets of one value always have.

        Raises ``ValueError`` if it is empty.
        """
        return Bracket(lower=max(self.lower, other.lower), upper=min(self.upper, other.upper))

    def larger(self, other: Bracket) -> Bracket:
        """Return the bracket of the larger of two values, one in each bracket."""
        return Bracket(lower=max(self.lower, other.lower), upper=max(self.upper, other.upper))

    def meets(self, other: Bracket, relative: float = 0.0) -> bool:
        """Return whether the brackets overlap after widening both by ``relative``."""
        slack = 1.0 + relative
        return self.lower <= other.upper * slack and other.lower <= self.upper * slack


def decimal_up(value: float, digits: int = 12) -> str:
    """Return the least decimal of at most ``digits`` digits whose double is >= ``value``."""
    return _decimal(value, digits, ROUND_CEILING)


def decimal_down(value: float, digits: int = 12) -> str:
    """Return the greatest decimal of at most ``digits`` digits whose double is <= ``value``."""
    return _decimal(value, digits, ROUND_FLOOR)


def _decimal(value: float, digits: int, rounding: str) -> str:
    if math.isnan(value):
        raise ValueError("a bound is never NaN")
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    # The shortest decimal that parses as this double, so that 1e-5 stays 1e-5.
    shortest = Decimal(repr(value))
    rounded = Context(prec=digits, rounding=rounding).create_decimal(shortest)
    return format(rounded.normalize(), "f" if 1e-4 <= abs(value) < 1e16 or value == 0 else "e")
