"""That the participations of a record in a run of correlated noise add up to no more, in balls.

Of a record that is drawn in the steps b, at random, the run shows at most s = ‖ |C| b ‖. Of n
participations at uniform places s² is at most n G_max and twice the sum over pairs of G = |C|ᵀ|C|,
whose law is bounded by the moments of matched pairs (docs/theorems/correlated-noise.md, Theorem
14). Any order of a moment is sound. Products are integers, counted by size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

from flint import arb, arb_mat, arb_poly, fmpz, fmpz_poly

from affidavit.accountants.checker.dominating_pairs import at_least
from affidavit.accountants.checker.lattice import no_statement, rounded_up
from affidavit.accountants.checker.sensitivity import (
    MAX_ROWS,
    UNIT,
    first_column,
    joint_precision,
    rational,
    strategy_matrix,
    toeplitz_rows,
)
from affidavit.plan import GaussianMixture

MAX_STEPS, MAX_PARTICIPATIONS, MAX_CUT = 20_000, 400, 100
"""Of Toeplitz C, and of one record in the mean, and of these in cut lots: some seconds."""
_BANDS = 64
"""Of the later of two steps, of Toeplitz C: products are as large as those of the first in it."""
_SIZES = 4096
"""Sizes of products that are told apart; others are rounded up."""
_MIN_ORDER, _MAX_ORDER, _ORDERS = 1e-3, 1e4, 256
"""Of moments, times the largest product."""

Products = Iterable[tuple[int, int, int]]
"""Distances of two steps, with sizes of G, in units of 2^-256, and how many pairs have no more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Draws:
    """How often a record can be drawn, each time independently with ``probability``."""

    most: int
    probability: Fraction


@dataclass(frozen=True, kw_only=True, slots=True)
class CutLots:
    """Poisson samples at ``probability`` that are cut to a ``largest`` lot, one in each step.

    A unit has so many ``records``, beside so many ``others``. Where it is drawn into a lot that may
    be cut, it moves the sum by at most ``moved`` clip norms.
    """

    steps: int
    probability: Fraction
    largest: int
    records: int
    others: int
    moved: int

    def fewest(self, conceded: arb) -> tuple[int, arb]:
        """A number of such lots, and the chance of more, certainly no more than ``conceded``.

        Raises ``Unproved`` where that is too many.
        """
        drawn = 1 - (1 - rational(self.probability)) ** self.records
        room = self.largest - self.records + 1
        chance = drawn * at_least(room, self.others, rational(self.probability))
        for number in range(MAX_CUT + 1):
            more = at_least(number + 1, self.steps, chance)
            if more <= conceded:
                return number, more
        raise no_statement("so many cut lots with one record")


