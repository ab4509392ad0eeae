"""That the participations of a record that are some steps apart add up to no more, in balls.

Under b-min-sep a record that took part in none of the last b - 1 steps does with at most p. Where
no two columns of C that are b steps apart share a row, a record of K participations moves the run
by at most the root of K times the longest column. Or steps are told: those of k stretches of m at
a phase that is drawn for each block of km, of which the few large ones are counted by a moment
(docs/theorems/correlated-noise.md, Theorem 15). Any order of a moment is sound. Products of
columns are integers in units of 2^-256.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import cache, reduce

from flint import arb, arb_mat

from affidavit.accountants.checker.dominating_pairs import at_least
from affidavit.accountants.checker.participation import Draws, Products
from affidavit.accountants.checker.sensitivity import UNIT, joint_precision, rational
from affidavit.plan import GaussianMixture, Leaf, PoissonSubsampledGaussian

_ORDERS = [0.02 * 200 ** (place / 23) for place in range(24)]
_ROUNDS = 8
"""Blocks after which a moment is known to grow no faster."""
_MAX_PHASES = 64
"""Some seconds for each size that is counted."""

Blocks = Sequence[tuple[int, Fraction]]


def by_distance(products: Products) -> list[int]:
    """The largest of ``products`` at each distance."""
    result: dict[int, int] = {}
    for distance, size, _ in products:
        result[distance] = max(size, result.get(distance, 0))
    return [result[distance] for distance in range(len(result))]


def takes_part_no_more(
    leaf: GaussianMixture, blocks: Blocks, products: Sequence[int], draws: Draws, apart: int
) -> bool:
    """Whether participations ``apart`` add up to no more than the units of ``leaf`` say."""
    if any(products[apart:]):
        return False
    rate, chance = rational(draws.probability), arb(leaf.conceded)
    for place in reversed(range(len(leaf.weights))):
        # A distance beyond which a record is has more participations than that.
        taken = _squared(Fraction(leaf.noise_multiplier), place, blocks) // products[0]
        if not at_least(taken + 1, draws.most - taken * (apart - 1), rate) <= chance:
            return False
        chance += leaf.weights[place]
    return True


def tells_no_less(
    leaves: Sequence[tuple[Leaf, int]],
    blocks: Blocks,
    products: Sequence[int],
    draws: Draws,
    apart: int,
    stretches: int,
) -> bool:
    """Whether ``leaves`` are no less than what is released at the steps that are told.

    A block is so many ``stretches`` long. ``blocks`` are so many blocks of a lot with a noise
    multiplier each.
    """
    bands = max(distance for distance, size in enumerate(products) if size) + 1
    phases = -(-(bands - 1) // stretches)
    if not 1 <= phases <= _MAX_PHASES or stretches * phases > apart:
        return False
    rate, conceded = _rate(rational(draws.probability), stretches, phases), arb(0)
    counts: dict[int, int] = {}
    for leaf, count in leaves:
        match leaf:
            case GaussianMixture(weights=(_, drawn)):
                conceded += count * arb(leaf.conceded)
            case PoissonSubsampledGaussian(sampling_probability=drawn):
                pass
            case _:
                return False
        if not arb(drawn) >= rate:
            return False
        square = _squared(Fraction(leaf.noise_multiplier), 1, blocks)
        counts[square] = counts.get(square, 0) + count
    run = -(-draws.most // (stretches * phases))
    larger, chance = 0, arb(0)
    for square in sorted(counts, reverse=True):
        chance += _chance_of_more(larger, square, products, run, stretches, phases)
        larger += counts[square]
    return larger >= run * stretches and bool(chance <= conceded)


def _squared(multiplier: Fraction, place: int, blocks: Blocks) -> int:
    """The square of ``place`` standard deviations of such noise, rounded down to a product."""
    squared = place**2 * int(UNIT) ** 2 / (multiplier**2 * joint_precision(blocks))
    return math.floor(squared)


def _rate(chance: arb, stretches: int, phases: int) -> arb:
    """The largest chance of a step, given its phase and all before; above one if there is none."""
    ahead, left, largest = phases * chance, arb(1), arb(0)
    for _ in range(stretches):
        if not left > 0:
            return arb(2)
        largest = largest.max(ahead / left)
        left -= ahead
        ahead *= (1 - chance) ** phases
    return largest


def _chance_of_more(
    count: int, square: int, products: Sequence[int], run: int, stretches: int, phases: int
) -> arb:
    """At least the chance that of so many blocks more than ``count`` steps have an s² above it."""
    exceeding = _exceeding(square, products, stretches, phases)
    most = max(number for rows in exceeding for row in rows for number in row)
    if most * run <= count:
        return arb(0)

    @cache
    def bound(place: int) -> arb:
        order = arb(_ORDERS[place])
        factors = [(order * number).exp() / phases for number in range(most + 1)]
        grown = [arb_mat([[factors[f] for f in row] for row in rows]) for rows in exceeding]
        moments, growth, rounds = arb_mat([[1] * phases] * phases), arb(1), min(run, _ROUNDS)
        for _ in range(rounds):
            before, columns = moments, moments.transpose().tolist()
            rows = [(arb_mat([columns[v]]) * grown[v]).entries() for v in range(phases)]
            moments = arb_mat(rows)
            ratios = (
                new / old for new, old in zip(moments.entries(), before.entries(), strict=True)
            )
            growth = reduce(arb.max, ratios)
        mean = sum(moments.entries(), arb(0)) / phases**2
        return mean * growth ** (run - rounds) * (-order * (count + 1)).exp()

    low, high = 0, len(_ORDERS) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if bound(middle) <= bound(middle + 1) else (middle + 1, high)
    return bound(low)


def _exceeding(
    square: int, products: Sequence[int], stretches: int, phases: int
) -> list[list[list[int]]]:
    """How many steps of a block have an s² above that, by the phases of the block, of the one
    before and of the one after, in this order."""
    length, own = stretches * phases, range(stretches)
    reached = [*products, *[0] * (2 * length)]

    def met(step: int, later: int) -> int:
        """Of a step, over the steps of the next block if its phase is so much ``later``."""
        return sum(reached[length + (other - step) * phases + later] for other in own)

    within = [sum(reached[abs(step - other) * phases] for other in own) for step in own]
    ahead = [{d: met(step, d) for d in range(1 - phases, phases)} for step in own]
    behind = [{d: met(stretches - 1 - step, d) for d in ahead[0]} for step in own]
    places = range(phases)
    return [
        [
            [
                sum(within[i] + behind[i][v - u] + ahead[i][w - v] > square for i in own)
                for w in places
            ]
            for u in places
        ]
        for v in places
    ]
