"""The analytic Gaussian mechanism by dp_accounting: a second opinion in closed form.

Where a run is one Gaussian mechanism, its profile is closed, and a grid of privacy losses
says less about it for a hundred times the work. The library inverts the same theorem as
``affidavit.accountants.gaussian`` with code of its own: it takes the difference of the two
terms as it is, and finds ε with Brent's method to within 1e-12. What the run's releases come
to together is worked out here a second time as well.

Its value is a hair below the truth as often as above it, so both ends are moved outward, by
the tolerance that it documents and a relative allowance for its arithmetic. Against 60 digits,
for μ from 1e-7 to 1e4 and δ from 1e-40 to 0.5, it was off by at most a quarter of that.

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
from affidavit.accountants.gaussian import MIN_MU
from affidavit.accountants.protocol import OutOfReach, Unsupported, require_delta, require_epsilon
from affidavit.accountants.registry import DP_ACCOUNTING
from affidavit.plan import Event, Gaussian

MAX_MU = 1e4
MIN_DELTA = 1e-200
"""A larger μ and a smaller δ were not compared."""
TOLERANCE = 1e-12
"""Nats: what the library's search is told to come within."""
ROUNDING = 1e-9
"""Relative allowance for the library's arithmetic."""
UNIT = 1e-15
"""A few units in the last place of what the library subtracts to find δ."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AnalyticCurve:
    """The profile of one Gaussian mechanism; ``mu``, sensitivity over σ, is 0 for no release."""

    mu: float

    def epsilon(self, delta: float) -> Bracket:
        """Bracket of ε (nats) at ``delta``; raises ``OutOfReach`` below 1e-200."""
        require_delta(delta)
        if self.mu == 0:
            return Bracket(lower=0.0, upper=0.0)
        if delta < MIN_DELTA:
            raise OutOfReach(
                f"dp_accounting's closed form was not tried below δ = {MIN_DELTA:g}.",
                "Use the gaussian accountant.",
            )
        with np.errstate(all="ignore"):
            result = float(get_epsilon_gaussian(1 / self.mu, delta, tol=TOLERANCE))
        slack = 2 * TOLERANCE + ROUNDING * result
        return Bracket(lower=max(0.0, result - slack), upper=result + slack)

    def delta(self, epsilon: float) -> Bracket:
        """Bracket of δ at ``epsilon`` (nats), some 1e-15 wide at the least.

        Raises ``ValueError`` unless ε is finite and not negative.
        """
        require_epsilon(epsilon)
        if self.mu == 0:
            return Bracket(lower=0.0, upper=0.0)
        with np.errstate(all="ignore"):
            result = float(GaussianPrivacyLoss(1 / self.mu).get_delta_for_epsilon(epsilon))
        # Moving the arguments, of at most this size, by an ulp moves their logarithms so much.
        reach = 1 + self.mu + epsilon / self.mu
        slack = UNIT * reach * reach + ROUNDING * result
        return Bracket(lower=max(0.0, result - slack), upper=min(1.0, result + slack))


@dataclass(frozen=True, kw_only=True, slots=True)
class AnalyticGaussianAccountant:
    """dp_accounting's closed form for runs of plain Gaussian releases; refuses everything else."""

    name: str = "analytic_gaussian"
    version: str = DP_ACCOUNTING

    def curve(self, event: Event) -> AnalyticCurve:
        """The curve of ``event``; raises ``Unsupported`` or ``OutOfReach``."""
        parts = leaves(event)
        for leaf, _ in parts:
            if not isinstance(leaf, Gaussian):
                raise Unsupported(
                    "dp_accounting's closed form takes unsampled Gaussian releases only.",
                    "Use an accountant for subsampled or Laplace releases.",
                )
        mu = math.hypot(*(math.sqrt(count) / leaf.noise_multiplier for leaf, count in parts))
        if parts and not MIN_MU <= mu <= MAX_MU:
            raise OutOfReach(
                f"μ = {mu:.3g} is outside [{MIN_MU:g}, {MAX_MU:g}], where "
                "dp_accounting's closed form was compared.",
                "Use the gaussian accountant.",
            )
        return AnalyticCurve(mu=mu)
