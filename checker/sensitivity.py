"""The noise of a plan as μ: σ_joint of a step's blocks, and sens of correlated noise, in balls.

A record that participates in the steps of a pattern π moves the run by at most sens, where
sens² = max over π of Σ_{i,j∈π} |X_ij|, X = CᵀC (docs/theorems/correlated-noise.md). Sizes are
integers in units of 2^-128, rounded up, so that their maxima and sums are exact.

A pattern of one step in each epoch is bounded as a chain: exactly between neighbouring epochs, and
by the largest entry of a row between others. A user of more records than a lot holds moves step t
by n_t ≤ 1 lots, Σ n_t an epoch at most ``lots_filled``; a row is then bounded by its largest
entries (Theorem 19 there).

For trees of partial sums sens² is an integer (Theorem 6 there): node i of level l holds the steps
i·2^l to (i+1)·2^l - 1 of its tree, if all of them are run. sens² is the largest Σ over nodes of
(participations inside)²."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, reduce
from itertools import accumulate

from flint import arb, arb_mat, arb_poly, fmpq, fmpz, fmpz_poly

from affidavit.checker.lattice import no_statement, rounded_up

MAX_PRODUCTS = 20_000_000
"""Products of one sensitivity: a few seconds."""
MAX_ROWS = 2048
"""Steps of a matrix that is multiplied, in half a minute, or inverted, in twice as long."""
MAX_ITERATED, _ITERATIONS = 20_000, 12
"""Steps up to which the power method bounds ‖C‖, and its iterations."""
MAX_CHAIN_WORK = 5_000_000
"""Pairs of steps of neighbouring epochs that are compared one by one."""
UNIT = fmpz(2) ** 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Patterns:
    """At most ``max_participations`` steps, ``separation`` apart, or more if not fixed.

    If ``epoch`` is given, they are also one of its first ``epoch`` steps, one of the next, and so
    on. If ``white_noise``, not sens but ‖C_S‖ of the steps S at multiples of ``separation``. A unit
    fills ``lots_filled`` lots of an epoch.
    """

    max_participations: int
    separation: int
    fixed_separation: bool = True
    white_noise: bool = False
    epoch: int | None = None
    lots_filled: Fraction = Fraction(1)

    def count(self, steps: int) -> int:
        """Return the largest number of participations in ``steps`` steps."""
        return min(self.max_participations, -(-steps // self.separation))

    @property
    def turn(self) -> int:
        """The steps of an epoch."""
        return self.separation if self.epoch is None else self.epoch

    @property
    def in_one_lot(self) -> Patterns:
        """These patterns for a unit that fills one lot of an epoch."""
        return replace(self, lots_filled=Fraction(1))


def squared_lots(filled: Fraction, lots: int, steps: int) -> Fraction:
    """Return the largest Σ n_t² over ``steps`` steps, ``lots`` of them an epoch.

    n_t ≤ 1, and they add up to ``filled`` in an epoch at most.
    """
    result = Fraction(0)
    for released, times in ((lots, steps // lots), (steps % lots, 1)):
        whole = min(filled.numerator // filled.denominator, released)
        part = filled - whole if whole < released else Fraction(0)
        result += times * (whole + part**2)
    return result


def has_noise(multiplier: float, blocks: Iterable[tuple[int, Fraction]], squared: arb) -> bool:
    """Return whether ``multiplier`` ² · ``squared`` ≤ σ_joint² is certain.

    σ_joint is (Σ count/σ²)^(-1/2) over the counts and noise multipliers of a lot's ``blocks``.
    """
    return bool(rational(Fraction(multiplier) ** 2 * joint_precision(blocks)) * squared <= 1)


def joint_precision(blocks: Iterable[tuple[int, Fraction]]) -> Fraction:
    """Return 1/σ_joint² of a lot's blocks."""
    return sum((count / sigma**2 for count, sigma in blocks), Fraction(0))


def rational(number: Fraction) -> arb:
    """Return ``number`` as a ball, exact if it is dyadic."""
    return arb(fmpq(number.numerator, number.denominator))


