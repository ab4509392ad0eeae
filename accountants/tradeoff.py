"""From δ(ε) to what an attacker can do: the trade-off of errors, as a bracket.

Let h(γ) = sup_S P(S) - γ Q(S) be the hockey-stick divergence, the larger of both orders of
every pair of neighbours, so that δ(ε) = h(e^ε). It is convex and decreasing in γ > 0, being
a supremum of lines with slopes in [-1, 0], has h(0) = 1, and swapping the two orders gives
h(γ) = 1 - γ + γ h(1/γ), so that δ at ε >= 0 gives h everywhere. The trade-off function is
its conjugate,

    f(α) = sup over γ > 0 of 1 - h(γ) - γ α
         = sup over ε >= 0 of max(0, 1 - δ(ε) - e^ε α, e^-ε (1 - δ(ε) - α)),

the largest convex function that is below the error of type II of every test with an error
of type I of α between neighbours, in either order. Known are brackets of δ at some ε.

* ``f`` from below: each known ε with the upper end of its δ is one line of the supremum,
  and a supremum over fewer lines is less.
* ``f`` from above: h is bounded from below by the lower ends and, between two known
  points, by the chords on either side prolonged into the interval, because a convex
  function lies above its chords outside them. That bound is piecewise linear, so that the
  supremum is attained at one of its vertices.

Guarantees
    * ``lower`` is at most and ``upper`` at least the tight value, whatever points are known.
    * ``lower`` is convex, decreasing, at most 1 - α and symmetric (f = f⁻¹).
    * 1e-12 is added outward, above what double precision loses in lines that matter, where
      γ α <= 1.

>>> from affidavit.accountants.gaussian import GaussianCurve
>>> trade = TradeOff.of(GaussianCurve(mu=1.0), (0.0, 0.5, 1.0, 2.0))
>>> round(trade.advantage.upper, 4)
0.3829
>>> trade.type_two(0.1).lower < 0.6105 < trade.type_two(0.1).upper
True

References: Dong, Roth and Su, arXiv:1905.02383 (f and δ(ε) as conjugates); Wasserman and
Zhou, arXiv:0811.2501; Kairouz, Oh and Viswanath, arXiv:1311.0776; Sason and Verdú,
arXiv:1508.00335 (E_γ is convex and decreasing).

What an observer may come to believe about one record, from a privacy curve.

An observer holds a record to be in the data with probability π, knows all others, and sees
everything that is released. Let P be the law of the release with the record and Q without
(or the reverse; the curve is the larger of both).

* ``guess``: how often the best guess is right. A test with rates TPR and FPR is right with
  probability π TPR + (1 - π)(1 - FPR), and the best has (1 - π) + π h((1 - π)/π) for π <= 1/2,
  where h(γ) = sup_S P(S) - γ Q(S) = δ(log γ); for π > 1/2 the two are exchanged. It is an
  average over what may be released, and tight.
* ``belief``: what the observer may believe after one release, except with probability τ.
  By Bayes the odds of π are multiplied by e^L, with L = log P/Q, so that a belief above
  π e^t / (1 - π + π e^t) needs L > t. Since δ(ε) = E_P (1 - e^(ε - L))_+ is at least
  P(L > t) (1 - e^(ε - t)) for every ε < t, it is enough that δ(ε) <= c τ with
  t = ε - log(1 - c), for any 0 < c < 1. Q(L > t) is smaller still. An (ε, δ) guarantee alone
  bounds P(L > ε) by nothing below 1.

>>> from affidavit.accountants.gaussian import GaussianCurve
>>> round(guess(GaussianCurve(mu=1.0), 0.5).upper, 4)
0.6915
>>> t = odds_exponent(GaussianCurve(mu=1.0), 1e-5)
>>> round(t, 2), round(belief(0.5, t), 4)
(4.96, 0.993)

References: Kasiviswanathan and Smith, arXiv:0803.3946 (Bayesian reading of privacy, and the
tail of the loss); Humphries et al., arXiv:2010.12112 (membership inference at a prior).

The privacy profile δ(ε), asked at enough points to draw it and to convert it.

``sample`` begins with evenly spaced ε and halves, in rounds, every interval in which the
trade-off function would be known less well than the tolerance, even if every δ asked for
were exact (``affidavit.accountants.tradeoff.gaps``). Nothing is interpolated: each point is
a bracket that the accountant proved. A point that it refuses is left out, which makes what
is derived from the profile looser and never wrong.

>>> from affidavit.accountants.gaussian import GaussianCurve
>>> profile = sample(GaussianCurve(mu=1.0))
>>> profile.epsilons[0], round(profile.deltas[0].upper, 6)
(0.0, 0.382925)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from affidavit.accountants.bracket import Bracket
from affidavit.accountants.protocol import AccountantError, OutOfReach, PrivacyCurve

Array = npt.NDArray[np.float64]

MAX_EPSILON = 690.0
"""Nats. Beyond it e^ε leaves the doubles; such a line says nothing for any α above 1e-299."""
ROUNDING = 1e-12
_ULPS = 1e-15
"""A few units in the last place of numbers up to one."""
_CHORDS = 4
"""How many points away a chord may begin: of two that are near, the chord says little."""
_TOGETHER = 1e-12
"""Points whose γ differ by less of it are one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TradeOff:
    """The trade-off function known from δ at ``epsilons`` (nats, in order, from 0 or above)."""

    epsilons: tuple[float, ...]
    deltas: tuple[Bracket, ...]

    def __post_init__(self) -> None:
        if len(self.epsilons) != len(self.deltas) or not self.epsilons:
            raise ValueError("a trade-off function needs a bracket of δ for each of its ε")
        if list(self.epsilons) != sorted(set(self.epsilons)) or self.epsilons[0] < 0:
            raise ValueError("ε are increasing and not negative")

    @classmethod
    def of(cls, curve: PrivacyCurve, epsilons: Sequence[float]) -> TradeOff:
        """The trade-off function of ``curve``, asked at ``epsilons`` (nats, increasing)."""
        return cls(
            epsilons=tuple(epsilons), deltas=tuple(curve.delta(epsilon) for epsilon in epsilons)
        )

    def refined(self, known: Mapping[float, Bracket]) -> TradeOff:
        """With δ as ``known`` at further ε (nats), or better at the same."""
        points = {**dict(zip(self.epsilons, self.deltas, strict=True)), **known}
        return TradeOff(
            epsilons=tuple(sorted(points)), deltas=tuple(points[point] for point in sorted(points))
        )

    def type_two(self, alpha: float) -> Bracket:
        """f(α): the least error of type II at an error of type I of ``alpha``, in [0, 1].

        Raises ``ValueError`` for an ``alpha`` that is no probability.
        """
        if not 0 <= alpha <= 1:
            raise ValueError(f"an error of type I lies in [0, 1], got {alpha!r}")
        gamma, low, high = self._everywhere()
        lines = 1 - high - gamma * alpha
        least = max(0.0, float(lines.max()) - ROUNDING)
        at, under = _minorant(gamma, low, high)
        most = min(1 - alpha, float((1 - under - at * alpha).max()) + ROUNDING)
        return Bracket(lower=min(least, 1 - alpha), upper=max(least, most, 0.0))

    def true_positive_rate(self, false_positive_rate: float) -> Bracket:
        """The most that a membership attack detects at a false-positive rate: 1 - f."""
        missed = self.type_two(false_positive_rate)
        return Bracket(
            lower=max(0.0, 1 - missed.upper - ROUNDING), upper=min(1.0, 1 - missed.lower + ROUNDING)
        )

    @property
    def advantage(self) -> Bracket:
        """The largest difference of true- and false-positive rate, which is δ at ε = 0.

        From below by the known points: δ does not increase, so any of them will do. From
        above by ε = 0 if it is known, else by h(1) <= h(γ) + (γ - 1), slopes being >= -1.
        """
        gamma = np.exp(np.minimum(self.epsilons, MAX_EPSILON))
        above = [item.upper + g - 1 for item, g in zip(self.deltas, gamma, strict=True)]
        return Bracket(
            lower=max(delta.lower for delta in self.deltas),
            upper=min(1.0, float(min(above)) * (1 + 1e-15)),
        )

    def _everywhere(self) -> tuple[Array, Array, Array]:
        """γ >= 0 in order with lower and upper ends of h, from h(0) = 1 on."""
        stored = [i for i, epsilon in enumerate(self.epsilons) if epsilon <= MAX_EPSILON]
        above = np.exp(np.array([self.epsilons[i] for i in stored]))
        low = np.array([self.deltas[i].lower for i in stored])
        high = np.array([self.deltas[i].upper for i in stored])
        below = 1 / above
        gamma = np.concatenate([[0.0], below[::-1], above])
        lower = np.concatenate([[1.0], (1 - below + below * low - _ULPS)[::-1], low])
        upper = np.concatenate([[1.0], (1 - below + below * high + _ULPS)[::-1], high])
        apart = np.diff(gamma, append=np.inf) > _TOGETHER * gamma
        return gamma[apart], np.maximum(lower, 0.0)[apart], upper[apart]


