"""Bounds by the number of participations of a record, for little noise and very large ε.

A record that is drawn K times has K Gaussian releases. Given K, a run is one Gaussian mechanism
with μ² = K d²/σ² (and the releases beside it), so its curve is at most the mean over K of Gaussian
curves. The Fourier accountant does not reach joint noise multipliers below 0.1 or ε above 1000.
There this bound is nearly tight, and Rényi bounds are far above it. Of several kinds of sampled
releases one is counted, and the record counts as drawn in all others. From below, an attacker
counts the releases in which the record seems to be.

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
from affidavit.accountants.bracketing_curves import MinimumCurve
from affidavit.accountants.composition import leaves, parts
from affidavit.accountants.gaussian import EMPTY_CURVE, MAX_MU, GaussianCurve
from affidavit.accountants.protocol import (
    OutOfReach,
    PrivacyCurve,
    Unsupported,
    require_delta,
    require_epsilon,
)
from affidavit.accountants.registry import AFFIDAVIT_VERSION, find_curve
from affidavit.accountants.rounding import Array
from affidavit.plan import events

Sampled = events.PoissonSubsampledGaussian | events.WithoutReplacementGaussian

MAX_EDGES = 2048
"""Numbers of participations with a Gaussian curve; others use the next larger one."""
ROUNDING = 1e-9
"""Relative allowance for tails of the binomial and normal laws, far above what they lose."""
MIN_DELTA = 1e-100
"""Smallest δ; tails of the binomial law would underflow below it."""
MAX_COUNTS = 512
"""Numbers of counted releases that an attack tries."""
_UNDERFLOW = 1e-290
"""A smaller probability is bounded by its logarithm alone."""
THRESHOLD_DEVIATIONS = np.linspace(-22.0, 4.0, 209)
"""Thresholds of a counted release, in deviations below its mean."""


@dataclass(frozen=True, slots=True)
class ParticipationCurve:
    """Upper bounds by the mean over participations of Gaussian curves, or of a record always drawn.

    The number of participations is binomial with ``rate`` and ``count``. Each adds ``gain`` to μ²,
    which is ``base`` without any. Losses of other releases are at most ``pure`` nats.
    """

    rate: float
    count: int
    gain: float
    base: float
    pure: float

    def epsilon(self, delta: float) -> Bracket:
        """Return ``[0, ε]`` (nats) at ``delta``.

        Raises ``ValueError`` unless 0 < δ < 1, and ``OutOfReach`` for a μ above 1e6.
        """
        require_delta(delta)
        always, result = self._always, self._mean_epsilon(delta)
        if always.mu <= MAX_MU:
            result = min(result, always.epsilon(delta).upper)
        if math.isinf(result):
            raise OutOfReach(
                f"a record that is always drawn has μ = {always.mu:.3g}, above {MAX_MU:g}.",
                "Add noise or run fewer steps.",
            )
        return Bracket(lower=0.0, upper=(result + self.pure) * (1 + ROUNDING))

    def _mean_epsilon(self, delta: float) -> float:
        if delta < MIN_DELTA:
            return math.inf
        edges, above = self._edges(delta)
        mu = np.sqrt(self.base + self.gain * edges)
        low, high = 0.0, float(mu[-1] ** 2 / 2 + 40 * mu[-1])
        if mu[-1] > MAX_MU or self._mean_delta(mu, above, high) > delta:
            return math.inf
        while high - low > 1e-7 * high:
            middle = (low + high) / 2
            is_met = self._mean_delta(mu, above, middle) <= delta
            low, high = (low, middle) if is_met else (middle, high)
        return high * (1 + ROUNDING)

    def delta(self, epsilon: float) -> Bracket:
        """Return ``[0, δ]`` at ``epsilon`` (nats); raises ``ValueError`` if it is negative."""
        require_epsilon(epsilon)
        rest = epsilon - self.pure * (1 + ROUNDING)
        edges, above = self._edges(MIN_DELTA)
        mu, always, result = np.sqrt(self.base + self.gain * edges), self._always, 1.0
        if rest >= 0 and mu[-1] <= MAX_MU:
            result = min(result, self._mean_delta(mu, above, rest))
        if rest >= 0 and always.mu <= MAX_MU:
            result = min(result, always.delta(rest).upper)
        return Bracket(lower=0.0, upper=result)

    @property
    def _always(self) -> GaussianCurve:
        return GaussianCurve(mu=math.sqrt(self.base + self.gain * self.count) * (1 + ROUNDING))

    def _edges(self, delta: float) -> tuple[Array, Array]:
        """Return increasing numbers of participations and the probability of more, rounded up."""
        first = tail_quantile(1 - 1e-4, self.count, self.rate)
        last = tail_quantile(1e-4 * delta, self.count, self.rate)
        edges = np.unique(np.round(np.linspace(first, last, MAX_EDGES)))
        return edges, more_than(edges, self.count, self.rate) * (1 + ROUNDING)

    @staticmethod
    def _mean_delta(mu: Array, above: Array, epsilon: float) -> float:
        """Return a bound of the mean of Φ(μ/2 - ε/μ) from its values at the edges."""
        shift = epsilon / np.maximum(mu, 1e-300)
        values = np.where(mu > 0, ndtr(mu / 2 - shift), 0.0) * (1 + ROUNDING)
        rises = np.maximum(np.diff(values), 0.0)
        return float(values[0] + rises @ above[:-1] + above[-1]) * (1 + ROUNDING)


@dataclass(frozen=True, slots=True)
class CountingAttack:
    """Lower bounds of ``times`` releases of ``leaf`` by an attack that counts large releases.

    In an epoch of shuffled lots it uses the largest sum.
    """

    leaf: Sampled | events.Laplace | events.ShuffledEpoch
    times: int

    def epsilon(self, delta: float) -> Bracket:
        """Return ``[lower, ∞]`` of ε (nats) at ``delta``."""
        lower = float(self._gains(delta)[0].max(initial=0.0))
        return Bracket(lower=lower * (1 - ROUNDING), upper=math.inf)

    def test(self, delta: float) -> tuple[float, int]:
        """Return the threshold and the count of the test that attains the lower end at ``delta``.

        The threshold is in standard deviations of the noise. The test decides for the first data
        set if at least so many releases, or largest sums of epochs, exceed it.
        """
        gains, counts = self._gains(delta)
        row, column = np.unravel_index(int(gains.argmax()), gains.shape)
        return float(self._thresholds[row]), int(counts[0, column])

    def _gains(self, delta: float) -> tuple[Array, Array]:
        """Return ε (nats) at ``delta`` by threshold and count, and the counts, shape (1, n)."""
        true_positive, log_false, counts = self._attack_rates(max(delta, MIN_DELTA))
        with np.errstate(divide="ignore", invalid="ignore"):
            gains = np.log(true_positive - delta) - log_false
        return np.where((true_positive > delta) & ~np.isnan(gains), gains, 0.0), counts

    def delta(self, epsilon: float) -> Bracket:
        """Return ``[lower, 1]`` of δ at ``epsilon`` (nats)."""
        true_positive, log_false, _ = self._attack_rates(MIN_DELTA)
        result = true_positive - np.exp(np.minimum(0.0, log_false + epsilon))
        return Bracket(lower=max(0.0, float(result.max(initial=0.0))), upper=1.0)

    def _attack_rates(self, delta: float) -> tuple[Array, Array, Array]:
        """Return the true-positive rate and log false-positive rate by threshold and count.

        The counts themselves have shape (1, n).
        """
        drawn, rest, log_other = self._count_probabilities()
        other = np.exp(log_other)
        true = (drawn + rest * other) * (1 - ROUNDING)
        last = max(1, tail_quantile(delta, self.times, float(drawn.max())))
        counts = np.unique(np.round(np.linspace(1, last, MAX_COUNTS)))[None, :]
        true_positive = more_than(counts - 1, self.times, true) * (1 - ROUNDING)
        whole = gammaln(self.times + 1)
        ways = whole - gammaln(counts + 1) - gammaln(self.times - counts + 1)
        union = ways + counts * log_other * (1 - ROUNDING)
        exact = more_than(counts - 1, self.times, other * (1 + ROUNDING)) * (1 + ROUNDING)
        with np.errstate(divide="ignore"):
            tail = np.where(exact > _UNDERFLOW, np.log(exact), np.inf)
        return true_positive, np.minimum(tail, union + 1e-14 * (1 + whole)).clip(max=0.0), counts

    @property
    def _thresholds(self) -> Array:
        """The thresholds of a release, in standard deviations of its noise."""
        sigma = self.leaf.noise_multiplier
        if isinstance(self.leaf, events.Laplace):
            return np.array([1 / sigma])
        if isinstance(self.leaf, events.ShuffledEpoch):
            return np.linspace(0.0, 2 / sigma + 10.0, len(THRESHOLD_DEVIATIONS))
        return 1 / sigma - THRESHOLD_DEVIATIONS[THRESHOLD_DEVIATIONS * sigma < 1]

    def _count_probabilities(self) -> tuple[Array, float, Array]:
        """Return probabilities of one release by threshold, shape (thresholds, 1).

        They are the probability that it has the record and is counted, the probability that it does
        not have the record, and the log probability that it is then counted.
        """
        sigma, thresholds = self.leaf.noise_multiplier, self._thresholds
        if isinstance(self.leaf, events.Laplace):
            # Half of the outputs have the largest loss.
            return np.array([[0.5]]), 0.0, np.array([[-1 / sigma - math.log(2)]])
        if isinstance(self.leaf, events.ShuffledEpoch):
            return _epoch_count_probabilities(self.leaf, thresholds)
        rate = _rate(self.leaf)
        drawn = rate * ndtr(1 / sigma - thresholds)
        return drawn[:, None], 1 - rate, log_ndtr(-thresholds)[:, None]


def _epoch_count_probabilities(
    epoch: events.ShuffledEpoch, thresholds: Array
) -> tuple[Array, float, Array]:
    """Return the probabilities that the largest of an epoch's sums exceeds a threshold."""
    near, far = epoch.without / epoch.noise_multiplier, 2 / epoch.noise_multiplier
    others = (epoch.lots - 1) * log_ndtr(thresholds)
    moved = ndtr(far - thresholds) - ndtr(near - thresholds)
    inside = -np.expm1(others + log_ndtr(thresholds - near))
    left_out = -np.expm1(others + log_ndtr(thresholds))
    other = epoch.drawn * inside + (1 - epoch.drawn) * left_out
    drawn = epoch.drawn * np.exp(others) * moved
    return drawn[:, None], 1.0, np.log(np.maximum(other, _UNDERFLOW))[:, None]


