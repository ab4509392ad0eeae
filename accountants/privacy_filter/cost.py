"""What a run costs a budget: exact decimals, rounded up once, that add and subtract exactly.

A cost has one coordinate for each of the filter's orders (Rényi divergences), one for Gaussian
DP (μ²), and two for the plain sum (ε and δ as certified). A coordinate is a whole number of
``UNIT``, or infinite where nothing bounds it; a sum counts its infinite terms, so that
taking one away again leaves exactly what was there before.

>>> one = Cost.of(renyi=(0.1, math.inf), mu_squared=0.25, epsilon=1.0, delta=1e-6)
>>> (one + one - one) == one
True
>>> one.as_document()["renyi"]
['0.1', 'Infinity']

Reference: ``docs/theorems/privacy-filter.md``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context, Decimal
from typing import Any, Self

UNIT = Decimal("1e-12")
"""The last decimal of a divergence and of ε (nats), and of μ²; δ has ``DELTA_UNIT``."""
DELTA_UNIT = Decimal("1e-24")
_EXACT = Context(prec=80, rounding=ROUND_CEILING)


@dataclass(frozen=True, slots=True)
class Coordinate:
    """A sum of costs in one coordinate: ``units`` of the finite terms, and how many are not."""

    units: int = 0
    unbounded: int = 0

    def __add__(self, other: Coordinate) -> Coordinate:
        return Coordinate(self.units + other.units, self.unbounded + other.unbounded)

    def __sub__(self, other: Coordinate) -> Coordinate:
        return Coordinate(self.units - other.units, self.unbounded - other.unbounded)

    def times(self, count: int) -> Coordinate:
        """The sum of ``count`` such terms."""
        return Coordinate(self.units * count, self.unbounded * count)

    def value(self, unit: Decimal) -> float:
        """The sum as a double, not below it."""
        if self.unbounded:
            return math.inf
        exact = _EXACT.multiply(Decimal(self.units), unit)
        result = float(exact)
        return math.nextafter(result, math.inf) if Decimal(result) < exact else result

    def at_most(self, limit: float, unit: Decimal) -> bool:
        """Whether the sum is at most the decimal by which ``limit`` is written."""
        limited = Decimal(repr(limit))
        return not self.unbounded and _EXACT.multiply(Decimal(self.units), unit) <= limited

    def written(self, unit: Decimal) -> str:
        """The sum as an exact decimal."""
        if self.unbounded:
            return "Infinity" if self.unbounded == 1 and not self.units else self._mixed(unit)
        return format(_EXACT.multiply(Decimal(self.units), unit).normalize(), "f")

    def _mixed(self, unit: Decimal) -> str:
        finite = Coordinate(self.units).written(unit)
        return f"{finite}+{self.unbounded}*Infinity"

    @classmethod
    def read(cls, text: str, unit: Decimal) -> Coordinate:
        """What ``written`` wrote; raises ``ValueError``."""
        finite, plus, infinite = text.partition("+")
        if text == "Infinity":
            return cls(0, 1)
        units = _EXACT.divide(Decimal(finite), unit)
        if units != units.to_integral_value():
            raise ValueError(f"{text!r} is not a whole number of {unit}")
        return cls(int(units), int(infinite.removesuffix("*Infinity")) if plus else 0)

    @classmethod
    def up(cls, value: float, unit: Decimal) -> Coordinate:
        """``value`` up to whole ``unit``; raises ``ValueError`` if it is negative or NaN."""
        if math.isnan(value) or value < 0:
            raise ValueError(f"a cost is at least zero, got {value!r}")
        if math.isinf(value):
            return cls(0, 1)
        # The shortest decimal that reads back as this double, so that 1e-5 stays 1e-5; it is
        # off by less than a rounding, which every bound that comes here has to spare.
        exact = _EXACT.divide(Decimal(repr(float(value))), unit)
        return cls(int(exact.to_integral_value(rounding=ROUND_CEILING)), 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """One run's cost, or the sum of many; ``renyi`` has one coordinate an order."""

    renyi: tuple[Coordinate, ...]
    mu_squared: Coordinate
    epsilon: Coordinate
    delta: Coordinate

    @classmethod
    def of(cls, *, renyi: Sequence[float], mu_squared: float, epsilon: float, delta: float) -> Self:
        """A cost from proved upper bounds, each rounded up; ``math.inf`` where there is none.

        Divergences and ε in nats; raises ``ValueError`` for a bound that is negative or NaN.
        """
        return cls(
            renyi=tuple(Coordinate.up(item, UNIT) for item in renyi),
            mu_squared=Coordinate.up(mu_squared, UNIT),
            epsilon=Coordinate.up(epsilon, UNIT),
            delta=Coordinate.up(delta, DELTA_UNIT),
        )

    @classmethod
    def nothing(cls, orders: int) -> Self:
        """What no run at all costs, at so many orders."""
        return cls.of(renyi=(0.0,) * orders, mu_squared=0.0, epsilon=0.0, delta=0.0)

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            renyi=tuple(a + b for a, b in zip(self.renyi, other.renyi, strict=True)),
            mu_squared=self.mu_squared + other.mu_squared,
            epsilon=self.epsilon + other.epsilon,
            delta=self.delta + other.delta,
        )

    def __sub__(self, other: Cost) -> Cost:
        return self + other.times(-1)

    def times(self, count: int) -> Cost:
        """What ``count`` such runs cost."""
        return Cost(
            renyi=tuple(item.times(count) for item in self.renyi),
            mu_squared=self.mu_squared.times(count),
            epsilon=self.epsilon.times(count),
            delta=self.delta.times(count),
        )

    def least(self, other: Cost) -> Cost:
        """The lower of both in every coordinate, where either is a bound of one run."""
        return Cost(
            renyi=tuple(map(_lower, self.renyi, other.renyi)),
            mu_squared=_lower(self.mu_squared, other.mu_squared),
            epsilon=_lower(self.epsilon, other.epsilon),
            delta=_lower(self.delta, other.delta),
        )

    def within(self, other: Cost) -> bool:
        """Whether no coordinate of this cost is above the other's."""
        return self.least(other) == self

    def as_document(self) -> dict[str, Any]:
        """JSON data that ``read`` takes back exactly."""
        return {
            "renyi": [item.written(UNIT) for item in self.renyi],
            "mu_squared": self.mu_squared.written(UNIT),
            "epsilon": self.epsilon.written(UNIT),
            "delta": self.delta.written(DELTA_UNIT),
        }

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Self:
        """The cost of ``as_document``; raises ``ValueError`` or ``KeyError``."""
        return cls(
            renyi=tuple(Coordinate.read(item, UNIT) for item in document["renyi"]),
            mu_squared=Coordinate.read(document["mu_squared"], UNIT),
            epsilon=Coordinate.read(document["epsilon"], UNIT),
            delta=Coordinate.read(document["delta"], DELTA_UNIT),
        )


def _lower(one: Coordinate, other: Coordinate) -> Coordinate:
    return min(one, other, key=lambda item: (item.unbounded, item.units))
