"""Sensitivity of a strategy under what a sampler draws: one step an epoch, and users of many lots.

Every strategy bounds patterns of a fixed or a least distance itself (``sensitivity``). Here are the
patterns that depend on epochs (docs/theorems/correlated-noise.md, Theorem 19), from X = CᵀC:

**One step in each epoch** (``one_per_epoch``). With r_i(e) = max over j in epoch e of |X_ij|,

    sens² ≤ max over i_0, i_1, ... of Σ_e (X_ii + Σ_{|e'-e| ≥ 2} r_i(e')) + 2 Σ_e |X_{i_e i_{e+1}}|,

a dynamic programme over the epochs, exact for two of them. For a Toeplitz C of many steps |X_ij| is
bounded by the largest entry of no smaller lag.

**Records of a user that fill w > 1 lots of an epoch.** Step t is moved by n_t ≤ 1, and Σ n_t ≤ w
in each epoch. The worst n has ⌊w⌋ ones an epoch, and w - ⌊w⌋ in one more step. With h_i the largest
Σ_j |X_ij| n_j, sens² ≤ max Σ n_i h_i; also sens ≤ w times that of one lot, and
sens² ≤ ‖C‖² Σ n_t², which is exact for independent noise.

>>> from fractions import Fraction
>>> from affidavit.mechanisms.strategies.bidiagonal import Bidiagonal
>>> from affidavit.mechanisms.strategies.toeplitz import identity
>>> thrice = Participation.one_per_epoch(participations=3, epoch=10)
>>> round(pattern_sensitivity(Bidiagonal.of(0.9, steps=30), thrice).value, 6)
5.5198
>>> filled = Participation(schema="fixed_epoch", separation=9, lots_filled=Fraction(5, 2))
>>> round(pattern_sensitivity(identity(steps=9), filled).value ** 2, 9)
2.25
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction

import numpy as np

from affidavit.mechanisms.strategies.numerics import (
    UNIT,
    Array,
    fftconvolve,
    gamma,
    root_down,
    root_up,
    transform_slack,
)
from affidavit.mechanisms.strategies.participation import Participation
from affidavit.mechanisms.strategies.sensitivity import (
    Sensitivity,
    Unaffordable,
    best_signs,
    inverse_sensitivity,
    toeplitz_gram,
)
from affidavit.mechanisms.strategies.strategy import (
    COEFFICIENT_ERROR,
    MAX_VECTOR,
    Strategy,
    TooLarge,
)
from affidavit.mechanisms.strategies.white_noise import max_stretch

MAX_GRAM_STEPS = 2048
"""Steps up to which X is formed, in about a second."""
MAX_CHAIN_WORK = 5_000_000
"""Pairs of steps of neighbouring epochs up to which they are compared one by one."""
MAX_CLIMBS = 50
"""Steps of the search for an allocation of records to lots."""


def pattern_sensitivity(strategy: Strategy, participation: Participation) -> Sensitivity:
    """Return sens of ``strategy`` in clip norms of one full lot; raises ``Unaffordable``."""
    one_lot = replace(participation, lots_filled=Fraction(1))
    if participation.epoch is not None:
        result = _one_per_epoch(strategy, one_lot)
    else:
        try:
            result = strategy.sensitivity(one_lot)
        except Unaffordable:
            result = strategy.sensitivity(one_lot.by_separation)
    return result if participation == one_lot else _several_lots(strategy, participation, result)


def _one_per_epoch(strategy: Strategy, at: Participation) -> Sensitivity:
    epochs, epoch = at.max_participations(strategy.steps), at.turn
    in_order = Participation.fixed_epoch(participations=epochs, separation=epoch)
    bounds, attained = [], 0.0
    with suppress(Unaffordable):
        bounds.append(strategy.sensitivity(at.by_separation).value)
    with suppress(Unaffordable):
        attained = strategy.sensitivity(in_order).attained
    if strategy.steps <= MAX_GRAM_STEPS:
        gram, doubt = _gram(strategy)
        squared, pattern = _worst_chain(np.abs(gram) + doubt, epoch)
        weights = np.zeros(strategy.steps)
        weights[pattern] = 1.0
        reached = _reached(*_visible_gram(strategy, gram, doubt), weights)
        by_epoch = Sensitivity(value=root_up(squared, strategy.steps + 8), attained=reached)
    elif strategy.steps <= MAX_VECTOR and strategy.strategy_coefficients is not None:
        squared = _chain_by_lag(np.abs(strategy.strategy_coefficients), epochs, epoch)
        by_epoch = Sensitivity(value=root_up(squared, 4 * epochs + 8), attained=0.0)
    elif bounds:
        return Sensitivity(value=bounds[0], attained=attained)
    else:
        raise Unaffordable(f"bounding {epochs} epochs of a strategy without structure")
    by_epoch = inverse_sensitivity(by_epoch, strategy.residual)
    return Sensitivity(
        value=min([by_epoch.value, *bounds]), attained=max(by_epoch.attained, attained)
    )


def _gram(strategy: Strategy) -> tuple[Array, Array]:
    """Return X, shape (T, T), and how far each entry may be wrong."""
    column = strategy.strategy_coefficients
    if column is None:
        return _gram_of(strategy.strategy_matrix())
    doubt = (gamma(len(column)) + COEFFICIENT_ERROR) * float(column @ column)
    gram = toeplitz_gram(column, range(len(column)))
    return gram, np.full_like(gram, doubt)


def _visible_gram(strategy: Strategy, gram: Array, doubt: Array) -> tuple[Array, Array]:
    """Return X of the rows of C that an observer sees, by default all."""
    if type(strategy).visible_matrix is Strategy.visible_matrix:
        return gram, doubt
    return _gram_of(strategy.visible_matrix())


def _gram_of(matrix: Array) -> tuple[Array, Array]:
    gram = matrix.T @ matrix
    norms = np.sqrt(np.diagonal(gram)) * (1 + gamma(len(matrix)))
    return gram, (gamma(len(matrix)) + COEFFICIENT_ERROR) * np.outer(norms, norms)


def _worst_chain(size: Array, epoch: int) -> tuple[float, list[int]]:
    """Return the bound of sens² from |X|, shape (T, T), and the pattern of the programme."""
    steps, starts = len(size), np.arange(0, len(size), epoch)
    reach = np.maximum.reduceat(size, starts, axis=1)
    apart = np.abs(np.arange(len(starts)) - np.arange(steps)[:, None] // epoch)
    alone = np.diagonal(size) + np.where(apart >= 2, reach, 0.0).sum(axis=1)
    best, earlier = alone[:epoch], []
    for start in starts[1:]:
        sums = best[:, None] + 2 * size[start - epoch : start, start : start + epoch]
        earlier.append(np.argmax(sums, axis=0))
        best = alone[start : start + epoch] + np.max(sums, axis=0)
    place = int(np.argmax(best))
    pattern = [int(starts[-1]) + place]
    for start, choice in zip(starts[-2::-1], reversed(earlier), strict=True):
        place = int(choice[place])
        pattern.append(int(start) + place)
    return float(np.max(best)), pattern


def _chain_by_lag(column: Array, epochs: int, epoch: int) -> float:
    """Return the bound of sens² of a Toeplitz C ≥ 0 by the largest entries of each lag.

    Neighbouring epochs are bounded like distant ones beyond ``MAX_CHAIN_WORK``.
    """
    steps, chained = len(column), epochs * epoch**2 <= MAX_CHAIN_WORK
    overlaps = fftconvolve(column, column[::-1])[steps - 1 :]
    overlaps += transform_slack(steps) * float(column @ column)
    lags = np.zeros((epochs + 1) * epoch + 1)
    lags[:steps] = np.maximum.accumulate(overlaps[::-1])[::-1]
    places = np.arange(epoch)
    after, before = np.zeros((2, epochs, epoch))
    for gap in range(1, epochs):
        counted = 0.0 if gap == 1 and chained else 1.0
        after[gap] = after[gap - 1] + counted * lags[gap * epoch - places]
        before[gap] = before[gap - 1] + counted * lags[(gap - 1) * epoch + places + 1]
    pairs = 2 * lags[epoch + places - places[:, None]] if chained else np.zeros((1, 1))
    best = np.zeros(epoch)
    for here in range(epochs):
        joined = np.max(best[:, None] + pairs, axis=0) if chained and here else np.max(best)
        best = lags[0] + after[epochs - 1 - here] + before[here] + joined
    return float(np.max(best)) * (1 + COEFFICIENT_ERROR) ** 2


def _several_lots(strategy: Strategy, at: Participation, one_lot: Sensitivity) -> Sensitivity:
    """Return sens for a unit that fills several lots of an epoch, from that of ``one_lot``."""
    steps, squares = strategy.steps, float(at.squares(strategy.steps))
    bounds = [float(at.lots_filled) * one_lot.value * (1 + 4 * UNIT)]
    attained = one_lot.attained
    with suppress(TooLarge):
        bounds.append(max_stretch(strategy, 1) * math.sqrt(squares) * (1 + 4 * UNIT))
    if steps <= MAX_GRAM_STEPS:
        gram, doubt = _gram(strategy)
        rows = _filled_rows(np.abs(gram) + doubt, at)
        squared = float(_filled(rows, at).sum())
        reached = _climb(*_visible_gram(strategy, gram, doubt), at, rows)
        by_epoch = Sensitivity(value=root_up(squared, 4 * steps), attained=reached)
        by_epoch = inverse_sensitivity(by_epoch, strategy.residual)
        bounds.append(by_epoch.value)
        attained = max(attained, by_epoch.attained)
    else:
        attained = max(attained, attained_in_first_lots(strategy, at))
    return Sensitivity(value=min(bounds), attained=attained)


def attained_in_first_lots(strategy: Strategy, at: Participation) -> float:
    """Return what a unit attains in the first lots of each epoch, in lots, rounded down.

    It is 0 if C has no structure and too many steps.
    """
    steps = strategy.steps
    shares = _shares(np.arange(steps, 0.0, -1.0), at)
    if steps <= MAX_GRAM_STEPS:
        seen = _reached(*_visible_gram(strategy, *_gram(strategy)), shares)
    elif steps <= MAX_VECTOR and (column := strategy.strategy_coefficients) is not None:
        moved = fftconvolve(column, shares)[:steps]
        norms = float(np.linalg.norm(column)) * float(np.linalg.norm(shares))
        spare = (transform_slack(steps) * math.sqrt(steps) + COEFFICIENT_ERROR) * norms
        seen = max(0.0, root_down(float(moved @ moved), steps) - 2 * spare)
    else:
        return 0.0
    return seen * (1 - 4 * UNIT) / (1 + strategy.residual)


def _by_epoch(values: Array, at: Participation) -> Array:
    """Return ``values`` of T steps in the last axis by epoch and place, with zeros at the end.

    Under ``fixed_epoch``, the sum over epochs, as one.
    """
    steps = values.shape[-1]
    epochs = -(-steps // at.turn)
    result = np.zeros((*values.shape[:-1], epochs * at.turn))
    result[..., :steps] = values
    result = result.reshape(*values.shape[:-1], epochs, at.turn)
    return result.sum(axis=-2, keepdims=True) if at.schema == "fixed_epoch" else result


def _filled(values: Array, at: Participation) -> Array:
    """Return the largest Σ n_t v_t of each epoch, for v ≥ 0 of T steps in the last axis."""
    ordered = -np.sort(-_by_epoch(values, at), axis=-1)
    whole = min(math.floor(at.lots_filled), at.turn)
    result = ordered[..., :whole].sum(axis=-1)
    if whole < at.turn:
        result += float(at.lots_filled - whole) * (1 + 4 * UNIT) * ordered[..., whole]
    return np.asarray(result)


def _filled_rows(size: Array, at: Participation) -> Array:
    """Return h_i, shape (T,), from |X|; under ``fixed_epoch``, n is the same in each epoch."""
    return np.asarray(_filled(size, at).sum(axis=-1))


def _shares(scores: Array, at: Participation) -> Array:
    """Return n, shape (T,), for the steps of the highest ``scores`` of each epoch."""
    whole = min(math.floor(at.lots_filled), at.turn)
    by_epoch = _by_epoch(scores, at)
    order = np.argsort(-by_epoch, axis=-1, kind="stable")
    shares = np.zeros(by_epoch.shape)
    np.put_along_axis(shares, order[..., :whole], 1.0, axis=-1)
    if whole < at.turn:
        rest = float(at.lots_filled - whole) * (1 - 4 * UNIT)
        np.put_along_axis(shares, order[..., whole : whole + 1], rest, axis=-1)
    epochs = -(-len(scores) // at.turn)
    return np.broadcast_to(shares, (epochs, at.turn)).ravel()[: len(scores)].copy()


def _climb(gram: Array, doubt: Array, at: Participation, scores: Array) -> float:
    """Return what one allocation of records attains, rounded down.

    The search climbs to the steps that its own records pull at most: Σ n_i n_j X_ij is convex.
    """
    best = 0.0
    for start in (scores, np.arange(len(gram), 0.0, -1.0)):
        weights = _shares(start, at)
        for _ in range(MAX_CLIMBS):
            pull = gram @ weights
            climbed = np.where(pull < 0, -1.0, 1.0) * _shares(np.abs(pull), at)
            if np.array_equal(climbed, weights):
                break
            weights = climbed
        best = max(best, _reached(gram, doubt, np.abs(weights)))
    return best


def _reached(gram: Array, doubt: Array, weights: Array) -> float:
    """Return √ of the largest Σ s_i s_j n_i n_j X_ij found for these n ≥ 0, rounded down."""
    taken = np.flatnonzero(weights)
    pairs = np.outer(weights[taken], weights[taken])
    block = pairs * gram[np.ix_(taken, taken)]
    signs = best_signs(block)
    size = float(np.sum(np.abs(block)))
    unsure = float(np.sum(pairs * doubt[np.ix_(taken, taken)])) + 2 * gamma(block.size) * size
    return root_down(float(signs @ block @ signs) - unsure, 4)
