"""What a privacy curve δ(ε) means for an attacker: error rates and beliefs.

**Trade-off function.** Let h(γ) = sup_S P(S) - γ Q(S) be the hockey-stick divergence, the larger of
both orders of every pair of neighbours, so that δ(ε) = h(e^ε). It is convex and decreasing in
γ > 0, being a supremum of lines with slopes in [-1, 0], has h(0) = 1, and swapping the two orders
gives h(γ) = 1 - γ + γ h(1/γ), so that δ at ε >= 0 determines h everywhere. The trade-off function
is its conjugate,

    f(α) = sup over γ > 0 of 1 - h(γ) - γ α
         = sup over ε >= 0 of max(0, 1 - δ(ε) - e^ε α, e^-ε (1 - δ(ε) - α)),

the largest convex function below the type II error of every test with type I error α between
neighbours, in either order. ``TradeOff`` bounds it from brackets of δ at some ε:

* From below, each ε with the upper bound of its δ is one line of the supremum. Fewer lines have a
  smaller supremum.
* From above, h is at least the lower bounds of δ and, between two points, the chords on either side
  extended into the interval, because a convex function lies above its chords outside them. This
  bound is piecewise linear, so its vertices attain the supremum.

**Guessing.** An observer believes with probability π that a record is in the data, knows all other
records and sees everything released, with law P with the record and Q without it (or the
reverse). A test with rates TPR and FPR is right with probability π TPR + (1 - π)(1 - FPR). The
best one has (1 - π) + π h((1 - π)/π) for π <= 1/2; for π > 1/2 the two are exchanged
(``guess_accuracy``). This is an average over releases, and tight.

**Belief.** By Bayes' rule a release multiplies the odds of π by e^L with L = log P/Q, so a belief
above π e^t / (1 - π + π e^t) needs L > t. Since δ(ε) = E_P (1 - e^(ε - L))_+ is at least
P(L > t) (1 - e^(ε - t)) for every ε < t, P(L > t) is at most τ if δ(ε) <= c τ with
t = ε - log(1 - c), for any 0 < c < 1 (``odds_exponent``). Q(L > t) is smaller still. A single
(ε, δ) guarantee does not bound P(L > ε) below 1.

Guarantees
    * ``lower`` is at most and ``upper`` at least the tight value, for any set of points.
    * ``lower`` is convex, decreasing, at most 1 - α and symmetric (f = f⁻¹).
    * Errors are widened by 1e-12, more than double precision loses in the lines that matter, where
      γ α <= 1.
    * Nothing is interpolated. A point that the accountant refuses is omitted, which makes the
      result looser and never wrong.

>>> from affidavit.accountants.gaussian import GaussianCurve
>>> curve = GaussianCurve(mu=1.0)
>>> trade_off = TradeOff.of(curve, (0.0, 0.5, 1.0, 2.0))
>>> round(trade_off.advantage.upper, 4)
0.3829
>>> trade_off.type_two(0.1).lower < 0.6105 < trade_off.type_two(0.1).upper
True
>>> round(guess_accuracy(curve, 0.5).upper, 4)
0.6915
>>> t = odds_exponent(curve, 1e-5)
>>> round(t, 2), round(belief(0.5, t), 4)
(4.96, 0.993)
>>> profile = sample_trade_off(curve)
>>> profile.epsilons[0], round(profile.deltas[0].upper, 6)
(0.0, 0.382925)

References: Dong, Roth and Su, arXiv:1905.02383 (f and δ(ε) as conjugates); Wasserman and
Zhou, arXiv:0811.2501; Kairouz, Oh and Viswanath, arXiv:1311.0776; Sason and Verdú,
arXiv:1508.00335 (E_γ is convex and decreasing); Kasiviswanathan and Smith, arXiv:0803.3946
(Bayesian reading of privacy, and the tail of the loss); Humphries et al., arXiv:2010.12112
(membership inference at a prior).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from affidavit.accountants.bracket import Bracket
from affidavit.accountants.protocol import AccountantError, OutOfReach, PrivacyCurve
from affidavit.accountants.rounding import Array

MAX_EPSILON = 690.0
"""Nats. Beyond it e^ε overflows; such a line bounds nothing for any α above 1e-299."""
ERROR_ROUNDING = 1e-12
"""Added outward to error rates."""
BELIEF_ROUNDING = 1e-14
"""Added outward to the accuracy of a guess, and relative allowance for an odds exponent."""
_FEW_ULPS = 1e-15
"""A few units in the last place of numbers up to one."""
_MAX_CHORD_DISTANCE = 4
"""How many points away a chord may start. A chord between two close points bounds little."""
_MIN_SPACING = 1e-12
"""Points whose γ differ relatively by less than this are merged."""
_DELTA_SHARES = (0.05, 0.2, 0.5)
"""The c that ``odds_exponent`` tries; each gives a bound, and it returns the least."""

MIN_DELTA = 1e-12
"""``sample_trade_off`` follows the curve until δ is about this small."""
TOLERANCE = 3e-4
"""Accuracy of the type II error between sampled points, beside the accountant's own width."""
INITIAL_POINTS, MAX_POINTS = 17, 257

