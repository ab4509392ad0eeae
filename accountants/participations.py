"""Bounds by how often one record takes part: for little noise and for very large ε.

A record that is drawn K times has K Gaussian releases: given which, a run is one Gaussian mechanism
with μ² = K d²/σ² (and what is released beside it), so that its curve is at most the mean over
K of Gaussian ones. The Fourier accountant's grids end where a joint noise multiplier is below
0.2 or ε above 1000; there this is nearly all of the truth, and Rényi bounds are far above it.
Of several kinds of sampled release one is counted, and the record is taken to be in all others.
From below, an attacker counts the releases in which the record seems to be.

>>> from affidavit.plan.events import PoissonSubsampledGaussian, Repeated
>>> step = PoissonSubsampledGaussian(sampling_probability=0.01, noise_multiplier=0.1)
>>> curve = ParticipationAccountant().curve(Repeated(event=step, count=1000))
>>> 1300 < curve.epsilon(1e-5).upper < 1500, 800 < CountingAttack(step, 1000).epsilon(1e-5).lower
(True, True)

Reference: docs/theorems/participations.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import assert_never

import numpy as np
from scipy.special import betainc, gammaln, log_ndtr, ndtr

from affidavit.accountants.bracket import Bracket
from affidavit.accountants.bracketing_curves import LeastCurve
from affidavit.accountants.composition import leaves, parts
from affidavit.accountants.cyclic_convolution import Array
from affidavit.accountants.gaussian import MAX_MU, GaussianCurve
from affidavit.accountants.protocol import (
    OutOfReach,
    PrivacyCurve,
    Unsupported,
    require_delta,
    require_epsilon,
)
from affidavit.accountants.registry import AFFIDAVIT_VERSION, find_curve
from affidavit.plan import (
    BallsInBinsGaussian,
    Composed,
    Event,
    Gaussian,
    GaussianMixture,
    Laplace,
    Leaf,
    PoissonSampledGroupGaussian,
    PoissonSubsampledGaussian,
    RandomAllocationGaussian,
    RepeatAndSelect,
    Repeated,
    ReplacedAllocationGaussian,
    ShuffledEpoch,
    TruncatedPoissonGaussian,
    TruncatedPoissonGroupGaussian,
    WithoutReplacementGaussian,
    WithoutReplacementGroupGaussian,
)

Drawn = PoissonSubsampledGaussian | WithoutReplacementGaussian


EDGES = 2048
"""Numbers of participations at which the Gaussian curves are taken; in between the next one."""
ROUNDING = 1e-9
"""Relative allowance for tails of the binomial and normal laws, far above what they lose."""
MIN_DELTA = 1e-100
"""No smaller δ is answered for: tails of the binomial law would underflow."""
COUNTS = 512
"""Numbers of counted releases that are tried from below."""
_UNDERFLOW = 1e-290
"""A probability below it is bounded by its logarithm alone."""
BELOW = np.linspace(-22.0, 4.0, 209)
"""Thresholds from which a release is counted, in deviations below its mean."""


@dataclass(frozen=True, slots=True)
class ParticipationCurve:
    """Upper ends: the mean over the participations of Gaussian curves, or a lower one.

    That is the curve of a record that takes part always.

    ``rate`` and ``count`` are those of the participations; each adds ``gain`` to μ², which is
    ``base`` without any. No loss of what else is released is above ``pure`` nats.
    """

    rate: float
    count: int
    gain: float
    base: float
    pure: float

    def epsilon(self, delta: float) -> Bracket:
        """``[0, ε]`` (nats) at ``delta``.

        Raises ``ValueError`` unless 0 < δ < 1, and ``OutOfReach`` for a μ above 1e6.
        """
        require_delta(delta)
        always, result = self._always, self._by_participations(delta)
        if always.mu <= MAX_MU:
            result = min(result, always.epsilon(delta).upper)
        if math.isinf(result):
            raise OutOfReach(
                f"a record that is always drawn has μ = {always.mu:.3g}, above {MAX_MU:g}.",
                "Add noise or run fewer steps.",
            )
        return Bracket(lower=0.0, upper=(result + self.pure) * (1 + ROUNDING))

    def _by_participations(self, delta: float) -> float:
        if delta < MIN_DELTA:
            return math.inf
        edges, above = self._edges(delta)
        mu = np.sqrt(self.base + self.gain * edges)
        low, high = 0.0, float(mu[-1] ** 2 / 2 + 40 * mu[-1])
        if mu[-1] > MAX_MU or self._mean(mu, above, high) > delta:
            return math.inf
        while high - low > 1e-7 * high:
            middle = (low + high) / 2
            low, high = (low, middle) if self._mean(mu, above, middle) <= delta else (middle, high)
        return high * (1 + ROUNDING)

    def delta(self, epsilon: float) -> Bracket:
        """``[0, δ]`` at ``epsilon`` (nats); raises ``ValueError`` unless it is at least 0."""
        require_epsilon(epsilon)
        rest = epsilon - self.pure * (1 + ROUNDING)
        edges, above = self._edges(MIN_DELTA)
        mu, always, result = np.sqrt(self.base + self.gain * edges), self._always, 1.0
        if rest >= 0 and mu[-1] <= MAX_MU:
            result = min(result, self._mean(mu, above, rest))
        if rest >= 0 and always.mu <= MAX_MU:
            result = min(result, always.delta(rest).upper)
        return Bracket(lower=0.0, upper=result)

    @property
    def _always(self) -> GaussianCurve:
        return GaussianCurve(mu=math.sqrt(self.base + self.gain * self.count) * (1 + ROUNDING))

    def _edges(self, delta: float) -> tuple[Array, Array]:
        """Numbers of participations, rising, and the chance of more than each, rounded up."""
        first = tail_quantile(1 - 1e-4, self.count, self.rate)
        last = tail_quantile(1e-4 * delta, self.count, self.rate)
        edges = np.unique(np.round(np.linspace(first, last, EDGES)))
        return edges, more_than(edges, self.count, self.rate) * (1 + ROUNDING)

    @staticmethod
    def _mean(mu: Array, above: Array, epsilon: float) -> float:
        """A bound of the mean of Φ(μ/2 - ε/μ), by its values at the edges and the chances above."""
        shift = epsilon / np.maximum(mu, 1e-300)
        values = np.where(mu > 0, ndtr(mu / 2 - shift), 0.0) * (1 + ROUNDING)
        rises = np.maximum(np.diff(values), 0.0)
        return float(values[0] + rises @ above[:-1] + above[-1]) * (1 + ROUNDING)


@dataclass(frozen=True, slots=True)
class CountingAttack:
    """Lower ends of ``times`` releases of ``leaf``, from the releases above a threshold.

    Of an epoch of shuffled lots the largest sum counts.
    """

    leaf: Drawn | Laplace | ShuffledEpoch
    times: int

    def epsilon(self, delta: float) -> Bracket:
        """``[lower end, ∞]`` of ε (nats) at ``delta``."""
        chance, log_false = self._attacks(max(delta, MIN_DELTA))
        with np.errstate(divide="ignore", invalid="ignore"):
            result = np.log(chance - delta) - log_false
        lower = float(np.nanmax(np.where(chance > delta, result, 0.0), initial=0.0))
        return Bracket(lower=max(0.0, lower * (1 - ROUNDING)), upper=math.inf)

    def delta(self, epsilon: float) -> Bracket:
        """``[lower end, 1]`` of δ at ``epsilon`` (nats)."""
        chance, log_false = self._attacks(MIN_DELTA)
        result = chance - np.exp(np.minimum(0.0, log_false + epsilon))
        return Bracket(lower=max(0.0, float(result.max(initial=0.0))), upper=1.0)

    def _attacks(self, delta: float) -> tuple[Array, Array]:
        """Of each threshold and count: its chance with the record, and log of that without it."""
        drawn, rest, log_other = self._seen()
        other = np.exp(log_other)
        true = (drawn + rest * other) * (1 - ROUNDING)
        last = max(1, tail_quantile(delta, self.times, float(drawn.max())))
        counts = np.unique(np.round(np.linspace(1, last, COUNTS)))[None, :]
        chance = more_than(counts - 1, self.times, true) * (1 - ROUNDING)
        whole = gammaln(self.times + 1)
        ways = whole - gammaln(counts + 1) - gammaln(self.times - counts + 1)
        union = ways + counts * log_other * (1 - ROUNDING)
        exact = more_than(counts - 1, self.times, other * (1 + ROUNDING)) * (1 + ROUNDING)
        with np.errstate(divide="ignore"):
            tail = np.where(exact > _UNDERFLOW, np.log(exact), np.inf)
        return chance, np.minimum(tail, union + 1e-14 * (1 + whole)).clip(max=0.0)

    def _seen(self) -> tuple[Array, float, Array]:
        """The chance that a release is counted, as one with the record and, times what follows, as
        one without it; and log of the chance of one without it, shape (thresholds, 1).
        """
        sigma = self.leaf.noise_multiplier
        if isinstance(self.leaf, Laplace):
            # Half of the outputs have the largest loss.
            return np.array([[0.5]]), 0.0, np.array([[-1 / sigma - math.log(2)]])
        if isinstance(self.leaf, ShuffledEpoch):
            return _seen_in_an_epoch(self.leaf)
        rate, thresholds = _rate(self.leaf), 1 - BELOW[BELOW * sigma < 1] * sigma
        drawn = rate * ndtr((1 - thresholds) / sigma)
        return drawn[:, None], 1 - rate, log_ndtr(-thresholds / sigma)[:, None]


def _seen_in_an_epoch(epoch: ShuffledEpoch) -> tuple[Array, float, Array]:
    """As ``CountingAttack._seen``: whether the largest of an epoch's sums exceeds a threshold."""
    near, far = epoch.without / epoch.noise_multiplier, 2 / epoch.noise_multiplier
    thresholds = np.linspace(0.0, far + 10.0, len(BELOW))
    others = (epoch.lots - 1) * log_ndtr(thresholds)
    moved = ndtr(far - thresholds) - ndtr(near - thresholds)
    inside = -np.expm1(others + log_ndtr(thresholds - near))
    left_out = -np.expm1(others + log_ndtr(thresholds))
    other = epoch.drawn * inside + (1 - epoch.drawn) * left_out
    drawn = epoch.drawn * np.exp(others) * moved
    return drawn[:, None], 1.0, np.log(np.maximum(other, _UNDERFLOW))[:, None]


