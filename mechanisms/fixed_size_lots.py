"""Correlated noise with lots of fixed size, bounded by records that are drawn independently.

A lot is a uniform sample of B of N records, fresh in each step. Reveal the others of each lot in
random order: the unit's K records in it take the places of the last K. A unit thus moves the sum by
2K clip norms at most, whichever data set it is in, and K is independent between steps. K lies
between two binomial numbers of draws: one record fewer is left for each that was tried before, and
as few draws succeed with the geometric mean of their probabilities.

Reference: docs/theorems/correlated-noise.md, Theorem 18.
"""

from __future__ import annotations

import math

from affidavit.plan import events

FixedSize = events.WithoutReplacementGaussian | events.WithoutReplacementGroupGaussian
Independent = events.PoissonSubsampledGaussian | events.PoissonSampledGroupGaussian


def at_most_drawn(leaf: FixedSize) -> Independent | None:
    """Return independent draws of which at least as many succeed; None if all would."""
    records = getattr(leaf, "records", 1)
    left = leaf.dataset_size - records + 1
    if leaf.sample_size >= left:
        return None
    return _draws(records, math.nextafter(leaf.sample_size / left, 1.0), leaf.noise_multiplier)


def at_least_drawn(leaf: FixedSize) -> Independent:
    """Return independent draws of which at most as many succeed.

    K is a sum of independent draws, and at least one of as many that all have the geometric mean of
    their probabilities. Of a user with many records in small lots only some count.
    """
    lot, size = leaf.sample_size, leaf.dataset_size
    best, logs = (1, math.nextafter(lot / size, 0.0)), math.log(lot / size)
    for drawn in range(1, min(getattr(leaf, "records", 1), lot)):
        logs += math.log((lot - drawn) / (size - drawn))
        probability = math.exp(logs / (drawn + 1)) * (1 - 1e-12)
        if (drawn + 1) * probability > best[0] * best[1]:
            best = drawn + 1, probability
    return _draws(*best, leaf.noise_multiplier)


def _draws(records: int, probability: float, noise_multiplier: float) -> Independent:
    if records == 1:
        return events.PoissonSubsampledGaussian(
            sampling_probability=probability, noise_multiplier=noise_multiplier
        )
    return events.PoissonSampledGroupGaussian(
        records=records, sampling_probability=probability, noise_multiplier=noise_multiplier
    )
