"""Groups of records as chains of neighbours: docs/theorems/group-privacy.md, the first theorem.

>>> from affidavit.accountants.gaussian import GaussianCurve
>>> one = GaussianCurve(mu=1.0)
>>> round(chained_epsilon(lambda delta: one.epsilon(delta).upper, 1e-6, 4), 2)
26.4
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from affidavit.accountants.bracket import Bracket
from affidavit.accountants.bracketing_curves import LeastCurve, adjusted, closed, orders_of
from affidavit.accountants.composition import leaves
from affidavit.accountants.protocol import AccountantError, PrivacyCurve, Refinable
from affidavit.plan import (
    Composed,
    Event,
    Leaf,
    PoissonSampledGroupGaussian,
    PoissonSubsampledGaussian,
    Repeated,
    TruncatedPoissonGaussian,
    TruncatedPoissonGroupGaussian,
    WithoutReplacementGaussian,
    WithoutReplacementGroupGaussian,
)

Group = (
    PoissonSampledGroupGaussian | TruncatedPoissonGroupGaussian | WithoutReplacementGroupGaussian
)
NARROW = 1e-2
"""Relative width of a bracket up to which no chain is asked."""
_MAX_REFINED = 8
"""Links whose narrower bounds are worth their time."""
_MIN_DELTA = 1e-300
_HALVINGS, _MIN_SHARE, _RUNG = 40, 1e-30, 0.25
"""Of the search for a smaller δ, the smallest that is looked for, of the first one, and how far
apart, as a ratio, the δ lie at which neighbours are known."""


def of_one_record(event: Event) -> tuple[Event | None, int]:
    """``event`` of users of m records as that of neighbours that differ in one of them, and m.

    None where a release is no sample of users, of one m for all, and where all are samples by
    Poisson, whose bound is attained.
    """
    parts = leaves(event)
    samples = [leaf for leaf, _ in parts if isinstance(leaf, Group)]
    numbers = {leaf.records for leaf in samples}
    if len(samples) < len(parts) or len(numbers) != 1:
        return None, 0
    if all(isinstance(leaf, PoissonSampledGroupGaussian) for leaf in samples):
        return None, 0
    result = []
    for leaf, count in parts:
        one = _of_one_record(leaf) if isinstance(leaf, Group) else None
        if one is None:
            return None, 0
        result.append(Repeated(event=one, count=count))
    return Composed(events=tuple(result)), samples[0].records


def _of_one_record(leaf: Group) -> Leaf | None:
    if isinstance(leaf, PoissonSampledGroupGaussian):
        return PoissonSubsampledGaussian(
            sampling_probability=leaf.sampling_probability,
            noise_multiplier=leaf.noise_multiplier,
            pair=leaf.pair,
        )
    if isinstance(leaf, WithoutReplacementGroupGaussian):
        return WithoutReplacementGaussian(
            dataset_size=leaf.dataset_size,
            sample_size=leaf.sample_size,
            noise_multiplier=leaf.noise_multiplier,
        )
    # Under add_remove the larger of two neighbours has up to m records more.
    size = leaf.dataset_size + (leaf.records - 1 if leaf.neighbours == "add_remove" else 0)
    if leaf.max_lot_size > size:
        return None
    return TruncatedPoissonGaussian(
        dataset_size=size,
        sampling_probability=leaf.sampling_probability,
        max_lot_size=leaf.max_lot_size,
        noise_multiplier=leaf.noise_multiplier,
        neighbours=leaf.neighbours,
    )


def chained_epsilon(
    neighbours: Callable[[float], float], delta: float, links: int, most: float = math.inf
) -> float:
    """An upper bound of ε (nats) at ``delta`` between data sets so many ``links`` apart.

    ``neighbours`` bounds ε between neighbours, in either order, at the δ that it is called with.
    Infinite where it is above ``most``.
    """
    total = 0.0
    for _ in range(links):
        at = delta / links * math.exp(-total) * (1 - 1e-9)
        if at < _MIN_DELTA or total > most:
            return math.inf
        total = (total + float(neighbours(at))) * (1 + 2.0**-50)
    return total if total <= most else math.inf


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainedCurve:
    """Data sets ``links`` apart: the upper ends of ``above``, each computed where those are wide.

    After these a chain of ``neighbours`` is computed. The highest lower ends of ``below`` count.
    """

    above: tuple[PrivacyCurve, ...]
    below: tuple[PrivacyCurve, ...]
    neighbours: PrivacyCurve
    links: int

    def with_width(self, relative_width: float) -> ChainedCurve:
        """The same with narrower or wider brackets of each, where they can be had."""
        return replace(
            self,
            above=tuple(adjusted(curve, relative_width) for curve in self.above),
            below=tuple(adjusted(curve, relative_width) for curve in self.below),
            neighbours=adjusted(self.neighbours, relative_width)
            if self._is_short
            else self.neighbours,
        )

    @property
    def refined(self) -> ChainedCurve | None:
        """The chain of what takes a second for each link, if it has not too many."""
        link = self.neighbours.refined if isinstance(self.neighbours, Refinable) else None
        return replace(self, neighbours=link) if link is not None and self._is_short else None

    @property
    def _is_short(self) -> bool:
        return self.links <= _MAX_REFINED

    @property
    def orders(self) -> tuple[ChainedCurve, ChainedCurve]:
        """Upper ends of either order: all links of a chain are of one."""
        above, neighbours = LeastCurve(self.above).orders, orders_of(self.neighbours)
        one, other = (
            replace(self, above=curves.curves, neighbours=link)
            for curves, link in zip(above, neighbours, strict=True)
        )
        return one, other

    def epsilon(self, delta: float) -> Bracket:
        """Bracket of ε (nats) at ``delta``; raises what the first curve does if none answers."""
        return self._bracket(
            lambda curve: curve.epsilon(delta), lambda own: self._chained(delta, own.upper)
        )

    def delta(self, epsilon: float) -> Bracket:
        """Bracket of δ at ``epsilon`` (nats); raises what the first curve does if none answers."""
        return self._bracket(
            lambda curve: curve.delta(epsilon), lambda own: self._chained_delta(epsilon, own)
        )

    def _bracket(
        self, answer: Callable[[PrivacyCurve], Bracket], chained: Callable[[Bracket], float]
    ) -> Bracket:
        errors: list[AccountantError] = []
        result = closed(math.inf, self.below, answer)
        for curve in (*self.above, None):
            try:
                upper = chained(result) if curve is None else answer(curve).upper
            except AccountantError as error:
                errors.append(error)
                continue
            upper = min(upper, result.upper)
            result = Bracket(lower=min(result.lower, upper), upper=upper)
            if result.lower >= upper * (1 - NARROW):
                break
        if math.isinf(result.upper) and errors:
            raise errors[0]
        return result

    def _chained(self, delta: float, most: float) -> float:
        def neighbours(at: float) -> float:
            return self.neighbours.epsilon(at).upper

        return chained_epsilon(neighbours, delta, self.links, most)

    def _chained_delta(self, epsilon: float, own: Bracket) -> float:
        """A bound of δ by links whose ε are chosen by about what is known of neighbours."""
        most = self.neighbours.delta(0.0).upper

        def about(at: float) -> float:
            number, part = divmod(max(0.0, math.log(at / most) / math.log(_RUNG)), 1)
            low, high = (
                _about(self, most * _RUNG**rung) if rung else 0.0
                for rung in (int(number), int(number) + 1)
            )
            return low + part * (high - low) if math.isfinite(high) else high

        low, high = max(own.lower, min(1.0, own.upper) * _MIN_SHARE), min(1.0, own.upper)
        # What the chain does not reach there it reaches at no smaller δ.
        if chained_epsilon(about, high, self.links, epsilon) > epsilon:
            return high
        for _ in range(_HALVINGS):
            middle = math.sqrt(low * high)
            if chained_epsilon(about, middle, self.links, epsilon) <= epsilon:
                high = middle
            else:
                low = middle
        total = result = 0.0
        for link in range(1, self.links + 1):
            rest = epsilon - total
            at = high / self.links * math.exp(-total)
            one = rest if link == self.links else min(rest, about(at))
            result += math.exp(total) * self.neighbours.delta(max(0.0, one * (1 - 1e-12))).upper
            total += one
        return result * (1 + 1e-9)


@lru_cache(maxsize=512)
def _about(chain: ChainedCurve, delta: float) -> float:
    """About ε (nats) between neighbours of ``chain`` at ``delta``; infinite where none is known."""
    try:
        return float(chain.neighbours.epsilon(delta).upper)
    except AccountantError:
        return math.inf
