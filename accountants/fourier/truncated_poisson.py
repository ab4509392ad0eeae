"""Truncated Poisson sampling: the laws of a release whose lot may be cut.

With L the largest lot and u and w the probabilities that exactly L - 1 and that at least L of the
other records are drawn, a step is one of two, and the release reveals which:

* fewer than L - 1 others are drawn: the Poisson pair at q;
* L - 1 or more, with probability u + w: a record that is in a full lot is in it with L - 1 others,
  as it is if exactly these are drawn. So the sums are those of L - 1 others, of these and the
  record, and of these and one more whose place the record may take: ``DisplacementLaw``.

Under add_remove the number of others is private too; the largest data set bounds every smaller
one. If cuts are frequent, lots that hide them give a smaller bound (``hidden_law``).

Two data sets give lower bounds. If all other records contribute zero, the run is a Poisson sample
at the record's own rate. And let every other record contribute a unit vector h, and the record one
at a right angle to it (``visible_law``). Along h the release shows how many others are in the lot,
as far as the noise permits: with the record in a cut lot one fewer. Along the record's own vector
it is a Poisson sample whose rate is the probability that the record is in the lot, given the
observation along h. Places along h with similar rates form one ``shelf``, and the release reveals
which one it is on.

Probabilities are of a binomial law from scipy, trusted to ``BINOMIAL_ERROR`` of themselves, and
each is rounded to the safe side. Proofs: docs/theorems/truncated-poisson.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from affidavit.accountants.fourier.loss_laws import (
    ConstantLaw,
    Kind,
    NormalMixtureLaw,
    RevealedMixtureLaw,
    WorseOfBothLaw,
)
from affidavit.accountants.fourier.privacy_loss import (
    Array,
    LossLaw,
    Mixture,
    NormalPair,
    normal_masses,
)
from affidavit.plan import events

BINOMIAL_ERROR = 1e-10
"""Relative error allowed for scipy's binomial probabilities."""
_RATE_ERROR = 8 * BINOMIAL_ERROR
"""Relative error of probabilities and rates of a shelf: each is a few of scipy's, two of which are
rounded."""
_MIN_CROWDED_SHARE, _CONCEDED_DEVIATIONS = 0.05, 6.3
"""Least share of a cover that is given up because two of the others may coincide; it is larger if
fewer standard deviations than these would remain to the conceded outputs."""
_MAX_LOSS = 650.0
"""Loss (nats) beyond which either probability underflows."""
_MAX_VISIBLE_NOISE = 20.0
"""Noise multiplier above which nothing shows how full a lot is."""
_VISIBLE_REACH, _VISIBLE_PLACES = 8.0, 400
"""Standard deviations of the noise around a full lot, and places that are distinguished there."""
_SHELF_RATIO = 1.6
"""Ratio of the rates of consecutive shelves."""
_MIN_SEEN_SHARE = 1e-6
"""Share of the record's participations on shelves below which these change nothing."""