def gaps(epsilons: Sequence[float], deltas: Sequence[float]) -> Array:
    """How far f is known between each two neighbouring ε, if δ were known exactly at them.

    The height of the chord over the vertex of the prolonged chords: an error of type II.

    Shape (n - 1,) for n ε, in nats and increasing.
    """
    exact = TradeOff(
        epsilons=tuple(epsilons),
        deltas=tuple(Bracket(lower=delta, upper=delta) for delta in deltas),
    )
    gamma, low, high = exact._everywhere()
    at, under = _vertices(gamma, low, high)
    share = (at - gamma[:-1]) / np.diff(gamma)
    height = np.maximum(high[:-1] + share * np.diff(high) - under, 0.0)
    # Each interval of ε is the interval of γ that begins at its left end.
    begins = np.searchsorted(gamma, np.exp(epsilons[:-1]) * (1 - _TOGETHER))
    result: Array = height[np.minimum(begins, len(height) - 1)]
    return result


def _minorant(gamma: Array, low: Array, high: Array) -> tuple[Array, Array]:
    """Where the lower bound of h may bend, and its value there."""
    at, under = _vertices(gamma, low, high)
    # Beyond the last point the last chord goes on until it meets h >= 0.
    width = gamma[-1] - gamma[-2]
    slope = (low[-1] - high[-2]) / width * (1 + _ULPS * gamma[-1] / width)
    beyond = gamma[-1] + (low[-1] / -slope if slope < 0 else 0.0)
    return (
        np.concatenate([gamma, at, [beyond]]),
        np.concatenate([low, under, [0.0]]),
    )