@dataclass(frozen=True, kw_only=True, slots=True)
class ParticipationAccountant:
    """Upper bounds of sampled Gaussian releases, of which one kind is counted."""

    name: str = "participations"
    version: str = AFFIDAVIT_VERSION

    def curve(self, event: events.Event) -> PrivacyCurve:
        """Return the curve of ``event``; raises ``Unsupported``."""
        releases = leaves(event)
        if not releases:
            return EMPTY_CURVE
        gaussian = [part for part in releases if not isinstance(part[0], events.Laplace)]
        base = sum(count * always_drawn(leaf) ** 2 for leaf, count in gaussian)
        rate, times, gain = max(
            (_draws(leaf, count) for leaf, count in gaussian),
            key=lambda draws: draws[1] * draws[2],
            default=(0.0, 0, 0.0),
        )
        pure = [
            n / leaf.noise_multiplier for leaf, n in releases if isinstance(leaf, events.Laplace)
        ]
        own = ParticipationCurve(
            rate=min(1.0, rate * (1 + ROUNDING)),
            count=times,
            gain=gain * (1 + ROUNDING),
            base=max(0.0, base * (1 + ROUNDING) - times * gain),
            pure=sum(pure),
        )
        other = find_curve("rdp", event)
        return own if other is None else MinimumCurve((own, other))


