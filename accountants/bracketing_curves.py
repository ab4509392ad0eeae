"""Curves that combine other curves: upper bounds of a run, and lower bounds that a record attains.

The sensitivity of correlated noise is often an upper bound that no participation pattern attains,
and truncated Poisson samples are bounded by a pair that no data set attains. Such an event proves
the upper bound of a bracket; the lower bound comes from an event that a record attains.

>>> from affidavit.accountants.gaussian import GaussianCurve
>>> curve = BracketingCurve(above=GaussianCurve(mu=1.0), below=(GaussianCurve(mu=0.9),))
>>> bracket = curve.epsilon(1e-5)
>>> round(bracket.lower, 3), round(bracket.upper, 3)
(3.876, 4.377)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import reduce

from affidavit.accountants.bracket import Bracket
from affidavit.accountants.composition import parts
from affidavit.accountants.protocol import (
    Accountant,
    AccountantError,
    Adjustable,
    OutOfReach,
    PrivacyCurve,
    Refinable,
    TwoOrders,
)
from affidavit.plan import events

Truncated = events.TruncatedPoissonGaussian | events.TruncatedPoissonGroupGaussian
NARROW_WIDTH = 2e-6
"""Relative width of a bracket that is narrow enough: no other curve is evaluated."""
DECIDING_WIDTH = 1e-5
"""Relative width of brackets for a decision whether ε is below a target."""
ROUNDING = 1e-8
"""Relative difference of two equal Gaussian-DP parameters by rounding."""


class CombinedCurve(ABC):
    """A curve whose brackets of ε and of δ follow in the same way from those of other curves."""

    __slots__ = ()

    def epsilon(self, delta: float) -> Bracket:
        """Return the bracket of ε (nats) at ``delta``; raises if no curve answers."""
        return self._answer(lambda curve: curve.epsilon(delta))

    def delta(self, epsilon: float) -> Bracket:
        """Return the bracket of δ at ``epsilon`` (nats); raises if no curve answers."""
        return self._answer(lambda curve: curve.delta(epsilon))

    @abstractmethod
    def _answer(self, ask: Callable[[PrivacyCurve], Bracket]) -> Bracket:
        """Combine the brackets that ``ask`` returns of each curve."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BracketingCurve(CombinedCurve):
    """Upper bounds of ``above`` and the highest lower bounds of ``below``, or 0.

    A ``narrower`` curve of the same run takes about a second for each bracket.
    """

    above: PrivacyCurve
    below: tuple[PrivacyCurve, ...]
    narrower: PrivacyCurve | None = None

    @property
    def refined(self) -> PrivacyCurve | None:
        """The curve ``narrower``."""
        return self.narrower

    @property
    def mu(self) -> float | None:
        """The Gaussian-DP parameter, if both are one Gaussian mechanism up to rounding."""
        mu: float | None = getattr(self.above, "mu", None)
        least: float = max((getattr(curve, "mu", None) or 0.0 for curve in self.below), default=0.0)
        return mu if mu is not None and least >= mu * (1 - ROUNDING) else None

    @property
    def confidence(self) -> float | None:
        """The confidence of a sampled upper bound. A sampled curve has no other one below it."""
        return getattr(self.above, "confidence", None)

    @property
    def seed(self) -> str | None:
        """The seed of a sampled upper bound."""
        return getattr(self.above, "seed", None)

    def _answer(self, ask: Callable[[PrivacyCurve], Bracket]) -> Bracket:
        return close_bracket(ask(self.above).upper, self.below, ask)

    @property
    def orders(self) -> tuple[BracketingCurve, BracketingCurve]:
        """The curves of P against Q, and of Q against P."""
        above, below = orders_of(self.above), [orders_of(curve) for curve in self.below]
        first, second = (
            BracketingCurve(above=above[side], below=tuple(curves[side] for curves in below))
            for side in (0, 1)
        )
        return first, second

    def with_width(self, relative_width: float) -> PrivacyCurve:
        """Return this curve with narrower or wider brackets, where they are adjustable.

        A curve for a decision is also ``refined``.
        """
        curve = BracketingCurve(
            above=adjusted(self.above, relative_width),
            below=tuple(adjusted(curve, relative_width) for curve in self.below),
            narrower=self.narrower,
        )
        return refined_curve(curve) if relative_width <= DECIDING_WIDTH else curve


@dataclass(frozen=True, kw_only=True, slots=True)
class CappedCurve(CombinedCurve):
    """A slow ``curve`` and fast upper bounds of it, ``cap``."""

    curve: PrivacyCurve
    cap: PrivacyCurve

    def _answer(self, ask: Callable[[PrivacyCurve], Bracket]) -> Bracket:
        return ask(self.curve)


