"""From a plan's noise to μ: σ_joint of a step's blocks, and sens of correlated noise, in balls.

A record that takes part in the steps of a pattern π moves the run by at most sens, where
sens² = max over π of Σ_{i,j∈π} |X_ij|, X = CᵀC (docs/theorems/correlated-noise.md). Sizes are
integers in units of 2^-128, rounded up, so that maxima and sums of them are exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

from flint import arb, arb_mat, arb_poly, fmpq, fmpz

from affidavit.accountants.checker.lattice import no_statement, rounded_up

MOST_PRODUCTS = 20_000_000
"""Products of one sensitivity, a few seconds."""
MOST_ROWS = 2048
"""Steps up to which a matrix is multiplied, in half a minute, or inverted, in twice as long."""
_UNIT = fmpz(2) ** 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Patterns:
    """At most ``most`` steps, any two ``apart`` steps apart or, where not ``exactly``, more.

    ``white``: not sens but ‖C_S‖ of the steps S that are multiples of ``apart`` from each other.
    """

    most: int
    apart: int
    exactly: bool = True
    white: bool = False


def has_noise(multiplier: float, blocks: Iterable[tuple[int, Fraction]], squared: arb) -> bool:
    """Whether ``multiplier`` ² · ``squared`` ≤ σ_joint² is certain, σ_joint of the blocks of a lot.

    σ_joint is (Σ count/σ²)^(-1/2), σ the noise multiplier of so many blocks.
    """
    precision = sum((count / sigma**2 for count, sigma in blocks), Fraction(0))
    ratio = Fraction(multiplier) ** 2 * precision
    return bool(arb(fmpq(ratio.numerator, ratio.denominator)) * squared <= 1)


def buffered(decays: Sequence[float], scales: Sequence[float], steps: int) -> list[arb]:
    """The first column of a BLT: 1, then Σ ω_i θ_i^(t-1). Raises ``Unproved``."""
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
    """sens of C with this first column, zero afterwards; ``inverse`` where it is that of C⁻¹.

    Column t is clipped to ``factors``[t] clip norms. With c ≥ 0 the worst pattern of a fixed
    distance begins at once, and so it does of a least distance where c does not increase or columns
    do not overlap; a larger c bounds any other. Raises ``Unproved``.
    """
    steps, apart = len(factors), patterns.apart
    require_affordable(steps)
    column = [arb(c) for c in coefficients[:steps]]
    column = _reciprocal(column, steps) if inverse else column + [arb(0)] * (steps - len(column))
    sizes = [_units(c) for c in column]
    most = min(patterns.most, -(-steps // apart))
    if patterns.white:
        sums = [sum(sizes[first::apart]) for first in range(min(apart, steps))]
    else:
        if most > 1 and not patterns.exactly and any(sizes[apart:]):
            sizes = list(accumulate(reversed(sizes), max))[::-1]
        sums = []
        for t, size in enumerate(sizes):
            earlier = sums[t - apart] if t >= apart else 0
            ended = sizes[t - most * apart] if t >= most * apart else 0
            sums.append(size + earlier - ended)
    bound = max(factors) * (arb(fmpz(sum(s * s for s in sums))) / _UNIT**2).sqrt()
    tight = sizes == [_units(c.max(arb(0))) for c in column] and min(factors) == max(factors)
    if tight or steps > MOST_ROWS:
        return bound
    rows = [[column[i - j] if i >= j else arb(0) for j in range(steps)] for i in range(steps)]
    return bound.min(matrix_sensitivity(rows, factors, patterns, inverse=False))


def matrix_sensitivity(
    rows: Sequence[Sequence[float]] | Sequence[Sequence[arb]],
    factors: Sequence[float],
    patterns: Patterns,
    *,
    inverse: bool,
) -> arb:
    """sens of C, ``rows`` or their inverse, whose columns are clipped to ``factors``.

    Patterns of a least distance are bounded row by row (Theorem 5 there), or by the entries that no
    later and no farther one exceeds. Raises ``Unproved``.
    """
    steps, apart = len(factors), patterns.apart
    most = min(patterns.most, -(-steps // apart))
    require_affordable(steps**2 * (1 if patterns.white or patterns.exactly else most))
    matrix = arb_mat([[arb(entry) for entry in row] for row in rows])
    if inverse:
        identity = [[int(i == j) for j in range(steps)] for i in range(steps)]
        matrix = matrix.solve(arb_mat(identity), algorithm="lu")
    if most == 1 and not patterns.white:
        columns = zip(*matrix.tolist(), strict=True)
        norms = (sum((x * x for x in column), arb(0)).sqrt() for column in columns)
        scaled = (_units(norm * arb(own)) for norm, own in zip(norms, factors, strict=True))
        return arb(fmpz(max(scaled))) / _UNIT
    gram = matrix.transpose() * matrix
    sizes = [
        [_units(gram[i, j] * arb(own) * arb(other)) for j, other in enumerate(factors)]
        for i, own in enumerate(factors)
    ]
    if patterns.white:
        best = max(sum(row[i % apart :: apart]) for i, row in enumerate(sizes))
    elif patterns.exactly:
        turns = [range(first, steps, apart)[:most] for first in range(steps)]
        best = max(sum(sizes[i][j] for i in turn for j in turn) for turn in turns)
    else:
        bounds = []
        for i, row in enumerate(sizes):
            others = [0 if abs(i - j) < apart else size for j, size in enumerate(row)]
            bounds.append(row[i] + _separated(others, most - 1, apart))
        best = min(_separated(bounds, most, apart), _falling(sizes, most, apart))
    return (arb(fmpz(best)) / _UNIT).sqrt()


def _separated(values: Sequence[int], most: int, apart: int) -> int:
    """The most that ``most`` of ``values``, which are ``apart``, add up to."""
    steps = len(values)
    later = [0] * (steps + apart)
    for _ in range(most):
        here = [value + later[i + apart] for i, value in enumerate(values)]
        later[:steps] = list(accumulate(reversed(here), max))[::-1]
    return later[0]


def _falling(sizes: Sequence[Sequence[int]], most: int, apart: int) -> int:
    """Σ over m, n < ``most`` of the largest size from step m ``apart`` on, |m-n| ``apart`` away.

    The m-th step of a pattern is not before that, and the n-th at least so far from it.
    """
    steps = len(sizes)
    largest = [[0] * (steps + 1) for _ in range(steps + 1)]
    for i in reversed(range(steps)):
        for distance in reversed(range(steps - i)):
            later, farther = largest[i + 1][distance], largest[i][distance + 1]
            largest[i][distance] = max(sizes[i][i + distance], later, farther)
    return sum(
        largest[min(m, n) * apart][abs(m - n) * apart] for m in range(most) for n in range(most)
    )


def _reciprocal(series: Sequence[arb], steps: int) -> list[arb]:
    """The power series 1 / ``series`` up to so many steps: the quotient of reversed polynomials."""
    if not abs(series[0]) > 0:
        raise no_statement("a matrix that may have no inverse")
    dividend = arb_poly([0] * (steps + len(series) - 2) + [1])
    return list((dividend // arb_poly(series[::-1])).coeffs()[::-1])


def _units(size: arb) -> int:
    return rounded_up(abs(size) * _UNIT)


def require_affordable(products: int) -> None:
    """Raise ``Unproved`` for more than ``MOST_PRODUCTS``."""
    if products > MOST_PRODUCTS:
        raise no_statement("a sensitivity that takes more than a few seconds")
