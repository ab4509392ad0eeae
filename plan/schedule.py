"""Steps, sampling probability and participations, each by its scheme's own rule.

Arithmetic is exact (``Fraction`` of the decimals that the plan wrote), because rounding a
step away under-reports: ``int(epochs / q)`` of doubles gives 1959 where 1960 is meant.

>>> from fractions import Fraction
>>> lots_per_epoch(42043, 1024)
41
"""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction

from affidavit.plan.document import Phase, PlanDocument

FIXED_ORDER = frozenset({"shuffled", "cyclic"})
"""Schemes in which every record takes part once an epoch, at its place in the order."""


ONE_LOT_PER_EPOCH = FIXED_ORDER | {"balls_in_bins"}
"""Schemes in which every record is in exactly one of an epoch's lots."""


def exact_fraction(value: float) -> Fraction:
    """The decimal that a plan wrote, not the double next to it."""
    return Fraction(Decimal(repr(value)))


def lots_per_epoch(dataset_size: int, lot_size: int) -> int:
    """Full lots of one pass over the data; the last, partial lot is left out.

    Leaving it out is the safe reading: with fewer lots an epoch, a given number of steps
    holds more epochs, and so more participations of one record.
    """
    return dataset_size // lot_size


def sampling_probability(plan: PlanDocument, phase: Phase) -> Fraction:
    """q: the given probability, or lot size over data set size; 1 for full_batch."""
    if phase.sampling.probability is not None:
        return exact_fraction(phase.sampling.probability)
    if phase.sampling.lot_size is None or plan.dataset.size is None:
        return Fraction(1)
    return Fraction(phase.sampling.lot_size, plan.dataset.size)


def highest_probability(plan: PlanDocument, phase: Phase) -> Fraction:
    """The most with which a record takes part in a step, whatever it took part in before.

    Under ``b_min_sep`` it is drawn with p if it took part in none of the last b - 1 steps, so that
    it takes part in a share q = p / (1 + (b - 1) p) of the steps, of at most 1/b.
    """
    rate = sampling_probability(plan, phase)
    if phase.sampling.scheme != "b_min_sep" or phase.sampling.separation is None:
        return rate
    apart = phase.sampling.separation
    return rate / (1 - (apart - 1) * rate) if apart * rate < 1 else Fraction(1)


def divisor(plan: PlanDocument, phase: Phase) -> Fraction | None:
    """B, what a step's sum is divided by: the lot size, expected or fixed; None if unknown."""
    if phase.sampling.lot_size is not None:
        return Fraction(phase.sampling.lot_size)
    if plan.dataset.size is None:
        return None
    return sampling_probability(plan, phase) * plan.dataset.size


def steps(plan: PlanDocument, phase: Phase) -> int | None:
    """Optimiser steps of the phase; None when the plan asks for them.

    One lot an epoch: the full lots of an epoch, times the epochs. Otherwise epochs / q. Both
    are rounded up to a whole step.
    """
    if phase.epochs is None:
        return phase.steps
    epochs = exact_fraction(phase.epochs)
    if phase.sampling.scheme in ONE_LOT_PER_EPOCH:
        assert plan.dataset.size is not None
        assert phase.sampling.lot_size is not None
        return math.ceil(epochs * lots_per_epoch(plan.dataset.size, phase.sampling.lot_size))
    return math.ceil(epochs / sampling_probability(plan, phase))


def participations(plan: PlanDocument, phase: Phase, steps: int) -> int:
    """k: the most steps in which one record takes part, with one lot an epoch."""
    assert plan.dataset.size is not None
    assert phase.sampling.lot_size is not None
    return math.ceil(steps / lots_per_epoch(plan.dataset.size, phase.sampling.lot_size))


def double_up(value: Fraction) -> float:
    """The smallest double that is not below ``value``."""
    nearest = float(value)
    return math.nextafter(nearest, math.inf) if Fraction(nearest) < value else nearest
