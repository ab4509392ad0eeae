"""From a pair of mixtures of normals to points: masses under P, and losses.

The line is cut at the places of a witness. Between two places each loss lies between theirs, and
is moved to them with its mass under P and under Q kept, which can only raise the curve
(docs/theorems/checker.md, Theorem 2). Random allocation sums likelihood ratios first (Theorem 4).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from flint import arb

from affidavit.accountants.checker.lattice import Grid, bad_witness, power_product

MOST_PLACES = 50_000
_LARGEST_LOSS = 30
"""Losses of adding a record to bins that are above this (nats) count as infinite."""

Mixture = Mapping[int, arb]
"""Weights of normals of variance one by their means, in clip norms."""
Points = list[tuple[arb, arb]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cuts:
    """Where a witness cuts the line: every ``spacing``, to ``reach`` beyond the outermost means.

    Both in standard deviations of the noise.
    """

    spacing: float
    reach: float

    def places(self, first: arb, last: arb) -> list[arb]:
        """The places from ``first`` to at least ``last``; raises ``Unproved`` for too many."""
        count = (last - first) / arb(self.spacing)
        if not (self.spacing > 0 and 0 < count < MOST_PLACES):
            raise bad_witness("the line is cut in no or too many places")
        return [first + arb(self.spacing) * k for k in range(int(float(count)) + 2)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """The losses log P/Q on a part of the line, monotone there.

    ``start`` and ``stop`` are in clip norms; without one the part has no end on that side.
    """

    over: Mixture
    under: Mixture
    start: arb | None = None
    stop: arb | None = None
    falling: bool = False

    @property
    def reversed(self) -> Piece:
        """The losses of Q against P."""
        return Piece(
            over=self.under,
            under=self.over,
            start=self.start,
            stop=self.stop,
            falling=not self.falling,
        )

    def points(self, mu: arb, cuts: Cuts) -> tuple[Points, arb]:
        """Points that dominate the piece, and the mass that is put at infinity.

        ``mu`` is a clip norm in standard deviations of the noise.
        """
        means = (*self.over, *self.under)
        first = min(means) * mu - arb(cuts.reach) if self.start is None else self.start * mu
        last = max(means) * mu + arb(cuts.reach) if self.stop is None else self.stop * mu
        places = cuts.places(first, last)
        if self.stop is not None:
            places = [place for place in places if place < last] + [last]
        ratios = [_density(self.over, mu, x) / _density(self.under, mu, x) for x in places]
        cells = {mean: _cells(mean * mu, places) for mean in {*means}}
        over, under = (_mixed(mixture, cells) for mixture in (self.over, self.under))
        below, above = self.start is None, self.stop is None
        if self.falling:
            ratios, over, under = ratios[::-1], over[::-1], under[::-1]
            below, above = above, below
        masses = [arb(0)] * len(places)
        for k, (left, right) in enumerate(pairwise(ratios)):
            share = (over[k + 1] - left * under[k + 1]) / (1 - left / right)
            masses[k + 1] += share
            masses[k] += over[k + 1] - share
        infinite = arb(0)
        if below:
            masses[0] += over[0]
        if above:
            # What a last place that keeps its mass under Q cannot hold is infinite.
            infinite = over[-1] - ratios[-1] * under[-1]
            masses[-1] += over[-1] - infinite
        return [(mass, ratio.log()) for mass, ratio in zip(masses, ratios, strict=True)], infinite


def pair_points(pieces: tuple[Piece, ...], mu: arb, cuts: Cuts) -> tuple[Points, arb]:
    """The points of ``pieces``, whose total mass is one with what is at a loss of zero."""
    points: Points = []
    infinite, rest = arb(0), arb(1)
    for piece in pieces:
        if all(weight == 0 for weight in (*piece.over.values(), *piece.under.values())):
            continue
        own, beyond = piece.points(mu, cuts)
        points += own
        infinite += beyond
        rest -= sum((mass for mass, _ in own), beyond)
    return [*points, (rest, arb(0))], infinite


def allocation_points(
    bins: int, chance: arb, mu: arb, cuts: Cuts, grid: Grid, *, removed: bool
) -> tuple[Points, arb]:
    """Points for 1 + c (S - 1) against one, or the reverse; c is ``chance``.

    S = (1/b) Σ X_i with X_i = e^{μz - μ²/2}.

    Laws of ±(X - 1) that are larger in increasing convex order are summed on ``grid``. Raises
    ``Unproved`` where that is too small.
    """
    sign = 1 if removed else -1
    places = cuts.places(-arb(cuts.reach), mu + arb(cuts.reach))
    ratios = [(mu * x - mu * mu / 2).exp() for x in places]
    under, means = _cells(arb(0), places), _cells(mu, places)
    nodes = [arb(0), *ratios]
    masses = [arb(0)] * len(nodes)
    for k, (left, right) in enumerate(pairwise(nodes)):
        share = (means[k] - left * under[k]) / (right - left)
        masses[k + 1] += share
        masses[k] += under[k] - share
    beyond = arb(0)
    if removed:
        # X ≤ X 1[X ≤ R] + X 1[X > R], and the last term adds at most its mean.
        masses[0] += under[-1]
        beyond = chance * means[-1]
    else:
        masses[-1] += under[-1]
    law = grid.measure([(m, sign * (x - 1)) for m, x in zip(masses, nodes, strict=True)], arb(0))
    total = power_product([(law, bins)])
    if not grid.linear or total.infinite:
        raise bad_witness("a sum is larger than its grid holds")
    points: Points = []
    largest = arb(_LARGEST_LOSS).exp()
    for mass, place in total.points():
        ratio = 1 + chance * sign * place / bins
        if removed and ratio > 0:
            points.append((mass * ratio, ratio.log()))
        elif not removed and ratio * largest > 1:
            points.append((mass, -ratio.log()))
        elif not removed:
            # The curve does not increase: beyond ``largest`` it is at most what it is there.
            beyond += mass * (1 + largest * (-ratio).max(arb(0)))
    return points, beyond


def _cells(mean: arb, places: list[arb]) -> list[arb]:
    """The masses of N(``mean``) below the first place, between two, and above the last."""
    root = arb(2).sqrt()
    above = [((place - mean) / root).erfc() / 2 for place in places]
    return [left - right for left, right in pairwise([arb(1), *above, arb(0)])]


def _mixed(mixture: Mixture, cells: Mapping[int, list[arb]]) -> list[arb]:
    weighed = [[weight * mass for mass in cells[mean]] for mean, weight in mixture.items()]
    return [sum(masses, arb(0)) for masses in zip(*weighed, strict=True)]


def _density(mixture: Mixture, mu: arb, x: arb) -> arb:
    """The density over that of N(0)."""
    terms = (
        weight * (mean * mu * x - (mean * mu) ** 2 / 2).exp() for mean, weight in mixture.items()
    )
    return sum(terms, arb(0))
