"""Truncated Poisson sampling: the laws of a release whose lot may be cut.

With L the largest lot and u and w the chances that exactly L - 1 and that at least L of the other
records are drawn, a step is one of two, and which is revealed:

* fewer than L - 1 others are drawn: the Poisson pair at q;
* L - 1 or more, with probability u + w: a record that is in a full lot is in it with L - 1 others,
  as it is when just these are drawn. So the sums are those of L - 1 others, of these and the
  record, and of these and one more whose place the record may take: ``DisplacementLaw``.

Under add_remove the number of others is private too; the largest data set bounds every smaller
one. Where cuts are frequent a smaller bound is that of lots which hide them (``hidden_law``).

From below there are two data sets. Where all other records contribute zero the run is a Poisson
sample at the record's own rate. And let every other record contribute a unit vector h, and the
record one at a right angle to it (``visible_law``). Along h the release shows how many others are
in the lot, as far as the noise lets it be seen: with the record in a cut lot one fewer. Along the
record's own vector it is a Poisson sample whose rate is the chance of the record to be in the lot,
after what was seen along h. Places along h of about the same rate are one ``shelf``, and the
release reveals which one it is on.

Chances are of a binomial law from scipy, trusted to ``TAIL_ERROR`` of themselves, and each is
rounded to the safe side. Proofs: docs/theorems/truncated-poisson.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from affidavit.accountants.fourier.loss_laws import (
    Kind,
    NormalMixtureLaw,
    RevealedMixtureLaw,
    ShiftedLaw,
    WorseOfBothLaw,
)
from affidavit.accountants.fourier.privacy_loss import (
    Array,
    LossLaw,
    Mixture,
    NormalPair,
    normal_masses,
)
from affidavit.plan import TruncatedPoissonGaussian

TAIL_ERROR = 1e-10
"""Relative error allowed for scipy's binomial probabilities."""
_LEFT_OVER = 1e-3
"""Probability of what no cover is about below which rounding would decide its losses."""
_CROWDED, _RARE = 0.05, 6.3
"""Part of a cover that is given up at the least to what two of the others may have in common; more
of it where that leaves less than so many standard deviations to what is conceded."""
_MAX_LOSS = 650.0
"""Of a loss beyond this (nats) either probability is below what a double holds."""

_LOUDEST = 20.0
"""Clip norms of noise that hide how full a lot is."""
_REACH, _PLACES = 8.0, 400
"""Deviations of the noise around a full lot, and places that are told apart there."""
_STEP = 1.6
"""Between the rates of one shelf and of the next."""
_LEAST = 1e-6
"""Of the record's participations those that are seen; fewer change nothing."""
_DOWN = 8 * TAIL_ERROR
"""What chances and rates may be wrong by: each is a few of scipy's, of which two are rounded."""

