"""Bounds of groups of records by chains of neighbours.

>>> from affidavit.accountants.gaussian import GaussianCurve
>>> one = GaussianCurve(mu=1.0)
>>> round(chained_epsilon(lambda delta: one.epsilon(delta).upper, 1e-6, 4), 2)
26.4

Reference: docs/theorems/group-privacy.md, the first theorem.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from affidavit.accountants.bracket import Bracket
from affidavit.accountants.bracketing_curves import MinimumCurve, adjusted, close_bracket, orders_of
from affidavit.accountants.composition import leaves
from affidavit.accountants.protocol import AccountantError, PrivacyCurve, Refinable
from affidavit.plan import events

Group = (
    events.PoissonSampledGroupGaussian
    | events.TruncatedPoissonGroupGaussian
    | events.WithoutReplacementGroupGaussian
)
NARROW_WIDTH = 1e-2
"""Relative width of a bracket that is narrow enough: no chain is computed."""
_MAX_REFINED_LINKS = 8
"""Links whose narrower bounds are fast enough."""
_MIN_DELTA = 1e-300
_MAX_RATIO = 1.5
"""The most by which a bound of a link is above the least, if later links use it."""
_BISECTIONS, _MIN_DELTA_SHARE, _DELTA_RATIO = 40, 1e-30, 0.25
"""Steps and range, as a share of the first δ, of the search for a smaller δ, and the ratio of the δ
at which the curve of neighbours is sampled."""


def neighbour_event(event: events.Event) -> tuple[events.Event | None, int]:
    """Return the event between neighbours in one record for users of m records, and m.

    The event is None unless all releases sample users with the same m. It is also None if all are
    Poisson samples, whose bound is attained.
    """
    parts = leaves(event)
    samples = [leaf for leaf, _ in parts if isinstance(leaf, Group)]
    numbers = {leaf.records for leaf in samples}
    if len(samples) < len(parts) or len(numbers) != 1:
        return None, 0
    if all(isinstance(leaf, events.PoissonSampledGroupGaussian) for leaf in samples):
        return None, 0
    result = []
    for leaf, count in parts:
        one = _neighbour_leaf(leaf) if isinstance(leaf, Group) else None
        if one is None:
            return None, 0
        result.append(events.Repeated(event=one, count=count))
    return events.Composed(events=tuple(result)), samples[0].records


def _neighbour_leaf(leaf: Group) -> events.Leaf | None:
    if isinstance(leaf, events.PoissonSampledGroupGaussian):
        return events.PoissonSubsampledGaussian(
            sampling_probability=leaf.sampling_probability,
            noise_multiplier=leaf.noise_multiplier,
            pair=leaf.pair,
        )
    if isinstance(leaf, events.WithoutReplacementGroupGaussian):
        if leaf.zeroed:
            return None
        return events.WithoutReplacementGaussian(
            dataset_size=leaf.dataset_size,
            sample_size=leaf.sample_size,
            noise_multiplier=leaf.noise_multiplier,
        )
    # Under add_remove the larger of two neighbours has up to m more records.
    size = leaf.dataset_size + (leaf.records - 1 if leaf.neighbours == "add_remove" else 0)
    if leaf.max_lot_size > size:
        return None
    return events.TruncatedPoissonGaussian(
        dataset_size=size,
        sampling_probability=leaf.sampling_probability,
        max_lot_size=leaf.max_lot_size,
        noise_multiplier=leaf.noise_multiplier,
        neighbours=leaf.neighbours,
    )


def chained_epsilon(
    neighbours: Callable[[float], float],
    delta: float,
    links: int,
    most: float = math.inf,
    added: Callable[[float], float] | None = None,
) -> float:
    """Return an upper bound of ε (nats) at ``delta`` between data sets ``links`` neighbours apart.

    ``neighbours`` maps δ to a bound of ε between neighbours, in either order; or, with ``added``,
    of those of the first half of the links, and ``added`` of the others. The result is infinite if
    it is above ``most``.
    """
    total = one = 0.0
    for left in range(links, 0, -1):
        if added is not None and 2 * left <= links:
            neighbours, added, one = added, None, 0.0
        alike = left if added is None else left - links // 2
        at = delta / links * math.exp(-total) * (1 - 1e-9)
        # The δ of a link is smaller than that of the one before, so that its ε is no less.
        if at < _MIN_DELTA or total + alike * one > most:
            return math.inf
        one = float(neighbours(at))
        total = (total + one) * (1 + 2.0**-50)
    return total if total <= most else math.inf


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainedCurve:
    """The curve of data sets ``links`` neighbours apart.

    The upper bounds are those of ``above`` and of a chain of ``neighbours``, each computed only if
    the previous ones are wide. The lower bounds are the highest of ``below``. Where half of the
    links add records, ``added`` is their curve, and ``neighbours`` that of the others.
    """

    above: tuple[PrivacyCurve, ...]
    below: tuple[PrivacyCurve, ...]
    neighbours: PrivacyCurve
    links: int
    added: PrivacyCurve | None = None

    def with_width(self, relative_width: float) -> ChainedCurve:
        """Return this curve with narrower or wider brackets, where they are adjustable."""
        link, added = self.neighbours, self.added
        if self._is_short:
            link = adjusted(link, relative_width)
            added = None if added is None else adjusted(added, relative_width)
        return replace(
            self,
            above=tuple(adjusted(curve, relative_width) for curve in self.above),
            below=tuple(adjusted(curve, relative_width) for curve in self.below),
            neighbours=link,
            added=added,
        )

    @property
    def refined(self) -> ChainedCurve | None:
        """The chain of narrower bounds, which take a second per link, if it is short."""
        link = None
        if self.added is None and isinstance(self.neighbours, Refinable):
            link = self.neighbours.refined
        return replace(self, neighbours=link) if link is not None and self._is_short else None

    @property
    def _is_short(self) -> bool:
        return self.links <= _MAX_REFINED_LINKS

    @property
    def orders(self) -> tuple[ChainedCurve, ChainedCurve]:
        """The curves of both orders; all links of a chain have the same order.

        Half of those of a replaced unit have the other one, in both of its orders.
        """
        if self.added is not None:
            return self, self
        above, neighbours = MinimumCurve(self.above).orders, orders_of(self.neighbours)
        one, other = (
            replace(self, above=curves.curves, neighbours=link)
            for curves, link in zip(above, neighbours, strict=True)
        )
        return one, other

    def epsilon(self, delta: float) -> Bracket:
        """Return the bracket of ε (nats) at ``delta``; raises if no curve answers."""
        return self._bracket(
            lambda curve: curve.epsilon(delta), lambda own: self._chained(delta, own.upper)
        )

    def delta(self, epsilon: float) -> Bracket:
        """Return the bracket of δ at ``epsilon`` (nats); raises if no curve answers."""
        return self._bracket(
            lambda curve: curve.delta(epsilon), lambda own: self._chained_delta(epsilon, own)
        )

    def _bracket(
        self, answer: Callable[[PrivacyCurve], Bracket], chained: Callable[[Bracket], float]
    ) -> Bracket:
        errors: list[AccountantError] = []
        result = close_bracket(math.inf, self.below, answer)
        for curve in (*self.above, None):
            try:
                upper = chained(result) if curve is None else answer(curve).upper
            except AccountantError as error:
                errors.append(error)
                continue
            upper = min(upper, result.upper)
            result = Bracket(lower=min(result.lower, upper), upper=upper)
            if result.lower >= upper * (1 - NARROW_WIDTH):
                break
        if math.isinf(result.upper) and errors:
            raise errors[0]
        return result

    def _chained(self, delta: float, most: float) -> float:
        def of_links(curve: PrivacyCurve) -> Callable[[float], float]:
            def neighbours(at: float) -> float:
                nonlocal curve
                if not isinstance(curve, MinimumCurve):
                    return curve.epsilon(at).upper
                # Bounds that are far above the least at one link are not computed for the next.
                least, curve = curve.least_at(at, _MAX_RATIO)
                return least

            return neighbours

        added = None if self.added is None else of_links(self.added)
        return chained_epsilon(of_links(self.neighbours), delta, self.links, most, added)

    def _chained_delta(self, epsilon: float, own: Bracket) -> float:
        """Return a bound of δ by links whose ε follow an approximate curve of neighbours."""

        def of_links(curve: PrivacyCurve, *, are_added: bool = False) -> Callable[[float], float]:
            most = curve.delta(0.0).upper

            def approximate(at: float) -> float:
                number, part = divmod(max(0.0, math.log(at / most) / math.log(_DELTA_RATIO)), 1)
                low, high = (
                    _approximate_epsilon(self, are_added, most * _DELTA_RATIO**rung)
                    if rung
                    else 0.0
                    for rung in (int(number), int(number) + 1)
                )
                return low + part * (high - low) if math.isfinite(high) else high

            return approximate

        first = of_links(self.neighbours)
        added = None if self.added is None else of_links(self.added, are_added=True)
        low, high = max(own.lower, min(1.0, own.upper) * _MIN_DELTA_SHARE), min(1.0, own.upper)
        # If the chain is above ε there, it is above ε at every smaller δ.
        if chained_epsilon(first, high, self.links, epsilon, added) > epsilon:
            return high
        for _ in range(_BISECTIONS):
            middle = math.sqrt(low * high)
            if chained_epsilon(first, middle, self.links, epsilon, added) <= epsilon:
                high = middle
            else:
                low = middle
        total = result = 0.0
        for link in range(1, self.links + 1):
            rest = epsilon - total
            at = high / self.links * math.exp(-total)
            curve, approximate = self.neighbours, first
            if self.added is not None and added is not None and 2 * link > self.links:
                curve, approximate = self.added, added
            one = rest if link == self.links else min(rest, approximate(at))
            result += math.exp(total) * curve.delta(max(0.0, one * (1 - 1e-12))).upper
            total += one
        return result * (1 + 1e-9)


@lru_cache(maxsize=512)
def _approximate_epsilon(chain: ChainedCurve, are_added: bool, delta: float) -> float:
    """Return about ε (nats) between neighbours of ``chain`` at ``delta``, or infinity."""
    curve = chain.added if are_added and chain.added is not None else chain.neighbours
    try:
        return float(curve.epsilon(delta).upper)
    except AccountantError:
        return math.inf