def _draws(leaf: events.Leaf, count: int) -> tuple[float, int, float]:
    """Return the rate and number of draws in ``count`` releases, and how much each adds to μ².

    If j of a user's m records are drawn, they move a sum by j, and j² is at most m j.
    """
    match leaf:
        case events.PoissonSubsampledGaussian() | events.WithoutReplacementGaussian():
            return _rate(leaf), count, always_drawn(leaf) ** 2
        case events.TruncatedPoissonGaussian(sampling_probability=rate):
            return rate, count, always_drawn(leaf) ** 2
        case (
            events.PoissonSampledGroupGaussian(records=records, sampling_probability=rate)
            | events.TruncatedPoissonGroupGaussian(records=records, sampling_probability=rate)
        ):
            return rate, records * count, always_drawn(leaf) ** 2 / records
        case _:
            return 0.0, 0, 0.0


def always_drawn(leaf: events.Leaf) -> float:
    """Return μ of a release, or a pass over all bins, that always includes the unit's records.

    Raises ``Unsupported`` for releases that are not Gaussian given who is drawn.
    """
    return distance_if_drawn(leaf) / leaf.noise_multiplier


def distance_if_drawn(leaf: events.Leaf) -> float:
    """Return the distance, in clip norms, of neighbours if the unit's records are always drawn.

    Raises ``Unsupported`` for releases that are not Gaussian given who is drawn.
    """
    match leaf:
        case events.Gaussian() | events.RandomAllocationGaussian():
            return 1.0
        case events.ReplacedAllocationGaussian():
            return 1.0 if leaf.place == "zero_out" else 2.0
        case events.PoissonSubsampledGaussian():
            return 2.0 if leaf.pair == "replace_one" else 1.0
        case events.PoissonSampledGroupGaussian():
            return leaf.records * (2.0 if leaf.pair == "replace_one" else 1.0)
        case events.WithoutReplacementGaussian() | events.TruncatedPoissonGaussian():
            # A record in a truncated sample displaces another one.
            return 2.0
        case events.WithoutReplacementGroupGaussian(zeroed=True):
            return float(leaf.records)
        case events.WithoutReplacementGroupGaussian() | events.TruncatedPoissonGroupGaussian():
            return 2.0 * leaf.records
        case events.BallsInBinsGaussian():
            return math.sqrt(max(row[place] for place, row in enumerate(leaf.gram.rows)))
        case events.GaussianMixture() | events.Laplace():
            raise Unsupported(
                f"this accountant has no bound for {type(leaf).__name__}.",
                "Use another accountant.",
            )
        case _:
            assert_never(leaf)