Progress = Callable[[int], None]
"""Called with the number of sampled points after each of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TradeOff:
    """Bounds of the trade-off function from ``deltas`` at increasing ``epsilons`` (nats, >= 0)."""

    epsilons: tuple[float, ...]
    deltas: tuple[Bracket, ...]

    def __post_init__(self) -> None:
        if len(self.epsilons) != len(self.deltas) or not self.epsilons:
            raise ValueError("a trade-off function needs one bracket of δ for each ε")
        if list(self.epsilons) != sorted(set(self.epsilons)) or self.epsilons[0] < 0:
            raise ValueError("the ε of a trade-off function must increase and not be negative")

    @classmethod
    def of(cls, curve: PrivacyCurve, epsilons: Sequence[float]) -> TradeOff:
        """Return the trade-off function of ``curve`` sampled at increasing ``epsilons`` (nats)."""
        return cls(
            epsilons=tuple(epsilons), deltas=tuple(curve.delta(epsilon) for epsilon in epsilons)
        )

    def refined(self, known: Mapping[float, Bracket]) -> TradeOff:
        """Return a copy that adds or replaces the brackets of δ at the ε (nats) of ``known``."""
        points = {**dict(zip(self.epsilons, self.deltas, strict=True)), **known}
        return TradeOff(
            epsilons=tuple(sorted(points)), deltas=tuple(points[point] for point in sorted(points))
        )

    def type_two(self, alpha: float) -> Bracket:
        """Return f(α), the least type II error at type I error ``alpha``.

        Raises ``ValueError`` unless ``alpha`` is in [0, 1].
        """
        if not 0 <= alpha <= 1:
            raise ValueError(f"a type I error must lie in [0, 1], got {alpha!r}")
        gamma, low, high = self._hockey_stick()
        lines = 1 - high - gamma * alpha
        least = max(0.0, float(lines.max()) - ERROR_ROUNDING)
        at, under = _lower_envelope(gamma, low, high)
        most = min(1 - alpha, float((1 - under - at * alpha).max()) + ERROR_ROUNDING)
        return Bracket(lower=min(least, 1 - alpha), upper=max(least, most, 0.0))

    def true_positive_rate(self, false_positive_rate: float) -> Bracket:
        """Return 1 - f, the largest detection rate of a membership attack at this rate."""
        missed = self.type_two(false_positive_rate)
        return Bracket(
            lower=max(0.0, 1 - missed.upper - ERROR_ROUNDING),
            upper=min(1.0, 1 - missed.lower + ERROR_ROUNDING),
        )

    @property
    def advantage(self) -> Bracket:
        """The largest difference of true- and false-positive rate, which is δ at ε = 0.

        Since δ decreases, each point bounds it from below. From above it is bounded by δ at ε = 0
        or by h(1) <= h(γ) + (γ - 1), because slopes are at least -1.
        """
        gamma = np.exp(np.minimum(self.epsilons, MAX_EPSILON))
        above = [item.upper + g - 1 for item, g in zip(self.deltas, gamma, strict=True)]
        return Bracket(
            lower=max(delta.lower for delta in self.deltas),
            upper=min(1.0, float(min(above)) * (1 + 1e-15)),
        )

    def least_hockey_stick(self, ratios: Array) -> Array:
        """Return lower bounds of h at ``ratios`` γ = e^ε, shape (n,)."""
        at, under = _lower_envelope(*self._hockey_stick())
        order = np.argsort(at, kind="stable")
        return np.asarray(np.interp(ratios, at[order], under[order]) - ERROR_ROUNDING)

    def _hockey_stick(self) -> tuple[Array, Array, Array]:
        """Return increasing γ >= 0 with lower and upper bounds of h, starting with h(0) = 1."""
        finite = [i for i, epsilon in enumerate(self.epsilons) if epsilon <= MAX_EPSILON]
        above = np.exp(np.array([self.epsilons[i] for i in finite]))
        low = np.array([self.deltas[i].lower for i in finite])
        high = np.array([self.deltas[i].upper for i in finite])
        below = 1 / above
        gamma = np.concatenate([[0.0], below[::-1], above])
        lower = np.concatenate([[1.0], (1 - below + below * low - _FEW_ULPS)[::-1], low])
        upper = np.concatenate([[1.0], (1 - below + below * high + _FEW_ULPS)[::-1], high])
        apart = np.diff(gamma, append=np.inf) > _MIN_SPACING * gamma
        return gamma[apart], np.maximum(lower, 0.0)[apart], upper[apart]


def type_two_gaps(epsilons: Sequence[float], deltas: Sequence[float]) -> Array:
    """Return the uncertainty of f between neighbouring ε if ``deltas`` were exact.

    It is the height of the chord above the vertex of the extended chords: a type II error.
    For n increasing ``epsilons`` (nats) the result has shape (n - 1,).
    """
    exact = TradeOff(
        epsilons=tuple(epsilons),
        deltas=tuple(Bracket(lower=delta, upper=delta) for delta in deltas),
    )
    gamma, low, high = exact._hockey_stick()
    at, under = _vertices(gamma, low, high)
    share = (at - gamma[:-1]) / np.diff(gamma)
    height = np.maximum(high[:-1] + share * np.diff(high) - under, 0.0)
    # Each interval of ε is the interval of γ that starts at its left end.
    starts = np.searchsorted(gamma, np.exp(epsilons[:-1]) * (1 - _MIN_SPACING))
    result: Array = height[np.minimum(starts, len(height) - 1)]
    return result


def _lower_envelope(gamma: Array, low: Array, high: Array) -> tuple[Array, Array]:
    """Return the γ at which the lower bound of h may bend, and its values there."""
    at, under = _vertices(gamma, low, high)
    # Beyond the last point the last chord continues until it reaches 0.
    width = gamma[-1] - gamma[-2]
    slope = (low[-1] - high[-2]) / width * (1 + _FEW_ULPS * gamma[-1] / width)
    beyond = gamma[-1] + (low[-1] / -slope if slope < 0 else 0.0)
    return (
        np.concatenate([gamma, at, [beyond]]),
        np.concatenate([low, under, [0.0]]),
    )


def _vertices(gamma: Array, low: Array, high: Array) -> tuple[Array, Array]:
    """Return where the chords extended from both sides of each interval of γ meet.

    The line from the left is l_j + s x, with s the largest slope to l_j from the upper bound at an
    earlier point, or -1 at the first. The line from the right is l_{j+1} + r (d - x), with r the
    largest decrease from l_{j+1} to the upper bound at a later point, or 0. Their maximum bends
    where they meet. If they meet outside the interval, one line is above the other throughout and
    the ends of the interval suffice.
    """
    width = np.diff(gamma)
    slope, rise = np.full(width.size, -1.0), np.zeros(width.size)
    for away in range(1, min(_MAX_CHORD_DISTANCE, width.size) + 1):
        # The chord to the point `away` places before or after spans this much of γ.
        across = gamma[away:] - gamma[:-away]
        fall = (high[away:] - low[:-away]) / across, (low[away:] - high[:-away]) / across
        # γ is rounded, which matters more for close points.
        slip = _FEW_ULPS * gamma[away:] / across
        extended = np.minimum(0.0, fall[1] * (1 + slip))[: width.size - away]
        slope[away:] = np.maximum(slope[away:], extended)
        rising = np.maximum(0.0, -fall[0] * (1 - slip))[1:]
        rise[: rising.size] = np.maximum(rise[: rising.size], rising)
    with np.errstate(divide="ignore", invalid="ignore"):
        step = (low[1:] + rise * width - low[:-1]) / (slope + rise)
    # Parallel lines give NaN or infinities, which are not inside either.
    inside = np.where((step >= 0) & (step <= width), step, 0.0)
    under = low[:-1] + slope * inside
    return gamma[:-1] + inside, np.maximum(under, 0.0)


def guess_accuracy(curve: PrivacyCurve, prior: float) -> Bracket:
    """Return the probability that the best guess about the record's membership is right.

    Raises ``ValueError`` unless ``prior`` lies strictly between 0 and 1.
    """
    _require_prior(prior)
    rarer, commoner = min(prior, 1 - prior), max(prior, 1 - prior)
    # h changes by at most the rounding of γ, and 1 - π by the rounding of the subtraction.
    known = curve.delta(math.log(commoner / rarer))
    return Bracket(
        lower=max(commoner, commoner + rarer * known.lower - BELIEF_ROUNDING),
        upper=min(1.0, commoner + rarer * known.upper + BELIEF_ROUNDING),
    )


def belief(prior: float, exponent: float) -> float:
    """Return the belief after the odds of ``prior`` grew by e^``exponent`` (nats), rounded up.

    Raises ``ValueError`` unless ``prior`` lies strictly between 0 and 1.
    """
    _require_prior(prior)
    odds = prior / (1 - prior) * math.exp(min(700.0, exponent))
    return min(1.0, odds / (1 + odds) * (1 + 1e-12))


def odds_exponent(curve: PrivacyCurve, probability: float) -> float:
    """Return t (nats) such that the odds grow by more than e^t with at most ``probability``.

    It is infinite if the accountant bounds nothing. Raises ``ValueError`` unless the probability
    lies strictly between 0 and 1.
    """
    if not 0 < probability < 1:
        raise ValueError(f"a probability must lie strictly between 0 and 1, got {probability!r}")
    best = math.inf
    for share in _DELTA_SHARES:
        try:
            epsilon = curve.epsilon(share * probability * (1 - BELIEF_ROUNDING)).upper
        except AccountantError:
            continue
        best = min(best, (epsilon - math.log1p(-share)) * (1 + BELIEF_ROUNDING))
    return best


def _require_prior(prior: float) -> None:
    if not 0 < prior < 1:
        raise ValueError(f"a prior must lie strictly between 0 and 1, got {prior!r}")


def sample_trade_off(
    curve: PrivacyCurve, *, tolerance: float = TOLERANCE, progress: Progress = lambda _: None
) -> TradeOff:
    """Sample δ of ``curve`` from ε = 0 until it is ``MIN_DELTA``, as a trade-off function.

    Sampling starts with evenly spaced ε and halves every interval in which the type II error
    would be uncertain by more than ``tolerance`` even if every sampled δ were exact.

    Raises ``AccountantError`` if the accountant bounds δ at no ε.
    """
    sampled: dict[float, Bracket | None] = {}
    top = min(_max_epsilon(curve), MAX_EPSILON)
    pending = [top * index / (INITIAL_POINTS - 1) for index in range(INITIAL_POINTS)]
    while pending and len(sampled) < MAX_POINTS:
        for epsilon in pending[: MAX_POINTS - len(sampled)]:
            try:
                sampled[epsilon] = curve.delta(epsilon)
            except AccountantError:
                sampled[epsilon] = None
            progress(len(sampled))
        known = {epsilon: delta for epsilon, delta in sorted(sampled.items()) if delta is not None}
        pending = [epsilon for epsilon in _midpoints(known, tolerance) if epsilon not in sampled]
    if not known:
        raise OutOfReach("δ is not bounded at any ε.", "Use another accountant.")
    return TradeOff(epsilons=tuple(known), deltas=tuple(known.values()))


def _midpoints(known: dict[float, Bracket], tolerance: float) -> list[float]:
    """Return the midpoints of the intervals with a larger gap than ``tolerance``, widest first."""
    if len(known) < 2:
        return []
    epsilons = list(known)
    gaps = type_two_gaps(epsilons, [delta.upper for delta in known.values()])
    order = sorted(range(len(gaps)), key=lambda index: -gaps[index])
    return [
        (epsilons[index] + epsilons[index + 1]) / 2 for index in order if gaps[index] > tolerance
    ]


def _max_epsilon(curve: PrivacyCurve) -> float:
    """Return the ε (nats) up to which ``curve`` is sampled."""
    for exponent in range(round(-math.log10(MIN_DELTA)), 0, -1):
        try:
            top = curve.epsilon(10.0**-exponent).upper
        except AccountantError:
            continue
        if math.isfinite(top):
            return max(top, 1e-3)
    return 1.0
