"""From a law to a measure on a grid, cut and summed as a witness says.

The line is cut at places. Between two places each loss lies between theirs, and is moved to them
with its mass under P and under Q kept, which can only raise the curve (docs/theorems/checker.md,
Theorem 2). Random allocation sums likelihood ratios first (Theorem 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from flint import arb

from affidavit.accountants.checker.dominating_pairs import Law, Mixture, Piece
from affidavit.accountants.checker.lattice import (
    Grid,
    Measure,
    bad_witness,
    power_product,
    rounded_up,
)

MOST_PLACES = 50_000
_LARGEST_LOSS = 30
"""Losses of adding a record to bins that are above this (nats) count as infinite."""

Points = list[tuple[arb, arb]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """How one release is cut: every ``spacing``, to ``reach`` beyond the outermost means.

    Both in standard deviations of the noise. ``sums`` is where ratios of bins are added up.
    """

    spacing: float
    reach: float
    sums: Grid | None = None


def measure(law: Law, rule: Rule, grid: Grid) -> Measure:
    """What dominates ``law`` on ``grid``; raises ``Unproved`` for a bad ``rule``."""
    ratios, infinite = ratio_points(law, rule)
    if law.bins:
        points, infinite = _mean_points(law, ratios, infinite, rule.sums)
    else:
        points = [(mass, ratio.log()) for mass, ratio in ratios]
        # Where pieces are a part of the line, the rest of the mass has a loss of zero.
        points.append((1 - infinite - sum((mass for mass, _ in ratios), arb(0)), arb(0)))
    return grid.measure(points, infinite)


def ratio_points(law: Law, rule: Rule) -> tuple[Points, arb]:
    """Masses under P with likelihood ratios, and the mass that is put at infinity."""
    points: Points = []
    infinite = arb(0)
    for piece in law.pieces:
        if all(weight == 0 for weight in (*piece.over.values(), *piece.under.values())):
            continue  # exactly zero: a comparison of balls is false where it is not certain
        own, beyond = _cut(piece, law.mu, rule)
        points, infinite = points + own, infinite + beyond
    return points, infinite


def _cut(piece: Piece, mu: arb, rule: Rule) -> tuple[Points, arb]:
    """Theorem 2 (d) from each place to the next; the outer cells go to the outer places."""
    spacing, reach, means = arb(rule.spacing), arb(rule.reach), {*piece.over, *piece.under}
    first = min(means) * mu - reach if piece.start is None else piece.start * mu
    last = max(means) * mu + reach if piece.stop is None else piece.stop * mu
    count = (last - first) / spacing
    if not (spacing > 0 and 0 < count < MOST_PLACES):
        raise bad_witness("the line is cut in no or too many places")
    between = (first + spacing * k for k in range(1, rounded_up(count)))
    places = [first, *(place for place in between if place < last), last]
    ratios = [_density(piece.over, mu, x) / _density(piece.under, mu, x) for x in places]
    cells = {mean: _cells(mean * mu, places) for mean in means}
    over, under = (_mixed(mixture, cells) for mixture in (piece.over, piece.under))
    masses = [over[0] if piece.start is None else arb(0)]
    for (left, right), p, q in zip(pairwise(ratios), over[1:], under[1:], strict=False):
        share = (p - left * q) / (1 - left / right)
        masses[-1] += p - share
        masses.append(share)
    infinite = arb(0)
    if piece.stop is None:
        # What a last place that keeps its mass under Q cannot hold is infinite.
        infinite = over[-1] - ratios[-1] * under[-1]
        masses[-1] += over[-1] - infinite
    return list(zip(masses, ratios, strict=True)), infinite


def _cells(mean: arb, places: Sequence[arb]) -> list[arb]:
    """The masses of N(``mean``) below the first place, between two, and above the last."""
    root = arb(2).sqrt()
    above = [((place - mean) / root).erfc() / 2 for place in places]
    return [left - right for left, right in pairwise([arb(1), *above, arb(0)])]


def _mixed(mixture: Mixture, cells: dict[int, list[arb]]) -> list[arb]:
    weighed = [[weight * mass for mass in cells[mean]] for mean, weight in mixture.items()]
    return [sum(masses, arb(0)) for masses in zip(*weighed, strict=True)]


def _density(mixture: Mixture, mu: arb, x: arb) -> arb:
    """The density over that of N(0)."""
    terms = (w * (m * mu * x - (m * mu) ** 2 / 2).exp() for m, w in mixture.items())
    return sum(terms, arb(0))


def _mean_points(law: Law, ratios: Points, beyond: arb, grid: Grid | None) -> tuple[Points, arb]:
    """Theorem 4: the mean S of ``bins`` ratios X, summed on ``grid`` as ±(X - 1)."""
    if grid is None or not grid.linear:
        raise bad_witness("an allocation is summed on no grid of ratios")
    sign, chance = (1 if law.removed else -1), arb(law.share.numerator) / law.share.denominator
    under = [(mass / ratio, sign * (ratio - 1)) for mass, ratio in ratios]
    under.append((1 - sum((mass for mass, _ in under), arb(0)), -arb(sign)))
    total = power_product([(grid.measure(under, arb(0)), law.bins)])
    if total.infinite:
        raise bad_witness("a sum is larger than its grid holds")
    points: Points = []
    # X ≤ X' + (X - R)⁺, and the last term adds at most its mean; added records lower X to R.
    infinite = chance * beyond if law.removed else arb(0)
    largest = arb(_LARGEST_LOSS).exp()
    for mass, place in total.points():
        ratio = 1 + chance * sign * place / law.bins
        if ratio > 0 if law.removed else ratio * largest > 1:
            points.append((mass * ratio, ratio.log()) if law.removed else (mass, -ratio.log()))
        elif law.removed:
            infinite += mass * ratio.max(arb(0))
        else:
            # The curve does not increase: beyond ``largest`` it is at most what it is there.
            infinite += mass * (1 + largest * (-ratio).max(arb(0)))
    return points, infinite