def _vertices(gamma: Array, low: Array, high: Array) -> tuple[Array, Array]:
    """For each interval of γ, where the chords prolonged from either side meet, and how low.

    From the left: l_j + s x, with s the greatest slope to l_j from the upper end of one of the
    points before it, or -1 where there is none. From the right: l_{j+1} + r (d - x), with r the
    greatest fall from l_{j+1} to the upper end of one behind it, or 0. The greater of two lines
    bends where they meet; where that is outside, one of them is above the other throughout,
    and the ends say enough.
    """
    width = np.diff(gamma)
    slope, rise = np.full(width.size, -1.0), np.zeros(width.size)
    for away in range(1, min(_CHORDS, width.size) + 1):
        # A chord from a point `away` places before or behind, over this much of γ.
        across = gamma[away:] - gamma[:-away]
        fall = (high[away:] - low[:-away]) / across, (low[away:] - high[:-away]) / across
        # γ is rounded, which matters the more the nearer two of them are.
        slip = _ULPS * gamma[away:] / across
        prolonged = np.minimum(0.0, fall[1] * (1 + slip))[: width.size - away]
        slope[away:] = np.maximum(slope[away:], prolonged)
        rising = np.maximum(0.0, -fall[0] * (1 - slip))[1:]
        rise[: rising.size] = np.maximum(rise[: rising.size], rising)
    with np.errstate(divide="ignore", invalid="ignore"):
        step = (low[1:] + rise * width - low[:-1]) / (slope + rise)
    # nan and infinities, of parallel lines, are not inside either.
    inside = np.where((step >= 0) & (step <= width), step, 0.0)
    under = low[:-1] + slope * inside
    return gamma[:-1] + inside, np.maximum(under, 0.0)


SHARES = (0.05, 0.2, 0.5)
"""The c that are tried; each gives a bound and the least is returned."""
ROUNDING = 1e-14


