"""The saddle point of a composition, which steers everything and bounds nothing.

With K(λ) = Σ count · log E[exp(λ L)] over the releases, the hockey-stick curve is

    δ(ε) = (1/2πi) ∫ exp(K(s) - s ε) / (s (s + 1)) ds    along Re s = λ > 0,

and the integrand is least along the real axis at the λ with K'(λ) = ε + 1/λ + 1/(λ+1).
``Saddle`` is that λ with ε, log δ and the first moments of the tilted law. Its δ is the
leading term of the Laplace expansion, good to some per cent of δ where many releases are
composed, and what ``approximate_epsilon`` and ``approximate_delta`` give: **not a bound**.

References: Daniels, "Saddlepoint approximations in statistics" (1954); Zheng, Dong, Long
and Su, arXiv:2003.04493; Alghamdi et al., "The Saddle-Point Method in Differential
Privacy", ICML 2023.

Truncated Poisson sampling: the laws of a release whose lot may be cut.

Whether the sample had to be cut is revealed, with the same probability under both
hypotheses, so that the law of the loss is a mixture of two laws that are known:

* not cut (at most L - 1 of the other records were drawn): the Poisson pair at q;
* cut, with probability w: the record is in the lot with probability p only, but when it
  is, another record is not, so that the sum moves by two clip norms: the pair of sampling
  without replacement at p.

Under add_remove the number of others is private too; w is taken for the largest data set
and p as q, which bounds every smaller one. The lower bound is a data set whose other
records contribute zero: Poisson sampling at the record's own rate.

w is a binomial tail from scipy, trusted to ``TAIL_ERROR`` of itself: it is rounded down by
that and p up by twice as much, which together can only raise the curve, because it is
convex in p and nothing at p = 0. Proofs: docs/theorems/truncated-poisson.md.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from affidavit.accountants.fourier.cache import down
from affidavit.accountants.fourier.normal_masses import Array
from affidavit.accountants.fourier.privacy_loss import (
    Atoms,
    Cells,
    Kind,
    LossLaw,
    NormalMixtureLaw,
    Survival,
    WorseOfBothLaw,
)
from affidavit.plan import TruncatedPoissonGaussian

Composition = Sequence[tuple[Atoms, int]]
"""The laws of the releases with how often each runs."""

_SMALLEST_LOG_ORDER = math.log(1e-6)
_LARGEST_LOG_ORDER = math.log(1e7)
_NEWTON = 30
"""Steps of Newton's method at most, before bisection alone."""
_NEAREST, _TRIED = 0.1, 15
"""The least of the further tilts tried by ``tilted_reach``, in units of one over the tilted
deviation, and how many there are, each √2 times as much as the one before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Saddle:
    """A point of the curve by its tilt: order λ, ε, log δ, and the tilted law's moments.

    ε, ``mean`` in nats, ``variance`` in nats², λ in 1/nat.
    """

    order: float
    epsilon: float
    log_delta: float
    mean: float
    variance: float

    @property
    def curvature(self) -> float:
        """Of the integrand's logarithm along the real axis, in nats²: d epsilon / d order."""
        return self.variance + self.order**-2 + (self.order + 1) ** -2


def at_order(laws: Composition, order: float) -> Saddle:
    """The point of the approximate curve whose saddle is ``order`` (1/nat)."""
    log_moment = mean = variance = 0.0
    for atoms, count in laws:
        exponents = order * atoms.losses
        peak = float(exponents.max())
        weights = atoms.weights * np.exp(exponents - peak)
        total = float(weights.sum())
        first = float(weights @ atoms.losses) / total
        centred = atoms.losses - first
        second = float(weights @ (centred * centred)) / total
        log_moment += count * (peak + math.log(total))
        mean += count * first
        variance += count * second
    # Strong tilts pile a bounded law up on its last atom; a hair of spread keeps the
    # parameters finite there.
    variance = max(variance, (1e-6 / (1 + order)) ** 2)
    epsilon = mean - 1 / order - 1 / (order + 1)
    result = Saddle(order=order, epsilon=epsilon, log_delta=0.0, mean=mean, variance=variance)
    log_delta = (
        log_moment
        - order * epsilon
        - math.log(order)
        - math.log1p(order)
        - 0.5 * math.log(2 * math.pi * result.curvature)
    )
    return replace(result, log_delta=log_delta)


