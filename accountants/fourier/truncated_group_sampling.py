"""Truncated Poisson sampling with several records of one user: the laws of a release.

With M the number of other records that are drawn, of which there are n, L the largest lot and m
the user's records, a step is one of two, and the release reveals which:

* M <= L - m: no lot is cut, and the step is a Poisson sample of the user's records;
* M > L - m: each of the K drawn records of the user may take another record's place, so that they
  move the sum by at most 2K clip norms. It is a Poisson sample at half the noise, or a lot of fixed
  size with K of the user's records.

For lower bounds the other records contribute zero: the user's J records that are left in the lot
move the sum by J clip norms, and a Poisson sample of (stochastically) fewer moves it by less.
Probabilities are of a binomial law from scipy, trusted to ``BINOMIAL_ERROR`` of themselves. Proof:
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
    binomial_weights,
    displacement_law,
)
from affidavit.accountants.fourier.loss_laws import RevealedMixtureLaw
from affidavit.accountants.fourier.privacy_loss import Array, LossLaw
from affidavit.accountants.fourier.truncated_poisson import BINOMIAL_ERROR, binomial
from affidavit.plan import events

MIN_DISPLACEMENT_NOISE = 0.4
"""Noise multiplier per record of the user, below which a lot that may be cut is conceded if records
are displaced under both hypotheses."""
_CROWD_BLOCKS, _CROWD_DEVIATIONS = 64, 12.0
"""Numbers of others above a full lot that the lower bound distinguishes, and their range in
standard deviations."""
_MIN_PROBABILITY = 1e-300
_RATE_MARGIN = 1e-9
"""Relative margin by which a rate is rounded down."""


def truncated_group_law(
    leaf: events.TruncatedPoissonGroupGaussian, *, added: bool, displaced: bool
) -> tuple[LossLaw, float]:
    """Return a law that dominates one release except with a probability, and that probability.

    For lots that may be cut it reveals how many records were ``displaced``, or replaces them by two
    Poisson samples as far apart as possible. Under add_remove both are the same.
    """
    weights = binomial_weights(leaf.records, leaf.sampling_probability)
    first = _law(leaf, weights, leaf.noise_multiplier, added=added)
    crowded = crowd_probability(leaf)
    if crowded == 0:
        return first, 0.0
    second: LossLaw
    if leaf.neighbours == "add_remove":
        second = _law(leaf, weights, leaf.noise_multiplier / 2, added=added)
    elif leaf.noise_multiplier < MIN_DISPLACEMENT_NOISE * leaf.records:
        return first, crowded
    elif displaced:
        second = displacement_law(weights, leaf.noise_multiplier)
    else:
        # Records that contribute zero displace others, too.
        second = ReplacedGroupLaw(noise_multiplier=leaf.noise_multiplier / 2, weights=weights)
    if crowded >= 1:
        return second, 0.0
    return RevealedMixtureLaw(first=first, second=second, weight=crowded), 0.0


def _law(
    leaf: events.TruncatedPoissonGroupGaussian,
    weights: tuple[float, ...],
    noise_multiplier: float,
    *,
    added: bool,
) -> LossLaw:
    if leaf.neighbours == "replace_one":
        return ReplacedGroupLaw(noise_multiplier=noise_multiplier, weights=weights)
    return GroupMixtureLaw(noise_multiplier=noise_multiplier, weights=weights, added=added)


def crowd_probability(leaf: events.TruncatedPoissonGroupGaussian) -> float:
    """Return P(M > L - m) in the largest data set, rounded up."""
    others = leaf.dataset_size - (0 if leaf.neighbours == "add_remove" else leaf.records)
    room = leaf.max_lot_size - leaf.records
    chance = float(binomial().sf(room, others, leaf.sampling_probability))
    return min(1.0, max(chance, _MIN_PROBABILITY if others > room else 0.0) * (1 + BINOMIAL_ERROR))


@lru_cache(maxsize=64)
def attained_sample(
    leaf: events.TruncatedPoissonGroupGaussian,
) -> events.PoissonSampledGroupGaussian | events.PoissonSubsampledGaussian:
    """Return a Poisson sample of at most as many records as are left in a lot, in a full data set.

    It samples the number of the user's records that maximises the mean; the others contribute zero.
    """
    records, best = min(leaf.records, leaf.max_lot_size), (0, 0.0)
    while records:
        rate = _max_rate(leaf, records)
        if records * rate > best[0] * best[1]:
            best = records, rate
        records //= 2
    records, rate = best
    pair: events.SubsampledPair = (
        "replace_one" if leaf.neighbours == "replace_one" else "add_remove"
    )
    if records == 1:
        return events.PoissonSubsampledGaussian(
            sampling_probability=rate, noise_multiplier=leaf.noise_multiplier, pair=pair
        )
    return events.PoissonSampledGroupGaussian(
        records=records,
        sampling_probability=rate,
        noise_multiplier=leaf.noise_multiplier,
        pair=pair,
    )


def _max_rate(leaf: events.TruncatedPoissonGroupGaussian, records: int) -> float:
    """Return about the largest rate at which draws of ``records`` are at most J."""
    number = np.arange(1, records + 1)
    rates = betaincinv(number, records - number + 1, _min_tail_left(leaf, records))
    return float(rates.min()) * (1 - _RATE_MARGIN)


def _min_tail_left(leaf: events.TruncatedPoissonGroupGaussian, records: int) -> Array:
    """Return lower bounds of P(J >= k) for k = 1..``records``, of shape (records,).

    Given that K of the records are drawn with M others, J is K, or hypergeometric if M + K > L, and
    falls in M.
    """
    largest, q = leaf.max_lot_size, leaf.sampling_probability
    others = max(0, leaf.dataset_size - records)
    spread = _CROWD_DEVIATIONS * math.sqrt(others * q * (1 - q) + largest + 1)
    top = max(largest, min(others, largest + math.ceil(spread + max(0.0, others * q - largest))))
    edges = np.union1d(
        np.arange(largest - records, largest + 1),
        np.linspace(largest, top, _CROWD_BLOCKS).astype(np.int64),
    )
    above = np.asarray(binomial().sf(edges, others, q))
    chances = np.maximum(above[:-1] * (1 - BINOMIAL_ERROR) - above[1:] * (1 + BINOMIAL_ERROR), 0.0)
    left = np.zeros(records + 1)
    for drawn, weight in enumerate(binomial_weights(records, q)):
        left[drawn] += weight * float(binomial().cdf(min(largest - drawn, others), others, q))
        cut = (edges[1:] > largest - drawn) & (chances > 0)
        left[: drawn + 1] += weight * (
            chances[cut] @ _left_probabilities(largest, drawn, edges[1:][cut])
        )
    return np.asarray(left[:0:-1].cumsum()[::-1] * (1 - _RATE_MARGIN))


def _left_probabilities(largest: int, drawn: int, others: NDArray[np.int64]) -> Array:
    """Return P(J = k), k = 0..``drawn``, given more than ``largest`` draws, (n, drawn + 1).

    The numbers of ``others`` that are drawn have shape (n,).
    """
    k, sample = np.arange(drawn + 1), others + drawn
    ways = gammaln(drawn + 1) - gammaln(k + 1) - gammaln(drawn - k + 1)
    stay = _log_falling(np.array([largest]), drawn)[:, k]
    go = _log_falling(sample - largest, drawn)[:, drawn - k]
    return np.asarray(np.exp(ways + stay + go - _log_falling(sample, drawn)[:, -1:]))


def _log_falling(numbers: NDArray[np.int64], length: int) -> Array:
    """Return log(number (number - 1) ...) of 0 to ``length`` factors, shape (n, length + 1)."""
    factors = np.maximum(numbers[:, None] - np.arange(length, dtype=np.float64), 0.0)
    with np.errstate(divide="ignore"):
        sums = np.cumsum(np.log(factors), axis=1)
    return np.concatenate((np.zeros((len(numbers), 1)), sums), axis=1)
