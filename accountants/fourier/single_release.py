"""ε and δ of one release, in closed form.

P = Σ_k w_k N(m_k) and Q = Σ_j v_j N(n_j) have densities p and q, and the loss L(z) = log p/q rises
in z, so that the outputs beyond z are the worst ones: at ε = L(z)

    δ = P(Z > z) - e^{L(z)} Q(Z > z)
      = Σ_k w_k Σ_j s_j (Φ(m_k - z) - φ(z - m_k)/φ(z - n_j) Φ(n_j - z)),

where s_j = v_j φ(z - n_j)/q(z). As m_k ≥ n_j no term is negative; that of a mean of both laws is
zero, and left out. No grid is needed, and no loss is too large. The bounds of terms include the
rounding of their exponents and of Φ.

Reference: docs/theorems/group-sampling.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import log_ndtr

from affidavit.accountants.bracket import Bracket
from affidavit.accountants.fourier.dominating_pairs import Direction
from affidavit.accountants.fourier.privacy_loss import UNIT_ROUNDOFF, Array, Mixture, NormalPair
from affidavit.accountants.protocol import OutOfReach

MIN_DELTA = 1e-250
"""The smallest δ of which no term underflows."""
_BISECTIONS = 200
_LOG_NORMAL_ERROR = 1e-13
"""Relative error of log Φ, and absolute error near zero; measured errors are some 1e-15."""


def single_release(directions: Sequence[Direction]) -> tuple[NormalPair, ...]:
    """Return the laws of ``directions`` that are one release each; empty if any is not.

    The result is also empty if only bounds of the release are known.
    """
    laws = []
    for direction in directions:
        law = direction.laws[0][0]
        if direction.has_gap or direction.steps != 1 or not isinstance(law, NormalPair):
            return ()
        laws.append(law)
    return tuple(laws)


def epsilon_of(law: NormalPair, delta: float) -> Bracket:
    """Return ε (nats) at ``delta``; raises ``OutOfReach`` if that is too small."""
    if delta < MIN_DELTA:
        raise OutOfReach(f"delta {delta:g} is below {MIN_DELTA:g}.", "Choose a larger δ.")
    outputs = _Outputs(law)
    low = outputs.last(lambda point: point.delta.lower > delta)
    high = outputs.last(lambda point: point.delta.upper > delta, above=True)
    lower = max(0.0, low.epsilon.lower) if low is not None else 0.0
    if high is None:
        raise OutOfReach("no place has so small a delta.", "Choose a larger δ.")
    return Bracket(lower=lower, upper=max(lower, high.epsilon.upper, 0.0))


def delta_of(law: NormalPair, epsilon: float) -> Bracket:
    """Return δ at ``epsilon`` (nats)."""
    # δ falls with ε: a lower ε bounds it from above, a higher one from below.
    outputs = _Outputs(law)
    low = outputs.last(lambda point: point.epsilon.lower < epsilon, above=True)
    high = outputs.last(lambda point: point.epsilon.upper <= epsilon)
    lower = 0.0 if low is None else max(0.0, low.delta.lower)
    upper = 1.0 if high is None else min(1.0, high.delta.upper)
    return Bracket(lower=min(lower, upper), upper=upper)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Point:
    """ε (nats) and δ at one place, each between two bounds."""

    epsilon: Bracket
    delta: Bracket


class _Normals:
    """Normals of a law: the logarithms of their weights and their means, of shape (n,)."""

    def __init__(self, mixture: Mixture) -> None:
        weights, means = zip(*(normal for normal in mixture if normal[0] > 0), strict=True)
        self._logs, self._means = np.log(weights), np.array(means)
        self._halves = self._means**2 / 2
        self.centred = self._means == 0

    def densities(self, z: float) -> tuple[Array, Array]:
        """Return logarithms of the density's terms over N(0)'s, and their errors; both (n,)."""
        shifts = self._means * z
        sizes = np.abs(self._logs) + np.abs(shifts) + self._halves
        return self._logs + shifts - self._halves, 16 * UNIT_ROUNDOFF * sizes

    def tails(self, z: float, errors: Array) -> tuple[Array, Array]:
        """Return logarithms of the terms of the tail beyond ``z``, and their errors; both (n,).

        ``errors`` (n,) are those of the densities at ``z``.
        """
        tails = log_ndtr(self._means - z)
        return self._logs + tails, errors + _LOG_NORMAL_ERROR * (1 + np.abs(tails))


class _Outputs:
    """The half-lines of outputs of ``law``."""

    def __init__(self, law: NormalPair) -> None:
        self._p, self._q = _Normals(law.p_mixture), _Normals(law.q_mixture)
        self._reach = law.mu + 60.0
        # Two searches for one ε or δ part only where its bounds do.
        self._points: dict[float, _Point] = {}

    def last(self, holds: Callable[[_Point], bool], *, above: bool = False) -> _Point | None:
        """Return about the last place up to which ``holds`` is true, or the first ``above`` it.

        Returns None if it holds nowhere or everywhere within reach.
        """
        low, high = -self._reach, self._reach
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            if not low < middle < high:
                break
            low, high = (middle, high) if holds(self._point(middle)) else (low, middle)
        result = self._point(high if above else low)
        return result if holds(result) != above else None

    def _point(self, z: float) -> _Point:
        if z not in self._points:
            self._points[z] = self._compute_point(z)
        return self._points[z]

    def _compute_point(self, z: float) -> _Point:
        """Return ε and δ of the outputs beyond ``z``."""
        (p, p_errors), (q, q_errors) = self._p.densities(z), self._q.densities(z)
        (log_p, p_error), (log_q, q_error) = _log_sum(p, p_errors), _log_sum(q, q_errors)
        own, own_errors = self._p.tails(z, p_errors)
        beyond, beyond_errors = self._q.tails(z, q_errors)
        middle, error = 0.0, 1e-300
        # The mean 0 of P has no term with that of Q.
        for rows, columns in ((~self._p.centred, slice(None)), (self._p.centred, ~self._q.centred)):
            if not rows.any() or not q[columns].size:
                continue
            share, share_error = _log_sum(q[columns], q_errors[columns])
            tail, tail_error = _log_sum(beyond[columns], beyond_errors[columns])
            sides = (
                (own[rows] + (share - log_q), own_errors[rows] + share_error),
                (p[rows] - log_q + tail, p_errors[rows] + tail_error + _LOG_NORMAL_ERROR),
            )
            for sign, (logs, errors) in zip((1, -1), sides, strict=True):
                terms = np.exp(logs)
                middle += sign * float(terms.sum())
                error += 1.1 * float(terms @ np.expm1(errors + q_error))
        return _Point(
            epsilon=Bracket(
                lower=log_p - log_q - p_error - q_error, upper=log_p - log_q + p_error + q_error
            ),
            delta=Bracket(lower=middle - error, upper=middle + error),
        )


def _log_sum(logs: Array, errors: Array) -> tuple[float, float]:
    """Return log Σ e^``logs`` and its error; ``logs`` have errors up to ``errors``, both (n,)."""
    peak = float(logs.max())
    shares = np.exp(logs - peak)
    total = float(shares.sum())
    result = peak + math.log(total)
    rounding = 16 * UNIT_ROUNDOFF * (logs.size + abs(peak) + abs(result))
    return result, math.log1p(float(shares @ np.expm1(errors)) / total) + rounding