def with_bins_known(event: events.Event) -> events.Event:
    """Return ``event`` with known bins of correlated noise, which costs no less."""
    result: list[events.Event] = []
    for part, count in parts(event):
        release: events.Event = part
        if isinstance(part, events.BallsInBinsGaussian):
            release = events.Gaussian(noise_multiplier=(1 - ROUNDING) / always_drawn(part))
        elif isinstance(part, events.RepeatAndSelect):
            release = replace(part, event=with_bins_known(part.event))
        result.append(events.Repeated(event=release, count=count))
    return events.Composed(events=tuple(result))


def more_than(number: Array, count: int, rate: Array | float) -> Array:
    """Return the probability of more than ``number`` (any shape) successes in ``count`` draws."""
    left = np.maximum(count - number, 1)
    return np.where(number < count, betainc(number + 1, left, rate), 0.0)


def tail_quantile(chance: float, count: int, rate: float) -> int:
    """Return the least number that is exceeded with at most ``chance``, up to rounding."""
    low, high = -1, count
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (
            (low, middle)
            if more_than(np.asarray(middle), count, rate) <= chance
            else (middle, high)
        )
    return high


def _rate(leaf: Sampled) -> float:
    if isinstance(leaf, events.PoissonSubsampledGaussian):
        return leaf.sampling_probability
    return leaf.sample_size / leaf.dataset_size
