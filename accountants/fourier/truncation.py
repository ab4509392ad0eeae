"""Runs with truncated lots: what is quicker and closer than the revealed cut.

``truncated_law`` reveals whether a lot was cut. Where cuts are rare its losses are those of an
event that almost never happens: costly to transform, and useless for the lower end. Two other
runs bracket the same ε:

* below, what a record attains among others that contribute zero: Poisson sampling at the rate
  with which it is in the lot as used, transformed by itself;
* above, the run in which no lot is cut, with δ less the chance that a cut lot holds the record.
  Given a cut the two outputs differ with probability at most p, so that its curve is at most
  p + (1-p)(1-α)₊: nothing, or with probability w·p anything. Over a run that is
  Σ count·w·p at most.

Only where these are apart is the revealed cut transformed, and the closest ends are the answer.

Reference: docs/theorems/truncated-poisson.md, "Rare cuts" and "Lower bound".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from affidavit.accountants.bracket import Bracket
from affidavit.accountants.composition import leaves
from affidavit.accountants.fourier.tail_bounds import attained_rate, chance_of_a_cut_with_the_record
from affidavit.accountants.protocol import OutOfReach, PrivacyCurve, require_delta, require_epsilon
from affidavit.plan import (
    Composed,
    Event,
    Leaf,
    PoissonSubsampledGaussian,
    Repeated,
    TruncatedPoissonGaussian,
)

Curve = Callable[[Event, float], PrivacyCurve]
"""From an event and a relative width to the curve."""
ROUGH = 1e-4
"""Relative width at which a gap between the two runs is looked for before a narrower one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TruncatedCurve:
    """ε against δ of a run with truncated lots, ``revealed``, by way of ``curve``.

    ``uncut`` bounds it from above at δ less ``spent``, and ``attained`` from below.
    ``relative_width`` is that of the bracket asked for.
    """

    revealed: Event
    uncut: Event
    attained: Event
    spent: float
    curve: Curve
    relative_width: float

    def with_width(self, relative_width: float) -> TruncatedCurve:
        """The same curve with brackets about ``relative_width`` of ε (or δ) wide."""
        return replace(self, relative_width=relative_width)

    def epsilon(self, delta: float) -> Bracket:
        """Bracket of the smallest ε (nats) at ``delta``.

        Raises ``ValueError`` unless 0 < δ < 1, and ``OutOfReach`` as ``FourierCurve`` does.
        """
        require_delta(delta)
        left = math.nextafter(delta - self.spent, 0.0)

        def above(curve: PrivacyCurve) -> float:
            return curve.epsilon(left).upper if left > 0 else math.inf

        return self._closest(above, lambda curve: curve.epsilon(delta), least=0.0)

    def delta(self, epsilon: float) -> Bracket:
        """Bracket of the smallest δ at ``epsilon`` (nats).

        Raises ``ValueError`` unless ε is finite and at least 0.
        """
        require_epsilon(epsilon)

        def above(curve: PrivacyCurve) -> float:
            return min(1.0, math.nextafter(curve.delta(epsilon).upper + self.spent, math.inf))

        return self._closest(above, lambda curve: curve.delta(epsilon), least=self.spent)

    def _closest(
        self,
        above: Callable[[PrivacyCurve], float],
        ask: Callable[[PrivacyCurve], Bracket],
        *,
        least: float,
    ) -> Bracket:
        """The bracket of what ``ask`` reads; a run without cuts proves nothing below ``least``."""
        lower, upper = 0.0, math.inf
        for width in sorted({self.relative_width, max(self.relative_width, ROUGH)}, reverse=True):
            lower = max(lower, self._end(lambda curve: ask(curve).lower, self.attained, width, 0.0))
            if least <= lower:
                upper = min(upper, self._end(above, self.uncut, width, math.inf))
            if upper - lower <= self.relative_width * upper < math.inf:
                return Bracket(lower=min(lower, upper), upper=upper)
            if upper - lower > 3 * width * lower:
                break  # what is between them is no rounding
        bracket = ask(self.curve(self.revealed, self.relative_width))
        upper = min(upper, bracket.upper)
        return Bracket(lower=min(max(bracket.lower, lower), upper), upper=upper)

    def _end(
        self, read: Callable[[PrivacyCurve], float], event: Event, width: float, otherwise: float
    ) -> float:
        try:
            return read(self.curve(event, width))
        except OutOfReach:
            return otherwise


def truncated_curve(event: Event, curve: Curve, relative_width: float) -> TruncatedCurve | None:
    """The curve of ``event`` by way of ``curve``; None where no lot is truncated.

    Raises ``Unsupported`` or ``OutOfReach`` as ``curve`` does.
    """
    parts = leaves(event)
    cut = [(leaf, count) for leaf, count in parts if isinstance(leaf, TruncatedPoissonGaussian)]
    if not cut:
        return None
    curve(event, relative_width)  # refuses what it does not know
    spent = math.fsum(count * chance_of_a_cut_with_the_record(leaf) for leaf, count in cut)

    def run(rate: Callable[[TruncatedPoissonGaussian], float]) -> Event:
        return Composed(
            events=tuple(Repeated(event=_poisson(leaf, rate), count=count) for leaf, count in parts)
        )

    return TruncatedCurve(
        revealed=event,
        uncut=run(lambda leaf: leaf.sampling_probability),
        attained=run(attained_rate),
        spent=spent * (1 + 2.0**-50),
        curve=curve,
        relative_width=relative_width,
    )


def _poisson(leaf: Leaf, rate: Callable[[TruncatedPoissonGaussian], float]) -> Leaf:
    if not isinstance(leaf, TruncatedPoissonGaussian):
        return leaf
    return PoissonSubsampledGaussian(
        sampling_probability=rate(leaf),
        noise_multiplier=leaf.noise_multiplier,
        pair="replace_one" if leaf.neighbours == "replace_one" else "add_remove",
    )
