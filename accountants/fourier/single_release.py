"""ε and δ of one mixture release, in closed form.

The loss L(z) of Σ_k w_k N(kμ) against N(0) rises, so that every half-line of outputs is a worst
one: beyond z lie P(Z > z) and Q(Z > z), and at ε = L(z)

    δ = P(Z > z) - e^{L(z)} Q(Z > z) = Σ_k w_k (Φ(kμ - z) - e^{kμz - k²μ²/2} Φ(-z)),

no term of which is negative. In the other order outputs lie below z, and ε = -L(z). No grid is
needed, and no loss is too large. Terms are bounded with what rounding of their exponents and of Φ
may change.

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
from affidavit.accountants.fourier.group_sampling import GroupMixtureLaw
from affidavit.accountants.fourier.normal_masses import UNIT_ROUNDOFF
from affidavit.accountants.protocol import OutOfReach

SMALLEST_DELTA = 1e-250
"""No smaller δ is answered for: terms would underflow."""
_HALVINGS = 200
_NORMAL = 1e-13
"""Relative error of log Φ, and absolute where that is near zero; some 1e-15 are seen."""


def single_release(directions: Sequence[Direction]) -> tuple[GroupMixtureLaw, ...]:
    """The laws of ``directions`` that are one mixture release each; empty where any is not.

    Empty too where only bounds of the release are known.
    """
    laws = []
    for direction in directions:
        if direction.gapped or direction.steps != 1:
            return ()
        if not isinstance(direction.laws[0][0], GroupMixtureLaw):
            return ()
        laws.append(direction.laws[0][0])
    return tuple(laws)


def epsilon_of(law: GroupMixtureLaw, delta: float) -> Bracket:
    """ε (nats) at ``delta``; raises ``OutOfReach`` where that is too small."""
    if delta < SMALLEST_DELTA:
        raise OutOfReach(f"delta {delta:g} is below {SMALLEST_DELTA:g}", "choose a larger δ")
    outputs = _Outputs(law)
    low = outputs.last(lambda point: point.delta.lower > delta)
    high = outputs.last(lambda point: point.delta.upper > delta, above=True)
    lower = max(0.0, low.epsilon.lower) if low is not None else 0.0
    if high is None:
        raise OutOfReach("no place has so small a delta", "choose a larger δ")
    return Bracket(lower=lower, upper=max(lower, high.epsilon.upper, 0.0))


def delta_of(law: GroupMixtureLaw, epsilon: float) -> Bracket:
    """δ at ``epsilon`` (nats)."""
    # δ falls with ε: that at a lower ε bounds it from above, that at a higher one from below.
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


class _Outputs:
    """The half-lines of outputs of ``law``."""

    def __init__(self, law: GroupMixtureLaw) -> None:
        self._law, self._weights = law, np.array(law.weights)
        self._means = np.arange(len(law.weights)) / law.noise_multiplier
        self._logs, self._halves = np.log(self._weights), self._means**2 / 2
        self._sizes = np.abs(self._logs)

    def last(self, holds: Callable[[_Point], bool], *, above: bool = False) -> _Point | None:
        """About the last place where ``holds``, as it does up to there, or the first above it.

        None where it holds nowhere above the place of ε = 0, or everywhere.
        """
        reach = self._law.mu + 60.0
        low, high = -reach, reach
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            if not low < middle < high:
                break
            low, high = (middle, high) if holds(self._point(middle)) else (low, middle)
        result = self._point(high if above else low)
        return result if holds(result) != above else None

    def _point(self, place: float) -> _Point:
        """ε and δ of the outputs beyond ``place``; below its mirror image if the law is added."""
        added, logs, means = self._law.added, self._logs, self._means
        z = -place if added else place
        shifts = means * z
        exponents = logs + shifts - self._halves
        size = self._sizes + np.abs(shifts) + self._halves
        peak = float(exponents.max())
        shares = np.exp(exponents - peak)
        total = float(shares.sum())
        loss = peak + math.log(total)
        # Each term's exponent moves the loss by the term's share.
        moved = float(shares @ size) / total + abs(peak) + abs(loss)
        unsure = 16 * UNIT_ROUNDOFF * (moved + len(means))
        epsilon = -loss if added else loss
        # The terms of a record that is not drawn are equal, and left out. log of each other term,
        # of P beyond the place and of Q times e^ε, or of P times e^ε and of Q.
        sign, scale = (-1.0, epsilon) if added else (1.0, 0.0)
        own = logs[1:] + log_ndtr(sign * (means[1:] - z)) + scale
        other = exponents[1:] + float(log_ndtr(-sign * z)) + scale
        slack = 2 * unsure + _NORMAL * (1 + np.abs(own) + np.abs(other))
        slack += 16 * UNIT_ROUNDOFF * size[1:]
        own, other = np.exp(own), np.exp(other)
        middle = sign * float((own - other).sum())
        error = float(((own + other) * slack).sum()) * 1.1 + 1e-300
        return _Point(
            epsilon=Bracket(lower=epsilon - unsure, upper=epsilon + unsure),
            delta=Bracket(lower=middle - error, upper=middle + error),
        )