@dataclass(frozen=True, slots=True)
class MinimumCurve(CombinedCurve):
    """The least upper bounds of several curves of one event, some of which may be out of reach."""

    curves: tuple[PrivacyCurve, ...]

    @property
    def orders(self) -> tuple[MinimumCurve, MinimumCurve]:
        """The curves of P against Q, and of Q against P."""
        both = [orders_of(one) for one in self.curves]
        first, second = zip(*both, strict=True)
        return MinimumCurve(first), MinimumCurve(second)

    def with_width(self, relative_width: float) -> MinimumCurve:
        """Return this curve with narrower or wider brackets, where they are adjustable."""
        return MinimumCurve(tuple(adjusted(curve, relative_width) for curve in self.curves))

    def least_at(self, delta: float, ratio: float) -> tuple[float, MinimumCurve]:
        """Return the least upper end of ε (nats) at ``delta``, and the curves within its ``ratio``.

        Raises if no curve answers.
        """
        results = self._results(lambda curve: curve.epsilon(delta))
        least = min(result.upper for _, result in results)
        return least, MinimumCurve(
            tuple(curve for curve, result in results if result.upper <= ratio * least)
        )

    def _answer(self, ask: Callable[[PrivacyCurve], Bracket]) -> Bracket:
        return reduce(Bracket.intersect, (result for _, result in self._results(ask)))

    def _results(
        self, ask: Callable[[PrivacyCurve], Bracket]
    ) -> list[tuple[PrivacyCurve, Bracket]]:
        results, errors = [], []
        for curve in self.curves:
            try:
                result = ask(curve)
            except AccountantError as error:
                errors.append(error)
                continue
            results.append((curve, result))
            # No upper bound lies below what the run attains.
            if 0 < result.lower >= result.upper * (1 - NARROW_WIDTH):
                break
        if not results:
            raise errors[0]
        return results


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstAvailableCurve(CombinedCurve):
    """The curve of ``event`` by the first of ``engines`` that answers.

    Later engines are not taken from ``engines``, so an iterator serves one question. A ``refined``
    curve also uses narrower upper bounds.
    """

    event: events.Event
    engines: Iterable[Accountant]
    refined: bool = False

    def _answer(self, ask: Callable[[PrivacyCurve], Bracket]) -> Bracket:
        errors = []
        for engine in self.engines:
            try:
                curve = engine.curve(self.event)
                return ask(refined_curve(curve) if self.refined else curve)
            except AccountantError as error:
                errors.append(error)
        raise next((error for error in errors if isinstance(error, OutOfReach)), errors[0])


def close_bracket(
    upper: float, below: tuple[PrivacyCurve, ...], answer: Callable[[PrivacyCurve], Bracket]
) -> Bracket:
    """Return the bracket from the highest ``answer`` of the curves ``below`` to ``upper``."""
    lower = 0.0
    for curve in below:
        if lower >= upper * (1 - NARROW_WIDTH):
            break
        try:
            if isinstance(curve, CappedCurve) and answer(curve.cap).upper <= lower:
                continue
            lower = max(lower, answer(curve).lower)
        except AccountantError:
            continue
    return Bracket(lower=min(lower, upper), upper=upper)


def refined_curve(curve: PrivacyCurve) -> PrivacyCurve:
    """Return ``curve`` with its narrower upper bounds, if any, which take a second each."""
    refined = curve.refined if isinstance(curve, Refinable) else None
    return curve if refined is None else MinimumCurve((curve, refined))


def orders_of(curve: PrivacyCurve) -> tuple[PrivacyCurve, PrivacyCurve]:
    """Return the curves of both orders, or ``curve`` twice if it does not separate them."""
    return curve.orders if isinstance(curve, TwoOrders) else (curve, curve)


def adjusted(curve: PrivacyCurve, relative_width: float) -> PrivacyCurve:
    """Return ``curve`` with narrower or wider brackets, if it is adjustable."""
    return curve.with_width(relative_width) if isinstance(curve, Adjustable) else curve


def attained_event(event: events.Event) -> events.Event:
    """Return ``event`` with releases that are only bounds replaced by ones that a record attains.

    In truncated Poisson samples it is a record among others that contribute zero: a Poisson sample
    at the rate at which it is in the lot (docs/theorems/truncated-poisson.md, lower bound).
    """
    releases = parts(event)
    if not any(isinstance(part, Truncated | events.RepeatAndSelect) for part, _ in releases):
        return event
    result = []
    for part, count in releases:
        leaf: events.Event | None = part
        if isinstance(part, Truncated):
            leaf = _attained_release(part)
        elif isinstance(part, events.RepeatAndSelect):
            leaf = replace(part, event=attained_event(part.event))
        if leaf is not None:
            result.append((leaf, count))
    if tuple(result) == releases:
        return event
    return events.Composed(
        events=tuple(events.Repeated(event=leaf, count=count) for leaf, count in result)
    )


def _attained_release(leaf: Truncated) -> events.Event | None:
    from affidavit.accountants.fourier.truncated_group_sampling import attained_sample
    from affidavit.accountants.fourier.truncated_poisson import attained_rate

    if isinstance(leaf, events.TruncatedPoissonGroupGaussian):
        return attained_sample(leaf)
    rate = attained_rate(leaf)
    if rate <= 0:
        return None
    return events.PoissonSubsampledGaussian(
        sampling_probability=rate,
        noise_multiplier=leaf.noise_multiplier,
        pair="replace_one" if leaf.neighbours == "replace_one" else "add_remove",
    )
