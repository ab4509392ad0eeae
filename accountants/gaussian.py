"""The exact Gaussian accountant: any run that is one Gaussian mechanism.

A composition of Gaussian releases, adaptively chosen, is exactly as private as one
Gaussian mechanism with μ² = Σ n_i / σ_i², whose privacy profile is closed:

    δ(ε) = Φ(μ/2 - ε/μ) - e^ε Φ(-μ/2 - ε/μ).

The two terms agree in most of their digits when μ is small, so they are compared as
logarithms: with a = log Φ(μ/2 - ε/μ) and b = ε + log Φ(-μ/2 - ε/μ), δ = e^a (1 - e^(b-a)).

Guarantees
    * ``upper`` is at least and ``lower`` at most the tight value: a and b are moved by a
      bound on the rounding of their arguments and of ``log_ndtr`` before they are used.
    * ``epsilon`` is inverted one-sidedly: δ at its upper end, itself rounded up, does not
      exceed the δ asked for.

Both orders of the pair have the same profile. The empty composition has μ = 0, ε = 0 and
δ = 0.

>>> from affidavit.plan.events import Gaussian
>>> round(GaussianAccountant().curve(Gaussian(noise_multiplier=1.0)).delta(1.0).upper, 6)
0.126937

References: Balle and Wang, arXiv:1805.06530, Theorem 8; Dong, Roth and Su,
arXiv:1905.02383, Corollary 3.3 (composition).
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

from scipy.special import log_ndtr

from affidavit.accountants.bracket import Bracket
from affidavit.accountants.composition import leaves
from affidavit.accountants.protocol import OutOfReach, Unsupported, require_delta, require_epsilon
from affidavit.accountants.registry import AFFIDAVIT_VERSION
from affidavit.plan import (
    Event,
    Gaussian,
    alternatives,
)

MIN_MU, MAX_MU = 1e-7, 1e6
MIN_LOWER = 1e-300
"""Below this a double has lost digits; no lower bound is claimed."""
ROUNDING = 16 * sys.float_info.epsilon
"""Relative error allowed for ``log_ndtr``, its argument and the sums around it."""
_TRIES = 64
"""Steps towards ε; six are usual."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GaussianCurve:
    """The profile of one Gaussian mechanism; ``mu`` is its Gaussian-DP parameter, sensitivity/σ."""

    mu: float

    @property
    def rho(self) -> float:
        """Its zero-concentrated DP parameter, μ²/2 (nats)."""
        return self.mu**2 / 2

    def delta(self, epsilon: float) -> Bracket:
        """Bracket of δ at ``epsilon`` (nats).

        Raises ``ValueError`` unless ε is finite and not negative.
        """
        require_epsilon(epsilon)
        if self.mu == 0:
            return Bracket(lower=0.0, upper=0.0)
        log_p, log_q, error = _log_terms(self.mu, epsilon)
        widest, refined_curve = log_q - log_p - 2 * error, log_q - log_p + 2 * error
        lower = math.exp(log_p - error) * -math.expm1(min(0.0, refined_curve))
        return Bracket(
            lower=lower if lower > MIN_LOWER else 0.0,
            # The next double up, so that a δ that underflows is still bounded above zero.
            upper=min(
                1.0,
                math.nextafter(math.exp(min(0.0, log_p + error)) * -math.expm1(widest), math.inf),
            ),
        )

    def epsilon(self, delta: float) -> Bracket:
        """Bracket of the smallest ε at ``delta``.

        In nats; raises ``ValueError`` unless 0 < δ < 1.
        """
        require_delta(delta)
        if self.mu == 0:
            return Bracket(lower=0.0, upper=0.0)
        return Bracket(lower=self._crossing(delta, upper=False), upper=self._crossing(delta))

    def _crossing(self, delta: float, *, upper: bool = True) -> float:
        """The end of the bracket of ε: the upper bound (or lower bound) of δ crosses there."""

        def enough(epsilon: float) -> bool:
            bracket = self.delta(epsilon)
            return bracket.upper <= delta if upper else bracket.lower <= delta

        if enough(0.0):
            return 0.0
        low, high = 0.0, max(self.mu**2, self.mu)
        while not enough(high):
            low, high = high, 2 * high
        at = self._near(delta, low, high, 1 if upper else -1)
        for reach in (8.0, 128.0, 2048.0):
            below, above = at - reach * math.ulp(at), at + reach * math.ulp(at)
            if low < below and above < high and not enough(below) and enough(above):
                low, high = below, above
                break
        while high - low > 4 * math.ulp(high):
            middle = low + (high - low) / 2
            low, high = (low, middle) if enough(middle) else (middle, high)
        return high if upper else low

    def _near(self, delta: float, low: float, high: float, side: int) -> float:
        """About where a bound of δ is ``delta``, between ``low`` and ``high``; decides nothing.

        Newton's method on the logarithm of the bound, upper for ``side`` 1 and lower for -1,
        which falls in ε, and bisection where a step would leave the bounds.
        """
        at, requested = (low + high) / 2, math.log(delta)
        for _ in range(_TRIES):
            log_p, log_q, error = _log_terms(self.mu, at)
            share = -math.expm1(log_q - log_p - side * 2 * error)
            if share <= 0:
                return at
            off = log_p + side * error + math.log(share) - requested
            low, high = (at, high) if off > 0 else (low, at)
            # d log δ / dε = -e^(log_q - log δ)
            step = off * share * math.exp(log_p - log_q)
            following = at + step if low < at + step < high else (low + high) / 2
            if abs(following - at) <= 2 * math.ulp(at):
                return following
            at = following
        return at


