"""The analytic Gaussian mechanism by dp_accounting: a second opinion in closed form.

If a run is one Gaussian mechanism, its profile is a closed form, which is narrower than a grid of
privacy losses at a hundredth of the work. The library inverts the same theorem as
``affidavit.accountants.gaussian`` with its own code: it subtracts the two terms directly and finds
ε with Brent's method to within 1e-12. The composition of the run's releases is also computed
independently here.

The library's value may be slightly below the truth, so both ends are moved outward by its
documented tolerance and a relative allowance for its arithmetic. Compared with 60 digits, for μ
from 1e-7 to 1e4 and δ from 1e-40 to 0.5, its error was at most a quarter of that.

References: Balle and Wang, arXiv:1805.06530, Theorem 8 and equation 6; dp_accounting 0.6.0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from dp_accounting import get_epsilon_gaussian
from dp_accounting.pld.privacy_loss_mechanism import GaussianPrivacyLoss

from affidavit.accountants.bracket import Bracket
from affidavit.accountants.composition import leaves
from affidavit.accountants.gaussian import EMPTY_CURVE, MIN_MU, GaussianCurve
from affidavit.accountants.protocol import OutOfReach, Unsupported, require_delta, require_epsilon
from affidavit.accountants.registry import DP_ACCOUNTING
from affidavit.plan import events

MAX_MU = 1e4
MIN_DELTA = 1e-200
"""Limits of the comparison."""
TOLERANCE = 1e-12
"""Tolerance (nats) of the library's search."""
ROUNDING = 1e-9
"""Relative allowance for the library's arithmetic."""
DELTA_ROUNDING = 1e-15
"""A few units in the last place of the terms that the library subtracts to compute δ."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AnalyticCurve:
    """The profile of one Gaussian mechanism; ``mu`` is sensitivity over σ."""

    mu: float

    def epsilon(self, delta: float) -> Bracket:
        """Return the bracket of ε (nats) at ``delta``; raises ``OutOfReach`` below 1e-200."""
        require_delta(delta)
        if delta < MIN_DELTA:
            raise OutOfReach(
                f"dp_accounting's closed form was not compared below δ = {MIN_DELTA:g}.",
                "Use the gaussian accountant.",
            )
        with np.errstate(all="ignore"):
            result = float(get_epsilon_gaussian(1 / self.mu, delta, tol=TOLERANCE))
        slack = 2 * TOLERANCE + ROUNDING * result
        return Bracket(lower=max(0.0, result - slack), upper=result + slack)

    def delta(self, epsilon: float) -> Bracket:
        """Return the bracket of δ at ``epsilon`` (nats), at least about 1e-15 wide.

        Raises ``ValueError`` unless ε is finite and not negative.
        """
        require_epsilon(epsilon)
        with np.errstate(all="ignore"):
            result = float(GaussianPrivacyLoss(1 / self.mu).get_delta_for_epsilon(epsilon))
        # An ulp of the arguments, which are at most this large, moves their logarithms this much.
        reach = 1 + self.mu + epsilon / self.mu
        slack = DELTA_ROUNDING * reach * reach + ROUNDING * result
        return Bracket(lower=max(0.0, result - slack), upper=min(1.0, result + slack))


@dataclass(frozen=True, kw_only=True, slots=True)
class AnalyticGaussianAccountant:
    """dp_accounting's closed form for runs of unsampled Gaussian releases only."""

    name: str = "analytic_gaussian"
    version: str = DP_ACCOUNTING

    def curve(self, event: events.Event) -> AnalyticCurve | GaussianCurve:
        """Return the curve of ``event``; raises ``Unsupported`` or ``OutOfReach``."""
        parts = leaves(event)
        if not parts:
            return EMPTY_CURVE
        for leaf, _ in parts:
            if not isinstance(leaf, events.Gaussian):
                raise Unsupported(
                    "dp_accounting's closed form takes unsampled Gaussian releases only.",
                    "Use an accountant for subsampled or Laplace releases.",
                )
        mu = math.hypot(*(math.sqrt(count) / leaf.noise_multiplier for leaf, count in parts))
        if not MIN_MU <= mu <= MAX_MU:
            raise OutOfReach(
                f"μ = {mu:.3g} is outside [{MIN_MU:g}, {MAX_MU:g}], where "
                "dp_accounting's closed form was compared.",
                "Use the gaussian accountant.",
            )
        return AnalyticCurve(mu=mu)