@dataclass(frozen=True, kw_only=True, slots=True)
class ParticipationAccountant:
    """Upper ends of sampled Gaussian releases, of which one kind is counted."""

    name: str = "participations"
    version: str = AFFIDAVIT_VERSION

    def curve(self, event: Event) -> PrivacyCurve:
        """The curve of ``event``; raises ``Unsupported``."""
        releases = leaves(event)
        if not releases:
            return GaussianCurve(mu=0.0)
        gaussian = [part for part in releases if not isinstance(part[0], Laplace)]
        base = sum(count * always_drawn(leaf) ** 2 for leaf, count in gaussian)
        rate, times, gain = max(
            (_draws(leaf, count) for leaf, count in gaussian),
            key=lambda draws: draws[1] * draws[2],
            default=(0.0, 0, 0.0),
        )
        pure = [n / leaf.noise_multiplier for leaf, n in releases if isinstance(leaf, Laplace)]
        own = ParticipationCurve(
            rate=min(1.0, rate * (1 + ROUNDING)),
            count=times,
            gain=gain * (1 + ROUNDING),
            base=max(0.0, base * (1 + ROUNDING) - times * gain),
            pure=sum(pure),
        )
        other = find_curve("rdp", event)
        return own if other is None else LeastCurve((own, other))