def blt_column(decays: Sequence[float], scales: Sequence[float], steps: int) -> list[arb]:
    """Return the first column of a BLT: 1, then Σ ω_i θ_i^(t-1). Raises ``Unproved``."""
    require_affordable(steps * len(decays))
    powers, column = [arb(scale) for scale in scales], [arb(1)]
    while len(column) < steps:
        column.append(sum(powers, arb(0)))
        powers = [power * decay for power, decay in zip(powers, decays, strict=True)]
    return column


def toeplitz_sensitivity(
    coefficients: Sequence[float] | Sequence[arb],
    factors: Sequence[float],
    patterns: Patterns,
    *,
    inverse: bool,
) -> arb:
    """Return sens of C with this first column, zero afterwards; of C⁻¹ if ``inverse``.

    Column t is clipped to ``factors``[t] clip norms. With c ≥ 0 the worst pattern of a fixed
    distance begins at step 0, as does that of a minimum distance if c does not increase or columns
    do not overlap; a larger c bounds any other. Raises ``Unproved``.
    """
    steps, separation = len(factors), patterns.separation
    require_affordable(steps)
    column = first_column(coefficients, steps, inverse=inverse)
    sizes = [_units(c) for c in column]
    if patterns.lots_filled > 1:
        whole = Patterns(max_participations=steps, separation=1, white_noise=True)
        one, white = (
            toeplitz_sensitivity(coefficients, factors, at, inverse=inverse)
            for at in (patterns.in_one_lot, whole)
        )
        return _several_lots(one, white, patterns, steps).min(
            _by_gram(column, sizes, factors, patterns)
        )
    count, falling = patterns.count(steps), sizes
    if patterns.white_noise:
        # The middle of a long run: the first iterate of the bound for shorter ones.
        sums = [sum(sizes[first::separation]) for first in range(min(separation, steps))]
    else:
        if count > 1 and not patterns.fixed_separation and any(sizes[separation:]):
            falling = list(accumulate(reversed(sizes), max))[::-1]
        sums = []
        for t, size in enumerate(falling):
            earlier = sums[t - separation] if t >= separation else 0
            ended = falling[t - count * separation] if t >= count * separation else 0
            sums.append(size + earlier - ended)
    squared = arb(fmpz(sum(s * s for s in sums))) / UNIT**2
    if patterns.white_noise and steps <= MAX_ITERATED:
        squared = squared.min(_largest_of_shifts([arb(fmpz(s)) / UNIT for s in sizes], separation))
    bound = max(factors) * squared.sqrt()
    if patterns.epoch is not None and not patterns.white_noise:
        if steps > MAX_ROWS:
            return bound.min(max(factors) * _chain_by_lag(sizes, patterns))
        return bound.min(_by_gram(column, sizes, factors, patterns))
    tight = falling == [_units(c.max(arb(0))) for c in column] and min(factors) == max(factors)
    if tight or steps > MAX_ROWS:
        return bound
    rows = toeplitz_rows(column)
    return bound.min(matrix_sensitivity(rows, factors, patterns, inverse=False))


