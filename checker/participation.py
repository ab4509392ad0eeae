"""Bounds of a record's random participations in a run of correlated noise, in balls.

A record that is drawn in the steps b, at random, moves the run by at most s = ‖ |C| b ‖. For n
participations at uniform places s² is at most n G_max plus twice the sum over pairs of G = |C|ᵀ|C|,
whose law the moments of matched pairs bound (docs/theorems/correlated-noise.md, Theorem 14). Any
order of a moment is sound.

Under b-min-sep a record participates with probability at most p, and only if it did not in the last
b - 1 steps. If no two columns of C that are b steps apart share a row, K participations move the
run by at most the root of K times the longest column. Or steps are disclosed: those of k stretches
of m at a phase that is drawn for each block of km, and a moment bounds the number of the few large
ones (Theorem 15 there). Products of columns are integers in units of 2^-256.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, reduce
from itertools import accumulate, zip_longest

from flint import arb, arb_mat, arb_poly, fmpz, fmpz_poly

from affidavit.checker import dominating_pairs, sensitivity
from affidavit.checker.lattice import no_statement, rounded_up
from affidavit.plan import events

MAX_STEPS, MAX_MEAN_PARTICIPATIONS, MAX_CUT_DRAWS = 20_000, 400, 100
"""Steps of Toeplitz C, mean participations of a record, and its draws into cut lots: some
seconds."""
_TREE_ORDERS, _MAX_NUMBERS, _MAX_NODE_WORK = 64, 512, 20_000
"""Orders of moments of trees, and what of these takes some seconds: the numbers of participations,
and as many for each group and level."""
_EXACT = (2, 12), (64, 6)
"""The most groups, or largest nodes of all groups, and how many participations have their law."""
_CONCEDED = 1e-32 / 512
"""The probability of more participations in nodes of a tree than are counted, at most."""
_BAND_COUNT = 64
"""Bands of the later of two steps of Toeplitz C: products are those of the first step of a band."""
_SIZE_LEVELS = 4096
"""Distinct sizes of products, to which others are rounded up."""
_MIN_ORDER, _MAX_ORDER, _ORDER_COUNT = 1e-3, 1e4, 256
"""Orders of moments, times the largest product, and their number."""
_STEP_ORDERS = [0.02 * 200 ** (place / 23) for place in range(24)]
"""Orders of the moments of numbers of large steps."""
_GROWTH_ROUNDS = 8
"""Blocks after which the growth of a moment is bounded."""
_MAX_PHASES = 64
"""Phases of a block: some seconds for each size."""

Blocks = Sequence[tuple[int, Fraction]]
"""Counts and noise multipliers of a lot's blocks."""