def guess(curve: PrivacyCurve, prior: float) -> Bracket:
    """The probability that the best guess about the record is right, at ``prior`` in (0, 1).

    Raises ``ValueError`` for another prior.
    """
    _require_prior(prior)
    rarer, commoner = min(prior, 1 - prior), max(prior, 1 - prior)
    # h moves by at most the rounding of γ, and 1 - π by that of the subtraction.
    known = curve.delta(math.log(commoner / rarer))
    return Bracket(
        lower=max(commoner, commoner + rarer * known.lower - ROUNDING),
        upper=min(1.0, commoner + rarer * known.upper + ROUNDING),
    )


def belief(prior: float, exponent: float) -> float:
    """The belief that odds of ``prior`` times e^``exponent`` (nats) are, rounded up.

    A probability, of a prior in (0, 1); raises ``ValueError`` for another.
    """
    _require_prior(prior)
    odds = prior / (1 - prior) * math.exp(min(700.0, exponent))
    return min(1.0, odds / (1 + odds) * (1 + 1e-12))


def odds_exponent(curve: PrivacyCurve, probability: float) -> float:
    """t (nats) such that the odds rise by more than e^t with ``probability`` at most.

    Infinite where the accountant bounds nothing.

    Raises ``ValueError`` unless the probability lies strictly between 0 and 1.
    """
    if not 0 < probability < 1:
        raise ValueError(f"a probability lies strictly between 0 and 1, got {probability!r}")
    best = math.inf
    for share in SHARES:
        try:
            epsilon = curve.epsilon(share * probability * (1 - ROUNDING)).upper
        except AccountantError:
            continue
        best = min(best, (epsilon - math.log1p(-share)) * (1 + ROUNDING))
    return best


def _require_prior(prior: float) -> None:
    if not 0 < prior < 1:
        raise ValueError(f"a prior lies strictly between 0 and 1, got {prior!r}")


MIN_DELTA = 1e-12
"""The profile is followed until δ is about this small."""
TOLERANCE = 3e-4
"""To what, a probability, the error of type II is known beside what the accountant leaves."""
FIRST, MOST = 17, 257
"""Points to begin with, and at most."""

Progress = Callable[[int], None]
"""Told how many points there are, whenever there is one more."""


def sample(
    curve: PrivacyCurve, *, tolerance: float = TOLERANCE, progress: Progress = lambda _: None
) -> TradeOff:
    """δ of ``curve`` from ε = 0 to where it is ``MIN_DELTA``, as a trade-off function.

    ``tolerance`` is in the error of type II, as ``TOLERANCE``.

    Raises ``AccountantError`` if the accountant gives no point at all.
    """
    requested: dict[float, Bracket | None] = {}

    def ask(epsilon: float) -> None:
        try:
            requested[epsilon] = curve.delta(epsilon)
        except AccountantError:
            requested[epsilon] = None
        progress(len(requested))

    top = min(_top(curve), MAX_EPSILON)
    expected = [top * index / (FIRST - 1) for index in range(FIRST)]
    while expected and len(requested) < MOST:
        for epsilon in expected[: MOST - len(requested)]:
            ask(epsilon)
        known = {entry: result for entry, result in sorted(requested.items()) if result is not None}
        expected = [item for item in _wanted(known, tolerance) if item not in requested]
    if not known:
        raise OutOfReach("δ is not bounded at any ε.", "Use another accountant.")
    return TradeOff(epsilons=tuple(known), deltas=tuple(known.values()))


def _wanted(known: dict[float, Bracket], tolerance: float) -> list[float]:
    """The middles of the intervals in which too little is known, the worst first."""
    if len(known) < 2:
        return []
    epsilons = list(known)
    result = gaps(epsilons, [item.upper for item in known.values()])
    worst = sorted(range(len(result)), key=lambda index: -result[index])
    return [
        (epsilons[index] + epsilons[index + 1]) / 2 for index in worst if result[index] > tolerance
    ]


def _top(curve: PrivacyCurve) -> float:
    """The ε up to which the profile is followed."""
    for exponent in range(round(-math.log10(MIN_DELTA)), 0, -1):
        try:
            top = curve.epsilon(10.0**-exponent).upper
        except AccountantError:
            continue
        if math.isfinite(top):
            return max(top, 1e-3)
    return 1.0
