"""Sampling of several records of one user: the law of a release in each direction.

A Poisson sample draws K of m records, K binomial, and the sum moves by at most K clip norms. The
dominating pair is Σ P(K = k) N(kμ) against N(0), μ a clip norm in standard deviations of the noise.
Its loss is log Σ P(K = k) e^{kμz - k²μ²/2}, convex and increasing in z. In a lot of fixed size the
K records take the places of others. Proof: docs/theorems/group-sampling.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache, partial

import numpy as np

from affidavit.accountants.fourier.loss_laws import (
    NormalMixtureLaw,
    RevealedMixtureLaw,
    WorseOfBothLaw,
    log_mixture,
)
from affidavit.accountants.fourier.privacy_loss import Array, LossLaw, Mixture, NormalPair
from affidavit.plan import events

_MIN_WEIGHT = 1e-300
"""Smaller probabilities of numbers of records are raised to this one."""
_NEGLIGIBLE_CHANCE = 1e-20
"""Chance of a number of draws that the range of the noise multiplier ignores."""
_MIN_CHANCE, _MAX_EXPONENT = 1e-40, 10.0
"""Chance of a number of records in a lot below which all records count, and the largest exponent
that weighs a number of records."""
_PARTS_ROUNDING = 1e-12
"""Relative error that bounds the rounding of parts of lots."""
_MAX_TABLE_DOUBLES = 1 << 20
"""Size of one table of terms; several are held at a time."""
_NEWTON_STEPS, _NEWTON_ACCURACY = 60, 1e-9
"""Steps of Newton's method, which converges from above, and the relative size of the last one,
which leaves its square."""


@dataclass(frozen=True, kw_only=True)
class GroupMixtureLaw(NormalPair):
    """The loss law of Σ weights[k] N(kμ) against N(0), or reversed and reflected where ``added``.

    μ is 1 / ``noise_multiplier``. ``weights`` are positive and sum to one.
    """

    noise_multiplier: float
    weights: tuple[float, ...]
    added: bool = False

    @property
    def mu(self) -> float:
        """The distance by which the user moves the sum, in standard deviations of the noise."""
        return (len(self.weights) - 1) / self.noise_multiplier

    @property
    def max_loss(self) -> float:
        """-log P(K = 0), rounded up, where added, else infinity."""
        return -math.log(self.weights[0]) * (1 + 1e-14) if self.added else math.inf

    @property
    def bounding_line(self) -> tuple[float, float]:
        """A line above the loss from z = μ/2 on, as slope and height."""
        return self.mu, -self.mu / self.noise_multiplier / 2

    @property
    def mixtures(self) -> tuple[Mixture, Mixture]:
        """P and Q."""
        sign = -1.0 if self.added else 1.0
        drawn = tuple((w, sign * k / self.noise_multiplier) for k, w in enumerate(self.weights))
        zero: Mixture = ((1.0, 0.0),)
        return (zero, drawn) if self.added else (drawn, zero)

    def loss(self, z: Array) -> Array:
        """Return the loss (nats) at ``z``, both of shape (n,)."""
        return _in_blocks(self._loss, z, len(self.weights))

    def _loss(self, z: Array) -> Array:
        exponents = self._exponents(-z if self.added else z)
        gain = self._drawn @ np.expm1(np.minimum(exponents, 1.0))
        exact = (exponents.max(axis=0) < 1.0) & (np.abs(gain) < 0.5)
        terms = np.vstack((np.full_like(z, math.log(self.weights[0])), self._logs + exponents))
        peak = terms.max(axis=0)
        total = peak + np.log(np.exp(terms - peak).sum(axis=0))
        result = np.where(exact, np.log1p(np.where(exact, gain, 0.0)), total)
        return np.asarray(-result if self.added else result)

    def inverse_loss(self, losses: Array) -> Array:
        """Return the z at which the loss is ``losses`` (increasing); infinite outside its range.

        Both have shape (n,). The terms of the records drawn, log-convex in z, are together
        e^loss - P(K = 0). Newton's method falls to the root from where one term alone equals that.
        """
        return _in_blocks(self._inverse_loss, losses, len(self.weights))

    def _inverse_loss(self, losses: Array) -> Array:
        at = -losses if self.added else losses
        rest = 1.0 - self.weights[0]
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            near = np.log(np.maximum(np.expm1(np.minimum(at, 1.0)) + rest, 0.0))
            far = at + np.log1p(-self.weights[0] * np.exp(-np.maximum(at, 1.0)))
        target = np.where(at < 1.0, near, far)
        finite = np.isfinite(target)
        goal = target[finite]
        k = self.shifts
        z = np.min((goal - self._logs + k * k / 2) / k, axis=0)
        for _ in range(_NEWTON_STEPS):
            terms = self.log_terms(z)
            peak = terms.max(axis=0)
            shares = np.exp(terms - peak)
            total = shares.sum(axis=0)
            step = (peak + np.log(total) - goal) / ((k * shares).sum(axis=0) / total)
            z = z - step
            if np.all(np.abs(step) <= _NEWTON_ACCURACY * (1.0 + np.abs(z))):
                break
        result = np.where(target > 0, np.inf, -np.inf)
        result[finite] = z
        return np.asarray(-result if self.added else result)

    def _exponents(self, z: Array) -> Array:
        """Return kμz - k²μ²/2 for k from 1 on, of shape (m, n)."""
        k = self.shifts
        return np.asarray(k * z - k * k / 2)

    @cached_property
    def shifts(self) -> Array:
        """kμ for k from 1 on, of shape (m, 1)."""
        return np.arange(1, len(self.weights))[:, None] / self.noise_multiplier

    @cached_property
    def _drawn(self) -> Array:
        return np.array(self.weights[1:])

    @cached_property
    def _logs(self) -> Array:
        return np.log(self._drawn)[:, None]

    def _edge_roundings(self, edges: Array, z: Array) -> Array:
        """Bound the rounding of z, wherever z is, in roundings of the loss.

        The logarithm of the drawn terms' sum is good to some roundings of the largest exponent that
        matters, and moves the loss by at most the drawn terms' share of the likelihood ratio.
        """
        del z
        return self.rounding(-edges if self.added else edges)

    def rounding(self, losses: Array) -> Array:
        """Return the roundings of ``losses`` of the mixture against N(0), both of shape (n,)."""
        at = np.clip(losses, math.log(self.weights[0]), None)
        drawn = -np.expm1(math.log(self.weights[0]) - at)
        largest = abs(math.log(min(self.weights))) + self.mu * self.mu
        return 32.0 + 8.0 * np.abs(losses) + 16.0 * drawn * (np.abs(losses) + largest)

    def log_terms(self, z: Array) -> Array:
        """Return the logarithms of the drawn terms of the likelihood ratio, of shape (m, n)."""
        return np.asarray(self._logs + self._exponents(z))


@dataclass(frozen=True, kw_only=True)
class ReplacedGroupLaw(NormalPair):
    """The loss law of Σ weights[k] N(kμ) against Σ weights[k] N(-kμ), μ = 1 / ``noise_multiplier``.

    The loss is A(z) - A(-z), A that of ``one_sided``, and odd.
    """

    noise_multiplier: float
    weights: tuple[float, ...]

    @cached_property
    def one_sided(self) -> GroupMixtureLaw:
        """Σ weights[k] N(kμ) against N(0)."""
        return GroupMixtureLaw(noise_multiplier=self.noise_multiplier, weights=self.weights)

    @property
    def mu(self) -> float:
        """The distance by which the user moves the sum from zero, in standard deviations."""
        return self.one_sided.mu

    @property
    def bounding_line(self) -> tuple[float, float]:
        """A line above the loss from z = μ/2 on, as slope and height."""
        slope, height = self.one_sided.bounding_line
        return slope, height - math.log(self.weights[0])

    @property
    def mixtures(self) -> tuple[Mixture, Mixture]:
        """P and Q."""
        drawn = self.one_sided.p_mixture
        return drawn, tuple((weight, -mean) for weight, mean in drawn)

    def loss(self, z: Array) -> Array:
        """Return the loss (nats) at ``z``, both of shape (n,)."""
        return self.one_sided.loss(z) - self.one_sided.loss(-z)

    def inverse_loss(self, losses: Array) -> Array:
        """Return the z at which the loss is ``losses``, of either sign; both have shape (n,).

        Newton's method between zero and where A alone is the loss, halving where it leaves that.
        """
        size = np.abs(losses)
        low, high = np.zeros_like(size), self.one_sided.inverse_loss(size)
        z = high
        for _ in range(_NEWTON_STEPS):
            missing = self.loss(z) - size
            low, high = np.where(missing < 0, z, low), np.where(missing < 0, high, z)
            new = z - missing / (self._slope(z) + self._slope(-z))
            new = np.where((new >= low) & (new <= high), new, (low + high) / 2)
            done = bool(np.all(np.abs(new - z) <= _NEWTON_ACCURACY * (1.0 + z)))
            z = new
            if done:
                break
        return np.asarray(np.copysign(z, losses))

    def _slope(self, z: Array) -> Array:
        """Return A'(z), the mean of kμ by the terms' shares."""
        return _in_blocks(self._slope_of_block, z, len(self.weights))

    def _slope_of_block(self, z: Array) -> Array:
        one = self.one_sided
        terms = np.vstack((np.full_like(z, math.log(self.weights[0])), one.log_terms(z)))
        shares = np.exp(terms - terms.max(axis=0))
        return np.asarray((one.shifts * shares[1:]).sum(axis=0) / shares.sum(axis=0))

    def _edge_roundings(self, edges: Array, z: Array) -> Array:
        """Bound the rounding of z by that of both logarithms."""
        one = self.one_sided
        sides = (one.loss(side) for side in (z, -z))
        return sum((one.rounding(side) for side in sides), 64.0 + 8.0 * np.abs(edges))


@dataclass(frozen=True, kw_only=True)
class ZeroedLaw(NormalPair):
    """The loss law of (1-q) N(0) + q N(2μ) against (1-q) N(0) + q N(μ), for losses above zero.

    q is ``probability`` and μ ``records`` / ``noise_multiplier``. Where ``restored`` the order is
    the reverse, reflected so that the loss increases in z, for losses below zero. On the other side
    of zero the loss does not increase everywhere.
    """

    probability: float
    records: int
    noise_multiplier: float
    restored: bool = False

    @property
    def _reach(self) -> float:
        return self.records / self.noise_multiplier

    @property
    def mu(self) -> float:
        """The distance by which the user moves the sum, in standard deviations of the noise."""
        return 2 * self._reach

    @property
    def bounding_line(self) -> tuple[float, float]:
        """A line above the loss from z = μ on, as slope and height."""
        return self.mu, -self.mu * self.mu / 2

    @property
    def mixtures(self) -> tuple[Mixture, Mixture]:
        """P and Q."""
        sign, q = (-1.0 if self.restored else 1.0), self.probability
        two, one = (((1 - q, 0.0), (q, sign * times * self._reach)) for times in (2, 1))
        return (one, two) if self.restored else (two, one)

    def loss(self, z: Array) -> Array:
        """Return the loss (nats) at ``z``, both of shape (n,)."""
        mu, at = self._reach, -z if self.restored else z
        two, one = (
            log_mixture(times * mu * at - (times * mu) ** 2 / 2, self.probability)
            for times in (2, 1)
        )
        return one - two if self.restored else two - one

    def inverse_loss(self, losses: Array) -> Array:
        """Return the z at which the loss is ``losses``, of the law's sign; both of shape (n,)."""
        z = (np.abs(losses) + self._excess(losses)) / self._reach + 1.5 * self._reach
        return np.asarray(-z if self.restored else z)

    def _excess(self, losses: Array) -> Array:
        """Return μz - 3μ²/2 less the loss, at z where the loss is ``losses``, shape (n,).

        x = e^{μz - μ²/2} solves q e^{-μ²} x² - q e^l x = (1-q)(e^l - 1).
        """
        size, mu, q = np.abs(losses), self._reach, self.probability
        share = 4 * math.exp(-mu * mu) * (1 - q) / q
        root = np.sqrt(1 + share * np.exp(-size) * -np.expm1(-size))
        return np.asarray(np.log1p((root - 1) / 2))

    def _edge_roundings(self, edges: Array, z: Array) -> Array:
        """Bound the rounding of z by its terms, and the slope of the loss by 2μ."""
        terms = np.abs(edges) + self._excess(edges) + self.mu * self.mu
        return 64.0 + 16.0 * terms + 8.0 * self.mu * np.abs(z)


