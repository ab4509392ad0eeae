"""Upper ends of a selection: hinges of the curves of one run, whichever engine has these.

What is released beside the selection is composed with the run before the hinges are read
(docs/theorems/selection.md, Theorem 2); bins of correlated noise count as known. Its lower ends are
those of attacks (``lower_bound.py``).

>>> from affidavit.plan.events import Gaussian, RepeatAndSelect
>>> run = Gaussian(noise_multiplier=2.0)
>>> event = RepeatAndSelect(event=run, mean=10.0, shape=1.0)
>>> 3.25 < SelectionAccountant().curve(event).epsilon(1e-6).upper < 3.27
True
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from affidavit.accountants.bracket import Bracket
from affidavit.accountants.bracketing_curves import BracketingCurve, orders_of
from affidavit.accountants.chains import ChainedCurve
from affidavit.accountants.composition import parts
from affidavit.accountants.gaussian import GaussianCurve
from affidavit.accountants.participations import with_bins_known
from affidavit.accountants.protocol import (
    OutOfReach,
    PrivacyCurve,
    Unsupported,
    require_delta,
    require_epsilon,
)
from affidavit.accountants.registry import AFFIDAVIT_VERSION, find_curve
from affidavit.accountants.selection.hypotheses import MAX_LOSS, Hypotheses
from affidavit.accountants.selection.lower_bound import FAR, by_engines, near, widened
from affidavit.accountants.selection.repetitions import Repetitions
from affidavit.accountants.selection.upper_bound import Hinges
from affidavit.plan import (
    ChainOfNeighbours,
    Composed,
    Event,
    RepeatAndSelect,
    Repeated,
    alternatives,
)

_SHARPENED = 2
_STEEP = 50.0
"""A density of the best run that falls by more (its log) leaves hinges far apart, and can leave
them above Rényi bounds: that of a Poisson number with a larger mean."""

Order = tuple[PrivacyCurve, PrivacyCurve]
"""The curves of P against Q, and of Q against P."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectionCurve:
    """Upper ends of a selection: ``run`` and ``whole``, with what is beside, in each order.

    Those of ``other`` are taken where they are lower.
    """

    run: tuple[Order, ...]
    whole: tuple[Order, ...]
    repetitions: Repetitions
    other: PrivacyCurve | None

    def epsilon(self, delta: float) -> Bracket:
        """``[0, ε]`` (nats) at ``delta``; raises ``ValueError`` unless 0 < δ < 1."""
        require_delta(delta)
        upper = 0.0
        bounds = self._bounds(delta / self.repetitions.mean / FAR)
        for bound in sorted(bounds, key=lambda bound: -bound.epsilon(delta)):
            result = bound.epsilon(delta)
            for _ in range(_SHARPENED):
                if result <= upper or math.isinf(result):
                    break
                bound.sharpen(result)
                result = min(result, bound.epsilon(delta))
            upper = max(upper, result)
        if self.other is not None:
            upper = min(upper, self.other.epsilon(delta).upper)
        if not math.isfinite(upper):
            raise OutOfReach("no ε was found for this δ.", "Choose a larger δ.")
        return Bracket(lower=0.0, upper=upper)

    def delta(self, epsilon: float) -> Bracket:
        """``[0, δ]`` at ``epsilon`` (nats); raises ``ValueError`` unless it is at least 0."""
        require_epsilon(epsilon)
        epsilon = min(epsilon, MAX_LOSS)
        upper = 0.0
        for order, bound in enumerate(self._bounds(near(self.run[0][0], epsilon))):
            for _ in range(_SHARPENED):
                if order and bound.delta(epsilon) <= upper:
                    break
                bound.sharpen(epsilon)
            upper = max(upper, bound.delta(epsilon))
        if self.other is not None:
            upper = min(upper, self.other.delta(epsilon).upper)
        return Bracket(lower=0.0, upper=min(1.0, upper))

    def _bounds(self, delta: float) -> list[_Bound]:
        """One for each order of the hypotheses; the curves of a run are followed to ``delta``."""
        result = []
        for run, whole in zip(self.run, self.whole, strict=True):
            one = Hypotheses(*run)
            one.begin(delta)
            both = one
            if whole != run:
                both = Hypotheses(*whole)
                both.begin(delta)
            result.append(_Bound(one, both, self.repetitions))
        return result


class _Bound:
    """The hinges of one order, and what is known of what they are read of."""

    def __init__(self, run: Hypotheses, whole: Hypotheses, repetitions: Repetitions) -> None:
        self._run, self._whole, self._repetitions = run, whole, repetitions
        self._hinges = Hinges.of(run, repetitions)

    def epsilon(self, delta: float) -> float:
        return self._hinges.epsilon(self._whole, delta)

    def delta(self, epsilon: float) -> float:
        return self._hinges.delta(self._whole, epsilon)

    def sharpen(self, epsilon: float) -> None:
        """Ask where the bound at ``epsilon`` (nats) is made."""
        self._hinges.sharpen(self._run, self._whole, epsilon)
        self._hinges = Hinges.of(self._run, self._repetitions)


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectionAccountant:
    """Upper ends for one selection among runs that an engine knows, and what is beside it."""

    name: str = "selection"
    version: str = AFFIDAVIT_VERSION

    def curve(self, event: Event) -> PrivacyCurve:
        """The curve of ``event``; raises ``Unsupported`` or ``OutOfReach``."""
        own = self._curve(event)
        for bound in alternatives(event):
            if isinstance(bound, ChainOfNeighbours):
                link = self._curve(bound.event)
                return ChainedCurve(above=(own,), below=(), neighbours=link, links=bound.links)
        return own

    def _curve(self, event: Event) -> PrivacyCurve:
        event = with_bins_known(event)
        releases = parts(event)
        if not releases:
            return GaussianCurve(mu=0.0)
        selections = [(part, n) for part, n in releases if isinstance(part, RepeatAndSelect)]
        if len(selections) != 1 or selections[0][1] != 1:
            raise Unsupported(
                "this accountant is for one selection among repeated runs.",
                "Use another accountant.",
            )
        ((selection, _),) = selections
        beside = [
            Repeated(event=part, count=n)
            for part, n in releases
            if not isinstance(part, RepeatAndSelect)
        ]
        run = _orders(selection.event)
        whole = _orders(Composed(events=(selection.event, *beside))) if beside else run
        orders = max(len(run), len(whole))
        repetitions = Repetitions(mean=selection.mean, shape=selection.shape)
        return SelectionCurve(
            run=run * (orders // len(run)),
            whole=whole * (orders // len(whole)),
            repetitions=repetitions,
            other=find_curve("rdp", event) if repetitions.fall > _STEEP else None,
        )


def _orders(event: Event) -> tuple[Order, ...]:
    """The curves of ``event``, twice where the orders of the hypotheses differ."""
    curve = by_engines(lambda engine: engine.curve(event))
    if isinstance(curve, BracketingCurve):
        curve = curve.above
    one, other = orders_of(widened(curve))
    return ((one, other),) if one == other else ((one, other), (other, one))
