"""A record in one random lot of an epoch, told all but which one of several lots far apart.

Let a record be in each of b bins with the same probability, and let m_i be what it adds in bin i.
Tell a place x, uniform: the record is then in one of the n bins x, x + w, ..., x + (n-1)w mod b,
uniformly, and their m_i have few rows in common. If no two of these have a product above r, and
none has a square above g, the run costs no more than n bins of orthogonal means of square g - r and
one Gaussian release of square r.

>>> from affidavit.mechanisms.strategies.toeplitz import Toeplitz
>>> apart = lots_apart(Toeplitz.from_strategy([1.0, 0.5], steps=1000), turn=1000, scale=0.1)
>>> apart.lots, apart.common, round(apart.own, 9)
(500, 0.0, 1.25)

Reference: docs/theorems/balls-in-bins-correlated.md, Theorem 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from affidavit.mechanisms.strategies.disclosed_steps import (
    MAX_BANDS,
    products_of_columns,
    rounding_of_products,
)
from affidavit.mechanisms.strategies.numerics import UNIT, Array, fftconvolve, transform_slack
from affidavit.mechanisms.strategies.strategy import (
    COEFFICIENT_ERROR,
    MAX_VECTOR,
    Strategy,
    TooLarge,
)
from affidavit.mechanisms.strategies.tree import Tree
from affidavit.mechanisms.strategies.white_noise import (
    ITERATIONS,
    MAX_ITERATED_STEPS,
    largest_eigenvalue,
)

_MAX_ENDS = 6
"""Numbers of lots at an end of an epoch, powers of two, that are told from the others."""
_MIN_SHARE = 1e-3
"""The least ``LotsApart.less`` over ``own``, which keeps its noise in range."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LotsApart:
    """A record in one of ``lots``, of which a run may end after ``released``.

    Its squared distance, in clip norms, is ``own`` in its lot, and ``common`` whichever that is.
    If a last epoch ends early, it is ``own`` in ``longer`` of the lots, and ``less`` in others.
    """

    lots: int
    released: int | None
    own: float
    common: float
    longer: int | None = None
    less: float = 0.0

    def log_divergence(self, scale: float) -> float:
        """Return about log(1 + χ²) of the run; ``scale`` is 1/σ² in squared clip norms."""
        most = log_divergence(self.lots, self.own * scale)
        if self.longer is None:
            return self.common * scale + most
        share, least = self.longer / self.lots, log_divergence(self.lots, self.less * scale)
        return self.common * scale + share * most + (1 - share) * least


@dataclass(frozen=True, kw_only=True, slots=True)
class DisclosedLots:
    """A record told, in each epoch, ``lots`` of which it is in one, ``width`` or more apart.

    ``stretch`` bounds ‖C_S‖ over the steps S of all these lots, in clip norms, and
    ``log_divergence`` is about log(1 + χ²) of the run. With ``ends`` the same holds for a
    ``stretch`` of so many lots at each end of an epoch, and ``inner`` for all others.
    """

    lots: int
    width: int
    stretch: float
    log_divergence: float
    ends: int = 0
    inner: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class OverlappingLots:
    """A record in one random lot of an epoch, which is kept, by products of what lots add.

    ``products`` bound those of lots 0, ..., b - 1 apart, in squared clip norms. If a last epoch
    ends early ``longer`` lots are in it, and the squares of the others are at most ``less``.
    """

    products: tuple[float, ...]
    longer: int | None
    less: float

    def log_divergence(self, scale: float) -> float:
        """Return about the log(1 + χ²) that is bounded; ``scale`` is 1/σ² in squared clip norms."""
        own, together = self.products[0], math.fsum(self.products)
        return log_divergence(max(1, int(len(self.products) * own / together)), own * scale)


def log_divergence(lots: int, square: float) -> float:
    """Return log(1 + χ²) of one of ``lots`` orthogonal means of this square over the noise's."""
    return float(np.logaddexp(0.0, square + math.log(-math.expm1(-square) / lots)))


