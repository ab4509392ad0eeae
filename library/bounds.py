"""A proved upper bound that can be used as a number.

>>> bound = Bound(1.0000001, lower=0.9)
>>> f"{bound:.3f}", bound.lower, bound + 1 > 2
('1.001', 0.9, True)
"""

from __future__ import annotations

from decimal import ROUND_CEILING, Decimal, localcontext
from typing import Any

from affidavit.accountants import Bracket


class Bound(float):
    """A proved upper bound, and below it the proved ``lower`` bound on the tight value.

    In the unit of what is bounded: nats for ε, a probability for δ. ``confidence`` is the
    probability with which a sampled bound holds, and None where it is certain. Formatting
    rounds up, so that a shorter number is a bound too.
    """

    __slots__ = ("_confidence", "_lower")
    _lower: float
    _confidence: float | None

    def __new__(cls, upper: float, *, lower: float = 0.0, confidence: float | None = None) -> Bound:
        """Raises ``ValueError`` unless ``lower <= upper``."""
        Bracket(lower=lower, upper=upper)
        bound = super().__new__(cls, upper)
        bound._lower, bound._confidence = lower, confidence
        return bound

    @property
    def upper(self) -> float:
        """The bound itself, as a plain float."""
        return float(self)

    @property
    def lower(self) -> float:
        """The proved lower bound, in the same unit; 0 where a method has none."""
        return self._lower

    @property
    def confidence(self) -> float | None:
        """The probability with which the bound holds; None where it is certain."""
        return self._confidence

    def __format__(self, spec: str) -> str:
        if not spec:
            return float.__repr__(self)
        with localcontext(rounding=ROUND_CEILING):
            return format(Decimal(float.__repr__(self)), spec)

    def __getnewargs_ex__(self) -> tuple[tuple[float], dict[str, Any]]:
        return (float(self),), {"lower": self._lower, "confidence": self._confidence}


def bound_of(bracket: Bracket, confidence: float | None = None) -> Bound:
    """``bracket`` as a number."""
    return Bound(bracket.upper, lower=bracket.lower, confidence=confidence)
