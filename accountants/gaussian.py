"""The exact Gaussian accountant, for runs that are one Gaussian mechanism.

A composition of adaptively chosen Gaussian releases is exactly as private as one Gaussian mechanism
with μ² = Σ n_i / σ_i², whose privacy profile is a closed form:

    δ(ε) = Φ(μ/2 - ε/μ) - e^ε Φ(-μ/2 - ε/μ).

The two terms agree in most digits if μ is small, so they are compared as logarithms: with a = log
Φ(μ/2 - ε/μ) and b = ε + log Φ(-μ/2 - ε/μ), δ = e^a (1 - e^(b-a)).

Guarantees
    * ``upper`` is at least and ``lower`` at most the tight value: a and b are moved by a bound on
      the rounding of their arguments and of ``log_ndtr``.
    * ``epsilon`` is inverted one-sidedly: δ at its upper end, rounded up, does not exceed the
      requested δ.

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
from affidavit.plan import events

MIN_MU, MAX_MU = 1e-7, 1e6
MIN_LOWER = 1e-300
"""Below this doubles lose digits, and the lower bound is 0."""
ROUNDING = 16 * sys.float_info.epsilon
"""Relative allowance for ``log_ndtr``, its argument and the sums around it."""
_MAX_NEWTON_STEPS = 64
"""Six are usual."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GaussianCurve:
    """The profile of one Gaussian mechanism; ``mu`` is its Gaussian-DP parameter, sensitivity/σ."""

    mu: float

    @property
    def rho(self) -> float:
        """The zero-concentrated DP parameter, μ²/2 (nats)."""
        return self.mu**2 / 2

    def delta(self, epsilon: float) -> Bracket:
        """Return the bracket of δ at ``epsilon`` (nats).

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
            # The next larger double, so that the bound of a δ that underflows is positive.
            upper=min(
                1.0,
                math.nextafter(math.exp(min(0.0, log_p + error)) * -math.expm1(widest), math.inf),
            ),
        )

    def epsilon(self, delta: float) -> Bracket:
        """Return the bracket of ε (nats) at ``delta``.

        Raises ``ValueError`` unless 0 < δ < 1.
        """
        require_delta(delta)
        if self.mu == 0:
            return Bracket(lower=0.0, upper=0.0)
        return Bracket(lower=self._crossing(delta, upper=False), upper=self._crossing(delta))

    def _crossing(self, delta: float, *, upper: bool = True) -> float:
        """Return the ε (nats) at which the upper (or lower) bound of δ reaches ``delta``."""

        def is_reached(epsilon: float) -> bool:
            bracket = self.delta(epsilon)
            return bracket.upper <= delta if upper else bracket.lower <= delta

        if is_reached(0.0):
            return 0.0
        low, high = 0.0, max(self.mu**2, self.mu)
        while not is_reached(high):
            low, high = high, 2 * high
        at = self._approximate_crossing(delta, low, high, 1 if upper else -1)
        for reach in (8.0, 128.0, 2048.0):
            below, above = at - reach * math.ulp(at), at + reach * math.ulp(at)
            if low < below and above < high and not is_reached(below) and is_reached(above):
                low, high = below, above
                break
        while high - low > 4 * math.ulp(high):
            middle = low + (high - low) / 2
            low, high = (low, middle) if is_reached(middle) else (middle, high)
        return high if upper else low

    def _approximate_crossing(self, delta: float, low: float, high: float, side: int) -> float:
        """Return about the ε from ``low`` to ``high`` where a bound of δ is ``delta``.

        It uses Newton's method on the log of the bound, upper for ``side`` 1 and lower for -1, and
        bisection if a step would leave the interval.
        """
        at, requested = (low + high) / 2, math.log(delta)
        for _ in range(_MAX_NEWTON_STEPS):
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


EMPTY_CURVE = GaussianCurve(mu=0.0)
"""The curve of a run without releases."""


def _log_terms(mu: float, epsilon: float) -> tuple[float, float, float]:
    """Return log Φ(μ/2 - ε/μ), ε + log Φ(-μ/2 - ε/μ), and a bound on the error of either.

    A relative error u of an argument x moves log Φ(x) by at most u |x| (|x| + 1), because
    Φ'/Φ <= |x| + 1. The arguments have the rounding of both of their terms.
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
    """Exact accounting of compositions of unsampled Gaussian releases only."""

    name: str = "gaussian"
    version: str = AFFIDAVIT_VERSION

    def curve(self, event: events.Event) -> GaussianCurve:
        """Return the curve of ``event``; raises ``Unsupported`` or ``OutOfReach``."""
        if len(events.alternatives(event)) > 1:
            raise Unsupported(
                "the run has other bounds than that of unsampled Gaussian releases.",
                "Use the fourier accountant.",
            )
        return GaussianCurve(mu=joint_mu(event))

    def attained(self, event: events.Event) -> tuple[GaussianCurve, GaussianCurve]:
        """Return the same curve for either order; raises as ``curve`` does."""
        curve = self.curve(event)
        return curve, curve


def joint_mu(event: events.Event) -> float:
    """Return μ = √(Σ count/σ²) of a Gaussian composition, rounded up; 0 for the empty one.

    Raises ``Unsupported`` for other releases, and ``OutOfReach`` for a μ outside
    [``MIN_MU``, ``MAX_MU``].
    """
    precisions = []
    for leaf, count in leaves(event):
        if not isinstance(leaf, events.Gaussian):
            raise Unsupported(
                "the exact Gaussian accountant takes unsampled Gaussian releases only.",
                "Use an accountant for subsampled or Laplace releases.",
            )
        precisions.append(count / leaf.noise_multiplier / leaf.noise_multiplier)
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
