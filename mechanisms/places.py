"""Places: in a fixed order a record has one place in all phases.

``cyclic`` lots follow the order of the data set in every phase. A phase alone costs a record at its
worst place; a run of several phases costs at least what it does at the best single place of an
attacker. That is the first place unless the strategies of the phases disagree.

>>> from affidavit.mechanisms.strategies.toeplitz import Toeplitz
>>> lengths_by_place(Toeplitz.from_strategy([1.0, 0.5], steps=4), turn=2).round(3)
array([1.581, 1.5  ])

Reference: docs/theorems/correlated-noise.md, Theorem 9.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from affidavit.mechanisms.strategies.numerics import Array, gamma
from affidavit.mechanisms.strategies.sensitivity import sum_shifts
from affidavit.mechanisms.strategies.strategy import COEFFICIENT_ERROR, Strategy
from affidavit.plan import Event, Gaussian, Plan, schedule

if TYPE_CHECKING:
    from affidavit.mechanisms.lowering import LoweredPhase

MAX_PLACES = 4096
"""Places that are compared; the first is always one of them."""


def at_one_place(
    plan: Plan, phases: Sequence[LoweredPhase], joints: Sequence[float], attained: Sequence[Event]
) -> tuple[Event, ...]:
    """Return the effect of a unit on each phase, at one place in all phases of a fixed order.

    ``attained`` are the effects at the worst place of each phase, returned for other phases and if
    no two phases have a place in common. ``joints`` are σ_joint of the phases.
    """
    in_order = [
        index for index, phase in enumerate(plan.phases) if phase.sampling.scheme == "cyclic"
    ]
    if len(in_order) < 2 or all(phases[index].correlation is None for index in in_order):
        return tuple(attained)
    moves = {index: _moves_by_lot(plan, index, phases[index]) for index in in_order}
    lots = {index: plan.phases[index].sampling.lot_size or 1 for index in in_order}
    used = min(lots[index] * len(moves[index]) for index in in_order)
    starts = sorted({place for lot in lots.values() for place in range(0, used, lot)})[:MAX_PLACES]
    # A user's records are in one lot, or a part of them fills the smallest lot.
    records = min(plan.dataset.records_per_unit, *lots.values())
    shared = [
        place for place in starts if all(place % lot + records <= lot for lot in lots.values())
    ]

    def square(place: int) -> float:
        return sum(
            float(moves[index][place // lots[index]] / joints[index]) ** 2 for index in in_order
        )

    best = max(shared, key=square)
    result = list(attained)
    for index in in_order:
        reach = records * float(moves[index][best // lots[index]])
        result[index] = Gaussian(noise_multiplier=joints[index] / reach * (1 + 4 * 2.0**-53))
    return tuple(result)


def _moves_by_lot(plan: Plan, index: int, phase: LoweredPhase) -> Array:
    """Return how far a record moves the phase by its lot, in clip norms, rounded down."""
    assert phase.steps is not None
    distance = 2.0 if plan.adjacency == "replace_one" else 1.0
    turn = schedule.lots_in_turn(plan, plan.phases[index])
    if phase.correlation is not None:
        return distance * lengths_by_place(phase.correlation.at(phase.steps).strategy, turn)
    lots = np.arange(min(turn, phase.steps))
    times = (phase.steps - lots + turn - 1) // turn
    return np.asarray(distance * np.sqrt(times) * (1 - 2.0**-52))


@lru_cache(maxsize=8)
def lengths_by_place(strategy: Strategy, turn: int) -> Array:
    """Return ‖Σ_j s_j c_(o + jb)‖ for the places o < b = ``turn``, rounded down.

    The signs s_j are equal or alternate, whichever is longer. Shape (min(b, T),), in clip norms.
    Raises ``TooLarge`` if C has no structure and too many steps.
    """
    column, steps = strategy.strategy_coefficients, strategy.steps
    count, places = -(-steps // turn), min(turn, steps)
    if column is None:
        matrix = strategy.visible_matrix()
        parts = [matrix[:, place::turn] for place in range(places)]
        lengths = np.array([_longest_sum(part) for part in parts])
        longest = np.array([np.linalg.norm(np.abs(part).sum(axis=1)) for part in parts])
    else:
        sums = [sum_shifts(column, count, turn), _alternating_sum(column, count, turn)]
        # A later place sees the same sum, cut at the end of the run.
        lengths = np.max([_lengths_of_parts(one, places) for one in sums], axis=0)
        longest = _lengths_of_parts(sum_shifts(np.abs(column), count, turn), places)
    slack = gamma(8 * steps + 64) + 4 * COEFFICIENT_ERROR + 2.2 * strategy.residual
    return np.asarray(np.maximum(lengths - slack * longest, 0.0))


def _longest_sum(columns: Array) -> float:
    """Return the length of the sum of ``columns`` with the best of a few signs."""
    count = columns.shape[1]
    like_first = np.where(columns.T @ columns[:, 0] < 0, -1.0, 1.0)
    signs = np.stack([np.ones(count), (-1.0) ** np.arange(count), like_first], axis=1)
    return float(np.linalg.norm(columns @ signs, axis=0).max())


def _alternating_sum(column: Array, count: int, turn: int) -> Array:
    """Return Σ_{j < count} (-1)^j S^(jb) c, shape (T,)."""
    if count == 1:
        return column
    change = column.copy()
    change[turn:] -= column[: len(column) - turn]
    result = sum_shifts(change, count // 2, 2 * turn)
    if count % 2:
        result[turn * (count - 1) :] += column[: len(column) - turn * (count - 1)]
    return result


def _lengths_of_parts(total: Array, places: int) -> Array:
    return np.asarray(np.sqrt(np.cumsum(total**2))[::-1][:places])
