"""δ(ε) ≤ x, proved from a witness in ball arithmetic.

The witness says where to cut the losses of each release and on which lattices to add them. The
checker composes measures that dominate the releases and reads δ from them. Bad places and lattices
make the bound larger, never wrong. docs/theorems/checker.md has the proof. Nothing here comes from
the engines except events.

>>> from affidavit.plan import events
>>> release = events.Gaussian(noise_multiplier=1.0)
>>> prove(Witness(epsilon="4.4", delta="1e-5", runs=()), release).theorems
('gaussian',)

To turn a law into a measure on a grid, the line is cut at places. Each loss between two places lies
between theirs, and is moved to them with its mass under P and under Q kept, which can only raise
the curve (docs/theorems/checker.md, Theorem 2). Random allocation sums likelihood ratios first
(Theorem 4).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest

from flint import arb

from affidavit.checker import dominating_pairs
from affidavit.checker.lattice import (
    Grid,
    Measure,
    Unproved,
    bad_witness,
    power_product,
    rounded_up,
)
from affidavit.plan import events

MAX_PLACES, MAX_CELLS = 50_000, 4_000_000
"""Places of one piece, and places times normals: two minutes at most."""
MAX_RATIOS = 400
"""Ratios e^ε at which differences are summed, each for itself."""
CHAIN = "chain_of_neighbours"
"""The statement of the first theorem of docs/theorems/group-privacy.md."""
_MAX_ADDED_LOSS = 30
"""Loss (nats) of adding a record to bins above which it counts as infinite."""

Points = list[tuple[arb, arb]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """The cuts of one release: every ``spacing``, to ``reach`` beyond the outermost means.

    Both are in standard deviations of the noise. ``sums`` is the grid of sums of bins' ratios, or
    of their differences, which are summed for each of ``ratios``, values of e^ε above one.
    """

    spacing: float
    reach: float
    sums: Grid | None = None
    ratios: tuple[float, ...] = ()


def measure(law: dominating_pairs.Law, rule: Rule, grid: Grid) -> Measure:
    """Return a measure that dominates ``law``; raises ``Unproved`` for a bad ``rule``."""
    if law.reverse:
        return grid.measure(*_difference_points(law, rule))
    ratios, infinite = ratio_points(law, rule)
    if law.bins:
        points, infinite = _mean_points(law, ratios, infinite, rule.sums)
    else:
        points = [(mass, ratio.log()) for mass, ratio in ratios]
        # If the pieces are only a part of the line, the rest of the mass has a loss of zero.
        points.append((1 - infinite - sum((mass for mass, _ in ratios), arb(0)), arb(0)))
    return grid.measure(points, infinite)


def ratio_points(law: dominating_pairs.Law, rule: Rule) -> tuple[Points, arb]:
    """Return masses under P with their likelihood ratios, and the infinite mass."""
    points: Points = []
    infinite = arb(0)
    for piece in law.pieces:
        if all(weight == 0 for weight in (*piece.over.values(), *piece.under.values())):
            continue  # exactly zero: an uncertain comparison of balls is false
        own, beyond = _cut(piece, law.mu, rule)
        points, infinite = points + own, infinite + beyond
    return points, infinite


def _cut(piece: dominating_pairs.Piece, mu: arb, rule: Rule) -> tuple[Points, arb]:
    """Apply Theorem 2 (d) between places; the outer cells move to the outer places."""
    spacing, reach, means = arb(rule.spacing), arb(rule.reach), {*piece.over, *piece.under}
    if len(means) == 1 and piece.start is piece.stop is None:
        (mass,), (under_mass,) = piece.over.values(), piece.under.values()
        return [(mass, mass / under_mass)], arb(0)  # of one normal: all losses are equal
    first = min(means) * mu - reach if piece.start is None else piece.start * mu
    last = max(means) * mu + reach if piece.stop is None else piece.stop * mu
    count = (last - first) / spacing
    if not (spacing > 0 and 0 < count < MAX_PLACES and count * len(means) < MAX_CELLS):
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
        # The last place keeps its mass under Q; the excess under P is infinite.
        infinite = over[-1] - ratios[-1] * under[-1]
        masses[-1] += over[-1] - infinite
    return list(zip(masses, ratios, strict=True)), infinite


def _cells(mean: arb, places: Sequence[arb]) -> list[arb]:
    """Return the masses of N(``mean``) below the first place, between two, and above the last."""
    root = arb(2).sqrt()
    above = [((place - mean) / root).erfc() / 2 for place in places]
    return [left - right for left, right in pairwise([arb(1), *above, arb(0)])]


def _mixed(mixture: dominating_pairs.Mixture, cells: dict[int, list[arb]]) -> list[arb]:
    weighed = [[weight * mass for mass in cells[mean]] for mean, weight in mixture.items()]
    return [sum(masses, arb(0)) for masses in zip(*weighed, strict=True)]


def _density(mixture: dominating_pairs.Mixture, mu: arb, x: arb) -> arb:
    """Return the density over that of N(0)."""
    terms = (w * (m * mu * x - (m * mu) ** 2 / 2).exp() for m, w in mixture.items())
    return sum(terms, arb(0))


def _mean_points(
    law: dominating_pairs.Law, ratios: Points, beyond: arb, grid: Grid | None
) -> tuple[Points, arb]:
    """Apply Theorem 4: the mean S of ``bins`` ratios X, summed on ``grid`` as ±(X - 1)."""
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
    largest = arb(_MAX_ADDED_LOSS).exp()
    for mass, place in total.points():
        ratio = 1 + chance * sign * place / law.bins
        if ratio > 0 if law.removed else ratio * largest > 1:
            points.append((mass * ratio, ratio.log()) if law.removed else (mass, -ratio.log()))
        elif law.removed:
            infinite += mass * ratio.max(arb(0))
        else:
            # The curve does not increase: beyond ``largest`` it is at most its value there.
            infinite += mass * (1 + largest * (-ratio).max(arb(0)))
    return points, infinite


def _difference_points(law: dominating_pairs.Law, rule: Rule) -> tuple[Points, arb]:
    """Apply Theorem 5: chords between bounds of the curve at the ``ratios`` of ``rule``."""
    if rule.sums is None or not rule.sums.linear:
        raise bad_witness("an allocation is summed on no grid of differences")
    ratios = [arb(ratio) for ratio in rule.ratios]
    above_one = 0 < len(ratios) <= MAX_RATIOS and ratios[0] > 1
    if not (above_one and all(left < right for left, right in pairwise(ratios))):
        raise bad_witness("its ratios do not rise from one")
    # The curve at 1/α is 1 - 1/α + h(α)/α, h that of the other order.
    below = [
        (1 / ratio, 1 - 1 / ratio + _excess(law, law.reverse, ratio, rule) / ratio)
        for ratio in reversed(ratios)
    ]
    at = [arb(1), *ratios]
    above = [(ratio, _excess(law, law.pieces, ratio, rule)) for ratio in at]
    curve = _lower_hull([(arb(0), arb(1)), *below, *above])
    slopes = [(v - u) / (b - a) for (a, u), (b, v) in pairwise(curve)]
    points = [
        (ratio * (after - before), ratio.log())
        for (ratio, _), (before, after) in zip(curve[1:], pairwise([*slopes, arb(0)]), strict=True)
    ]
    return points, curve[-1][1]


def _lower_hull(points: Points) -> Points:
    """Return about the corners of the lower hull; chords of any of ``points`` are bounds."""
    hull: Points = []
    for x, y in points:
        while len(hull) > 1:
            (a, u), (b, v) = hull[-2:]
            if (v - u) * (x - a) < (y - u) * (b - a):
                break
            hull.pop()
        hull.append((x, y))
    return hull


def _excess(
    law: dominating_pairs.Law, pieces: Sequence[dominating_pairs.Piece], ratio: arb, rule: Rule
) -> arb:
    """Return a bound of the curve at e^ε = ``ratio`` by sums of ``bins`` differences."""
    assert rule.sums is not None
    points: Points = []
    beyond = arb(0)
    for piece in pieces:
        own, tail = _difference_cells(piece, law.mu, ratio, rule)
        points, beyond = points + own, beyond + tail
    points.append((1 - sum((mass for mass, _ in points), arb(0)), arb(0)))
    total = power_product([(rule.sums.measure(points, arb(0)), law.bins)])
    if total.infinite:
        raise bad_witness("a sum is larger than its grid holds")
    drawn = arb(law.share.numerator) / law.share.denominator
    threshold = law.bins * (1 / drawn - 1) * (ratio - 1)
    gains = (mass * (place - threshold).max(arb(0)) for mass, place in total.points())
    return drawn * (sum(gains, arb(0)) / law.bins + beyond)


def _difference_cells(
    piece: dominating_pairs.Piece, mu: arb, ratio: arb, rule: Rule
) -> tuple[Points, arb]:
    """Return points that dominate P - ``ratio`` Q of ``piece`` over N(0), and the mean beyond.

    The difference is monotone, and so are its values of one sign if the piece is of these.
    """
    ((a, _),), ((b, _),) = piece.over.items(), piece.under.items()
    if (a > b) == (piece.sign < 0):
        a, b = -a, -b  # mirrored, so that sizes grow to the right
    over_mean, under_mean, reach = a * mu, b * mu, arb(rule.reach)
    first = arb(0).min(over_mean).min(under_mean) - reach
    if piece.sign:
        # A little before the place where P = ratio Q.
        zero = (ratio.log() / mu + (a * a - b * b) * mu / 2) / (a - b)
        first = zero.lower()
    last = arb(0).max(over_mean).max(under_mean) + reach
    count = (last - first) / arb(rule.spacing)
    if not 0 < count < MAX_PLACES:
        raise bad_witness("the line has no cuts or too many")
    cuts = rounded_up(count)
    places = [first + (last - first) * k / cuts for k in range(cuts + 1)]
    values = [_density({a: arb(1)}, mu, x) - ratio * _density({b: arb(1)}, mu, x) for x in places]
    masses = _cells(arb(0), places)
    over, under = _cells(over_mean, places), _cells(under_mean, places)
    means = [p - ratio * q for p, q in zip(over, under, strict=True)]
    if piece.sign > 0:
        means[1] += (-values[0]).max(arb(0)) * masses[1]
    elif piece.sign < 0:
        means[1] = means[1].min(arb(0))
    if piece.sign:
        values[0], masses[0] = arb(0), arb(0)
    points = [(masses[0], values[0])]
    for (left, right), mass, mean in zip(pairwise(values), masses[1:], means[1:], strict=False):
        share = (mean - left * mass) / (right - left)
        points += [(mass - share, left), (share, right)]
    points.append((masses[-1], values[-1]))
    # What is negative is raised to the last value, and what is positive lowered to it.
    beyond = arb(0) if piece.sign < 0 else means[-1] - values[-1] * masses[-1]
    return points, beyond


_DECIMAL = re.compile(r"\d{1,40}(\.\d{1,40})?([eE][+-]?\d{1,3})?", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunWitness:
    """The witness of one direction of the adjacency; none of it needs to be right.

    Losses are composed on ``grid``; ``rules`` are one for each law of the direction, in order.
    """

    grid: Grid
    rules: tuple[Rule, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Witness:
    """The bound claimed, as decimals, and a ``RunWitness`` for each direction.

    One release whose losses rise everywhere needs none. ``covers`` are for the releases in which
    cut lots are hidden. If several events bound a run, ``alternative`` is the place of the proved
    one. A chain of neighbours has a witness for each of its ``links`` instead of runs.
    """

    epsilon: str
    delta: str
    runs: tuple[RunWitness, ...]
    covers: tuple[dominating_pairs.Cover | None, ...] = ()
    alternative: int = 0
    links: tuple[Witness, ...] = ()

    def event(self, run: events.Event) -> events.Event:
        """Return the bound of ``run`` that the witness is for; raises ``Unproved``."""
        bounds = events.alternatives(run)
        if self.alternative not in range(len(bounds)):
            raise bad_witness("it is for another bound of the run")
        return bounds[self.alternative]


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """A run is (``epsilon``, ``delta``)-DP by the rows of the table named by ``theorems``."""

    epsilon: str
    delta: str
    theorems: tuple[str, ...]


def prove(witness: Witness, event: events.Event) -> Proof:
    """Prove the bound that ``witness`` claims of ``event``.

    Raises ``Unproved`` if the witness does not prove it, or no theorem here covers the event.
    """
    bound = witness.event(event)
    if isinstance(bound, events.ChainOfNeighbours):
        if len(witness.links) != bound.links:
            raise bad_witness(f"it has {len(witness.links)} links of {bound.links}")
        return conclude_chain(witness, [prove(link, bound.event) for link in witness.links])
    directions = dominating_pairs.laws(bound, witness.covers)
    curves = [compose(*pair) for pair in zip_longest(directions, witness.runs)]
    return conclude(witness, directions, curves)


def conclude(
    witness: Witness,
    directions: tuple[dominating_pairs.Direction, ...],
    curves: Sequence[Measure | SingleRelease],
) -> Proof:
    """Return the proof by ``curves``, those that ``compose`` returned for each direction.

    Raises ``Unproved`` if they do not prove the witness's claim.
    """
    epsilon, delta = _decimal(witness.epsilon), _decimal(witness.delta)
    if not delta > 0:
        raise bad_witness("δ is not positive")
    for direction, curve in zip(directions, curves, strict=True):
        bound = curve.delta(epsilon) + conceded_probability(direction)
        if not bound <= delta:
            raise Unproved(
                "not_proved",
                f"The witness proves δ ≤ {bound.upper().str(6, radius=False)} at "
                f"ε = {witness.epsilon}, which is above {witness.delta}.",
                "Search for another witness, or state a larger ε.",
            )
    names = {law.statement for direction in directions for law, _ in direction}
    return Proof(epsilon=witness.epsilon, delta=witness.delta, theorems=tuple(sorted(names)))


def conclude_chain(witness: Witness, proofs: Sequence[Proof]) -> Proof:
    """Return the proof for the ends of a chain by the ``proofs`` of its links.

    Raises ``Unproved`` if they do not prove the witness's claim (group-privacy.md, the chain).
    """
    epsilon, delta = arb(0), arb(0)
    for proof in proofs:
        delta += _decimal(proof.delta) * epsilon.exp()
        epsilon += _decimal(proof.epsilon)
    if not (epsilon <= _decimal(witness.epsilon) and delta <= _decimal(witness.delta)):
        raise Unproved(
            "not_proved",
            f"The links prove ε ≤ {epsilon.upper().str(6, radius=False)} at "
            f"δ = {delta.upper().str(6, radius=False)}, not what the witness claims.",
            "Search for another witness, or state a larger ε.",
        )
    names = {name for proof in proofs for name in proof.theorems}
    return Proof(
        epsilon=witness.epsilon, delta=witness.delta, theorems=(*sorted(names - {CHAIN}), CHAIN)
    )


def conceded_probability(direction: dominating_pairs.Direction) -> arb:
    """Return the probability that the laws of ``direction`` concede, of all releases together."""
    return sum((times * law.conceded for law, times in direction), arb(0))


def compose(
    direction: dominating_pairs.Direction | None, witness: RunWitness | None
) -> Measure | SingleRelease:
    """Return a curve that dominates the run in one direction; a single release needs no witness.

    Raises ``Unproved`` if the witness is for other releases, or is malformed.
    """
    single = None if direction is None else single_release(direction)
    if single is not None:
        return single
    if direction is None or witness is None or len(witness.rules) != len(direction):
        raise bad_witness("it is for other releases")
    if witness.grid.linear:
        raise bad_witness("losses are composed on a grid of ratios")
    parts = zip(direction, witness.rules, strict=True)
    return power_product([(measure(law, rule, witness.grid), n) for (law, n), rule in parts])


def single_release(direction: dominating_pairs.Direction) -> SingleRelease | None:
    """Return the curve of ``direction`` if it is one release whose losses rise everywhere."""
    match direction:
        case ():
            return SingleRelease(piece=_EMPTY_PIECE, mu=arb(0))
        case (
            (
                dominating_pairs.Law(
                    pieces=(dominating_pairs.Piece(start=None, stop=None) as piece,), bins=0, mu=mu
                ),
                1,
            ),
        ):
            return SingleRelease(piece=piece, mu=mu)
    return None


_EMPTY_PIECE = dominating_pairs.Piece(over={0: arb(1)}, under={0: arb(1)})


@dataclass(frozen=True, kw_only=True, slots=True)
class SingleRelease:
    """One release with the rising losses of ``piece``: the worst outputs lie above a place.

    Places are in standard deviations, of which ``mu`` make a clip norm; 0 is the empty run.
    """

    piece: dominating_pairs.Piece
    mu: arb

    def delta(self, epsilon: arb) -> arb:
        """Return a bound of P(x > t) - e^ε Q(x > t), t the place whose loss is ε (nats), a ball."""
        if self.mu == 0:
            return arb(0)
        low, high = self._around(epsilon)
        if not self._loss(low) <= epsilon:
            return sum(self.piece.over.values(), arb(0))
        bound = self._above(self.piece.over, low)
        if self._loss(high) >= epsilon:
            bound -= epsilon.exp() * self._above(self.piece.under, high)
        return bound

    def _loss(self, place: arb) -> arb:
        over, under = (
            _density(side, self.mu, place) for side in (self.piece.over, self.piece.under)
        )
        return (over / under).log()

    def _above(self, mixture: dominating_pairs.Mixture, place: arb) -> arb:
        root = arb(2).sqrt()
        terms = (w * ((place - m * self.mu) / root).erfc() / 2 for m, w in mixture.items())
        return sum(terms, arb(0))

    def _around(self, epsilon: arb) -> tuple[arb, arb]:
        """Return places that enclose t closely, if it lies in reach; no bound rests on it."""
        mu, target = float(self.mu), float(epsilon)
        sides = [
            [(m * mu, float(w.log())) for m, w in side.items() if w > 0]
            for side in (self.piece.over, self.piece.under)
        ]

        def loss(place: float) -> float:
            over, under = (_log_density(side, place) for side in sides)
            return over - under

        low, high = (
            pick(mean for side in sides for mean, _ in side) + sign * _PLACE_REACH
            for pick, sign in ((min, -1), (max, 1))
        )
        while low < (middle := (low + high) / 2) < high:
            low, high = (middle, high) if loss(middle) < target else (low, middle)
        place = arb(low)
        width = 1e-4 * (1 + abs(low))
        slope = (loss(low + width) - loss(low - width)) / (2 * width)
        for _ in range(_REFINEMENTS if slope > 0 else 0):
            place = arb((place - (self._loss(place) - epsilon) / slope).mid())
        margin = _PLACE_MARGIN * (1 + abs(low))
        return place - margin, place + margin


_PLACE_REACH, _REFINEMENTS, _PLACE_MARGIN = 60.0, 4, 2.0**-100
"""Search range beyond the outermost means, in standard deviations; Newton steps towards t, and the
relative margin around their result."""


def _log_density(terms: Sequence[tuple[float, float]], place: float) -> float:
    """Return log Σ w N(place - m) / N(place), from means and log w."""
    logs = [weight + mean * (place - mean / 2) for mean, weight in terms]
    largest = max(logs)
    return largest + math.log(math.fsum(math.exp(term - largest) for term in logs))


def _decimal(text: str) -> arb:
    if not (isinstance(text, str) and _DECIMAL.fullmatch(text)):
        raise bad_witness("ε or δ is not a decimal number")
    return arb(text)
