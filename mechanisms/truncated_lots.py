"""Correlated noise with truncated Poisson lots, bounded as if no lot were truncated.

Let L be the largest lot and M the number of other records that are drawn. A record takes the
place of another one only where it is drawn and M >= L (for a user with m records, M > L - m).
Reveal the steps where this holds: a unit is drawn J times in them, and no other lot is truncated.
Each of the J draws moves the sum by at most two clip norms, its own and that of the record it
displaces, or by one if it is in the lot under both hypotheses.

Where lots are often truncated nothing is revealed, and every draw counts ``DISTANCE``.

Reference: docs/theorems/correlated-noise.md, Theorems 17 and 20;
docs/theorems/truncated-poisson.md.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import betainc, betaincinv, gammaln

from affidavit.mechanisms.strategies.numerics import Array
from affidavit.plan import events

Truncated = events.TruncatedPoissonGaussian | events.TruncatedPoissonGroupGaussian
Untruncated = events.PoissonSubsampledGaussian | events.PoissonSampledGroupGaussian
Numbers = NDArray[np.int64]

CONCEDED_PROBABILITIES = 1e-9, 1e-18, 1e-32
"""Probabilities of more truncated lots that are added to δ; a smaller one counts more lots."""
_MAX_DRAWS = 100
_CROWD_DEVIATIONS, _CROWD_RANGES = 9.0, 64
"""Numbers of other drawn records that are told apart: how far from the mean, and how many."""
_RATE_MARGIN = 1e-6
"""Relative allowance for the rounding of a rate, far above its size."""
_TAIL_ERROR = 1e-9
"""Relative error allowed for binomial probabilities."""


def without_truncation(leaf: Truncated) -> Untruncated:
    """Return ``leaf`` with lots of any size, under add_remove or zero_out."""
    return _independent_draws(getattr(leaf, "records", 1), leaf.sampling_probability, leaf)


def _independent_draws(records: int, probability: float, leaf: Truncated) -> Untruncated:
    sigma = leaf.noise_multiplier
    if records == 1:
        return events.PoissonSubsampledGaussian(
            sampling_probability=probability, noise_multiplier=sigma
        )
    return events.PoissonSampledGroupGaussian(
        records=records, sampling_probability=probability, noise_multiplier=sigma
    )


def among_zero_records(leaf: events.Leaf) -> events.Leaf:
    """Return ``leaf`` for a data set in which all other records contribute zero.

    Truncation is then invisible: the record is in the lot or not. Other samples, and those of
    users with several records, are returned unchanged.
    """
    if not isinstance(leaf, events.TruncatedPoissonGaussian):
        return leaf
    size, largest, q = leaf.dataset_size, leaf.max_lot_size, leaf.sampling_probability
    whole = q * (1 - _binomial_tail(largest, size - 1, q))
    cut = largest / size * _binomial_tail(largest + 1, size, q)
    return events.PoissonSubsampledGaussian(
        sampling_probability=min(q, whole + cut) * (1 - _TAIL_ERROR),
        noise_multiplier=leaf.noise_multiplier,
        pair="replace_one" if leaf.neighbours == "replace_one" else "add_remove",
    )


@lru_cache(maxsize=16)
def at_least_left(leaf: Truncated) -> Untruncated | None:
    """Return independent draws of which at most as many succeed as are left in a lot of zeros.

    All others contribute zero. Given that M of them are drawn and K of the user's records, the
    number left is hypergeometric where M + K > L. It falls in M, so that M counts as the largest of
    a range. None if too few are left.
    """
    if isinstance(leaf, events.TruncatedPoissonGaussian):
        among = among_zero_records(leaf)
        return among if isinstance(among, Untruncated) else None
    records, best = min(leaf.records, leaf.max_lot_size), (0, 0.0)
    while records:
        number = np.arange(1, records + 1)
        rates = betaincinv(number, records - number + 1, _tail_left(leaf, records))
        rate = float(rates.min()) * (1 - _RATE_MARGIN)
        if records * rate > best[0] * best[1]:
            best = records, rate
        records //= 2
    if not best[1] > 0:
        return None
    return _independent_draws(*best, leaf)


def _tail_left(leaf: events.TruncatedPoissonGroupGaussian, records: int) -> Array:
    """Return lower bounds of P(at least k records are left) for k = 1, 2, ..., shape (n,)."""
    largest, q, others = leaf.max_lot_size, leaf.sampling_probability, leaf.dataset_size - records
    spread = _CROWD_DEVIATIONS * math.sqrt(others * q + largest + 1)
    most = min(others, math.ceil(max(largest, others * q) + spread))
    fewest = min(others, max(0, largest - records))
    ends = np.unique(np.linspace(fewest, max(fewest, most), _CROWD_RANGES).astype(np.int64))
    cut = others - ends > 0
    fewer = np.where(cut, betainc(np.maximum(others - ends, 1), ends + 1, 1 - q), 1.0)
    more = np.where(cut, betainc(ends + 1, np.maximum(others - ends, 1), q), 0.0)
    chances = np.zeros(len(ends))
    for here, before in ((fewer, np.append(0.0, fewer[:-1])), (-more, -np.append(1.0, more[:-1]))):
        error = _TAIL_ERROR * (np.abs(here) + np.abs(before))
        chances = np.maximum(chances, here - before - error)
    number = np.arange(records + 1)
    drawn = number[:, None]
    law = np.exp(
        _log_choices(number[-1:], drawn) + drawn * math.log(q) + (records - drawn) * math.log1p(-q)
    )
    left = np.zeros(records + 1)
    for crowd, chance in zip(ends, chances, strict=True):
        lot = np.minimum(largest, crowd + drawn)
        possible = (number <= drawn) & (lot - number >= 0) & (lot - number <= crowd)
        logs = _log_choices(drawn, np.where(possible, number, 0)) - _log_choices(crowd + drawn, lot)
        logs += _log_choices(crowd, np.where(possible, lot - number, 0))
        left += chance * (np.where(possible, np.exp(logs), 0.0) * law).sum(axis=0)
    return np.asarray(left[:0:-1].cumsum()[::-1] * (1 - _RATE_MARGIN))


def _log_choices(number: Numbers, chosen: Numbers) -> Array:
    """Return the logarithms of binomial coefficients."""
    result = gammaln(number + 1.0) - gammaln(chosen + 1.0) - gammaln(number - chosen + 1.0)
    return np.asarray(result)


def truncated_draw_counts(leaf: Truncated, steps: int) -> dict[int, float]:
    """Return numbers of draws into truncated lots, each with the probability of more."""
    above, result = draws_above(leaf, steps), {}
    for conceded in CONCEDED_PROBABILITIES:
        for number, more in enumerate(above):
            if more <= conceded:
                result[number] = more
                break
    return result


def draws_above(leaf: Truncated, steps: int) -> list[float]:
    """Return the probabilities of more than 0, 1, ... draws into truncated lots, rounded up."""
    records, q = getattr(leaf, "records", 1), leaf.sampling_probability
    crowded = crowded_probability(leaf)
    drawn = -crowded * math.expm1(records * math.log1p(-q))
    if records == 1:
        drawn = min(1.0, drawn * (1 + _TAIL_ERROR))
        above = [_binomial_tail(number + 1, steps, drawn) for number in range(_MAX_DRAWS)]
    else:
        law = np.zeros(_MAX_DRAWS + 1)
        numbers = np.arange(1, min(records, _MAX_DRAWS) + 1)
        rest = records - numbers
        ways = gammaln(records + 1) - gammaln(numbers + 1) - gammaln(rest + 1)
        chances = np.exp(ways + numbers * math.log(q) + rest * math.log1p(-q))
        law[0], law[numbers] = 1 - drawn, crowded * chances
        several = _repeated(law, steps)
        above = [float(several[number + 1 :].sum()) for number in range(_MAX_DRAWS)]
    return [max(more * (1 + _TAIL_ERROR), math.ulp(0.0) if crowded else 0.0) for more in above]


def _repeated(law: Array, times: int) -> Array:
    """Return the law of the sum of ``times`` numbers of ``law``, whose last place is for more."""
    result: Array = np.eye(1, len(law))[0]
    power = law
    while times:
        if times % 2:
            result = _added(result, power)
        times, power = times // 2, _added(power, power)
    return result


def _added(one: Array, other: Array) -> Array:
    both = np.convolve(one, other)
    return np.asarray(np.append(both[: len(one) - 1], both[len(one) - 1 :].sum()))


def displacement(leaf: Truncated) -> int:
    """Return how far a privacy unit moves the sum of a truncated lot, at most, in clip norms.

    Under add_remove its records may take the places of others.
    """
    records = min(getattr(leaf, "records", 1), leaf.max_lot_size)
    return records * (1 if leaf.neighbours == "zero_out" else 2)


def crowded_probability(leaf: Truncated) -> float:
    """Return the probability that others leave too few places for the unit, rounded up."""
    records, q = getattr(leaf, "records", 1), leaf.sampling_probability
    others = leaf.dataset_size - (0 if leaf.neighbours == "add_remove" else records)
    crowded = _binomial_tail(leaf.max_lot_size - records + 1, others, q)
    # A probability below the smallest double is not zero.
    return max(crowded, 1e-300 if others > leaf.max_lot_size - records else 0.0)


def _binomial_tail(least: int, size: int, q: float) -> float:
    """Return P(at least ``least`` of ``size`` draws)."""
    if not 0 < least <= size:
        return 0.0 if least > 0 else 1.0
    return float(betainc(least, size - least + 1, q))