Shelves = tuple[tuple[float, float], ...]
"""Chances and rates; of all other places only the rate is used."""
Weights = tuple[float, float, float]
"""Of normals one clip norm below the centre, at it and one above it."""


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
        """How far a record moves the sum, in standard deviations of the noise."""
        return 1 / self.noise_multiplier

    @property
    def ceiling(self) -> float:
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
    def p_mixture(self) -> Mixture:
        """Weights and means of P."""
        return self._mixture(self.present)

    @property
    def q_mixture(self) -> Mixture:
        """Weights and means of Q."""
        return self._mixture(self.absent)

    @property
    def line(self) -> tuple[float, float]:
        """A line that the loss is nowhere above from z = μ/2 on, as slope and height.

        P is at most N(μ) there, and Q at least its highest normal.
        """
        weight, mean = self.q_mixture[-1]
        return self.mu - mean, (mean * mean - self.mu * self.mu) / 2 - math.log(weight)

    def _mixture(self, own: Weights) -> Mixture:
        weights = (common + more for common, more in zip(self.common, own, strict=True))
        means = (-self.mu, 0.0, self.mu)
        return tuple((w, m) for w, m in zip(weights, means, strict=True) if w > 0)

    def loss(self, z: Array) -> Array:
        """The loss at ``z``. In nats, of the shape of ``z``."""
        mu = self.mu
        peak = np.abs(mu * z)
        scaled = [np.exp(m * mu * z - m * m * mu * mu / 2 - peak) for m in (-1, 0, 1)]
        gain = sum((p - q) * e for p, q, e in zip(self.present, self.absent, scaled, strict=True))
        above = sum((c + p) * e for c, p, e in zip(self.common, self.present, scaled, strict=True))
        below = sum((c + q) * e for c, q, e in zip(self.common, self.absent, scaled, strict=True))
        near = np.clip(gain / below, -0.5, 0.5)
        is_near = near == gain / below
        return np.asarray(np.where(is_near, np.log1p(near), np.log(above) - np.log(below)))

    def place(self, losses: Array) -> Array:
        """The z at which the loss is ``losses`` (increasing); infinite outside its range.

        Both have shape (n,). With x = e^{μz} and k = e^{-μ²/2}, P - e^l Q vanishes where
        k a₁ x + a₀ + k a₋₁ / x does, a_i = (1 - e^l) common_i + present_i - e^l absent_i. The
        loss increases in z, so that the signs of a change once, and the root is
        found without a difference. A negative loss is that of Q against P.
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
        """z where common + ``above`` is e^loss (common + ``below``), at losses that are >= 0."""
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

    def _misplaced(self, edges: Array, z: Array) -> Array:
        """Each of the weights of a root is a sum of three that is good to six roundings of them.

        Over Q that is at most as many of |l| and of what P and Q do not share. The root adds eight
        roundings of x, and z one of itself, where the loss rises by at most 2μ.
        """
        return 24.0 * (np.abs(edges) + self._unshared) + 16.0 + 2.0 * self.mu * np.abs(z)

    @property
    def _unshared(self) -> float:
        def share(own: Weights) -> float:
            return max(w / (w + c) for w, c in zip(own, self.common, strict=True) if w > 0)

        return min(share(self.present), share(self.absent))

    @property
    def _spread(self) -> float:
        return 3.0 + 0.125 * self.mu * (38.0 + self.mu)


def truncated_law(leaf: TruncatedPoissonGaussian, side: Kind) -> LossLaw:
    """A law that dominates one release of ``leaf`` in the direction ``side``."""
    first, lots = poisson_law(leaf, leaf.sampling_probability, side), _Lots.of(leaf)
    if lots.cut == 0:
        return first
    return _mixed(first, _full_lot(leaf, lots, side), _masses(leaf, lots)[0])


def hidden_law(leaf: TruncatedPoissonGaussian, side: Kind) -> tuple[LossLaw, float]:
    """A law that dominates one release of ``leaf`` but for a probability, and that probability.

    Nobody sees whether a lot was cut: lots of one other less and of one more hide a lot of L - 1
    others that the record is in, up to where they are too unlikely. That is conceded. Under
    add_remove data sets of fewer than half of the records are left to ``truncated_law``.
    """
    cover = Cover.of(leaf)
    if cover is None:
        return truncated_law(leaf, side), 0.0
    parts = cover.fewer, cover.lots
    rest, other = 1.0, 1.0
    for part in parts:
        own, under = _masses(leaf, part)[:: 1 if side == "remove" else -1]
        rest, other = rest - own, other - under
    law: LossLaw = poisson_law(leaf, leaf.sampling_probability, side)
    if rest != other:
        law = ShiftedLaw(law=law, shift=math.log(rest / other))
    total = max(rest, 0.0)
    for part in parts:
        weight = _masses(leaf, part)[0 if side == "remove" else 1]
        total += weight
        law = _mixed(law, _full_lot(leaf, part, side), weight / total)
    return law, cover.conceded


def _mixed(first: LossLaw, second: LossLaw, weight: float) -> LossLaw:
    if weight >= 1:
        return second
    return RevealedMixtureLaw(first=first, second=second, weight=weight)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Lots:
    """Chances of lots with the record and L - 1 others, of as many others, and of L of them.

    Under add_remove the last two are those without the record, who is added at the rate q to some.
    """

    record: float
    others: float
    cut: float

    @classmethod
    def of(cls, leaf: TruncatedPoissonGaussian) -> _Lots:
        """All there are, in the largest data set."""
        q = leaf.sampling_probability
        almost, cut = _chance_of(leaf, leaf.max_lot_size - 1), chance_of_a_cut(leaf, _others(leaf))
        if leaf.neighbours == "add_remove":
            cut = min(cut * (1 + TAIL_ERROR), 1 - almost)
            return cls(record=q * (almost + cut), others=almost, cut=cut)
        cut *= 1 - TAIL_ERROR
        displaced = min(cut, chance_of_a_cut_with_the_record(leaf)) if cut else 0.0
        return cls(record=almost * q + displaced, others=almost * (1 - q), cut=cut - displaced)


def _masses(leaf: TruncatedPoissonGaussian, lots: _Lots) -> tuple[float, float]:
    """Of ``lots`` with the record and without it."""
    without = lots.others + lots.cut
    if leaf.neighbours == "add_remove":
        return (1 - leaf.sampling_probability) * without + lots.record, without
    return lots.record + without, lots.record + without


@dataclass(frozen=True, kw_only=True, slots=True)
class Cover:
    """What hides a record in a lot of L - 1 others, whoever these are.

    The share ``spent`` of the lots of L - 2 others without the record and some of those of L others
    are at any place at least as likely as so many more ``lots`` of L - 1 others, but for outputs
    that have at most the probability ``conceded`` with the record. ``share`` is that of lots of L
    others which are used, ``crowded`` what is lost as two of the others cannot be one.
    """

    spent: float
    share: float
    crowded: float
    fewer: _Lots
    lots: _Lots
    conceded: float

    @classmethod
    @lru_cache(maxsize=64)
    def of(cls, leaf: TruncatedPoissonGaussian) -> Cover | None:
        """A good choice of what the theorem leaves open, or none where it gives nothing."""
        lots, sigma, q = _Lots.of(leaf), leaf.noise_multiplier, leaf.sampling_probability
        private = leaf.neighbours == "add_remove"
        absent = 1.0 if private else 1 - q
        two_less = _chance_of(leaf, leaf.max_lot_size - 2)
        # Others that may fill the last two places of a cut lot, in the smallest data set.
        left = (
            (leaf.dataset_size // 2 + 1 if private else leaf.dataset_size) + 1 - leaf.max_lot_size
        )
        if left < 2 or lots.cut <= 0 or two_less <= 0:
            return None
        apart = math.exp(-1 / sigma**2)
        balance = math.sqrt(absent * two_less / (lots.cut * apart))
        # Lots of L others also hide the record as they are, about so well.
        share = min(1.0, (balance * math.exp(1.5 / sigma**2)) ** 2)
        likely = math.exp((_RARE + 1.5 / sigma) / sigma) / (left - 1)
        crowded = max(_CROWDED, likely * math.sqrt(share) / (2 * balance))
        if crowded > 0.5:
            share, crowded = share * (0.5 / crowded) ** 2, 0.5
        gain = 2 * balance * math.sqrt(share) * lots.cut * apart * (1 - crowded)
        # A record in a lot of L - 2 others and one in a full lot are then hidden equally well.
        odds = absent / q
        slope, height = gain / lots.record, odds - lots.others / lots.record
        root = 2 * height / (slope + math.sqrt(slope * slope + 4 * odds * height))
        used = share * lots.cut
        if private:
            # As many as there are of L others at the most, so that a larger data set is worse; the
            # chances on either side may each be wrong.
            root = min(root, used / gain * (1 - 4 * TAIL_ERROR))
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
        cover = cls(
            spent=spent,
            share=share,
            crowded=crowded,
            fewer=_Lots(record=q * two_less, others=(1 - spent) * absent * two_less, cut=0.0),
            lots=_Lots(
                record=lots.record, others=lots.others + gain * root, cut=lots.cut * (1 - share)
            ),
            conceded=conceded,
        )
        left_over = 1 - sum(_masses(leaf, part)[0] for part in (cover.fewer, cover.lots))
        return cover if left_over > _LEFT_OVER or not private else None


def _full_lot(leaf: TruncatedPoissonGaussian, lots: _Lots, side: Kind) -> LossLaw:
    """The pair of L - 1 or more others, or of a smaller number of them where none is cut."""
    if leaf.neighbours == "add_remove":
        return _removal(leaf, lots, side)
    if lots.cut == 0:
        return poisson_law(leaf, lots.record / _masses(leaf, lots)[0] * (1 + TAIL_ERROR), side)
    return _exchange(leaf, lots, side)


def _removal(leaf: TruncatedPoissonGaussian, lots: _Lots, side: Kind) -> LossLaw:
    """The pair where the record is there or not."""
    q = leaf.sampling_probability
    total = _masses(leaf, lots)[0 if side == "remove" else 1]
    cut, others = lots.cut / total, lots.others / total
    law = DisplacementLaw(
        noise_multiplier=leaf.noise_multiplier,
        common=((1 - q) * cut, (1 - q) * others, 0.0),
        present=(0.0, 0.0, lots.record / total),
        absent=(q * cut, q * others, 0.0),
    )
    return law if side == "remove" else law.reverse


def _exchange(leaf: TruncatedPoissonGaussian, lots: _Lots, side: Kind) -> LossLaw:
    """The pair where the record is drawn as one or as another.

    For positive losses the worst place to take is opposite to the record, for negative ones the
    record's own.
    """
    total = _masses(leaf, lots)[0]
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


def attained_law(leaf: TruncatedPoissonGaussian, side: Kind) -> LossLaw:
    """The law of a data set whose other records contribute zero."""
    return poisson_law(leaf, attained_rate(leaf), side)


def attained_rate(leaf: TruncatedPoissonGaussian) -> float:
    """The chance of a record to be in the lot as it is used, rounded down."""
    others = leaf.dataset_size - 1
    whole = leaf.sampling_probability * float(
        binomial().cdf(leaf.max_lot_size - 1, others, leaf.sampling_probability)
    )
    cut = leaf.max_lot_size / leaf.dataset_size * _sample_above(leaf, leaf.dataset_size)
    return min(leaf.sampling_probability, whole + cut) * (1 - 2 * TAIL_ERROR)


def chance_of_a_cut_with_the_record(leaf: TruncatedPoissonGaussian) -> float:
    """w·p: that a lot is cut, and the record then in it; rounded up, for every size allowed."""
    if leaf.neighbours == "add_remove":
        chance = leaf.sampling_probability * chance_of_a_cut(leaf, leaf.dataset_size)
    else:
        chance = leaf.max_lot_size / leaf.dataset_size * _sample_above(leaf, leaf.dataset_size)
    return chance * (1 + 2 * TAIL_ERROR)


def poisson_law(leaf: TruncatedPoissonGaussian, rate: float, side: Kind) -> NormalMixtureLaw:
    """The law of ``leaf`` with lots that are never cut, sampled at ``rate``."""
    kind: Kind = "replace" if leaf.neighbours == "replace_one" else side
    return NormalMixtureLaw(
        kind=kind, noise_multiplier=leaf.noise_multiplier, sampling_probability=min(1.0, rate)
    )


def chance_of_a_cut(leaf: TruncatedPoissonGaussian, others: int) -> float:
    """w: the chance that the record, if drawn, finds the lot already full."""
    return float(binomial().sf(leaf.max_lot_size - 1, others, leaf.sampling_probability))


def _chance_of(leaf: TruncatedPoissonGaussian, number: int) -> float:
    """The chance that ``number`` of the others are drawn, rounded down."""
    chance = binomial().pmf(number, _others(leaf), leaf.sampling_probability)
    return float(chance) * (1 - TAIL_ERROR)


def _others(leaf: TruncatedPoissonGaussian) -> int:
    """Of the largest data set, which is one of ``dataset_size`` records or one of these more."""
    return leaf.dataset_size - (0 if leaf.neighbours == "add_remove" else 1)


def _sample_above(leaf: TruncatedPoissonGaussian, size: int) -> float:
    """The chance that a sample from ``size`` records is larger than the largest lot."""
    return float(binomial().sf(leaf.max_lot_size, size, leaf.sampling_probability))


def binomial() -> Any:
    """scipy's, loaded at the first use: it takes longer than most plans take to certify."""
    from scipy.stats import binom

    return binom


