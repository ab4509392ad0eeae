"""A curve between two events: what bounds a run from above, and what one record attains.

The sensitivity of correlated noise is often an upper bound that no pattern of participation
reaches, and a cut Poisson sample is bounded by a pair that no data set attains. Such an event
proves the upper end of a bracket; the lower one comes from an event that a record attains.

>>> from affidavit.accountants.gaussian import GaussianCurve
>>> curve = BracketingCurve(above=GaussianCurve(mu=1.0), below=(GaussianCurve(mu=0.9),))
>>> bracket = curve.epsilon(1e-5)
>>> round(bracket.lower, 3), round(bracket.upper, 3)
(3.876, 4.377)
"""

from __future__ import annotations

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
from affidavit.plan import (
    Composed,
    Event,
    PoissonSubsampledGaussian,
    RepeatAndSelect,
    Repeated,
    TruncatedPoissonGaussian,
    TruncatedPoissonGroupGaussian,
)

Cut = TruncatedPoissonGaussian | TruncatedPoissonGroupGaussian
NARROW = 2e-6
"""Relative width of a bracket beside which no other is computed."""
ROUNDING = 1e-8
"""Relative difference of two Gaussian-DP parameters that is rounding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BracketingCurve:
    """Upper ends of ``above`` and the highest lower ends of ``below``, or 0 where it has none."""

    above: PrivacyCurve
    below: tuple[PrivacyCurve, ...]

    @property
    def mu(self) -> float | None:
        """The Gaussian-DP parameter, where both are one Gaussian mechanism up to rounding."""
        mu: float | None = getattr(self.above, "mu", None)
        least: float = max((getattr(curve, "mu", None) or 0.0 for curve in self.below), default=0.0)
        return mu if mu is not None and least >= mu * (1 - ROUNDING) else None

    @property
    def confidence(self) -> float | None:
        """Of the upper end, where that is sampled; a sampled curve has no other one below it."""
        return getattr(self.above, "confidence", None)

    @property
    def seed(self) -> str | None:
        """Of the upper end, where that is sampled."""
        return getattr(self.above, "seed", None)

    def epsilon(self, delta: float) -> Bracket:
        """Bracket of ε (nats) at ``delta``; raises what ``above`` raises."""
        upper = self.above.epsilon(delta).upper
        return closed(upper, self.below, lambda curve: curve.epsilon(delta))

    def delta(self, epsilon: float) -> Bracket:
        """Bracket of δ at ``epsilon`` (nats); raises what ``above`` raises."""
        upper = self.above.delta(epsilon).upper
        return closed(upper, self.below, lambda curve: curve.delta(epsilon))

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
        """The same with narrower or wider brackets of both, where they can be had."""
        return BracketingCurve(
            above=adjusted(self.above, relative_width),
            below=tuple(adjusted(curve, relative_width) for curve in self.below),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Capped:
    """A ``curve`` that takes long, and upper ends of it, ``cap``, that do not."""

    curve: PrivacyCurve
    cap: PrivacyCurve

    def epsilon(self, delta: float) -> Bracket:
        """The curve's bracket of ε (nats) at ``delta``; raises what it raises."""
        return self.curve.epsilon(delta)

    def delta(self, epsilon: float) -> Bracket:
        """The curve's bracket of δ at ``epsilon`` (nats); raises what it raises."""
        return self.curve.delta(epsilon)


