"""δ(ε) ≤ x, proved from a witness in ball arithmetic.

The witness says where to cut the losses of each release and on which lattices to add them up;
the checker then composes measures that dominate the releases and reads off δ. Bad places and
lattices make the bound larger, never wrong. docs/theorems/checker.md has the proof. Nothing here
comes from the engines: only events do.

>>> from affidavit.plan import Gaussian
>>> prove(Witness(epsilon="4.4", delta="1e-5", runs=()), Gaussian(noise_multiplier=1.0)).theorems
('gaussian',)

From a law to a measure on a grid: the line is cut at places. Between two places each loss lies
between theirs, and is moved to them with its mass under P and under Q kept, which can only raise
the curve (docs/theorems/checker.md, Theorem 2). Random allocation sums likelihood ratios first
(Theorem 4)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest

from flint import arb

from affidavit.accountants.checker.dominating_pairs import (
    Cover,
    Direction,
    Law,
    Mixture,
    Piece,
    laws,
)
from affidavit.accountants.checker.lattice import (
    Grid,
    Measure,
    Unproved,
    bad_witness,
    power_product,
    rounded_up,
)
from affidavit.plan import Event

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
        raise bad_witness("the line has no cuts or too many")
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


_DECIMAL = re.compile(r"\d{1,40}(\.\d{1,40})?([eE][+-]?\d{1,3})?", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunWitness:
    """What a search found for one direction of the adjacency; none of it needs to be right.

    Losses are composed on ``grid``; ``rules`` are one for each law of the direction, in order.
    """

    grid: Grid
    rules: tuple[Rule, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Witness:
    """The bound claimed, as decimals, and a ``RunWitness`` for each direction.

    One Gaussian mechanism needs none. ``covers`` are for the releases in which cut lots are hidden.
    """

    epsilon: str
    delta: str
    runs: tuple[RunWitness, ...]
    covers: tuple[Cover | None, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """A run is (``epsilon``, ``delta``)-DP by the rows of the table named by ``theorems``."""

    epsilon: str
    delta: str
    theorems: tuple[str, ...]


def prove(witness: Witness, event: Event) -> Proof:
    """The bound that ``witness`` claims, where it proves it of ``event``.

    Raises ``Unproved`` where it does not, or where no theorem here covers the event.
    """
    directions = laws(event, witness.covers)
    curves = [composed(*pair) for pair in zip_longest(directions, witness.runs)]
    return concluded(witness, directions, curves)


def concluded(
    witness: Witness, directions: tuple[Direction, ...], curves: Sequence[Measure | GaussianCurve]
) -> Proof:
    """What follows from ``curves``, those that ``composed`` returned, one for each direction.

    Raises ``Unproved`` where that is not what the witness claims.
    """
    epsilon, delta = _decimal(witness.epsilon), _decimal(witness.delta)
    if not delta > 0:
        raise bad_witness("δ is not positive")
    for direction, curve in zip(directions, curves, strict=True):
        bound = curve.delta(epsilon) + conceded(direction)
        if not bound <= delta:
            raise Unproved(
                "not_proved",
                f"The witness proves δ ≤ {bound.upper().str(6, radius=False)} at "
                f"ε = {witness.epsilon}, which is above {witness.delta}.",
                "Search for another witness, or state a larger ε.",
            )
    names = {law.statement for direction in directions for law, _ in direction}
    return Proof(epsilon=witness.epsilon, delta=witness.delta, theorems=tuple(sorted(names)))


def conceded(direction: Direction) -> arb:
    """The probability that the laws of ``direction`` concede, of all releases together."""
    return sum((times * law.conceded for law, times in direction), arb(0))


def composed(direction: Direction | None, witness: RunWitness | None) -> Measure | GaussianCurve:
    """What dominates the run in one direction; a lone Gaussian mechanism needs no witness.

    Raises ``Unproved`` where the witness is for other releases, or is no good.
    """
    if direction is not None and all(law.statement == "gaussian" for law, _ in direction):
        return GaussianCurve(mu=sum((law.mu for law, _ in direction), arb(0)))
    if direction is None or witness is None or len(witness.rules) != len(direction):
        raise bad_witness("it is for other releases")
    if witness.grid.linear:
        raise bad_witness("losses are composed on a grid of ratios")
    parts = zip(direction, witness.rules, strict=True)
    return power_product([(measure(law, rule, witness.grid), n) for (law, n), rule in parts])


@dataclass(frozen=True, kw_only=True, slots=True)
class GaussianCurve:
    """N(μ, 1) against N(0, 1); μ = 0 is the empty run."""

    mu: arb

    def delta(self, epsilon: arb) -> arb:
        """Φ(μ/2 - ε/μ) - e^ε Φ(-μ/2 - ε/μ), a ball."""
        if self.mu == 0:
            return arb(0)
        mu, root = self.mu, arb(2).sqrt()
        high, low = (epsilon / mu - mu / 2) / root, (epsilon / mu + mu / 2) / root
        return (high.erfc() - epsilon.exp() * low.erfc()) / 2


def _decimal(text: str) -> arb:
    if not (isinstance(text, str) and _DECIMAL.fullmatch(text)):
        raise bad_witness("ε or δ is not a decimal number")
    return arb(text)