def at_delta(laws: Composition, delta: float) -> Saddle:
    """The saddle near ``delta``; ε is not cut at zero."""

    def excess(point: Saddle) -> tuple[float, float]:
        return point.log_delta - math.log(delta), point.order**2 * point.curvature

    return _search(laws, excess, 1e-3)


def at_epsilon(laws: Composition, epsilon: float) -> Saddle:
    """The saddle near ``epsilon`` (nats)."""

    def excess(point: Saddle) -> tuple[float, float]:
        return epsilon - point.epsilon, point.order * point.curvature

    return _search(laws, excess, 5e-3)


def _search(
    laws: Composition, excess: Callable[[Saddle], tuple[float, float]], accuracy: float
) -> Saddle:
    """The order where ``excess``, decreasing in the order, changes sign, to ``accuracy`` of it.

    ``excess`` comes with about how fast it falls with log λ. Newton's method in log λ from
    λ = 1, by at most a factor of e² at once; bisection where it leaves the bracket or is slow.
    """
    low, high, at = _SMALLEST_LOG_ORDER, _LARGEST_LOG_ORDER, 0.0
    for turn in itertools.count():
        point = at_order(laws, math.exp(at))
        value, fall = excess(point)
        if value > 0:
            low = at
        else:
            high = at
        move = max(-2.0, min(2.0, value / fall))
        if abs(move) <= accuracy / 2 or high - low <= accuracy:
            break
        follow = turn < _NEWTON and low < at + move < high
        at = at + move if follow else (low + high) / 2
    return point


@dataclass(frozen=True, kw_only=True, slots=True)
class Reach:
    """Losses that bound the bulk of a tilted composition, and the further tilts that say so.

    ``low`` and ``high`` in nats, ``below`` and ``above`` in 1/nat.
    """

    low: float
    high: float
    below: float
    above: float


def tilted_reach(laws: Composition, point: Saddle, log_tail: float) -> Reach:
    """Losses below and above which the tilted composition has about exp(``log_tail``) mass.

    Chernoff's bound with the best of a ladder of further tilts on either side.
    """
    shifts = down(_NEAREST / math.sqrt(point.variance), 2) * 2.0 ** (0.5 * np.arange(_TRIED))
    orders = point.order + np.concatenate((-shifts, [0.0], shifts))
    moments = sum((count * atoms.log_moments(orders) for atoms, count in laws), np.zeros(1))
    further = moments - moments[shifts.size]
    lows = (log_tail - further[: shifts.size]) / shifts
    highs = (further[shifts.size + 1 :] - log_tail) / shifts
    low, high = int(np.argmax(lows)), int(np.argmin(highs))
    return Reach(
        low=float(lows[low]),
        high=float(highs[high]),
        below=float(shifts[low]),
        above=float(shifts[high]),
    )


def tilted_floor(atoms: Atoms, order: float, mass: float) -> float:
    """A loss (nats) below which the tilted law of one release has at most ``mass``."""
    cumulative: Array = np.cumsum(atoms.tilted(order))
    index = max(0, int(np.searchsorted(cumulative, mass)) - 1)
    return float(atoms.losses[index])


