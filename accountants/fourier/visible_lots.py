"""Truncated Poisson sampling from below: other records that show how full the lot is.

Let every other record contribute a unit vector h, and the record one at a right angle to it. Along
h the release shows how many others are in the lot, as far as the noise lets it be seen: with the
record in a cut lot one fewer. Along the record's own vector it is a Poisson sample whose rate is
the chance of the record to be in the lot, after what was seen along h. Places along h of about the
same rate are one ``shelf``, and the release reveals which one it is on.

Each chance is rounded so that it lowers the curve: those of shelves and their rates down, the rate
of all other places to what that leaves. Proof: docs/theorems/truncated-poisson.md.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from affidavit.accountants.fourier.displacement import (
    TAIL_ERROR,
    RevealedMixtureLaw,
    attained_rate,
    binomial,
    chance_of_a_cut,
    chance_of_a_cut_with_the_record,
    poisson_law,
)
from affidavit.accountants.fourier.normal_masses import Array, normal_masses
from affidavit.accountants.fourier.privacy_loss import Kind, LossLaw
from affidavit.plan import TruncatedPoissonGaussian

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