def _log_terms(mu: float, epsilon: float) -> tuple[float, float, float]:
    """log Φ(μ/2 - ε/μ), ε + log Φ(-μ/2 - ε/μ), and a bound on the error of either.

    An argument x off by a relative u moves log Φ(x) by at most u |x| (|x| + 1), because
    Φ'/Φ <= |x| + 1; the arguments here carry the rounding of both of their terms.
    """
    ratio = epsilon / mu
    log_p = float(log_ndtr(mu / 2 - ratio))
    log_q = float(log_ndtr(-mu / 2 - ratio))
    reach = mu / 2 + ratio
    steepest = abs(mu / 2 - ratio) + 1 if ratio > mu / 2 else 1.0
    slips = reach * (steepest + reach + 1) + abs(log_p) + abs(log_q) + epsilon + 1
    return log_p, epsilon + log_q, ROUNDING * slips


@dataclass(frozen=True, kw_only=True, slots=True)
class GaussianAccountant:
    """Exact for compositions of plain Gaussian releases; refuses everything else."""

    name: str = "gaussian"
    version: str = AFFIDAVIT_VERSION

    def curve(self, event: Event) -> GaussianCurve:
        """The curve of ``event``; raises ``Unsupported`` or ``OutOfReach`` as ``joint_mu`` does."""
        if len(alternatives(event)) > 1:
            raise Unsupported(
                "the run has a bound beside that of unsampled Gaussian releases.",
                "Use the fourier accountant.",
            )
        return GaussianCurve(mu=joint_mu(event))

    def attained(self, event: Event) -> tuple[GaussianCurve, GaussianCurve]:
        """The same curve for either order; raises as ``curve`` does."""
        curve = self.curve(event)
        return curve, curve


def joint_mu(event: Event) -> float:
    """μ of an all-Gaussian composition, rounded up; 0 for the empty one.

    μ = √(Σ count/σ²), σ the noise multipliers, as Gaussian DP composes (arXiv:1905.02383).
    Raises ``Unsupported`` for what is not Gaussian, and ``OutOfReach`` for a μ outside
    [``MIN_MU``, ``MAX_MU``].
    """
    precisions = []
    for leaf, count in leaves(event):
        match leaf:
            case Gaussian(noise_multiplier=sigma):
                precisions.append(count / sigma / sigma)
            case _:
                raise Unsupported(
                    "the exact Gaussian accountant takes unsampled Gaussian releases only.",
                    "Use an accountant for subsampled or Laplace releases.",
                )
    if not precisions:
        return 0.0
    mu = math.sqrt(math.fsum(precisions)) * (1 + ROUNDING)
    if not MIN_MU <= mu <= MAX_MU:
        raise OutOfReach(
            f"μ = {mu:.3g} is outside [{MIN_MU:g}, {MAX_MU:g}], where double "
            "precision bounds the profile.",
            "Choose a noise multiplier nearer to what training uses.",
        )
    return mu
