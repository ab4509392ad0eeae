"""Steps, sampling probability and participations of a phase, by the rule of its scheme.

Arithmetic is exact (``Fraction`` of the decimals in the plan): in doubles, ``int(epochs / q)`` can
lose a step and under-report the privacy loss.

>>> from fractions import Fraction
>>> lots_per_epoch(42043, 1024)
41
"""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction

from affidavit.plan.document import Phase, PlanDocument
from affidavit.plan.vocabulary import ONE_LOT_PER_EPOCH


def exact_fraction(value: float) -> Fraction:
    """Return the decimal that the plan contains, not the nearest double."""
    return Fraction(Decimal(repr(value)))


def lots_per_epoch(dataset_size: int, lot_size: int) -> int:
    """Return the number of full lots in one pass over the data.

    The last, partial lot is not counted. That is the safe reading: fewer lots per epoch mean more
    epochs, and so more participations of one record, in a given number of steps.
    """
    return dataset_size // lot_size


def lots_in_turn(plan: PlanDocument, phase: Phase) -> int:
    """Return b, the number of steps after which the turn of a record may come again."""
    if phase.sampling.scheme in ONE_LOT_PER_EPOCH:
        assert plan.dataset.size is not None
        assert phase.sampling.lot_size is not None
        size, lot = plan.dataset.size, phase.sampling.lot_size
        drops_last = phase.sampling.drop_last is not False
        return lots_per_epoch(size, lot) if drops_last else -(-size // lot)
    return phase.sampling.groups or 1


def sampling_probability(plan: PlanDocument, phase: Phase) -> Fraction:
    """Return q: the given probability, or lot size over data set size; 1 for ``full_batch``.

    For ``random_allocation`` it is the share of the steps in which a record takes part.
    """
    if phase.sampling.participations is not None and phase.steps is not None:
        return Fraction(phase.sampling.participations, phase.steps)
    if phase.sampling.probability is not None:
        return exact_fraction(phase.sampling.probability)
    if phase.sampling.lot_size is None or plan.dataset.size is None:
        return Fraction(1)
    return Fraction(phase.sampling.lot_size, plan.dataset.size)


def highest_probability(plan: PlanDocument, phase: Phase) -> Fraction:
    """Return the largest probability of a record at one step, given its earlier participations.

    ``b_min_sep`` draws a record with probability p if it took part in none of the last b - 1 steps.
    The record then takes part in a share q = p / (1 + (b - 1) p) of all steps, at most 1/b.
    """
    rate = sampling_probability(plan, phase)
    if phase.sampling.scheme != "b_min_sep" or phase.sampling.separation is None:
        return rate
    apart = phase.sampling.separation
    return rate / (1 - (apart - 1) * rate) if apart * rate < 1 else Fraction(1)


def divisor(plan: PlanDocument, phase: Phase) -> Fraction | None:
    """Return B, the expected or fixed lot size that divides the sum; None if it is unknown."""
    if phase.sampling.lot_size is not None:
        return Fraction(phase.sampling.lot_size)
    if plan.dataset.size is None:
        return None
    return sampling_probability(plan, phase) * plan.dataset.size


def steps(plan: PlanDocument, phase: Phase) -> int | None:
    """Return the optimiser steps of the phase, or None if the plan solves for them.

    With one lot per epoch these are the lots of an epoch times the epochs, otherwise epochs / q;
    both are rounded up.
    """
    if phase.epochs is None:
        return phase.steps
    epochs = exact_fraction(phase.epochs)
    if phase.sampling.scheme in ONE_LOT_PER_EPOCH:
        return math.ceil(epochs * lots_in_turn(plan, phase))
    return math.ceil(epochs / sampling_probability(plan, phase))


def participations(plan: PlanDocument, phase: Phase, steps: int) -> int:
    """Return k, the most steps in which one record takes part, for one lot per epoch."""
    return math.ceil(steps / lots_in_turn(plan, phase))


def double_up(value: Fraction) -> float:
    """Return the smallest double that is not below ``value``."""
    nearest = float(value)
    return math.nextafter(nearest, math.inf) if Fraction(nearest) < value else nearest