def visible_law(leaf: TruncatedPoissonGaussian, side: Kind) -> LossLaw:
    """The law of a data set whose other records contribute alike, or zero."""
    (_, rest), *shelves = _shelves(leaf)
    law: LossLaw = poisson_law(leaf, rest, side)
    total = 1 - sum(chance for chance, _ in shelves)
    for chance, rate in shelves:
        total += chance
        law = RevealedMixtureLaw(
            first=law, second=poisson_law(leaf, rate, side), weight=chance / total
        )
    return law


@lru_cache(maxsize=64)
def _shelves(leaf: TruncatedPoissonGaussian) -> Shelves:
    rate = attained_rate(leaf)
    alone = ((1.0, rate),)
    # Under add_remove others would show that one of them is missing, too.
    if leaf.neighbours == "add_remove" or leaf.noise_multiplier > _LOUDEST or rate <= 0:
        return alone
    drawn, absent = _along_the_others(leaf)
    with np.errstate(divide="ignore", invalid="ignore"):
        height = np.log(drawn / (drawn + absent) / rate) / math.log(_STEP)
    shelf = np.where(height >= 1, np.floor(height), 0.0)
    result = []
    for number in np.unique(shelf[shelf > 0]):
        here = shelf == number
        record, chance = float(drawn[here].sum()), float((drawn + absent)[here].sum())
        result.append((chance * (1 - _DOWN), record / chance * (1 - _DOWN)))
    seen = sum(chance * at for chance, at in result) * (1 + 4 * _DOWN)
    if seen < _LEAST * rate or seen >= rate:
        return alone
    return ((1.0, (rate - seen) / (1 - sum(chance for chance, _ in result))), *result)


def _along_the_others(leaf: TruncatedPoissonGaussian) -> tuple[Array, Array]:
    """The chances of places along h, near those of a full lot, with the record and without."""
    sigma, q, others = leaf.noise_multiplier, leaf.sampling_probability, leaf.dataset_size - 1
    # In standard deviations from a full lot; others in it are counted back from there.
    edges = np.linspace(-_REACH - 2 / sigma, _REACH, _PLACES)
    # More of them are missing from the first place with less than the chance that is added below.
    most_missing = math.ceil((13 - edges[0]) * sigma)
    missing = np.arange(min(most_missing, leaf.max_lot_size), -1, -1)
    places = np.array([normal_masses(edges, -number / sigma)[0][1:-1] for number in missing])
    fewer = binomial().pmf(leaf.max_lot_size - missing[:-1], others, q) @ places[:-1]
    cut = chance_of_a_cut(leaf, others)
    displaced = min(cut, chance_of_a_cut_with_the_record(leaf))
    drawn = q * fewer + displaced * places[-2]
    return drawn, (1 - q) * fewer + (cut - displaced) * places[-1] + 1e-37
