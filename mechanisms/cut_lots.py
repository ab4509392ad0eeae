"""Runs of correlated noise whose Poisson samples are cut to a largest lot, as if none were.

With L the largest lot and M the number of other records that are drawn, no record takes another's
place unless it is drawn where M >= L; of users with m records, where M > L - m. Reveal in which
steps that is so: in J of them, J binomial, and in all others no lot is cut. In each of the J steps
a record moves the sum by at most two clip norms, that of the record whose place it takes among
them, or by one where it is in the lot under both hypotheses.

Reference: docs/theorems/correlated-noise.md, Theorem 17; docs/theorems/truncated-poisson.md.
"""

from __future__ import annotations

import math

from scipy.special import betainc

from affidavit.plan import (
    Leaf,
    PoissonSampledGroupGaussian,
    PoissonSubsampledGaussian,
    TruncatedPoissonGaussian,
    TruncatedPoissonGroupGaussian,
)

Cut = TruncatedPoissonGaussian | TruncatedPoissonGroupGaussian
Uncut = PoissonSubsampledGaussian | PoissonSampledGroupGaussian

LEVELS = 1e-9, 1e-18, 1e-32
"""Chances of more cut lots with the record that are conceded: a small one costs more of them."""
_MAX_COUNTED = 100
_TAIL_ERROR = 1e-9
"""Relative error allowed for binomial probabilities."""


def uncut(leaf: Cut) -> Uncut:
    """``leaf`` with lots of any size, under add_remove or zero_out."""
    q, sigma = leaf.sampling_probability, leaf.noise_multiplier
    if isinstance(leaf, TruncatedPoissonGaussian):
        return PoissonSubsampledGaussian(sampling_probability=q, noise_multiplier=sigma)
    return PoissonSampledGroupGaussian(
        records=leaf.records, sampling_probability=q, noise_multiplier=sigma
    )


def seen_alone(leaf: Leaf) -> Leaf:
    """``leaf`` where all others contribute zero, so that nobody sees whether a lot was cut.

    A record is then in the lot or not. Of users and of other samples it is as it was.
    """
    if not isinstance(leaf, TruncatedPoissonGaussian):
        return leaf
    size, largest, q = leaf.dataset_size, leaf.max_lot_size, leaf.sampling_probability
    whole = q * (1 - _at_least(largest, size - 1, q))
    cut = largest / size * _at_least(largest + 1, size, q)
    return PoissonSubsampledGaussian(
        sampling_probability=min(q, whole + cut) * (1 - _TAIL_ERROR),
        noise_multiplier=leaf.noise_multiplier,
        pair="replace_one" if leaf.neighbours == "replace_one" else "add_remove",
    )


def cut_lots(leaf: Cut, steps: int) -> dict[int, float]:
    """Numbers of cut lots with the record in so many ``steps``, and the chances of more of them."""
    chance = _chance_of_a_cut(leaf)
    result = {}
    for level in LEVELS:
        for number in range(_MAX_COUNTED):
            more = _at_least(number + 1, steps, chance) * (1 + _TAIL_ERROR)
            if more <= level:
                result[number] = more
                break
    return result


def displacement(leaf: Cut) -> int:
    """Clip norms by which a record, or a user's, move the sum of a cut lot at the most.

    Under add_remove they take others' places, under the other adjacencies they always have them.
    """
    return getattr(leaf, "records", 1) * (1 if leaf.neighbours == "zero_out" else 2)


def _chance_of_a_cut(leaf: Cut) -> float:
    """That a record, or one of a user's, is drawn where the lot may be cut; rounded up."""
    records, q = getattr(leaf, "records", 1), leaf.sampling_probability
    others = leaf.dataset_size - (0 if leaf.neighbours == "add_remove" else records)
    crowded = _at_least(leaf.max_lot_size - records + 1, others, q)
    # A chance too small for a double is not zero.
    crowded = max(crowded, 1e-300 if others > leaf.max_lot_size - records else 0.0)
    return min(1.0, -crowded * math.expm1(records * math.log1p(-q)) * (1 + _TAIL_ERROR))


def _at_least(least: int, size: int, q: float) -> float:
    """P(at least so many of ``size`` draws)."""
    if not 0 < least <= size:
        return 0.0 if least > 0 else 1.0
    return float(betainc(least, size - least + 1, q))
