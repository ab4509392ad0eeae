"""Truncated Poisson sampling with several records of one user: the laws of a release.

With M the number of other records that are drawn, of which there are n, L the largest lot and m
the user's records, a step is one of two, and which is revealed:

* M <= L - m: no lot is cut, and the step is a Poisson sample of the user's records;
* M > L - m: of K of the user's records that are drawn each may take another record's place, so
  that they move the sum by at most 2K clip norms. It is a Poisson sample at half the noise, or a
  lot of fixed size with K of the user's records.

From below the other records contribute zero: the user's J records that are left in the lot move the
sum by J clip norms, and a Poisson sample of (stochastically) fewer moves it by less. Chances are of
a binomial law from scipy, trusted to ``TAIL_ERROR`` of themselves. Proof:
docs/theorems/truncated-poisson.md, several records of a user.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaincinv, gammaln

from affidavit.accountants.fourier.group_sampling import (
    GroupMixtureLaw,
    ReplacedGroupLaw,
    displacing_law,
    numbers_drawn,
)
from affidavit.accountants.fourier.loss_laws import RevealedMixtureLaw
from affidavit.accountants.fourier.privacy_loss import Array, LossLaw
from affidavit.accountants.fourier.truncated_poisson import TAIL_ERROR, binomial
from affidavit.plan import (
    PoissonSampledGroupGaussian,
    PoissonSubsampledGaussian,
    SubsampledPair,
    TruncatedPoissonGroupGaussian,
)

MIN_NOISE = 0.4
"""Over the clip norms of all records, where others' places are taken under both hypotheses; with
less a lot that may be cut is conceded."""
_BLOCKS, _BEYOND = 64, 12.0
"""Numbers of others above a full lot that are told apart from below, and standard deviations."""
_SMALLEST, _DOWN = 1e-300, 1e-9


def truncated_group_law(
    leaf: TruncatedPoissonGroupGaussian, *, added: bool, displaced: bool
) -> tuple[LossLaw, float]:
    """A law that dominates one release but for a probability, and that probability.

    Of lots that may be cut it reveals how many records were ``displaced``, or takes them for two
    Poisson samples that are as far apart as can be. Under add_remove both are one.
    """
    weights = numbers_drawn(leaf.records, leaf.sampling_probability)
    first = _law(leaf, weights, leaf.noise_multiplier, added=added)
    crowded = chance_of_a_crowd(leaf)
    if crowded == 0:
        return first, 0.0
    second: LossLaw
    if leaf.neighbours == "add_remove":
        second = _law(leaf, weights, leaf.noise_multiplier / 2, added=added)
    elif leaf.noise_multiplier < MIN_NOISE * leaf.records:
        return first, crowded
    elif displaced:
        second = displacing_law(weights, leaf.noise_multiplier)
    else:
        # Whoever contributes nothing takes places, too.
        second = ReplacedGroupLaw(noise_multiplier=leaf.noise_multiplier / 2, weights=weights)
    if crowded >= 1:
        return second, 0.0
    return RevealedMixtureLaw(first=first, second=second, weight=crowded), 0.0


def _law(
    leaf: TruncatedPoissonGroupGaussian,
    weights: tuple[float, ...],
    noise_multiplier: float,
    *,
    added: bool,
) -> LossLaw:
    if leaf.neighbours == "replace_one":
        return ReplacedGroupLaw(noise_multiplier=noise_multiplier, weights=weights)
    return GroupMixtureLaw(noise_multiplier=noise_multiplier, weights=weights, added=added)


def chance_of_a_crowd(leaf: TruncatedPoissonGroupGaussian) -> float:
    """P(M > L - m) in the largest data set, rounded up."""
    others = leaf.dataset_size - (0 if leaf.neighbours == "add_remove" else leaf.records)
    room = leaf.max_lot_size - leaf.records
    chance = float(binomial().sf(room, others, leaf.sampling_probability))
    return min(1.0, max(chance, _SMALLEST if others > room else 0.0) * (1 + TAIL_ERROR))


@lru_cache(maxsize=64)
def attained_sample(
    leaf: TruncatedPoissonGroupGaussian,
) -> PoissonSampledGroupGaussian | PoissonSubsampledGaussian:
    """A Poisson sample of no more records than are left in a lot, in a full data set.

    Of so many of the user's records that most are drawn by it; the others contribute zero.
    """
    records, best = min(leaf.records, leaf.max_lot_size), (0, 0.0)
    while records:
        rate = _rate(leaf, records)
        if records * rate > best[0] * best[1]:
            best = records, rate
        records //= 2
    records, rate = best
    pair: SubsampledPair = "replace_one" if leaf.neighbours == "replace_one" else "add_remove"
    if records == 1:
        return PoissonSubsampledGaussian(
            sampling_probability=rate, noise_multiplier=leaf.noise_multiplier, pair=pair
        )
    return PoissonSampledGroupGaussian(
        records=records,
        sampling_probability=rate,
        noise_multiplier=leaf.noise_multiplier,
        pair=pair,
    )


def _rate(leaf: TruncatedPoissonGroupGaussian, records: int) -> float:
    """The largest rate at which so many draws are no more than J, or about that."""
    number = np.arange(1, records + 1)
    rates = betaincinv(number, records - number + 1, _left_at_least(leaf, records))
    return float(rates.min()) * (1 - _DOWN)


def _left_at_least(leaf: TruncatedPoissonGroupGaussian, records: int) -> Array:
    """P(J >= k) for k = 1..``records``, from below.

    Given that K of so many are drawn with M others, J is K, or hypergeometric where M + K > L, and
    falls in M.
    """
    largest, q = leaf.max_lot_size, leaf.sampling_probability
    others = max(0, leaf.dataset_size - records)
    spread = _BEYOND * math.sqrt(others * q * (1 - q) + largest + 1)
    top = max(largest, min(others, largest + math.ceil(spread + max(0.0, others * q - largest))))
    edges = np.union1d(
        np.arange(largest - records, largest + 1),
        np.linspace(largest, top, _BLOCKS).astype(np.int64),
    )
    above = np.asarray(binomial().sf(edges, others, q))
    chances = np.maximum(above[:-1] * (1 - TAIL_ERROR) - above[1:] * (1 + TAIL_ERROR), 0.0)
    left = np.zeros(records + 1)
    for drawn, weight in enumerate(numbers_drawn(records, q)):
        left[drawn] += weight * float(binomial().cdf(min(largest - drawn, others), others, q))
        cut = (edges[1:] > largest - drawn) & (chances > 0)
        left[: drawn + 1] += weight * (
            chances[cut] @ _left_in_a_lot(largest, drawn, edges[1:][cut])
        )
    return np.asarray(left[:0:-1].cumsum()[::-1] * (1 - _DOWN))


def _left_in_a_lot(largest: int, drawn: int, others: NDArray[np.int64]) -> Array:
    """P(J = k), k = 0..``drawn`` and more than ``largest`` of these and the others, (n, drawn + 1).

    ``others`` that are drawn with them have shape (n,).
    """
    k, sample = np.arange(drawn + 1), others + drawn
    ways = gammaln(drawn + 1) - gammaln(k + 1) - gammaln(drawn - k + 1)
    stay = _log_falling(np.array([largest]), drawn)[:, k]
    go = _log_falling(sample - largest, drawn)[:, drawn - k]
    return np.asarray(np.exp(ways + stay + go - _log_falling(sample, drawn)[:, -1:]))


def _log_falling(numbers: NDArray[np.int64], length: int) -> Array:
    """Logarithms of number (number - 1) ... of 0 to ``length`` factors, shape (n, length + 1)."""
    factors = np.maximum(numbers[:, None] - np.arange(length, dtype=np.float64), 0.0)
    with np.errstate(divide="ignore"):
        sums = np.cumsum(np.log(factors), axis=1)
    return np.concatenate((np.zeros((len(numbers), 1)), sums), axis=1)
