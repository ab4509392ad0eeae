"""Places: in a fixed order a record has one place in all phases.

``cyclic`` lots follow the order of the data set in every phase. A phase alone costs a record at its
worst place; a run of several phases costs at least what it does at the best single place of an
attacker. That is the first place unless the strategies of the phases disagree.

Reference: docs/theorems/correlated-noise.md, Theorem 9.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from affidavit.mechanisms.strategies.epoch_patterns import attained_in_first_lots
from affidavit.mechanisms.strategies.lengths_by_place import lengths_by_place
from affidavit.mechanisms.strategies.numerics import Array
from affidavit.mechanisms.strategies.strategy import TooLarge
from affidavit.plan import (
    Plan,
    events,
    schedule,
)

if TYPE_CHECKING:
    from affidavit.mechanisms.lowered_phase import LoweredPhase

MAX_PLACES = 4096
"""Places that are compared; the first is always one of them."""


def at_one_place(
    plan: Plan,
    phases: Sequence[LoweredPhase],
    joints: Sequence[float],
    attained: Sequence[events.Event],
) -> tuple[events.Event, ...]:
    """Return the effect of a unit on each phase, at one place in all phases of a fixed order.

    ``attained`` are the effects at the worst place of each phase, returned for other phases. If
    places are too costly to compare, the unit contributes to one of the phases only. ``joints`` are
    σ_joint of the phases.
    """
    in_order = [
        index for index, phase in enumerate(plan.phases) if phase.sampling.scheme == "cyclic"
    ]
    if len(in_order) < 2 or all(phases[index].correlation is None for index in in_order):
        return tuple(attained)
    result = list(attained)
    try:
        moves = _moves_at_one_place(plan, phases, joints, in_order)
    except TooLarge:
        noise = {
            index: effect.noise_multiplier
            for index in in_order
            if isinstance(effect := attained[index], events.Gaussian)
        }
        worst = min(noise, key=noise.__getitem__)
        for index in in_order:
            if index != worst:
                result[index] = events.Composed(events=())
        return tuple(result)
    for index, move in moves.items():
        result[index] = events.Gaussian(noise_multiplier=joints[index] / move * (1 + 4 * 2.0**-53))
    return tuple(result)


def _moves_at_one_place(
    plan: Plan, phases: Sequence[LoweredPhase], joints: Sequence[float], in_order: Sequence[int]
) -> dict[int, float]:
    """Return how far the unit moves the phases ``in_order``; raises ``TooLarge``.

    Phases that it moves as far as at their worst place are left out.
    """
    lots = {index: plan.phases[index].sampling.lot_size or 1 for index in in_order}
    records = plan.dataset.records_per_unit
    if records <= min(lots.values()):
        by_lot = {index: _moves_by_lot(plan, index, phases[index]) for index in in_order}
        place = _best_place(by_lot, lots, joints, records)
        return {index: records * float(by_lot[index][place // lots[index]]) for index in in_order}
    # The records are the first of the data set, where independent noise shows most.
    result = {}
    for index in in_order:
        phase = phases[index]
        if phase.correlation is not None and phase.steps is not None:
            at = phase.correlation.at(phase.steps)
            seen = attained_in_first_lots(at.strategy, at.participation)
            seen = seen or float(lengths_by_place(at.strategy, at.turn)[0])
            result[index] = at.distance * seen
    return result


def _best_place(
    by_lot: Mapping[int, Array], lots: Mapping[int, int], joints: Sequence[float], records: int
) -> int:
    """Return the place with the largest μ² of the phases whose lot holds all of a unit's records.

    ``by_lot`` are the moves of each phase by lot, and ``lots`` the sizes of its lots.
    """
    used = min(lots[index] * len(moves) for index, moves in by_lot.items())
    starts = sorted({place for lot in lots.values() for place in range(0, used, lot)})[:MAX_PLACES]

    def square(place: int) -> float:
        return sum(
            float(moves[place // lots[index]] / joints[index]) ** 2
            for index, moves in by_lot.items()
        )

    fitting = (
        place for place in starts if all(place % lot + records <= lot for lot in lots.values())
    )
    return max(fitting, key=square)


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