Products = Iterable[tuple[int, int, int]]
"""Distances of two steps, sizes of G in units of 2^-256, and numbers of pairs with no more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Draws:
    """The most draws of a record, each with ``probability``, independently."""

    max_draws: int
    probability: Fraction


@dataclass(frozen=True, kw_only=True, slots=True)
class CutLots:
    """Poisson samples at ``probability`` that are cut to a ``largest`` lot, one in each step.

    A unit has ``records`` records, and there are ``others``. A record that is drawn into a lot that
    may be cut moves the sum by at most ``moved`` clip norms.
    """

    steps: int
    probability: Fraction
    largest: int
    records: int
    others: int
    moved: int

    def fewest(self, conceded: arb) -> tuple[int, arb]:
        """Return a number of draws into such lots, and the probability of more.

        It is at most ``conceded``. Raises ``Unproved`` if that is too many.
        """
        rate, room = sensitivity.rational(self.probability), self.largest - self.records + 1
        crowded, most = dominating_pairs.at_least(room, self.others, rate), MAX_CUT_DRAWS + 1
        drawn = [
            math.comb(self.records, n) * rate**n * (1 - rate) ** (self.records - n)
            for n in range(self.records + 1)
        ]
        law = [1 - crowded * (1 - drawn[0]), *(crowded * chance for chance in drawn[1:])]
        tails = list(accumulate(reversed(_repeated(law, self.steps, most))))
        for number, excess in enumerate(reversed(tails[:-1])):
            if excess <= conceded:
                return number, excess
        raise no_statement(f"more than {MAX_CUT_DRAWS} draws of one record into cut lots")


def _repeated(law: list[arb], times: int, most: int) -> list[arb]:
    """Return the law of the sum of ``times`` numbers of ``law``; ``most`` stands for more."""
    result, power = [arb(1)], law
    while times:
        if times % 2:
            result = _added(result, power, most)
        times, power = times // 2, _added(power, power, most)
    return result


def _added(one: list[arb], other: list[arb], most: int) -> list[arb]:
    chances = (arb_poly(one) * arb_poly(other)).coeffs()
    return [*chances[:most], sum(chances[most:], arb(0))]


def toeplitz_products(
    coefficients: Sequence[float] | Sequence[arb],
    factors: Sequence[float],
    turn: int,
    *,
    inverse: bool,
) -> Iterator[tuple[int, int, int]]:
    """Yield products of steps ``turn`` apart, by their distance, in bands of the later step.

    C has this first column, or C⁻¹ if ``inverse``; step t is clipped to ``factors``[t] clip norms.
    Raises ``Unproved`` for too many steps.
    """
    steps = len(factors)
    if steps > MAX_STEPS:
        raise no_statement(f"participations in {steps} steps")
    column = sensitivity.first_column(coefficients, steps, inverse=inverse)
    if min(factors) < max(factors):
        yield from matrix_products(sensitivity.toeplitz_rows(column), factors, turn, inverse=False)
        return
    sizes = [rounded_up(abs(c) * factors[0] * sensitivity.UNIT) for c in column]
    for first, last in _bands(-(-steps // turn)):
        # ⟨c, S^d c⟩ of columns that the end of the run cuts after ``overlap``.
        overlap = steps - first * turn
        shifted = fmpz_poly(sizes) * fmpz_poly(sizes[:overlap][::-1])
        for distance in range(last + 1):
            pairs = min(last + 1 - first, last + 1 - distance)
            size = int(shifted[overlap - 1 + distance * turn])
            yield distance, size, pairs * (2 if distance else 1)


def _bands(steps: int) -> Iterator[tuple[int, int]]:
    """Return the first and last step of each band; bands are as even as possible."""
    count = min(steps, _BAND_COUNT)
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
    """Yield products of steps ``turn`` apart: at two places of a group, the largest of any group.

    C is ``rows`` or their inverse; step t is clipped to ``factors``[t] clip norms. Raises
    ``Unproved`` for too many steps.
    """
    steps = len(factors)
    if steps > sensitivity.MAX_ROWS:
        raise no_statement(f"a matrix of {steps} steps")
    entries = sensitivity.strategy_matrix(rows, inverse=inverse).tolist()
    sizes = arb_mat(
        [[abs(x) * factor for x, factor in zip(row, factors, strict=True)] for row in entries]
    )
    gram = sizes.transpose() * sizes
    for i in range(0, steps, turn):
        for j in range(0, i + 1, turn):
            groups = range(min(turn, steps - i))
            size = max(rounded_up(gram[i + g, j + g] * sensitivity.UNIT**2) for g in groups)
            yield (i - j) // turn, size, 1 if i == j else 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Nodes:
    """Trees of ``period`` steps over ``steps``, in which a group has every ``turn``-th step.

    In each of these up to ``records`` are drawn.
    """

    steps: int
    period: int
    turn: int
    records: int

    def tails(self, squares: Sequence[arb], draws: Draws, conceded: float) -> list[arb]:
        """Return P(s² > x) at each x of ``squares``, by moments of each number of participations.

        Nodes with more than a number of them, but for ``conceded``, are not counted. Raises
        ``Unproved`` if it would take too long.
        """
        rate, levels = sensitivity.rational(draws.probability), self.period.bit_length()
        mean = draws.max_draws * float(draws.probability)
        typical = mean * (levels + 2 * mean)
        least, most = 0.05 / typical, max(30.0 / levels, 2 / typical)
        growth = (most / least) ** (1 / (_TREE_ORDERS - 1))
        orders = [0.0, *(least * growth**place for place in range(_TREE_ORDERS))]
        fewest, beyond = zip(
            *(self._fewest(1 << level, rate, conceded) for level in range(levels)), strict=True
        )
        whole, after = self._fewest(self.steps, rate, conceded)
        if self.turn * levels * (whole + 1) > _MAX_NODE_WORK or whole >= _MAX_NUMBERS:
            raise no_statement(f"{whole} participations of one record in a tree")
        moments = [self._moments(arb(order), rate, (*fewest, whole)) for order in orders]
        logs = [[float(value.log()) for value in row] for row in moments]
        left = after + sum(beyond, arb(0))
        exact = self._tails_of_few(rate)
        result = []
        for square in squares:
            place, tail = float(square), left
            for of_number in exact[: whole + 1]:
                # s² is a whole number, at least this one and one more.
                below = math.floor(place * (1 - 1e-12))
                tail += of_number[below] if below < len(of_number) else 0
            for number in range(len(exact), whole + 1):
                best = min(range(len(orders)), key=lambda at: logs[at][number] - orders[at] * place)
                chance = moments[best][number] * (-arb(orders[best]) * square).exp()
                tail += chance.min(arb(1))
            result.append(tail)
        return result

    def _tails_of_few(self, rate: arb) -> list[list[arb]]:
        """Return P(s² > k and n participations), of any group, for few n, by n and k."""
        starts = [
            (start, level)
            for first in range(0, self.steps, self.period)
            for start, level in _complete_nodes(first, min(self.period, self.steps - first))
        ]
        work = max(self.turn, self.turn * len(starts) / 32)
        most = next((few for size, few in _EXACT if work <= size), 0)
        if not most:
            return []
        drawn = (arb_poly([1 - rate, rate]) ** self.records).coeffs()[: most + 1]
        by_phase = [[arb_poly([chance]) for chance in drawn]]
        by_phase += [[arb_poly([1])]] * (self.turn - 1)
        nodes: list[list[list[arb_poly]]] = []
        for level in range(self.period.bit_length()):
            if level:
                half = 1 << (level - 1)
                by_phase = [
                    _both(left, by_phase[(phase - half) % self.turn], most)
                    for phase, left in enumerate(nodes[-1])
                ]
            nodes.append(
                [
                    [arb_poly([arb(0)] * n**2 + law.coeffs()) for n, law in enumerate(one)]
                    for one in by_phase
                ]
            )
        result: list[list[arb]] = [[]] * (most + 1)
        for group in range(self.turn):
            run = [arb_poly([1])]
            for start, level in starts:
                run = _both(run, nodes[level][(group - start) % self.turn], most)
            for number, law in enumerate(run):
                tails = list(accumulate(reversed(law.coeffs())))[::-1][1:]
                pairs = zip_longest(tails, result[number], fillvalue=arb(0))
                result[number] = [one.max(other) for one, other in pairs]
        return result

    def _fewest(self, steps: int, rate: arb, conceded: float) -> tuple[int, arb]:
        """Return a number of participations, and the chance that a range of ``steps`` has more."""
        draws, nodes = -(-steps // self.turn) * self.records, 2 * self.steps
        low, high = -1, draws
        while high - low > 1:
            middle = (low + high) // 2
            more = dominating_pairs.at_least(middle + 1, draws, rate) * (2 * nodes)
            low, high = (low, middle) if more <= conceded else (middle, high)
        return high, dominating_pairs.at_least(high + 1, draws, rate) * nodes

    def _moments(self, order: arb, rate: arb, most: tuple[int, ...]) -> list[arb]:
        """Return E e^{θs²} of each number of participations in all, of the worst group."""
        squares = [(order * number**2).exp() for number in range(most[-1] + 1)]

        def node(half: arb_poly) -> arb_poly:
            return arb_poly([c * w for c, w in zip(half.coeffs(), squares, strict=False)])

        def joined(first: arb_poly, second: arb_poly, number: int) -> arb_poly:
            return arb_poly((first * second).coeffs()[: number + 1])

        drawn = arb_poly([1 - rate, rate]) ** self.records
        # Below a node: by how many steps after its start the first one of the group is.
        by_phase = [drawn, *[arb_poly([1])] * (self.turn - 1)]
        levels = []
        for level, number in enumerate(most[:-1]):
            if level:
                half = 1 << (level - 1)
                by_phase = [
                    joined(node(left), by_phase[(phase - half) % self.turn], number)
                    for phase, left in enumerate(by_phase)
                ]
            levels.append([node(below) for below in by_phase])
        worst = [arb(0)] * (most[-1] + 1)
        for group in range(self.turn):
            run = arb_poly([1])
            for first in range(0, self.steps, self.period):
                length = min(self.period, self.steps - first)
                for start, level in _complete_nodes(first, length):
                    part = levels[level][(group - start) % self.turn]
                    run = joined(run, part, most[-1])
            pairs = zip_longest(worst, run.coeffs(), fillvalue=arb(0))
            worst = [one.max(other) for one, other in pairs]
        return worst


def _complete_nodes(first: int, length: int) -> Iterator[tuple[int, int]]:
    """Yield the start and level of the largest nodes of a tree of ``length`` steps."""
    for level in reversed(range(length.bit_length())):
        if length >> level & 1:
            yield first, level
            first += 1 << level


def _both(first: list[arb_poly], second: list[arb_poly], most: int) -> list[arb_poly]:
    """Return the laws of both parts, of each number of participations up to ``most``."""
    result = [arb_poly([0])] * min(most + 1, len(first) + len(second) - 1)
    for number, one in enumerate(first):
        for other in range(min(len(second), len(result) - number)):
            result[number + other] += one * second[other]
    return result


def is_participation_covered(
    leaf: events.GaussianMixture,
    blocks: Blocks,
    products: Products | Nodes,
    draws: Draws,
    cut: CutLots | None = None,
) -> bool:
    """Return whether ``leaf`` certainly bounds how far a record moves the run.

    The unit is the joint deviation of ``blocks``. Lots may be ``cut``. Raises ``Unproved`` if it
    would take too long.
    """
    miss = 1 - sensitivity.rational(draws.probability)
    mean = -draws.max_draws * miss.log()
    if not mean < MAX_MEAN_PARTICIPATIONS:
        raise no_statement(f"{MAX_MEAN_PARTICIPATIONS} participations of one record or more")
    if isinstance(products, Nodes):
        # At most one node of each level.
        largest, whole = arb(products.period.bit_length()), None
    else:
        largest, whole, moments = _moments(products)
        # Drawn in every step, all of a unit's records.
        whole *= arb(draws.max_draws) ** 2
    conceded, displaced = arb(leaf.conceded), 0
    if cut is not None:
        number, excess = cut.fewest(conceded)
        conceded, displaced = conceded - excess, number * cut.moved
    # The leaf's distances over the longest column, less the displacement in cut lots.
    square = 1 / (
        sensitivity.rational(
            Fraction(leaf.noise_multiplier) ** 2 * sensitivity.joint_precision(blocks)
        )
        * largest
    )
    distances = [square.sqrt() * place - displaced for place in range(len(leaf.weights))]
    squares = [distance.max(arb(0)) ** 2 for distance in distances]
    above = [conceded]
    for weight in leaf.weights[:0:-1]:
        above.append(above[-1] + weight)
    bounds = above[::-1]
    participates = 1 - miss**draws.max_draws
    if isinstance(products, Nodes):
        tails = products.tails([place * largest for place in squares], draws, _CONCEDED)
    else:
        max_count = int(float(mean) + 20 * float(mean) ** 0.5) + 40
        tails = _tails(squares, mean, max_count, moments)
    return all(
        (tail.min(participates) if distance >= 0 else 1) <= bound
        or (whole is not None and bool(square >= whole))
        for distance, square, tail, bound in zip(distances, squares, tails, bounds, strict=True)
    )


def _moments(products: Products) -> tuple[arb, arb, list[tuple[float, arb]]]:
    """Return the largest product, and of a uniform pair, relative to it, the mean and moments.

    The moments are orders with the logarithm of each.
    """
    counted = list(products)
    largest = max(size for _, size, _ in counted)
    counts = [0] * (_SIZE_LEVELS + 1)
    for _, size, pairs in counted:
        counts[-(-size * _SIZE_LEVELS // largest)] += pairs
    shares, total = arb_poly(counts), sum(counts)
    growth = (_MAX_ORDER / _MIN_ORDER) ** (1 / (_ORDER_COUNT - 1))
    orders = [_MIN_ORDER * growth**place for place in range(_ORDER_COUNT)]
    moments = [
        (order, (shares((arb(order) / _SIZE_LEVELS).exp()) / total).log()) for order in orders
    ]
    mean = arb(sum(fmpz(size) * pairs for _, size, pairs in counted)) / total / fmpz(largest)
    return arb(fmpz(largest)) / sensitivity.UNIT**2, mean, moments


def _tails(
    squares: Sequence[arb], mean: arb, max_count: int, moments: Sequence[tuple[float, arb]]
) -> list[arb]:
    """Return P(s² > x) at each x of ``squares``, relative to the largest product.

    Participations are at most a Poisson variable of this ``mean``, and more than ``max_count``
    always exceed x.
    """
    chances = [(-mean).exp()]
    for count in range(1, max_count + 1):
        chances.append(chances[-1] * mean / count)
    tails = [1 - sum(chances, arb(0))] * len(squares)
    places = [float(square) for square in squares]
    logs = [float(moment) for _, moment in moments]
    for count in range(1, max_count + 1):
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


def max_by_distance(products: Products) -> list[int]:
    """Return the largest of ``products`` at each distance."""
    result: dict[int, int] = {}
    for distance, size, _ in products:
        result[distance] = max(size, result.get(distance, 0))
    return [result[distance] for distance in range(len(result))]


def is_separated_participation_covered(
    leaf: events.GaussianMixture,
    blocks: Blocks,
    products: Sequence[int],
    draws: Draws,
    separation: int,
) -> bool:
    """Return whether ``leaf`` certainly bounds participations ``separation`` steps apart."""
    if any(products[separation:]):
        return False
    rate, chance = sensitivity.rational(draws.probability), arb(leaf.conceded)
    for place in reversed(range(len(leaf.weights))):
        # A record that moves farther than this distance participates more often than this.
        participations = _squared(Fraction(leaf.noise_multiplier), place, blocks) // products[0]
        trials = draws.max_draws - participations * (separation - 1)
        if not dominating_pairs.at_least(participations + 1, trials, rate) <= chance:
            return False
        chance += leaf.weights[place]
    return True


def is_disclosure_covered(
    leaves: Sequence[tuple[events.Leaf, int]],
    blocks: Blocks,
    products: Sequence[int],
    draws: Draws,
    separation: int,
    stretches: int,
) -> bool:
    """Return whether ``leaves`` bound the releases at the disclosed steps.

    A block of steps has ``stretches`` stretches.
    """
    bands = max(distance for distance, size in enumerate(products) if size) + 1
    phases = -(-(bands - 1) // stretches)
    if not 1 <= phases <= _MAX_PHASES or stretches * phases > separation:
        return False
    rate, conceded = _rate(sensitivity.rational(draws.probability), stretches, phases), arb(0)
    counts: dict[int, int] = {}
    for leaf, count in leaves:
        match leaf:
            case events.GaussianMixture(weights=(_, drawn)):
                conceded += count * arb(leaf.conceded)
            case events.PoissonSubsampledGaussian(sampling_probability=drawn):
                pass
            case _:
                return False
        if not arb(drawn) >= rate:
            return False
        square = _squared(Fraction(leaf.noise_multiplier), 1, blocks)
        counts[square] = counts.get(square, 0) + count
    run = -(-draws.max_draws // (stretches * phases))
    larger, chance = 0, arb(0)
    for square in sorted(counts, reverse=True):
        chance += _chance_of_more(larger, square, products, run, stretches, phases)
        larger += counts[square]
    return larger >= run * stretches and bool(chance <= conceded)


def _squared(multiplier: Fraction, place: int, blocks: Blocks) -> int:
    """Return the square of ``place`` standard deviations of the noise, rounded down, in units."""
    squared = (
        place**2
        * int(sensitivity.UNIT) ** 2
        / (multiplier**2 * sensitivity.joint_precision(blocks))
    )
    return math.floor(squared)


def _rate(chance: arb, stretches: int, phases: int) -> arb:
    """Return the largest probability of a step given its phase and the past, above 1 if none."""
    rate, remaining, largest = phases * chance, arb(1), arb(0)
    for _ in range(stretches):
        if not remaining > 0:
            return arb(2)
        largest = largest.max(rate / remaining)
        remaining -= rate
        rate *= (1 - chance) ** phases
    return largest


def _chance_of_more(
    count: int, square: int, products: Sequence[int], run: int, stretches: int, phases: int
) -> arb:
    """Bound the probability that more than ``count`` steps of ``run`` blocks have a larger s²."""
    exceeding = _exceeding(square, products, stretches, phases)
    max_count = max(number for rows in exceeding for row in rows for number in row)
    if max_count * run <= count:
        return arb(0)

    @cache
    def bound(place: int) -> arb:
        order = arb(_STEP_ORDERS[place])
        factors = [(order * number).exp() / phases for number in range(max_count + 1)]
        grown = [arb_mat([[factors[f] for f in row] for row in rows]) for rows in exceeding]
        moments, growth, rounds = arb_mat([[1] * phases] * phases), arb(1), min(run, _GROWTH_ROUNDS)
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

    low, high = 0, len(_STEP_ORDERS) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if bound(middle) <= bound(middle + 1) else (middle + 1, high)
    return bound(low)


def _exceeding(
    square: int, products: Sequence[int], stretches: int, phases: int
) -> list[list[list[int]]]:
    """Return the number of steps of a block whose s² exceeds ``square``.

    It is indexed by the phases of the block, of the one before and of the one after.
    """
    length, steps = stretches * phases, range(stretches)
    padded = [*products, *[0] * (2 * length)]

    def next_sum(step: int, later: int) -> int:
        """Return the products of a step with the next block, whose phase is ``later`` by this."""
        return sum(padded[length + (other - step) * phases + later] for other in steps)

    own_sums = [sum(padded[abs(step - other) * phases] for other in steps) for step in steps]
    next_sums = [{d: next_sum(step, d) for d in range(1 - phases, phases)} for step in steps]
    previous_sums = [{d: next_sum(stretches - 1 - step, d) for d in next_sums[0]} for step in steps]
    places = range(phases)
    return [
        [
            [
                sum(
                    own_sums[i] + previous_sums[i][v - u] + next_sums[i][w - v] > square
                    for i in steps
                )
                for w in places
            ]
            for u in places
        ]
        for v in places
    ]
