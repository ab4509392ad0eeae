"""A curve between two events: what bounds a run from above, and what one record attains.

The sensitivity of correlated noise is often an upper bound that no pattern of participation
reaches. The event that rests on it proves the upper end of a bracket, and says nothing of the lower
one, which comes from an event that a record attains.

>>> from affidavit.accountants.gaussian import GaussianCurve
>>> curve = Enclosed(above=GaussianCurve(mu=1.0), below=GaussianCurve(mu=0.9))
>>> bracket = curve.epsilon(1e-5)
>>> round(bracket.lower, 3), round(bracket.upper, 3)
(3.845, 4.378)
"""

from __future__ import annotations

from dataclasses import dataclass

from affidavit.accountants.bracket import Bracket
from affidavit.accountants.protocol import AccountantError, Adjustable, PrivacyCurve

ROUNDING = 1e-8
"""Relative difference of two Gaussian-DP parameters that is rounding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Enclosed:
    """Upper ends of ``above`` and lower ends of ``below``, or 0 where there is no ``below``."""

    above: PrivacyCurve
    below: PrivacyCurve | None

    @property
    def mu(self) -> float | None:
        """The Gaussian-DP parameter, where both are one Gaussian mechanism up to rounding."""
        mu, least = getattr(self.above, "mu", None), getattr(self.below, "mu", None)
        exact = mu is not None and least is not None and least >= mu * (1 - ROUNDING)
        return mu if exact else None

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
        try:
            lower = 0.0 if self.below is None else self.below.epsilon(delta).lower
        except AccountantError:
            lower = 0.0
        return Bracket(lower=min(lower, upper), upper=upper)

    def delta(self, epsilon: float) -> Bracket:
        """Bracket of δ at ``epsilon`` (nats); raises what ``above`` raises."""
        upper = self.above.delta(epsilon).upper
        try:
            lower = 0.0 if self.below is None else self.below.delta(epsilon).lower
        except AccountantError:
            lower = 0.0
        return Bracket(lower=min(lower, upper), upper=upper)

    def with_width(self, relative_width: float) -> PrivacyCurve:
        """The same with narrower or wider brackets of both, where they can be had."""
        return Enclosed(
            above=_adjusted(self.above, relative_width),
            below=None if self.below is None else _adjusted(self.below, relative_width),
        )


def _adjusted(curve: PrivacyCurve, relative_width: float) -> PrivacyCurve:
    return curve.with_width(relative_width) if isinstance(curve, Adjustable) else curve