def toeplitz_products(
    coefficients: Sequence[float] | Sequence[arb],
    factors: Sequence[float],
    turn: int,
    *,
    inverse: bool,
) -> Iterator[tuple[int, int, int]]:
    """Those of steps ``turn`` apart, by their distance, in bands of the later of the two.

    C has this first column, or C⁻¹; step t counts ``factors``[t] clip norms. Raises ``Unproved``.
    """
    steps = len(factors)
    if steps > MAX_STEPS:
        raise no_statement(f"participations in {steps} steps")
    column = first_column(coefficients, steps, inverse=inverse)
    if min(factors) < max(factors):
        yield from matrix_products(toeplitz_rows(column), factors, turn, inverse=False)
        return
    sizes = [rounded_up(abs(c) * factors[0] * UNIT) for c in column]
    for first, last in _bands(-(-steps // turn)):
        # ⟨c, S^d c⟩ of columns that the end of the run cuts after ``overlap``.
        overlap = steps - first * turn
        shifted = fmpz_poly(sizes) * fmpz_poly(sizes[:overlap][::-1])
        for distance in range(last + 1):
            pairs = min(last + 1 - first, last + 1 - distance)
            size = int(shifted[overlap - 1 + distance * turn])
            yield distance, size, pairs * (2 if distance else 1)


def _bands(steps: int) -> Iterator[tuple[int, int]]:
    """First and last of the steps of each band, as even as they can be."""
    count = min(steps, _BANDS)
    length, longer = divmod(steps, count)
    ends = list(accumulate([length + 1] * longer + [length] * (count - longer)))
    return ((end - length - (place < longer), end - 1) for place, end in enumerate(ends))


def matrix_products(
    rows: Sequence[Sequence[float]] | Sequence[Sequence[arb]],
    factors: Sequence[float],
    turn: int,
    *,
    inverse: bool,
) -> Iterator[tuple[int, int, int]]:
    """Those of steps ``turn`` apart: at two places of a group, the largest of any group.

    C is ``rows`` or their inverse; step t counts ``factors``[t] clip norms. Raises ``Unproved``.
    """
    steps = len(factors)
    if steps > MAX_ROWS:
        raise no_statement(f"a matrix of {steps} steps")
    entries = strategy_matrix(rows, inverse=inverse).tolist()
    sizes = arb_mat(
        [[abs(x) * own for x, own in zip(row, factors, strict=True)] for row in entries]
    )
    gram = sizes.transpose() * sizes
    for i in range(0, steps, turn):
        for j in range(0, i + 1, turn):
            groups = range(min(turn, steps - i))
            size = max(rounded_up(gram[i + g, j + g] * UNIT**2) for g in groups)
            yield (i - j) // turn, size, 1 if i == j else 2


def moves_no_more(
    leaf: GaussianMixture,
    blocks: Iterable[tuple[int, Fraction]],
    products: Products,
    draws: Draws,
    cut: CutLots | None = None,
) -> bool:
    """Whether a record certainly moves the run by no more than the units of ``leaf`` say.

    ``blocks`` are so many blocks of a lot with a noise multiplier each, in whose joint deviation
    the unit is counted. Lots may be ``cut``. Raises ``Unproved`` where it would take too long.
    """
    missed = 1 - rational(draws.probability)
    mean = -draws.most * missed.log()
    if not mean < MAX_PARTICIPATIONS:
        raise no_statement("so many participations of one record")
    largest, moments = _moments(products)
    conceded, displaced = arb(leaf.conceded), 0
    if cut is not None:
        lots, more = cut.fewest(conceded)
        conceded, displaced = conceded - more, lots * cut.moved
    # The leaf's distances, and what is left of them beside cut lots, over the longest column.
    square = 1 / (
        rational(Fraction(leaf.noise_multiplier) ** 2 * joint_precision(blocks)) * largest
    )
    left = [square.sqrt() * place - displaced for place in range(len(leaf.weights))]
    squares = [distance.max(arb(0)) ** 2 for distance in left]
    above = [conceded]
    for weight in leaf.weights[:0:-1]:
        above.append(above[-1] + weight)
    bounds = above[::-1]
    drawn = 1 - missed**draws.most
    most = int(float(mean) + 20 * float(mean) ** 0.5) + 40
    tails = _tails(squares, mean, most, moments)
    return all(
        (tail.min(drawn) if distance >= 0 else 1) <= bound
        for distance, tail, bound in zip(left, tails, bounds, strict=True)
    )


def _moments(products: Products) -> tuple[arb, list[tuple[float, arb]]]:
    """The largest product, and the logarithms of moments, orders times it, of a uniform pair."""
    counted = list(products)
    largest = max(size for _, size, _ in counted)
    counts = [0] * (_SIZES + 1)
    for _, size, pairs in counted:
        counts[-(-size * _SIZES // largest)] += pairs
    shares, total = arb_poly(counts), sum(counts)
    growth = (_MAX_ORDER / _MIN_ORDER) ** (1 / (_ORDERS - 1))
    orders = [_MIN_ORDER * growth**place for place in range(_ORDERS)]
    moments = [(order, (shares((arb(order) / _SIZES).exp()) / total).log()) for order in orders]
    return arb(fmpz(largest)) / UNIT**2, moments


def _tails(
    squares: Sequence[arb], mean: arb, most: int, moments: Sequence[tuple[float, arb]]
) -> list[arb]:
    """P(s > x) at each x of ``squares``, relative to the largest product, from 0 on.

    Participations are at most a Poisson variable of this ``mean``; more than ``most`` count.
    """
    chances = [(-mean).exp()]
    for count in range(1, most + 1):
        chances.append(chances[-1] * mean / count)
    tails = [1 - sum(chances, arb(0))] * len(squares)
    places = [float(square) for square in squares]
    logs = [float(moment) for _, moment in moments]
    for count in range(1, most + 1):
        matched, best = count // 2, 0
        for place, square in enumerate(squares):
            if square >= count**2:
                break
            bound = arb(1)
            if matched and places[place] > count:
                # The best order rises with x.
                tilt = (places[place] - count) / (count * (count - 1))
                while best + 1 < len(logs) and (
                    logs[best + 1] - moments[best + 1][0] * tilt
                    <= logs[best] - moments[best][0] * tilt
                ):
                    best += 1
                order, moment = moments[best]
                exponent = moment - order * (square - count) / (count * (count - 1))
                bound = (matched * exponent.min(arb(0))).exp()
            tails[place] += chances[count] * bound
    return tails