def _by_gram(
    column: Sequence[arb], sizes: Sequence[int], factors: Sequence[float], patterns: Patterns
) -> arb:
    """Return the bound by the entries of X of a Toeplitz C; none for too many steps."""
    steps = len(factors)
    if steps > MAX_ROWS:
        return arb("inf")
    signed = sizes != [_units(c.max(arb(0))) for c in column]
    if signed or min(factors) < max(factors):
        return _bound_by_epochs(_gram_sizes(arb_mat(toeplitz_rows(column)), factors), patterns)
    # X_ij is X_{i+1, j+1} and the product of what the end of the run leaves last of the columns.
    backwards, below, rows = sizes[::-1], [0] * (steps + 1), []
    for size in sizes:
        below = [more + size * last for more, last in zip(below[1:], backwards, strict=True)]
        rows.append([-(-product // int(UNIT)) for product in below])
        below.append(0)
    rows.reverse()
    return max(factors) * _bound_by_epochs(rows, patterns)


def _several_lots(one: arb, white: arb, patterns: Patterns, steps: int) -> arb:
    """Bound sens of a unit that fills several lots from that of ``one`` and from ‖C‖."""
    squares = squared_lots(patterns.lots_filled, patterns.turn, steps)
    return (rational(patterns.lots_filled) * one).min(white * rational(squares).sqrt())


def _gram_sizes(matrix: arb_mat, factors: Sequence[float]) -> list[list[int]]:
    """Return |X| of a C whose columns are clipped to ``factors``, in units."""
    gram = matrix.transpose() * matrix
    return [
        [_units(gram[i, j] * arb(f) * arb(g)) for j, g in enumerate(factors)]
        for i, f in enumerate(factors)
    ]


def _bound_by_epochs(sizes: Sequence[Sequence[int]], patterns: Patterns) -> arb:
    """Bound sens of patterns that depend on epochs, from |X| in units."""
    if patterns.lots_filled == 1:
        best = Fraction(_worst_chain(sizes, patterns.turn))
    else:
        rows = [sum(_filled(row, patterns), Fraction(0)) for row in sizes]
        best = sum(_filled(rows, patterns), Fraction(0))
    return (rational(best) / UNIT).sqrt()


def _worst_chain(sizes: Sequence[Sequence[int]], epoch: int) -> int:
    """Return the largest sum over a chain of one step in each epoch."""
    epochs = [range(first, len(sizes))[:epoch] for first in range(0, len(sizes), epoch)]
    best: list[int] = []
    for place, here in enumerate(epochs):
        others = [other for at, other in enumerate(epochs) if abs(at - place) >= 2]
        alone = [
            sizes[j][j] + sum(max(sizes[j][other.start : other.stop]) for other in others)
            for j in here
        ]
        before = epochs[place - 1] if place else range(0)
        best = [
            own + max((e + 2 * sizes[i][j] for e, i in zip(best, before, strict=True)), default=0)
            for own, j in zip(alone, here, strict=True)
        ]
    return max(best)


def _filled(values: Sequence[int | Fraction], patterns: Patterns) -> list[Fraction]:
    """Return the largest Σ n_t v_t of each epoch; of all of them together at a fixed distance."""
    turn, filled = patterns.turn, patterns.lots_filled
    if patterns.fixed_separation:
        values = [sum(values[first::turn], Fraction(0)) for first in range(min(turn, len(values)))]
    result = []
    for first in range(0, len(values), turn):
        remaining, total = filled, Fraction(0)
        for value in sorted(values[first : first + turn], reverse=True):
            total += min(remaining, Fraction(1)) * value
            remaining -= min(remaining, Fraction(1))
        result.append(total)
    return result


def _chain_by_lag(sizes: Sequence[int], patterns: Patterns) -> arb:
    """Bound sens of one step in each epoch by the largest product of columns no nearer."""
    steps, epoch = len(sizes), patterns.turn
    epochs = -(-steps // epoch)
    chained = epochs * epoch**2 <= MAX_CHAIN_WORK
    shifted = fmpz_poly(list(sizes)) * fmpz_poly(list(sizes[::-1]))
    overlaps = [int(shifted[steps - 1 + lag]) for lag in range(steps)]
    lags = list(accumulate(reversed(overlaps), max))[::-1] + [0] * (2 * epoch)
    first = 2 if chained else 1
    later, earlier = [[0] * epoch], [[0] * epoch]
    for gap in range(1, epochs):
        counts = gap >= first
        later.append([s + counts * lags[gap * epoch - o] for o, s in enumerate(later[-1])])
        earlier.append(
            [s + counts * lags[(gap - 1) * epoch + 1 + o] for o, s in enumerate(earlier[-1])]
        )
    best = [0] * epoch
    for here in range(epochs):
        if chained and here:
            joined = [
                max(value + 2 * lags[epoch + o - i] for i, value in enumerate(best))
                for o in range(epoch)
            ]
        else:
            joined = [max(best)] * epoch
        best = [
            lags[0] + after + before + so_far
            for after, before, so_far in zip(
                later[epochs - 1 - here], earlier[here], joined, strict=True
            )
        ]
    return (arb(fmpz(max(best))) / UNIT**2).sqrt()


def matrix_sensitivity(
    rows: Sequence[Sequence[float]] | Sequence[Sequence[arb]],
    factors: Sequence[float],
    patterns: Patterns,
    *,
    inverse: bool,
) -> arb:
    """Return sens of C, ``rows`` or their inverse, whose columns are clipped to ``factors``.

    Patterns of a minimum distance are bounded row by row (Theorem 5 there), or by the entries that
    no later and no farther one exceeds. Raises ``Unproved``.
    """
    steps = len(factors)
    count = patterns.count(steps)
    separated = not (patterns.white_noise or patterns.fixed_separation or patterns.epoch)
    require_affordable(steps**2 * (count if separated else 1))
    matrix = strategy_matrix(rows, inverse=inverse)
    if count == 1 == patterns.lots_filled and not patterns.white_noise:
        columns = zip(*matrix.tolist(), strict=True)
        norms = (sum((x * x for x in column), arb(0)).sqrt() for column in columns)
        scaled = (_units(norm * arb(factor)) for norm, factor in zip(norms, factors, strict=True))
        return arb(fmpz(max(scaled))) / UNIT
    return _bound_of_gram(_gram_sizes(matrix, factors), patterns)


def _bound_of_gram(sizes: Sequence[Sequence[int]], patterns: Patterns) -> arb:
    """Bound sens from |X| in units."""
    steps, separation = len(sizes), patterns.separation
    count = patterns.count(steps)
    if patterns.white_noise:
        return _largest_of_groups(sizes, separation).sqrt()
    if patterns.lots_filled > 1:
        one = _bound_of_gram(sizes, patterns.in_one_lot)
        bound = _several_lots(one, _largest_of_groups(sizes, 1).sqrt(), patterns, steps)
        return bound.min(_bound_by_epochs(sizes, patterns))
    if patterns.epoch is not None:
        return _bound_by_epochs(sizes, patterns)
    if patterns.fixed_separation:
        turns = [range(first, steps, separation)[:count] for first in range(steps)]
        best = max(sum(sizes[i][j] for i in turn for j in turn) for turn in turns)
    else:
        bounds = []
        for i, row in enumerate(sizes):
            others = [0 if abs(i - j) < separation else size for j, size in enumerate(row)]
            bounds.append(row[i] + _max_separated_sum(others, count - 1, separation))
        separated = _max_separated_sum(bounds, count, separation)
        best = min(separated, _falling_bound(sizes, count, separation))
    return (arb(fmpz(best)) / UNIT).sqrt()


def strategy_matrix(
    rows: Sequence[Sequence[float]] | Sequence[Sequence[arb]], *, inverse: bool
) -> arb_mat:
    """Return C, ``rows`` or their inverse."""
    matrix, steps = arb_mat([[arb(entry) for entry in row] for row in rows]), len(rows[0])
    if not inverse:
        return matrix
    identity = [[int(i == j) for j in range(steps)] for i in range(steps)]
    return matrix.solve(arb_mat(identity), algorithm="lu")


def first_column(
    coefficients: Sequence[float] | Sequence[arb], steps: int, *, inverse: bool
) -> list[arb]:
    """Return the first column of a Toeplitz C of ``coefficients``, or of C⁻¹ if ``inverse``."""
    column = [arb(c) for c in coefficients[:steps]]
    return _reciprocal(column, steps) if inverse else column + [arb(0)] * (steps - len(column))


def toeplitz_rows(column: Sequence[arb]) -> list[list[arb]]:
    """Return the rows of the square Toeplitz matrix with this first column."""
    steps = len(column)
    return [[column[i - j] if i >= j else arb(0) for j in range(steps)] for i in range(steps)]


def _largest_of_shifts(column: list[arb], separation: int) -> arb:
    """Bound ‖C_S‖² of the steps 0, b, 2b, ... of a Toeplitz C ≥ 0, which bounds other groups."""
    steps, shifts = len(column), arb_poly(column)

    def product(vector: Sequence[arb]) -> list[arb]:
        spread = [arb(0)] * steps
        spread[::separation] = vector
        moved = _coefficients(shifts * arb_poly(spread), steps)
        return _coefficients(shifts * arb_poly(moved[::-1]), steps)[::-1][::separation]

    return _largest_eigenvalue(product, -(-steps // separation))


def _largest_of_groups(sizes: Sequence[Sequence[int]], separation: int) -> arb:
    """Bound the largest ‖C_S‖² of a group, from |X| in units."""
    groups = []
    for first in range(min(separation, len(sizes))):
        rows = [
            [arb(fmpz(size)) / UNIT for size in row[first::separation]]
            for row in sizes[first::separation]
        ]
        matrix = arb_mat(rows)

        def product(vector: Sequence[arb], matrix: arb_mat = matrix) -> list[arb]:
            image = matrix * arb_mat([[entry] for entry in vector])
            return list(image.entries())

        groups.append(_largest_eigenvalue(product, len(rows)))
    return reduce(arb.max, groups)


def _largest_eigenvalue(product: Callable[[Sequence[arb]], list[arb]], size: int) -> arb:
    """Bound that of a symmetric matrix ≥ 0 by max (X v)_i / v_i, for any v > 0."""
    vector, ratios = [arb(1)] * size, [arb(0)]
    for _ in range(_ITERATIONS):
        image = product(vector)
        ratios = [new / old for new, old in zip(image, vector, strict=True)]
        vector = [arb((entry / image[0]).mid()) for entry in image]
    return reduce(arb.max, ratios)


def _coefficients(product: arb_poly, steps: int) -> list[arb]:
    return [product[place] for place in range(steps)]


def _max_separated_sum(values: Sequence[int], count: int, separation: int) -> int:
    """Return the largest sum of ``count`` of ``values``, ``separation`` apart."""
    steps = len(values)
    later = [0] * (steps + separation)
    for _ in range(count):
        here = [value + later[i + separation] for i, value in enumerate(values)]
        later[:steps] = list(accumulate(reversed(here), max))[::-1]
    return later[0]


def _falling_bound(sizes: Sequence[Sequence[int]], count: int, separation: int) -> int:
    """Return Σ over m, n of the largest size from step m ``separation`` on, as far apart.

    The m-th step of a pattern is not before that, and the n-th at least as far away.
    """
    steps = len(sizes)
    largest = [[0] * (steps + 1) for _ in range(steps + 1)]
    for i in reversed(range(steps)):
        for distance in reversed(range(steps - i)):
            later, farther = largest[i + 1][distance], largest[i][distance + 1]
            largest[i][distance] = max(sizes[i][i + distance], later, farther)
    places = range(0, count * separation, separation)
    return sum(largest[min(i, j)][abs(i - j)] for i in places for j in places)


def _reciprocal(series: Sequence[arb], steps: int) -> list[arb]:
    """Return the power series 1 / ``series``, the quotient of reversed polynomials."""
    if not abs(series[0]) > 0:
        raise no_statement("a matrix that may have no inverse")
    dividend = arb_poly([0] * (steps + len(series) - 2) + [1])
    return list((dividend // arb_poly(series[::-1])).coeffs()[::-1])


def _units(size: arb) -> int:
    return rounded_up(abs(size) * UNIT)


def require_affordable(products: int) -> None:
    """Raise ``Unproved`` for more than ``MAX_PRODUCTS`` products."""
    if products > MAX_PRODUCTS:
        raise no_statement("a sensitivity that takes more than a few seconds")


Reach = dict[tuple[int, int, int], int]
"""The largest sum over the nodes inside a stretch, by its number of participations and the steps
before the first and after the last of these, counted up to the separation."""


def tree_sensitivity(steps: int, period: int, patterns: Patterns) -> arb:
    """Return sens of consecutive trees of ``period`` steps; raises ``Unproved``."""
    if patterns.lots_filled > 1:
        one = tree_sensitivity(steps, period, patterns.in_one_lot)
        return rational(patterns.lots_filled) * one
    count, separation = patterns.count(steps), patterns.separation
    if count == 1:
        return arb(period.bit_length()).sqrt()
    require_affordable(steps * count * period.bit_length())
    if patterns.fixed_separation:
        turns = (range(first, steps, separation)[:count] for first in range(steps))
        return arb(max(_sum_of_squares(steps, period, turn) for turn in turns)).sqrt()
    return arb(_Search(steps, period, count, separation).worst()).sqrt()


def _sum_of_squares(steps: int, period: int, places: Sequence[int]) -> int:
    counts: Counter[tuple[int, int, int]] = Counter()
    for place in places:
        tree, inside = divmod(place, period)
        length = min(period, steps - tree * period)
        for level in range(length.bit_length()):
            if ((inside >> level) + 1) << level <= length:
                counts[tree, level, inside >> level] += 1
    return sum(count * count for count in counts.values())


class _Search:
    """The search for the worst pattern, which joins stretches from single nodes upwards."""

    def __init__(self, steps: int, period: int, count: int, separation: int) -> None:
        self.steps, self.period, self.count, self.separation = steps, period, count, separation
        starts, turns = range(0, period, 1 << separation.bit_length()), range(count)
        require_affordable(len(starts) * count)
        self.places = sorted(
            {(start + turn * separation) % period for start in starts for turn in turns}
        )
        self.work = 0
        self.node = cache(self._node)

    def worst(self) -> int:
        """Return the largest sum of squares; raises ``Unproved``."""
        result, length = Reach(), 0
        for start in range(0, self.steps, self.period):
            rest, begin = min(self.period, self.steps - start), 0
            for level in reversed(range(rest.bit_length())):
                if rest >> level & 1:
                    size = 1 << level
                    node = self.node(size, self._inside(begin, size))
                    result = self._joined(result, length, node, size)
                    begin, length = begin + size, length + size
        return max(result.values())

    def _inside(self, start: int, size: int) -> tuple[int, ...]:
        return tuple(place - start for place in self.places if start <= place < start + size)

    def _node(self, size: int, places: tuple[int, ...]) -> Reach:
        """Return the sums of a complete node; ``places`` count from its first step."""
        free, half = self.separation - 1, size // 2
        if size <= self.separation:
            one = {(1, min(at, free), min(size - 1 - at, free)): size.bit_length() for at in places}
            return self._undominated(one)
        first = tuple(at for at in places if at < half)
        second = tuple(at - half for at in places if at >= half)
        both = self._joined(self.node(half, first), half, self.node(half, second), half)
        return {key: value + key[0] ** 2 for key, value in both.items()}

    def _joined(self, left: Reach, before: int, right: Reach, after: int) -> Reach:
        free = self.separation - 1
        self.work += len(left) * len(right)
        require_affordable(self.work)
        result: Reach = {}
        for (m, first, last), value in left.items():
            key = (m, first, min(free, last + after))
            result[key] = max(value, result.get(key, 0))
        for (m, first, last), value in right.items():
            key = (m, min(free, first + before), last)
            result[key] = max(value, result.get(key, 0))
        for (m, first, end), value in left.items():
            for (n, start, last), more in right.items():
                if end + start >= free and m + n <= self.count:
                    key = (m + n, first, last)
                    result[key] = max(value + more, result.get(key, 0))
        return self._undominated(result)

    def _undominated(self, reach: Reach) -> Reach:
        """Return ``reach`` without entries that another with as many participations dominates."""
        result: Reach = {}
        by_value = sorted(reach.items(), key=lambda item: (item[1], item[0]), reverse=True)
        fronts: dict[int, list[tuple[int, int]]] = {}
        for (m, first, last), value in by_value:
            front = fronts.setdefault(m, [])
            if not any(a >= first and b >= last for a, b in front):
                front.append((first, last))
                result[m, first, last] = value
        return result