TAIL_ERROR = 1e-10
"""Relative error allowed for ``scipy.stats.binom.sf``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RevealedMixtureLaw:
    """``second`` with probability ``weight``, else ``first``, and it is known which."""

    first: LossLaw
    second: LossLaw
    weight: float

    @property
    def ceiling(self) -> float:
        """No loss of either exceeds this (nats)."""
        return max(self.first.ceiling, self.second.ceiling)

    def atoms(self) -> Atoms:
        """The law under P, for parameters."""
        parts = (self.first.atoms(), 1 - self.weight), (self.second.atoms(), self.weight)
        losses = np.concatenate([atoms.losses for atoms, _ in parts])
        weights = np.concatenate([share * atoms.weights for atoms, share in parts])
        order = np.argsort(losses, kind="stable")
        return Atoms(losses=losses[order], weights=weights[order])

    def survival(self, losses: Array) -> Survival:
        """Both survival functions at increasing ``losses`` (nats), weighed."""
        first, second = self.first.survival(losses), self.second.survival(losses)
        rest = 1 - self.weight
        return Survival(
            p=rest * first.p + self.weight * second.p,
            q=rest * first.q + self.weight * second.q,
            relative=np.maximum(first.relative, second.relative) + 2.0**-51,
            loss_error=max(first.loss_error, second.loss_error),
        )

    def cells(self, edges: Array) -> Cells:
        """The masses of both laws between ``edges``, weighed."""
        first, second = self.first.cells(edges), self.second.cells(edges)
        rest = 1 - self.weight
        return Cells(
            p=rest * first.p + self.weight * second.p,
            q=rest * first.q + self.weight * second.q,
            relative=np.maximum(first.relative, second.relative) + 2.0**-51,
            misplaced=np.maximum(first.misplaced, second.misplaced),
        )

    def top(self, probability: float) -> float:
        """A loss (nats) that is exceeded under P with at most about this small probability.

        Half of it for either law, since the bound of ε that needs no transform rests on it.
        """
        half = probability / 2
        if self.weight <= half:
            return self.first.top(half)
        return max(self.first.top(half), self.second.top(half / self.weight))


def truncated_law(leaf: TruncatedPoissonGaussian, side: Kind) -> LossLaw:
    """A law that dominates one release of ``leaf`` in the direction ``side``."""
    others = leaf.dataset_size - (0 if leaf.neighbours == "add_remove" else 1)
    first = _poisson(leaf, leaf.sampling_probability, side)
    weight = _chance_of_cut(leaf, others) * (1 - TAIL_ERROR)
    if weight == 0:
        return first
    if leaf.neighbours == "add_remove":
        second: LossLaw = _moved_twice(leaf, leaf.sampling_probability, side)
    else:
        drawn = leaf.max_lot_size / leaf.dataset_size * _sample_above(leaf, leaf.dataset_size)
        rate = min(leaf.sampling_probability, drawn / weight)
        second = WorseOfBothLaw(
            remove=_moved_twice(leaf, rate, "remove"), add=_moved_twice(leaf, rate, "add")
        )
    return RevealedMixtureLaw(first=first, second=second, weight=weight)


def attained_law(leaf: TruncatedPoissonGaussian, side: Kind) -> LossLaw:
    """The law of a data set whose other records contribute zero."""
    return _poisson(leaf, attained_rate(leaf), side)


def attained_rate(leaf: TruncatedPoissonGaussian) -> float:
    """The chance of a record to be in the lot as it is used, rounded down."""
    others = leaf.dataset_size - 1
    whole = leaf.sampling_probability * float(
        _binomial().cdf(leaf.max_lot_size - 1, others, leaf.sampling_probability)
    )
    cut = leaf.max_lot_size / leaf.dataset_size * _sample_above(leaf, leaf.dataset_size)
    return min(leaf.sampling_probability, whole + cut) * (1 - 2 * TAIL_ERROR)


def chance_of_a_cut_with_the_record(leaf: TruncatedPoissonGaussian) -> float:
    """w·p: that a lot is cut, and the record then in it; rounded up, for every size allowed."""
    if leaf.neighbours == "add_remove":
        chance = leaf.sampling_probability * _chance_of_cut(leaf, leaf.dataset_size)
    else:
        chance = leaf.max_lot_size / leaf.dataset_size * _sample_above(leaf, leaf.dataset_size)
    return chance * (1 + 2 * TAIL_ERROR)


def _poisson(leaf: TruncatedPoissonGaussian, rate: float, side: Kind) -> NormalMixtureLaw:
    kind: Kind = "replace" if leaf.neighbours == "replace_one" else side
    return NormalMixtureLaw(
        kind=kind, noise_multiplier=leaf.noise_multiplier, sampling_probability=rate
    )


def _moved_twice(leaf: TruncatedPoissonGaussian, rate: float, side: Kind) -> NormalMixtureLaw:
    """The pair of a record that displaces another, at ``rate`` rounded up."""
    raised = rate * (1 + 2 * TAIL_ERROR)
    if raised >= 1:
        return NormalMixtureLaw(
            kind="gaussian", noise_multiplier=leaf.noise_multiplier, distance=2.0
        )
    return NormalMixtureLaw(
        kind=side,
        noise_multiplier=leaf.noise_multiplier,
        sampling_probability=raised,
        distance=2.0,
    )


def _chance_of_cut(leaf: TruncatedPoissonGaussian, others: int) -> float:
    """w: the chance that the record, if drawn, finds the lot already full."""
    return float(_binomial().sf(leaf.max_lot_size - 1, others, leaf.sampling_probability))


def _sample_above(leaf: TruncatedPoissonGaussian, size: int) -> float:
    """The chance that a sample from ``size`` records is larger than the largest lot."""
    return float(_binomial().sf(leaf.max_lot_size, size, leaf.sampling_probability))


def _binomial() -> Any:
    """scipy's, loaded at the first use: it takes longer than most plans take to certify."""
    from scipy.stats import binom

    return binom