Shelves = tuple[tuple[float, float], ...]
"""Probabilities and rates; of the first, all other places, only the rate is used."""
Weights = tuple[float, float, float]
"""Weights of normals one clip norm below the centre, at it and one above it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DisplacementLaw(NormalPair):
    """The loss law of two mixtures of normals at -μ, 0 and μ that share a part.

    P is ``common`` and ``present``, of total weight one, and Q is ``common`` and ``absent``, with μ
    one clip norm over the noise's standard deviation. The loss increases in z.
    """

    noise_multiplier: float
    common: Weights
    present: Weights
    absent: Weights

    @property
    def reverse(self) -> DisplacementLaw:
        """The law of Q against P, reflected so that its loss increases in z."""
        return DisplacementLaw(
            noise_multiplier=self.noise_multiplier,
            common=self.common[::-1],
            present=self.absent[::-1],
            absent=self.present[::-1],
        )

    @property
    def mu(self) -> float:
        """The distance by which a record moves the sum, in standard deviations of the noise."""
        return 1 / self.noise_multiplier

    @property
    def max_loss(self) -> float:
        """The loss at large z, rounded up: that of the highest normal of P."""
        for common, present, absent in zip(
            reversed(self.common), reversed(self.present), reversed(self.absent), strict=True
        ):
            if common + absent > 0:
                gain = (present - absent) / (common + absent)
                return math.log1p(gain) * (1 + 1e-14) + 1e-15
            if present > 0:
                break
        return math.inf

    @property
    def mixtures(self) -> tuple[Mixture, Mixture]:
        """P and Q."""
        return self._mixture(self.present), self._mixture(self.absent)

    @property
    def bounding_line(self) -> tuple[float, float]:
        """A line above the loss from z = μ/2 on, as slope and height.

        P is at most N(μ) there, and Q at least its highest normal.
        """
        weight, mean = self.q_mixture[-1]
        return self.mu - mean, (mean * mean - self.mu * self.mu) / 2 - math.log(weight)

    def _mixture(self, own: Weights) -> Mixture:
        weights = (common + more for common, more in zip(self.common, own, strict=True))
        means = (-self.mu, 0.0, self.mu)
        return tuple((w, m) for w, m in zip(weights, means, strict=True) if w > 0)

    def loss(self, z: Array) -> Array:
        """Return the loss (nats) at ``z``, both of shape (n,)."""
        mu = self.mu
        peak = np.abs(mu * z)
        scaled = [np.exp(m * mu * z - m * m * mu * mu / 2 - peak) for m in (-1, 0, 1)]
        gain = sum((p - q) * e for p, q, e in zip(self.present, self.absent, scaled, strict=True))
        above = sum((c + p) * e for c, p, e in zip(self.common, self.present, scaled, strict=True))
        below = sum((c + q) * e for c, q, e in zip(self.common, self.absent, scaled, strict=True))
        near = np.clip(gain / below, -0.5, 0.5)
        is_near = near == gain / below
        return np.asarray(np.where(is_near, np.log1p(near), np.log(above) - np.log(below)))

    def inverse_loss(self, losses: Array) -> Array:
        """Return the z at which the loss is ``losses`` (increasing); infinite outside its range.

        Both have shape (n,). With x = e^{μz} and k = e^{-μ²/2}, P - e^l Q vanishes where
        k a₁ x + a₀ + k a₋₁ / x does, a_i = (1 - e^l) common_i + present_i - e^l absent_i. The loss
        increases in z, so that the signs of a change once, and the root involves no difference. A
        negative loss is that of Q against P.
        """
        bounded = np.clip(losses, -_MAX_LOSS, _MAX_LOSS)
        split = int(np.searchsorted(bounded, 0.0))
        return np.concatenate(
            (
                self._root(-bounded[:split], self.absent, self.present, -1.0),
                self._root(bounded[split:], self.present, self.absent, 1.0),
            )
        )

    def _root(self, losses: Array, above: Weights, below: Weights, sign: float) -> Array:
        """Return z where common + ``above`` is e^loss (common + ``below``), at losses >= 0."""
        rise, factor = np.expm1(losses), np.exp(losses)
        low, middle, high = (
            sign * (p - rise * c - factor * q)
            for c, p, q in zip(self.common, above, below, strict=True)
        )
        shrink = math.exp(-self.mu * self.mu / 2)
        # Below the infimum no weight is negative, above the supremum none is positive.
        down = np.maximum(-low, 0.0) * shrink
        up = np.maximum(high, 0.0) * shrink
        root = np.sqrt(middle * middle + 4 * up * down)
        with np.errstate(divide="ignore", invalid="ignore"):
            x = np.where(middle <= 0, (root - middle) / (2 * up), 2 * down / (root + middle))
            z = np.log(x) / self.mu
        return np.asarray(np.where(np.isnan(z), np.inf, z))

    def _edge_roundings(self, edges: Array, z: Array) -> Array:
        """Bound the rounding of z, in roundings of the loss; all of shape (n,).

        Each weight of a root is a sum of three that is good to six roundings of them, over Q at
        most as many of |l| and of the unshared part of P and Q. The root adds eight roundings of x,
        and z one of itself, where the loss rises by at most 2μ.
        """
        return 24.0 * (np.abs(edges) + self._unshared) + 16.0 + 2.0 * self.mu * np.abs(z)

    @property
    def _unshared(self) -> float:
        def share(own: Weights) -> float:
            return max(w / (w + c) for w, c in zip(own, self.common, strict=True) if w > 0)

        return min(share(self.present), share(self.absent))


def truncated_law(leaf: events.TruncatedPoissonGaussian, side: Kind) -> LossLaw:
    """Return a law that dominates one release of ``leaf`` in the direction ``side``."""
    first, lots = poisson_law(leaf, leaf.sampling_probability, side), _LotProbabilities.of(leaf)
    if lots.cut == 0:
        return first
    return _revealed_mixture(first, _full_lot_law(leaf, lots, side), _lot_masses(leaf, lots)[0])


def hidden_law(leaf: events.TruncatedPoissonGaussian, side: Kind) -> tuple[LossLaw, float]:
    """Return a law that dominates one release except with a probability, and that probability.

    The release does not show whether a lot was cut: lots of one other less and of one more hide a
    lot of L - 1 others and the record, except where they are too unlikely, which is conceded. Under
    add_remove ``truncated_law`` covers data sets of fewer than half of the records.
    """
    cover = Cover.of(leaf)
    if cover is None:
        return truncated_law(leaf, side), 0.0
    loss, left_over = 0.0, cover.left_over
    if leaf.neighbours == "add_remove":
        loss = math.log1p(-leaf.sampling_probability)
        if side == "remove":
            left_over *= 1 - leaf.sampling_probability
        else:
            loss = -loss
    law: LossLaw = poisson_law(leaf, leaf.sampling_probability, side)
    parts: list[tuple[LossLaw, float]] = [(ConstantLaw(loss=loss), left_over)]
    for lots in (cover.fewer, cover.lots):
        mass = _lot_masses(leaf, lots)[0 if side == "remove" else 1]
        parts.append((_full_lot_law(leaf, lots, side), mass))
    total = cover.fewest
    for part, mass in parts:
        total += mass
        law = _revealed_mixture(law, part, mass / total)
    return law, cover.conceded


def _revealed_mixture(first: LossLaw, second: LossLaw, weight: float) -> LossLaw:
    if weight >= 1:
        return second
    return RevealedMixtureLaw(first=first, second=second, weight=weight)


@dataclass(frozen=True, kw_only=True, slots=True)
class _LotProbabilities:
    """Probabilities of lots: the record and L - 1 others, L - 1 others, and L others.

    Under add_remove the last two are those without the record, which is added to some at rate q.
    """

    record: float
    others: float
    cut: float

    @classmethod
    def of(cls, leaf: events.TruncatedPoissonGaussian) -> _LotProbabilities:
        """Return those of the largest data set."""
        q = leaf.sampling_probability
        almost = _draw_probability(leaf, leaf.max_lot_size - 1)
        cut = cut_probability(leaf, _max_others(leaf))
        if leaf.neighbours == "add_remove":
            cut = min(cut * (1 + BINOMIAL_ERROR), 1 - almost)
            return cls(record=q * (almost + cut), others=almost, cut=cut)
        cut *= 1 - BINOMIAL_ERROR
        displaced = min(cut, cut_probability_with_record(leaf)) if cut else 0.0
        return cls(record=almost * q + displaced, others=almost * (1 - q), cut=cut - displaced)


def _lot_masses(
    leaf: events.TruncatedPoissonGaussian, lots: _LotProbabilities
) -> tuple[float, float]:
    """Return the probabilities of ``lots`` with the record in the data set and without it."""
    without = lots.others + lots.cut
    if leaf.neighbours == "add_remove":
        return (1 - leaf.sampling_probability) * without + lots.record, without
    return lots.record + without, lots.record + without


@dataclass(frozen=True, kw_only=True, slots=True)
class Cover:
    """The lots that hide a record in a lot of any L - 1 others.

    The share ``spent`` of the lots of L - 2 others without the record and some of those of L others
    are at any place at least as likely as the additional ``lots`` of L - 1 others, except for
    outputs that have at most the probability ``conceded`` with the record. ``share`` is that of the
    used lots of L others, and ``crowded`` the share lost because two of the others may coincide.
    ``fewest`` is the probability of fewer than L - 2 others, and ``left_over`` what of the used
    lots hides nothing, in data sets without the record. Adding or removing a record changes the
    probability of what is left over; merging it with other lots would hide that.
    """

    spent: float
    share: float
    crowded: float
    fewer: _LotProbabilities
    lots: _LotProbabilities
    fewest: float
    left_over: float
    conceded: float

    @classmethod
    @lru_cache(maxsize=64)
    def of(cls, leaf: events.TruncatedPoissonGaussian) -> Cover | None:
        """Return a good cover for ``leaf``, or None if there is none; any choice is sound."""
        lots = _LotProbabilities.of(leaf)
        sigma, q = leaf.noise_multiplier, leaf.sampling_probability
        private = leaf.neighbours == "add_remove"
        absent = 1.0 if private else 1 - q
        two_less = _draw_probability(leaf, leaf.max_lot_size - 2)
        # Others that may take the last two places of a cut lot, in the smallest data set.
        smallest = leaf.dataset_size // 2 + 1 if private else leaf.dataset_size
        left = smallest + 1 - leaf.max_lot_size
        if left < 2 or lots.cut <= 0 or two_less <= 0:
            return None
        apart = math.exp(-1 / sigma**2)
        balance = math.sqrt(absent * two_less / (lots.cut * apart))
        # Lots of L others also hide the record as they are, about so well.
        share = min(1.0, (balance * math.exp(1.5 / sigma**2)) ** 2)
        likely = math.exp((_CONCEDED_DEVIATIONS + 1.5 / sigma) / sigma) / (left - 1)
        crowded = max(_MIN_CROWDED_SHARE, likely * math.sqrt(share) / (2 * balance))
        if crowded > 0.5:
            share, crowded = share * (0.5 / crowded) ** 2, 0.5
        gain = 2 * balance * math.sqrt(share) * lots.cut * apart * (1 - crowded)
        # A record in a lot of L - 2 others and one in a full lot are then hidden equally well.
        odds = absent / q
        slope, height = gain / lots.record, odds - lots.others / lots.record
        root = 2 * height / (slope + math.sqrt(slope * slope + 4 * odds * height))
        used = share * lots.cut
        if private:
            # At most as many as there are lots of L others, so that a larger data set is worse;
            # either probability may be wrong.
            root = min(root, used / gain * (1 - 4 * BINOMIAL_ERROR))
        spent = root * root
        if not 0 < spent < 1:
            return None
        likely = 2 * crowded * balance * math.sqrt(spent / share) * (left - 1)
        beyond = sigma * math.log(likely) - 1.5 / sigma
        conceded = lots.record * math.erfc(beyond * math.sqrt(0.5)) / 2 * (1 + 1e-6)
        if private:
            conceded /= 1 - q
        if conceded > used * (1 - apart):
            return None
        gained = gain * root
        left_over = spent * absent * two_less + used - gained
        fewest = 1 - two_less - _lot_masses(leaf, lots)[1]
        if fewest < 0:
            return None
        return cls(
            spent=spent,
            share=share,
            crowded=crowded,
            fewer=_LotProbabilities(
                record=q * two_less, others=(1 - spent) * absent * two_less, cut=0.0
            ),
            lots=_LotProbabilities(
                record=lots.record, others=lots.others + gained, cut=lots.cut * (1 - share)
            ),
            fewest=fewest,
            left_over=left_over,
            conceded=conceded,
        )


def _full_lot_law(
    leaf: events.TruncatedPoissonGaussian, lots: _LotProbabilities, side: Kind
) -> LossLaw:
    """Return the pair of L - 1 or more others, or of fewer if no lot is cut."""
    if leaf.neighbours == "add_remove":
        return _removal_law(leaf, lots, side)
    if lots.cut == 0:
        return poisson_law(
            leaf, lots.record / _lot_masses(leaf, lots)[0] * (1 + BINOMIAL_ERROR), side
        )
    return _exchange_law(leaf, lots, side)


def _removal_law(
    leaf: events.TruncatedPoissonGaussian, lots: _LotProbabilities, side: Kind
) -> LossLaw:
    """Return the pair in which the record is present or absent."""
    q = leaf.sampling_probability
    total = _lot_masses(leaf, lots)[0 if side == "remove" else 1]
    cut, others = lots.cut / total, lots.others / total
    law = DisplacementLaw(
        noise_multiplier=leaf.noise_multiplier,
        common=((1 - q) * cut, (1 - q) * others, 0.0),
        present=(0.0, 0.0, lots.record / total),
        absent=(q * cut, q * others, 0.0),
    )
    return law if side == "remove" else law.reverse


def _exchange_law(
    leaf: events.TruncatedPoissonGaussian, lots: _LotProbabilities, side: Kind
) -> LossLaw:
    """Return the pair in which the record has one value or another.

    For positive losses the worst displaced record is opposite to the record, for negative ones it
    equals the record.
    """
    total = _lot_masses(leaf, lots)[0]
    own, free, rest = (part / total for part in (lots.record, lots.others, lots.cut))
    replaced = leaf.neighbours == "replace_one"

    def law(opposite: bool) -> DisplacementLaw:
        return DisplacementLaw(
            noise_multiplier=leaf.noise_multiplier,
            common=(rest, free, 0.0) if opposite else (0.0, free, rest),
            present=(0.0, 0.0, own),
            absent=(own, 0.0, 0.0) if replaced else (0.0, own, 0.0),
        )

    mu = 1 / leaf.noise_multiplier
    at_zero = 0.0 if replaced else mu / 2
    reach = (mu - at_zero) * math.sqrt(0.5), (mu + at_zero) * math.sqrt(0.5)
    atom = rest * (math.erf(reach[0]) + math.erf(reach[1])) / 2
    if side == "add":
        return WorseOfBothLaw(remove=law(False).reverse, add=law(True).reverse, atom=atom)
    return WorseOfBothLaw(remove=law(True), add=law(False), atom=atom)


def attained_law(leaf: events.TruncatedPoissonGaussian, side: Kind) -> LossLaw:
    """Return the law of a data set whose other records contribute zero."""
    return poisson_law(leaf, attained_rate(leaf), side)


def attained_rate(leaf: events.TruncatedPoissonGaussian) -> float:
    """Return the probability that a record is in the used lot, rounded down."""
    others = leaf.dataset_size - 1
    uncut = leaf.sampling_probability * float(
        binomial().cdf(leaf.max_lot_size - 1, others, leaf.sampling_probability)
    )
    cut = leaf.max_lot_size / leaf.dataset_size * _overfull_probability(leaf, leaf.dataset_size)
    return min(leaf.sampling_probability, uncut + cut) * (1 - 2 * BINOMIAL_ERROR)


def cut_probability_with_record(leaf: events.TruncatedPoissonGaussian) -> float:
    """Return w·p, that a lot is cut with the record in it; rounded up, for every allowed size."""
    if leaf.neighbours == "add_remove":
        chance = leaf.sampling_probability * cut_probability(leaf, leaf.dataset_size)
    else:
        chance = (
            leaf.max_lot_size / leaf.dataset_size * _overfull_probability(leaf, leaf.dataset_size)
        )
    return chance * (1 + 2 * BINOMIAL_ERROR)


def poisson_law(leaf: events.TruncatedPoissonGaussian, rate: float, side: Kind) -> NormalMixtureLaw:
    """Return the law of ``leaf`` with lots that are never cut, sampled at ``rate``."""
    kind: Kind = "replace" if leaf.neighbours == "replace_one" else side
    return NormalMixtureLaw(
        kind=kind, noise_multiplier=leaf.noise_multiplier, sampling_probability=min(1.0, rate)
    )


def cut_probability(leaf: events.TruncatedPoissonGaussian, others: int) -> float:
    """Return w, the probability that the others alone fill the lot."""
    return float(binomial().sf(leaf.max_lot_size - 1, others, leaf.sampling_probability))


def _draw_probability(leaf: events.TruncatedPoissonGaussian, number: int) -> float:
    """Return the probability that ``number`` of the others are drawn, rounded down."""
    chance = binomial().pmf(number, _max_others(leaf), leaf.sampling_probability)
    return float(chance) * (1 - BINOMIAL_ERROR)


def _max_others(leaf: events.TruncatedPoissonGaussian) -> int:
    """Return the number of others in the largest data set."""
    return leaf.dataset_size - (0 if leaf.neighbours == "add_remove" else 1)


def _overfull_probability(leaf: events.TruncatedPoissonGaussian, size: int) -> float:
    """Return the probability that a sample from ``size`` records exceeds the largest lot."""
    return float(binomial().sf(leaf.max_lot_size, size, leaf.sampling_probability))


def binomial() -> Any:
    """Return scipy's binomial law, whose import takes longer than most plans take to certify."""
    from scipy.stats import binom

    return binom


