"""The cost of a run to a budget: exact decimals, rounded up once, that add and subtract exactly.

A cost has one coordinate for each order of the filter (Rényi divergences), one for Gaussian DP
(μ²), two for basic composition (ε and δ as certified), and the run's steps on fresh lots by kind. A
coordinate is a whole number of ``UNIT``, or infinite if nothing bounds it. A sum counts its
infinite terms, so subtracting one restores the previous sum exactly.

>>> one = Cost.of(renyi=(0.1, math.inf), mu_squared=0.25, epsilon=1.0, delta=1e-6)
>>> (one + one - one) == one
True
>>> one.as_document()["renyi"]
['0.1', 'Infinity']

Reference: ``docs/theorems/privacy-filter.md``.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, Context, Decimal
from typing import Any, Self

from affidavit.accountants.composition import parts
from affidavit.plan import events

UNIT = Decimal("1e-12")
"""The last decimal of divergences, ε (nats) and μ². That of δ is ``DELTA_UNIT``."""
DELTA_UNIT = Decimal("1e-24")
_EXACT = Context(prec=80, rounding=ROUND_CEILING)


@dataclass(frozen=True, slots=True)
class Coordinate:
    """A sum of costs in one coordinate: ``units`` of the finite terms, and the number of others."""

    units: int = 0
    unbounded: int = 0

    def __add__(self, other: Coordinate) -> Coordinate:
        return Coordinate(self.units + other.units, self.unbounded + other.unbounded)

    def times(self, count: int) -> Coordinate:
        """Return the sum of ``count`` such terms."""
        return Coordinate(self.units * count, self.unbounded * count)

    def value(self, unit: Decimal) -> float:
        """Return the sum as a double, rounded up."""
        if self.unbounded:
            return math.inf
        exact = _EXACT.multiply(Decimal(self.units), unit)
        result = float(exact)
        return math.nextafter(result, math.inf) if Decimal(result) < exact else result

    def at_most(self, limit: float, unit: Decimal) -> bool:
        """Return whether the sum is at most the shortest decimal of ``limit``."""
        limited = Decimal(repr(limit))
        return not self.unbounded and _EXACT.multiply(Decimal(self.units), unit) <= limited

    def written(self, unit: Decimal) -> str:
        """Return the sum as an exact decimal."""
        if self == Coordinate(0, 1):
            return "Infinity"
        finite = format(_EXACT.multiply(Decimal(self.units), unit).normalize(), "f")
        return f"{finite}+{self.unbounded}*Infinity" if self.unbounded else finite

    @classmethod
    def read(cls, text: str, unit: Decimal) -> Coordinate:
        """Parse the text of ``written``; raises ``ValueError``."""
        finite, plus, infinite = text.partition("+")
        if text == "Infinity":
            return cls(0, 1)
        units = _EXACT.divide(Decimal(finite), unit)
        if units != units.to_integral_value():
            raise ValueError(f"{text!r} is not a whole number of {unit}")
        return cls(int(units), int(infinite.removesuffix("*Infinity")) if plus else 0)

    @classmethod
    def up(cls, value: float, unit: Decimal) -> Coordinate:
        """Return ``value`` rounded up; raises ``ValueError`` if it is negative or NaN."""
        if math.isnan(value) or value < 0:
            raise ValueError(f"a cost is at least zero, got {value!r}")
        if math.isinf(value):
            return cls(0, 1)
        # The shortest decimal that parses as this double, so that 1e-5 stays 1e-5. It differs by
        # less than a rounding, for which every bound has an allowance.
        exact = _EXACT.divide(Decimal(repr(float(value))), unit)
        return cls(int(exact.to_integral_value(rounding=ROUND_CEILING)), 0)


Step = (
    events.PoissonSubsampledGaussian
    | events.PoissonSampledGroupGaussian
    | events.WithoutReplacementGaussian
    | events.WithoutReplacementGroupGaussian
    | events.TruncatedPoissonGaussian
    | events.TruncatedPoissonGroupGaussian
)
"""A step on a fresh lot with its own noise."""


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps by kind, and the number of other releases.

    The kind must bound a step for all previous releases.
    """

    kinds: tuple[tuple[Step, int], ...] = ()
    others: int = 0

    @classmethod
    def of(cls, event: events.Event) -> Self:
        """Return the releases of ``event``."""
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
        """Return the steps of ``count`` such runs."""
        return self._sorted({kind: n * count for kind, n in self.kinds}, self.others * count)

    def within(self, other: Steps) -> bool:
        """Return whether ``other`` has at least as many releases of every kind."""
        most = dict(other.kinds)
        enough = all(n <= most.get(kind, 0) for kind, n in self.kinds)
        return enough and self.others <= other.others

    def worst(self) -> Step | None:
        """Return a kind of step that dominates all of these releases, or None."""
        if not self.kinds:
            return None
        kinds = [kind for kind, _ in self.kinds]
        base = replace(kinds[0], noise_multiplier=min(kind.noise_multiplier for kind in kinds))
        if isinstance(base, events.PoissonSubsampledGaussian):
            rates = [kind.sampling_probability for kind in kinds if isinstance(kind, type(base))]
            base = replace(base, sampling_probability=max(rates))
        return base if self.dominated_by(base) is not None else None

    def dominated_by(self, base: Step) -> int | None:
        """Return the number of steps if ``base`` dominates every release, else None."""
        if self.others or not all(_dominates(base, kind) for kind, _ in self.kinds):
            return None
        return sum(n for _, n in self.kinds)

    def as_document(self) -> dict[str, Any]:
        """Return JSON data that ``read`` parses exactly."""
        kinds = [
            {"event": events.event_document(kind), "count": count} for kind, count in self.kinds
        ]
        return {"kinds": kinds, "others": self.others}

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Self:
        """Parse the data of ``as_document``; raises ``ValueError`` or ``KeyError``."""
        kinds = [
            (events.parse_event(item["event"]), int(item["count"])) for item in document["kinds"]
        ]
        result = [(kind, n) for kind, n in kinds if isinstance(kind, Step)]
        if len(result) < len(kinds):
            raise ValueError("a kind of step must be a Gaussian release on a fresh lot")
        return cls(tuple(result), int(document["others"]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """The cost of one run, or a sum of costs; ``renyi`` has one coordinate per order."""

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
        """Return a cost from proved upper bounds, rounded up; ``math.inf`` stands for no bound.

        Divergences and ε are in nats. Raises ``ValueError`` for a negative bound or NaN.
        """
        return cls(
            renyi=tuple(Coordinate.up(item, UNIT) for item in renyi),
            mu_squared=Coordinate.up(mu_squared, UNIT),
            epsilon=Coordinate.up(epsilon, UNIT),
            delta=Coordinate.up(delta, DELTA_UNIT),
            steps=steps,
        )

    @classmethod
    def zero(cls, orders: int) -> Self:
        """Return the cost of no runs at ``orders`` orders."""
        return cls.of(renyi=(0.0,) * orders, mu_squared=0.0, epsilon=0.0, delta=0.0, steps=Steps())

    def __add__(self, other: Cost) -> Cost:
        return self._combined(other, operator.add, self.steps + other.steps)

    def _combined(
        self, other: Cost, combine: Callable[[Coordinate, Coordinate], Coordinate], steps: Steps
    ) -> Cost:
        return Cost(
            renyi=tuple(combine(a, b) for a, b in zip(self.renyi, other.renyi, strict=True)),
            mu_squared=combine(self.mu_squared, other.mu_squared),
            epsilon=combine(self.epsilon, other.epsilon),
            delta=combine(self.delta, other.delta),
            steps=steps,
        )

    def __sub__(self, other: Cost) -> Cost:
        return self + other.times(-1)

    def times(self, count: int) -> Cost:
        """Return the cost of ``count`` such runs."""
        return Cost(
            renyi=tuple(item.times(count) for item in self.renyi),
            mu_squared=self.mu_squared.times(count),
            epsilon=self.epsilon.times(count),
            delta=self.delta.times(count),
            steps=self.steps.times(count),
        )

    def least(self, other: Cost) -> Cost:
        """Return the lower of two bounds of one run in every coordinate.

        The steps are those of ``other`` if it has no more of any kind.
        """
        steps = other.steps if other.steps.within(self.steps) else self.steps
        return self._combined(other, _lower, steps)

    def within(self, other: Cost) -> bool:
        """Return whether no coordinate of this cost is above the other's."""
        return self.steps.within(other.steps) and other.least(self) == self

    def as_document(self) -> dict[str, Any]:
        """Return JSON data that ``read`` parses exactly."""
        steps = {"steps": self.steps.as_document()} if self.steps != Steps() else {}
        return steps | {
            "renyi": [item.written(UNIT) for item in self.renyi],
            "mu_squared": self.mu_squared.written(UNIT),
            "epsilon": self.epsilon.written(UNIT),
            "delta": self.delta.written(DELTA_UNIT),
        }

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Self:
        """Parse the data of ``as_document``; raises ``ValueError`` or ``KeyError``."""
        return cls(
            renyi=tuple(Coordinate.read(item, UNIT) for item in document["renyi"]),
            mu_squared=Coordinate.read(document["mu_squared"], UNIT),
            epsilon=Coordinate.read(document["epsilon"], UNIT),
            delta=Coordinate.read(document["delta"], DELTA_UNIT),
            steps=Steps.read(document["steps"]) if "steps" in document else Steps(),
        )


def _dominates(base: Step, kind: Step) -> bool:
    """Theorem 4: more noise and a smaller Poisson rate are a channel behind the step ``base``."""
    if type(kind) is not type(base) or kind.noise_multiplier < base.noise_multiplier:
        return False
    kind = replace(kind, noise_multiplier=base.noise_multiplier)
    if isinstance(kind, events.PoissonSubsampledGaussian) and isinstance(base, type(kind)):
        rate = max(kind.sampling_probability, base.sampling_probability)
        kind = replace(kind, sampling_probability=rate)
    return kind == base


def _lower(one: Coordinate, other: Coordinate) -> Coordinate:
    return min(one, other, key=lambda item: (item.unbounded, item.units))