def _draws(leaf: Leaf, count: int) -> tuple[float, int, float]:
    """The rate and the number of draws in ``count`` releases, and what each adds to μ² at most.

    That j of a user's m records are drawn moves a sum by j, and j² is at most m j.
    """
    match leaf:
        case PoissonSubsampledGaussian() | WithoutReplacementGaussian():
            return _rate(leaf), count, always_drawn(leaf) ** 2
        case TruncatedPoissonGaussian(sampling_probability=rate):
            return rate, count, always_drawn(leaf) ** 2
        case (
            PoissonSampledGroupGaussian(records=records, sampling_probability=rate)
            | TruncatedPoissonGroupGaussian(records=records, sampling_probability=rate)
        ):
            return rate, records * count, always_drawn(leaf) ** 2 / records
        case _:
            return 0.0, 0, 0.0


def always_drawn(leaf: Leaf) -> float:
    """μ of a release, or of a pass over all bins, that the unit's records are always in.

    Raises ``Unsupported`` for what is no Gaussian release given who is drawn.
    """
    match leaf:
        case Gaussian() | RandomAllocationGaussian():
            distance = 1.0
        case ReplacedAllocationGaussian():
            distance = 2.0
        case PoissonSubsampledGaussian():
            distance = 2.0 if leaf.pair == "replace_one" else 1.0
        case PoissonSampledGroupGaussian():
            distance = leaf.records * (2.0 if leaf.pair == "replace_one" else 1.0)
        case WithoutReplacementGaussian() | TruncatedPoissonGaussian():
            # A record that stays in a cut sample displaces another.
            distance = 2.0
        case WithoutReplacementGroupGaussian() | TruncatedPoissonGroupGaussian():
            distance = 2.0 * leaf.records
        case BallsInBinsGaussian():
            distance = math.sqrt(max(row[place] for place, row in enumerate(leaf.gram.rows)))
        case GaussianMixture() | Laplace():
            raise Unsupported(
                f"what the records of a {type(leaf).__name__} do is not told apart here.",
                "Use another accountant.",
            )
        case _:
            assert_never(leaf)
    return distance / leaf.noise_multiplier


def with_bins_known(event: Event) -> Event:
    """``event`` with bins of correlated noise revealed: Gaussian releases, which cost no less."""
    result: list[Event] = []
    for part, count in parts(event):
        release: Event = part
        if isinstance(part, BallsInBinsGaussian):
            release = Gaussian(noise_multiplier=(1 - ROUNDING) / always_drawn(part))
        elif isinstance(part, RepeatAndSelect):
            release = replace(part, event=with_bins_known(part.event))
        result.append(Repeated(event=release, count=count))
    return Composed(events=tuple(result))


def more_than(number: Array, count: int, rate: Array | float) -> Array:
    """The chance that of ``count`` draws at ``rate`` more than ``number`` (any shape) succeed."""
    left = np.maximum(count - number, 1)
    return np.where(number < count, betainc(number + 1, left, rate), 0.0)


def tail_quantile(chance: float, count: int, rate: float) -> int:
    """The least number that is exceeded with at most ``chance``, as near as doubles tell."""
    low, high = -1, count
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (
            (low, middle)
            if more_than(np.asarray(middle), count, rate) <= chance
            else (middle, high)
        )
    return high


def _rate(leaf: Drawn) -> float:
    if isinstance(leaf, PoissonSubsampledGaussian):
        return leaf.sampling_probability
    return leaf.sample_size / leaf.dataset_size