@dataclass(frozen=True, slots=True)
class LeastCurve:
    """The least upper ends of several curves of one event, of which some may be out of reach."""

    curves: tuple[PrivacyCurve, ...]

    def epsilon(self, delta: float) -> Bracket:
        """Bracket of the smallest ε (nats) at ``delta``; raises where every curve does."""
        return self._least(lambda curve: curve.epsilon(delta))

    def delta(self, epsilon: float) -> Bracket:
        """Bracket of the smallest δ at ``epsilon`` (nats); raises where every curve does."""
        return self._least(lambda curve: curve.delta(epsilon))

    @property
    def orders(self) -> tuple[LeastCurve, LeastCurve]:
        """The curves of P against Q, and of Q against P."""
        both = [orders_of(one) for one in self.curves]
        first, second = zip(*both, strict=True)
        return LeastCurve(first), LeastCurve(second)

    def with_width(self, relative_width: float) -> LeastCurve:
        """The same with narrower or wider brackets of each, where they can be had."""
        return LeastCurve(tuple(adjusted(curve, relative_width) for curve in self.curves))

    def _least(self, answer: Callable[[PrivacyCurve], Bracket]) -> Bracket:
        results, errors = [], []
        for curve in self.curves:
            try:
                result = answer(curve)
            except AccountantError as error:
                errors.append(error)
                continue
            results.append(result)
            # No other upper end lies below what the run attains.
            if 0 < result.lower >= result.upper * (1 - NARROW):
                break
        if not results:
            raise errors[0]
        return reduce(Bracket.intersect, results)


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstThatAnswers:
    """The curve of ``event`` by the first of ``engines`` that reaches a question.

    No later one is taken from ``engines``; those of an iterator are for one question. A ``refined``
    curve has its narrower upper ends, too.
    """

    event: Event
    engines: Iterable[Accountant]
    refined: bool = False

    def epsilon(self, delta: float) -> Bracket:
        """Bracket of ε (nats) at ``delta``; raises ``OutOfReach`` or as the first engine does."""
        return self._ask(lambda curve: curve.epsilon(delta))

    def delta(self, epsilon: float) -> Bracket:
        """Bracket of δ at ``epsilon`` (nats); raises ``OutOfReach`` or as the first engine does."""
        return self._ask(lambda curve: curve.delta(epsilon))

    def _ask(self, question: Callable[[PrivacyCurve], Bracket]) -> Bracket:
        errors = []
        for engine in self.engines:
            try:
                curve = engine.curve(self.event)
                return question(refined_curve(curve) if self.refined else curve)
            except AccountantError as error:
                errors.append(error)
        raise next((error for error in errors if isinstance(error, OutOfReach)), errors[0])


def closed(
    upper: float, below: tuple[PrivacyCurve, ...], answer: Callable[[PrivacyCurve], Bracket]
) -> Bracket:
    """From the highest ``answer`` of those ``below`` to ``upper``, cheap ones first."""
    lower = 0.0
    for curve in below:
        if lower >= upper * (1 - NARROW):
            break
        try:
            if isinstance(curve, Capped) and answer(curve.cap).upper <= lower:
                continue
            lower = max(lower, answer(curve).lower)
        except AccountantError:
            continue
    return Bracket(lower=min(lower, upper), upper=upper)


def refined_curve(curve: PrivacyCurve) -> PrivacyCurve:
    """``curve`` with the narrower upper ends that it may have, which take a second each."""
    refined = curve.refined if isinstance(curve, Refinable) else None
    return curve if refined is None else LeastCurve((curve, refined))


def orders_of(curve: PrivacyCurve) -> tuple[PrivacyCurve, PrivacyCurve]:
    """``curve`` in either order of the hypotheses, or twice as it is."""
    return curve.orders if isinstance(curve, TwoOrders) else (curve, curve)


def adjusted(curve: PrivacyCurve, relative_width: float) -> PrivacyCurve:
    """``curve`` with narrower or wider brackets, if it can have them."""
    return curve.with_width(relative_width) if isinstance(curve, Adjustable) else curve


def attained_event(event: Event) -> Event:
    """``event`` with every release of which only a bound is known as one that a record attains.

    Of cut Poisson samples that is a record among others that contribute zero: a Poisson sample
    at the rate at which it is in the lot (docs/theorems/truncated-poisson.md, lower bound).
    """
    releases = parts(event)
    if not any(isinstance(part, Cut | RepeatAndSelect) for part, _ in releases):
        return event
    result = []
    for part, count in releases:
        leaf: Event | None = part
        if isinstance(part, Cut):
            leaf = _alone(part)
        elif isinstance(part, RepeatAndSelect):
            leaf = replace(part, event=attained_event(part.event))
        if leaf is not None:
            result.append((leaf, count))
    if tuple(result) == releases:
        return event
    return Composed(events=tuple(Repeated(event=leaf, count=count) for leaf, count in result))


def _alone(leaf: Cut) -> Event | None:
    from affidavit.accountants.fourier.truncated_group_sampling import attained_sample
    from affidavit.accountants.fourier.truncated_poisson import attained_rate

    if isinstance(leaf, TruncatedPoissonGroupGaussian):
        return attained_sample(leaf)
    rate = attained_rate(leaf)
    if rate <= 0:
        return None
    return PoissonSubsampledGaussian(
        sampling_probability=rate,
        noise_multiplier=leaf.noise_multiplier,
        pair="replace_one" if leaf.neighbours == "replace_one" else "add_remove",
    )