def visible_law(leaf: events.TruncatedPoissonGaussian, side: Kind) -> LossLaw:
    """Return the law of a data set whose other records all contribute the same, or zero."""
    (_, rest), *shelves = _visible_shelves(leaf)
    law: LossLaw = poisson_law(leaf, rest, side)
    total = 1 - sum(chance for chance, _ in shelves)
    for chance, rate in shelves:
        total += chance
        law = RevealedMixtureLaw(
            first=law, second=poisson_law(leaf, rate, side), weight=chance / total
        )
    return law


@lru_cache(maxsize=64)
def _visible_shelves(leaf: events.TruncatedPoissonGaussian) -> Shelves:
    rate = attained_rate(leaf)
    alone = ((1.0, rate),)
    # Under add_remove others would also show that one of them is missing.
    if leaf.neighbours == "add_remove" or leaf.noise_multiplier > _MAX_VISIBLE_NOISE or rate <= 0:
        return alone
    drawn, absent = _visible_probabilities(leaf)
    with np.errstate(divide="ignore", invalid="ignore"):
        height = np.log(drawn / (drawn + absent) / rate) / math.log(_SHELF_RATIO)
    shelf = np.where(height >= 1, np.floor(height), 0.0)
    result = []
    for number in np.unique(shelf[shelf > 0]):
        on_shelf = shelf == number
        record, chance = float(drawn[on_shelf].sum()), float((drawn + absent)[on_shelf].sum())
        result.append((chance * (1 - _RATE_ERROR), record / chance * (1 - _RATE_ERROR)))
    seen_rate = sum(chance * at for chance, at in result) * (1 + 4 * _RATE_ERROR)
    if seen_rate < _MIN_SEEN_SHARE * rate or seen_rate >= rate:
        return alone
    return ((1.0, (rate - seen_rate) / (1 - sum(chance for chance, _ in result))), *result)


def _visible_probabilities(leaf: events.TruncatedPoissonGaussian) -> tuple[Array, Array]:
    """Return the probabilities of places near a full lot along h, with the record and without.

    Both have shape (n,).
    """
    sigma, q, others = leaf.noise_multiplier, leaf.sampling_probability, leaf.dataset_size - 1
    # In standard deviations from a full lot; missing others are counted back from there.
    edges = np.linspace(-_VISIBLE_REACH - 2 / sigma, _VISIBLE_REACH, _VISIBLE_PLACES)
    # The probability that more are missing from the first place is less than that added below.
    most_missing = math.ceil((13 - edges[0]) * sigma)
    missing = np.arange(min(most_missing, leaf.max_lot_size), -1, -1)
    places = np.array([normal_masses(edges, -number / sigma)[0][1:-1] for number in missing])
    fewer = binomial().pmf(leaf.max_lot_size - missing[:-1], others, q) @ places[:-1]
    cut = cut_probability(leaf, others)
    displaced = min(cut, cut_probability_with_record(leaf))
    drawn = q * fewer + displaced * places[-2]
    return drawn, (1 - q) * fewer + (cut - displaced) * places[-1] + 1e-37