def _in_blocks(function: Callable[[Array], Array], values: Array, weights: int) -> Array:
    """Return ``function`` of ``values`` (n,), which needs a table of n by ``weights`` doubles."""
    length = max(1, _MAX_TABLE_DOUBLES // weights)
    if values.size <= length:
        return function(values)
    starts = range(0, values.size, length)
    return np.concatenate([function(values[start : start + length]) for start in starts])


def group_law(
    leaf: events.PoissonSampledGroupGaussian | events.GaussianMixture, *, added: bool
) -> GroupMixtureLaw | ReplacedGroupLaw:
    """Return the law of ``leaf`` in one direction, or in both if the pair is symmetric."""
    weights = (
        leaf.weights
        if isinstance(leaf, events.GaussianMixture)
        else binomial_weights(leaf.records, leaf.sampling_probability)
    )
    if leaf.pair == "replace_one":
        return ReplacedGroupLaw(noise_multiplier=leaf.noise_multiplier, weights=weights)
    return GroupMixtureLaw(noise_multiplier=leaf.noise_multiplier, weights=weights, added=added)


@lru_cache(maxsize=64)
def binomial_weights(records: int, probability: float) -> tuple[float, ...]:
    """Return P(K = k) for k = 0..m, the nearest doubles to the binomial probabilities."""
    q = Fraction(probability)
    exact = (math.comb(records, k) * q**k * (1 - q) ** (records - k) for k in range(records + 1))
    return tuple(max(float(weight), _MIN_WEIGHT) for weight in exact)


@lru_cache(maxsize=64)
def hypergeometric_weights(leaf: events.WithoutReplacementGroupGaussian) -> tuple[float, ...]:
    """Return P(K = k), the nearest doubles to the hypergeometric probabilities.

    k is at most the user's records and the lot's.
    """
    records, size, lot = leaf.records, leaf.dataset_size, leaf.sample_size
    exact = [
        math.comb(records, k) * math.perm(lot, k) * math.perm(size - lot, records - k)
        for k in range(min(records, lot) + 1)
    ]
    total = math.perm(size, records)
    return tuple(max(float(Fraction(ways, total)), _MIN_WEIGHT) for ways in exact)


def max_likely_draws(weights: tuple[float, ...]) -> int:
    """Return the largest number of records, at least 1, whose chance is not negligible.

    ``weights`` are the chances of 0, 1, ... records.
    """
    return max([1, *(k for k, chance in enumerate(weights) if chance > _NEGLIGIBLE_CHANCE)])


def fixed_lot_pair(leaf: events.WithoutReplacementGroupGaussian, *, added: bool) -> GroupMixtureLaw:
    """Return the law of one pair of data sets: all other records lie at -1, the user's at ±1.

    If the user's are ``zeroed``, others lie at 0, and the user's at 1 or 0.
    """
    return GroupMixtureLaw(
        noise_multiplier=leaf.noise_multiplier if leaf.zeroed else leaf.noise_multiplier / 2,
        weights=hypergeometric_weights(leaf),
        added=added,
    )


def fixed_lot_law(leaf: events.WithoutReplacementGroupGaussian, *, restored: bool) -> LossLaw:
    """Return a law that dominates one release of a lot of fixed size.

    If the user's records are ``zeroed``, ``restored`` is the order in which P has the zeros.
    """
    profile = partial(_worse_of_zeroed, restored=restored) if leaf.zeroed else worse_of_both
    return displacement_law(hypergeometric_weights(leaf), leaf.noise_multiplier, profile)


def displacement_law(
    weights: tuple[float, ...],
    noise_multiplier: float,
    profile: Callable[[float, int, float], LossLaw] | None = None,
) -> LossLaw:
    """Return a law for users of whom K records displace others; ``weights`` are P(K = k).

    K is revealed if it is positive, and each K has a part of the lots without the user. A lot of
    the part of k has k records of the user with probability P(K = k) over the part. Any parts that
    add up to one are sound; these make the χ² divergence about least. ``profile`` returns the law
    of K records that are drawn with a probability; by default they are replaced.
    """
    chances = np.array(weights[1:])
    moves = np.arange(1, len(chances) + 1)
    # Rare numbers count as all records.
    likely = (chances >= _MIN_CHANCE) | (moves == len(chances))
    chances[-1] += float(chances[~likely].sum())
    chances, moves = chances[likely], moves[likely]
    exponents = np.minimum((2 * moves / noise_multiplier) ** 2, _MAX_EXPONENT)
    parts = _parts(chances, np.sqrt(np.expm1(exponents)))
    rates = np.minimum(chances / parts * (1 + _PARTS_ROUNDING), 1.0)
    first, *others = (
        (profile or worse_of_both)(float(rate), int(move), noise_multiplier)
        for rate, move in zip(rates, moves, strict=True)
    )
    law: LossLaw = first
    for other, weight in zip(others, (parts / parts.cumsum())[1:], strict=True):
        law = RevealedMixtureLaw(first=law, second=other, weight=float(weight))
    return law


def _parts(chances: Array, weights: Array) -> Array:
    """Return parts in proportion to ``chances`` times ``weights``, none below its chance; (m,)."""
    sizes, least = chances * weights, np.zeros(len(chances), dtype=bool)
    while not least.all():
        scale = (1 - chances[least].sum()) / sizes[~least].sum()
        short = ~least & (scale * weights < 1)
        if not short.any():
            return np.where(least, chances, scale * sizes)
        least |= short
    return chances


def worse_of_both(probability: float, records: int, noise_multiplier: float) -> LossLaw:
    """Return the convex profile of ``records`` replaced in a lot with ``probability``."""
    if probability == 1:
        return NormalMixtureLaw(
            kind="gaussian", noise_multiplier=noise_multiplier, distance=2.0 * records
        )
    remove, add = (
        NormalMixtureLaw(
            kind=kind,
            noise_multiplier=noise_multiplier,
            sampling_probability=probability,
            distance=2.0 * records,
        )
        for kind in ("remove", "add")
    )
    # The atom lies between the places of a loss of zero, this far from the middle.
    half = records / noise_multiplier
    return WorseOfBothLaw(
        remove=remove, add=add, atom=(1 - probability) * math.erf(half * math.sqrt(0.5))
    )


def _worse_of_zeroed(
    probability: float, records: int, noise_multiplier: float, *, restored: bool
) -> LossLaw:
    """Return the convex profile of ``records`` that are zero in one of two data sets.

    They are drawn with ``probability``. P has them or, if ``restored``, the zeros.
    """
    if probability == 1:
        return NormalMixtureLaw(
            kind="gaussian", noise_multiplier=noise_multiplier, distance=float(records)
        )
    near = NormalMixtureLaw(
        kind="remove" if restored else "add",
        noise_multiplier=noise_multiplier,
        sampling_probability=probability,
        distance=float(records),
    )
    far = ZeroedLaw(
        probability=probability,
        records=records,
        noise_multiplier=noise_multiplier,
        restored=restored,
    )
    # The atom lies between the places of a loss of zero, half of the distance and three halves from
    # the middle.
    half = records / noise_multiplier * math.sqrt(0.125)
    return WorseOfBothLaw(
        remove=near if restored else far,
        add=far if restored else near,
        atom=(1 - probability) * (math.erf(half) + math.erf(3 * half)) / 2,
    )
