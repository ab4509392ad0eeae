"""What a run costs a budget: exact decimals, rounded up once, that add and subtract exactly.

A cost has one coordinate for each of the filter's orders (Rényi divergences), one for Gaussian
DP (μ²), two for the plain sum (ε and δ as certified), and the run's steps on fresh lots by
their kind. A coordinate is a whole number of ``UNIT``, or infinite where nothing bounds it; a sum
counts its infinite terms, so that taking one away again leaves exactly what was there before.

>>> one = Cost.of(renyi=(0.1, math.inf), mu_squared=0.25, epsilon=1.0, delta=1e-6)
>>> (one + one - one) == one
True
>>> one.as_document()["renyi"]
['0.1', 'Infinity']

Reference: ``docs/theorems/privacy-filter.md``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, Context, Decimal
from typing import Any, Self

from affidavit.accountants.composition import parts
from affidavit.plan import (
    Event,
    PoissonSampledGroupGaussian,
    PoissonSubsampledGaussian,
    TruncatedPoissonGaussian,
    TruncatedPoissonGroupGaussian,
    WithoutReplacementGaussian,
    WithoutReplacementGroupGaussian,
    event_document,
    parse_event,
)

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


Step = (
    PoissonSubsampledGaussian
    | PoissonSampledGroupGaussian
    | WithoutReplacementGaussian
    | WithoutReplacementGroupGaussian
    | TruncatedPoissonGaussian
    | TruncatedPoissonGroupGaussian
)
"""A step on a lot that is drawn anew, with noise of its own."""


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps by their kind, and how many other releases there are.

    Each step must be bounded by its kind whatever was released before it.
    """

    kinds: tuple[tuple[Step, int], ...] = ()
    others: int = 0

    @classmethod
    def of(cls, event: Event) -> Self:
        """The releases of ``event``."""
        releases = parts(event)
        counts = {part: n for part, n in releases if isinstance(part, Step)}
        return cls._sorted(counts, sum(n for _, n in releases) - sum(counts.values()))

    @classmethod
    def _sorted(cls, counts: Mapping[Step, int], others: int) -> Self:
        return cls(tuple(sorted(((kind, n) for kind, n in counts.items() if n), key=repr)), others)

    def __add__(self, other: Steps) -> Steps:
        counts = Counter(dict(self.kinds))
        counts.update(dict(other.kinds))
        return self._sorted(counts, self.others + other.others)

    def times(self, count: int) -> Steps:
        """The steps of ``count`` such runs."""
        return self._sorted({kind: n * count for kind, n in self.kinds}, self.others * count)

    def within(self, other: Steps) -> bool:
        """Whether ``other`` has no fewer releases of any kind."""
        most = dict(other.kinds)
        enough = all(n <= most.get(kind, 0) for kind, n in self.kinds)
        return enough and self.others <= other.others

    def worst(self) -> Step | None:
        """A kind of step that dominates all of these; None for other releases, or for none."""
        if not self.kinds:
            return None
        kinds = [kind for kind, _ in self.kinds]
        base = replace(kinds[0], noise_multiplier=min(kind.noise_multiplier for kind in kinds))
        if isinstance(base, PoissonSubsampledGaussian):
            rates = [kind.sampling_probability for kind in kinds if isinstance(kind, type(base))]
            base = replace(base, sampling_probability=max(rates))
        return base if self.dominated_by(base) is not None else None

    def dominated_by(self, base: Step) -> int | None:
        """How many steps there are if ``base`` dominates each of the releases; None otherwise."""
        if self.others or not all(_dominates(base, kind) for kind, _ in self.kinds):
            return None
        return sum(n for _, n in self.kinds)

    def as_document(self) -> dict[str, Any]:
        """JSON data that ``read`` takes back exactly."""
        kinds = [{"event": event_document(kind), "count": count} for kind, count in self.kinds]
        return {"kinds": kinds, "others": self.others}

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Self:
        """The steps of ``as_document``; raises ``ValueError`` or ``KeyError``."""
        kinds = [(parse_event(item["event"]), int(item["count"])) for item in document["kinds"]]
        result = [(kind, n) for kind, n in kinds if isinstance(kind, Step)]
        if len(result) < len(kinds):
            raise ValueError("a kind of step is a Gaussian release on a lot that is drawn anew")
        return cls(tuple(result), int(document["others"]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """One run's cost, or the sum of many; ``renyi`` has one coordinate an order."""

    renyi: tuple[Coordinate, ...]
    mu_squared: Coordinate
    epsilon: Coordinate
    delta: Coordinate
    steps: Steps

    @classmethod
    def of(
        cls,
        *,
        renyi: Sequence[float],
        mu_squared: float,
        epsilon: float,
        delta: float,
        steps: Steps = Steps(others=1),
    ) -> Self:
        """A cost from proved upper bounds, each rounded up; ``math.inf`` where there is none.

        Divergences and ε in nats; raises ``ValueError`` for a bound that is negative or NaN.
        """
        return cls(
            renyi=tuple(Coordinate.up(item, UNIT) for item in renyi),
            mu_squared=Coordinate.up(mu_squared, UNIT),
            epsilon=Coordinate.up(epsilon, UNIT),
            delta=Coordinate.up(delta, DELTA_UNIT),
            steps=steps,
        )

    @classmethod
    def nothing(cls, orders: int) -> Self:
        """What no run at all costs, at so many orders."""
        return cls.of(renyi=(0.0,) * orders, mu_squared=0.0, epsilon=0.0, delta=0.0, steps=Steps())

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            renyi=tuple(a + b for a, b in zip(self.renyi, other.renyi, strict=True)),
            mu_squared=self.mu_squared + other.mu_squared,
            epsilon=self.epsilon + other.epsilon,
            delta=self.delta + other.delta,
            steps=self.steps + other.steps,
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
            steps=self.steps.times(count),
        )

    def least(self, other: Cost) -> Cost:
        """The lower of both in every coordinate, where either is a bound of one run.

        The steps are those of ``other`` where it has no more of any kind.
        """
        return Cost(
            renyi=tuple(map(_lower, self.renyi, other.renyi)),
            mu_squared=_lower(self.mu_squared, other.mu_squared),
            epsilon=_lower(self.epsilon, other.epsilon),
            delta=_lower(self.delta, other.delta),
            steps=other.steps if other.steps.within(self.steps) else self.steps,
        )

    def within(self, other: Cost) -> bool:
        """Whether no coordinate of this cost is above the other's."""
        return self.steps.within(other.steps) and other.least(self) == self

    def as_document(self) -> dict[str, Any]:
        """JSON data that ``read`` takes back exactly."""
        steps = {"steps": self.steps.as_document()} if self.steps != Steps() else {}
        return steps | {
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
            steps=Steps.read(document["steps"]) if "steps" in document else Steps(),
        )


def _dominates(base: Step, kind: Step) -> bool:
    """Theorem 4: more noise, and rarer Poisson draws, are a channel behind the step ``base``."""
    if type(kind) is not type(base) or kind.noise_multiplier < base.noise_multiplier:
        return False
    kind = replace(kind, noise_multiplier=base.noise_multiplier)
    if isinstance(kind, PoissonSubsampledGaussian) and isinstance(base, type(kind)):
        rate = max(kind.sampling_probability, base.sampling_probability)
        kind = replace(kind, sampling_probability=rate)
    return kind == base


def _lower(one: Coordinate, other: Coordinate) -> Coordinate:
    return min(one, other, key=lambda item: (item.unbounded, item.units))