def lots_apart(strategy: Strategy, *, turn: int, scale: float) -> LotsApart | None:
    """Return about the cheapest lots of ``turn`` bins that are kept; None for less than two.

    ``scale`` is 1/σ² in squared clip norms, for the choice alone. Raises ``TooLarge``.
    """
    squares, best, cost = squares_by_lag(strategy, turn), None, math.inf
    least = _square_of_whole_epochs(strategy, turn)
    for width in (1 << power for power in range(turn.bit_length())):
        if (lots := turn // width) < 2:
            break
        lags = np.arange(1, lots) * width
        common = float(np.maximum(squares[lags], squares[turn - lags]).max())
        if (own := float(squares[0]) - common) <= 0:
            continue
        released = -(-strategy.steps // width)
        longer = longer_lots(strategy.steps, turn=turn, width=width, lots=lots)
        own += 4 * UNIT * float(squares[0])
        apart = LotsApart(
            lots=lots,
            released=released if released < lots else None,
            own=own,
            common=common,
            longer=longer,
            less=0.0 if longer is None else min(own, max(least - common, _MIN_SHARE * own)),
        )
        if (divergence := apart.log_divergence(scale)) < cost:
            best, cost = apart, divergence
    return best


def overlapping_lots(strategy: Strategy, *, turn: int) -> OverlappingLots:
    """Return the products of ``turn`` bins that are kept. Raises ``TooLarge``."""
    longer = longer_lots(strategy.steps, turn=turn, width=1, lots=turn)
    products = squares_by_lag(strategy, turn)
    less = min(_square_of_whole_epochs(strategy, turn), float(products[0]))
    return OverlappingLots(
        products=tuple(products.tolist()), longer=longer, less=0.0 if longer is None else less
    )


def longer_lots(steps: int, *, turn: int, width: int, lots: int) -> int | None:
    """Return how many of ``lots`` that are ``width`` or more apart a last, partial epoch has.

    None if it may have all of them, or none, or if it is the only one.
    """
    whole, rest = divmod(steps, turn)
    longer = -(-rest // width)
    return longer if whole and 0 < longer < lots else None


def disclosed_lots(
    strategy: Strategy, *, turn: int, scale: float, place: str | None
) -> list[DisclosedLots]:
    """Return lots to tell of epochs of ``turn``, of one width each, about the cheapest first.

    A record takes the ``place`` of another, as does what replaces it (or, under zero_out, nothing);
    without a place it is there or not, in one lot for all epochs. ``scale`` is 1/σ² in squared clip
    norms, for the choice alone. Raises ``TooLarge``.
    """
    result = []
    epochs = -(-strategy.steps // turn)
    for width in sorted(step << power for step in (1, 3) for power in range(turn.bit_length())):
        if (lots := turn // width) < 2:
            break
        best: DisclosedLots | None = None
        square = square_of_disclosed(strategy, turn, width, place is None)
        ways = [(square, 0, 0.0)]
        if place is not None:
            squares = squares_by_place(strategy, turn, width)
            most = float(squares.max())
            ways += [
                (most, ends, float(squares[ends : lots - ends].max()))
                for ends in (1 << power for power in range(_MAX_ENDS))
                if 2 * ends < lots
            ]
        for most, ends, inner in ways:
            if place is None:
                divergence = log_divergence(lots, epochs * most * scale)
            else:
                kinds = [(2 * ends, most * scale), (lots - 2 * ends, inner * scale)]
                kinds = kinds if ends else [(lots, most * scale)]
                divergence = epochs * placed_divergence(kinds, place)
            if best is None or divergence < best.log_divergence:
                best = DisclosedLots(
                    lots=lots,
                    width=width,
                    stretch=math.sqrt(most) * (1 + 4 * UNIT),
                    log_divergence=divergence,
                    ends=ends,
                    inner=math.sqrt(inner) * (1 + 4 * UNIT),
                )
        if best is not None:
            result.append(best)
    return sorted(result, key=lambda lots: lots.log_divergence)


def placed_divergence(kinds: Sequence[tuple[int, float]], place: str) -> float:
    """Return about log(1 + χ²) of a record that takes another's place in one of some lots.

    ``kinds`` are numbers of lots and, for each, the square of a clip norm over the noise.
    """
    lots, logs = sum(number for number, _ in kinds), -math.inf
    for number, square in kinds:
        # E (f_2 - 1)², or E (f_2 - f_1)², over e^(4 square)
        least = -math.expm1(-4 * square)
        if place == "zero_out":
            least = math.expm1(-3 * square) - 2 * math.expm1(-2 * square)
        own = 4 * square + math.log(max(least, 1e-300)) + math.log(number / lots**2)
        logs = float(np.logaddexp(logs, own))
    return float(np.logaddexp(0.0, logs))


@lru_cache(maxsize=32)
def squares_by_place(strategy: Strategy, turn: int, width: int) -> Array:
    """Return bounds of Σ_j ⟨|c_i|, |c_j|⟩ over the steps of ``square_of_disclosed``, shape (n,).

    They are those of the first to the last step i of an epoch, in squared clip norms. Raises
    ``TooLarge``.
    """
    count, product = _disclosed_steps(strategy, turn, width, is_repeated=False)
    sums = product(np.ones(count)).reshape(-1, turn // width)
    return np.asarray(sums.max(axis=0) * (1 + 8 * UNIT))


def _disclosed_steps(
    strategy: Strategy, turn: int, width: int, is_repeated: bool
) -> tuple[int, Callable[[Array], Array]]:
    """Return how many steps ``square_of_disclosed`` has, and products with what they share.

    The steps are as near as they may be. The products, of vectors by a matrix that bounds
    ⟨|c_i|, |c_j|⟩, are rounded up.
    """
    # Steps that are farther apart count as the nearer ones with the largest product.
    by_lag = np.maximum.accumulate(products_by_lag(strategy)[::-1])[::-1]
    lots, epochs = turn // width, -(-strategy.steps // turn)
    # No two steps are nearer than these, which may be neighbours where an epoch ends.
    starts = np.arange(epochs) * ((lots - 1) * width + (width if is_repeated else 1))
    steps = (starts[:, None] + width * np.arange(lots)).ravel()
    size = int(steps[-1]) + 1
    shifts = np.append(by_lag[:size], np.zeros(max(0, size - by_lag.size)))
    shifts = np.append(shifts[:0:-1], shifts)
    slack = transform_slack(2 * size) * float(np.linalg.norm(shifts))

    def product(vector: Array) -> Array:
        spread = np.zeros(size)
        spread[steps] = vector
        image = fftconvolve(spread, shifts)[size - 1 : 2 * size - 1]
        return np.asarray(image[steps] + slack * float(np.linalg.norm(vector)))

    return steps.size, product


@lru_cache(maxsize=32)
def square_of_disclosed(
    strategy: Strategy, turn: int, width: int, is_repeated: bool = False
) -> float:
    """Return a bound of ‖C_S‖² for S of ⌊b/w⌋ steps of each epoch, w or more apart, cyclically.

    In squared clip norms; b is ``turn`` and w ``width``. Where they are ``is_repeated``
    they have the same places in all epochs. Raises ``TooLarge``.
    """
    count, product = _disclosed_steps(strategy, turn, width, is_repeated)
    iterations = ITERATIONS if strategy.steps <= MAX_ITERATED_STEPS else 1
    return largest_eigenvalue(product, count, iterations) * (1 + 8 * UNIT)


@lru_cache(maxsize=8)
def squares_by_lag(strategy: Strategy, turn: int) -> Array:
    """Return upper bounds of ⟨m_i, m_j⟩ for bins 0, ..., b - 1 apart, shape (b,).

    In squared clip norms. Raises ``TooLarge``.
    """
    epochs = -(-strategy.steps // turn)
    products = np.zeros((epochs + 1) * turn)
    by_lag = products_by_lag(strategy)
    products[: len(by_lag)] = by_lag
    rows = products.reshape(-1, turn)
    result = np.zeros(turn)
    for gap in range(epochs):
        result += (epochs - gap) * rows[gap]
        if gap:
            # The earlier bin's step is in a later epoch.
            result += (epochs - gap) * np.append(rows[gap][0], rows[gap - 1][:0:-1])
    return np.asarray(result * (1 + (2 * epochs + 4) * UNIT))


def _square_of_whole_epochs(strategy: Strategy, turn: int) -> float:
    """Return an upper bound of the square of a bin that is in whole epochs only.

    In squared clip norms. Raises ``TooLarge``.
    """
    epochs, by_lag = strategy.steps // turn, products_by_lag(strategy)
    same = by_lag[::turn][:epochs]
    numbers = (epochs - np.arange(len(same))) * np.where(np.arange(len(same)) > 0, 2.0, 1.0)
    return float(numbers @ same) * (1 + (2 * epochs + 8) * UNIT)


def products_by_lag(strategy: Strategy) -> Array:
    """Return the largest ⟨|c_i|, |c_j|⟩ of steps 0, 1, ... apart, rounded up, shape (n,).

    In squared clip norms; further apart it is zero. Raises ``TooLarge``.
    """
    steps, column = strategy.steps, strategy.strategy_coefficients
    if isinstance(strategy, Tree):
        levels = strategy.period.bit_length()
        # Two steps share a node of 2^l steps only if they are less than that apart.
        lengths = np.frexp(np.arange(strategy.period))[1]
        return np.asarray(levels - lengths, dtype=float)
    if column is None or strategy.bands <= MAX_BANDS:
        return np.array(products_of_columns(strategy))
    if steps > MAX_VECTOR:
        raise TooLarge(f"a strategy over {steps} steps")
    size = np.abs(column)
    overlaps = fftconvolve(size, size[::-1])[steps - 1 :]
    slack = transform_slack(steps) * float(size @ size)
    error = (1 + COEFFICIENT_ERROR) ** 2 / (1 - strategy.residual) ** 2
    return np.asarray(np.maximum(overlaps, 0.0) + slack) * error


def sum_of_products(strategy: Strategy) -> float:
    """Return the largest Σ ⟨|c_i|, |c_j|⟩ of a step i over all other steps j, rounded up.

    In squared clip norms. Raises ``TooLarge``.
    """
    products = products_by_lag(strategy)
    by_lag = 2 * float(products[1:].sum()) * (1 + len(products) * UNIT)
    if isinstance(strategy, Tree) or strategy.strategy_coefficients is not None:
        return by_lag
    # Columns differ, and those with the largest products may have few neighbours.
    columns = np.abs(strategy.strategy_matrix())
    totals = columns.T @ columns.sum(axis=1)
    rounding = rounding_of_products(strategy)
    others = totals - np.square(columns).sum(axis=0) + (rounding - 1) * totals
    return min(by_lag, float(others.max()) * rounding)


def nodes_of_levels(strategy: Strategy) -> tuple[int, ...]:
    """Return the most steps of a node of each level of a tree; nothing for other strategies."""
    if not isinstance(strategy, Tree):
        return ()
    return tuple(min(1 << level, strategy.steps) for level in range(strategy.period.bit_length()))
