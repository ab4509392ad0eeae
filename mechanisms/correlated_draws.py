"""How a record is drawn into the steps of a phase whose noise is correlated, scheme by scheme.

Another sampling scheme is a function here and an entry of ``_DRAWS``, and one of
``strategies.participation`` for the patterns of steps that it draws.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from affidavit.mechanisms.samplers import (
    Sampled,
    distance_of,
    is_amplified,
    removal_moves_records,
    sample,
    subsampled_pair,
)
from affidavit.mechanisms.strategies.participation import lots_in_turn
from affidavit.mechanisms.strategies.strategy import Strategy
from affidavit.plan import (
    MAX_BINS,
    Gaussian,
    Leaf,
    Plan,
    PoissonSubsampledGaussian,
    SubsampledPair,
    schedule,
)

Route = Literal["gaussian", "cyclic_poisson", "white_noise", "balls_in_bins"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """What is known of the steps of a record before the run's length and strategy are.

    ``turn`` is b, after which its turn may come again, and ``claimed`` what is said of the phase.
    ``step`` is a step in which it may be, where being drawn for it amplifies, and ``fresh``
    whether every step is one. A record that may be in a step is with ``probability``, None
    where it certainly is or ``step`` says it. ``allows`` is the route of a strategy that is not
    certified as one Gaussian or by ``step``. ``in_turn``: strategies may restart at each turn.
    """

    turn: int
    claimed: Sampled
    step: Sampled | None = None
    fresh: bool = False
    probability: Fraction | None = None
    in_turn: bool = False
    allows: Callable[[Strategy], Route] = lambda _: "gaussian"


def draw_of(plan: Plan, index: int) -> Draw:
    """The draws of phase ``index``; raises ``RefusedPlan``."""
    result = _DRAWS[plan.phases[index].sampling.scheme](plan, index)
    chance = result.probability
    return replace(result, probability=None) if chance is not None and chance >= 1 else result


def _in_fresh_lots(plan: Plan, index: int) -> Draw:
    result = sample(plan, index)
    if result.probability == 1:
        return _in_every_step(plan, index)
    return Draw(turn=1, claimed=result, step=result, fresh=True)


def _in_every_step(plan: Plan, _index: int) -> Draw:
    return Draw(turn=1, claimed=_unsampled(plan, 1, "every record is in every lot"))


def _in_one_order(plan: Plan, index: int) -> Draw:
    if plan.adjacency == "add_remove":
        raise removal_moves_records(plan, index)
    turn = lots_in_turn(plan, plan.phases[index])
    assumption = (
        "each record is in exactly one lot of each epoch, at the same place in every epoch; what "
        "does not fill a last lot is left out; no amplification by shuffling is claimed"
    )
    return Draw(turn=turn, claimed=_unsampled(plan, turn, assumption), in_turn=True)


def _in_random_orders(plan: Plan, index: int) -> Draw:
    known = _in_one_order(plan, index)
    assumption = (
        "each record is in exactly one lot of each epoch; no amplification by shuffling is claimed"
    )
    return replace(
        known,
        claimed=replace(known.claimed, assumption=assumption),
        probability=schedule.sampling_probability(plan, plan.phases[index]),
    )


def _in_bins(plan: Plan, index: int) -> Draw:
    turn = lots_in_turn(plan, plan.phases[index])
    assumption = (
        "each record is thrown into one uniformly random lot of the epoch, independently of all "
        "other records, and is in that lot in every epoch of its phase; another phase throws the "
        "records anew"
    )

    def allows(strategy: Strategy) -> Route:
        bins = is_amplified(plan) and strategy.is_nonnegative and turn <= MAX_BINS
        return "balls_in_bins" if bins else "gaussian"

    return Draw(
        turn=turn,
        claimed=_unsampled(plan, turn, assumption),
        probability=Fraction(1, turn),
        in_turn=True,
        allows=allows,
    )


def _in_groups(plan: Plan, index: int) -> Draw:
    phase = plan.phases[index]
    turn = lots_in_turn(plan, phase)
    probability = schedule.sampling_probability(plan, phase) * turn
    assumption = (
        "each record belongs to one group for the whole run, chosen independently of all other "
        "records (by a hash or a draw of its own; under zero_out an equal split will do); step t "
        "takes each record of group t mod b independently with probability p, and the sum is "
        "divided by the fixed expected lot size"
    )
    claimed = replace(_unsampled(plan, turn, assumption), probability=float(probability))
    amplified = is_amplified(plan)
    return Draw(
        turn=turn,
        claimed=claimed,
        step=replace(claimed, event=_poisson_step(probability)) if amplified else None,
        probability=probability,
        in_turn=True,
        allows=lambda strategy: (
            "cyclic_poisson" if amplified and strategy.bands <= turn else "gaussian"
        ),
    )


def _apart(plan: Plan, index: int) -> Draw:
    """A step's draw depends on those before, and is at most what ``step`` is."""
    phase = plan.phases[index]
    most, apart = schedule.highest_probability(plan, phase), phase.sampling.separation
    assert apart is not None
    assumption = (
        "a record that took part in none of the last b - 1 steps takes part in a step with "
        "probability p, independently of all other records, and is not drawn otherwise; before "
        "the first step records have waited as after many steps (a warm start; the upper end holds "
        "for any start); the sum is divided by the fixed expected lot size"
    )
    claimed, step = _unsampled(plan, apart, assumption), None
    if plan.dataset.records_per_unit == 1 and most < 1:
        claimed = step = Sampled(
            event=_poisson_step(most, subsampled_pair(plan)),
            probability=schedule.double_up(most),
            distance=distance_of(plan),
            assumption=assumption,
        )
    return Draw(
        turn=1,
        claimed=claimed,
        step=step,
        fresh=step is not None,
        probability=schedule.sampling_probability(plan, phase),
    )


def _unsampled(plan: Plan, apart: int, assumption: str) -> Sampled:
    distance = distance_of(plan)
    return Sampled(
        event=lambda joint: Gaussian(noise_multiplier=joint / distance),
        times=lambda steps: -(-steps // apart),
        probability=None,
        distance=distance,
        assumption=assumption,
    )


def _poisson_step(
    probability: Fraction, pair: SubsampledPair = "add_remove"
) -> Callable[[float], Leaf]:
    if probability >= 1:
        return lambda joint: Gaussian(noise_multiplier=joint)
    rounded = schedule.double_up(probability)
    return lambda joint: PoissonSubsampledGaussian(
        sampling_probability=rounded, noise_multiplier=joint, pair=pair
    )


_DRAWS: dict[str, Callable[[Plan, int], Draw]] = {
    "poisson": _in_fresh_lots,
    "truncated_poisson": _in_fresh_lots,
    "fixed_size": _in_fresh_lots,
    "full_batch": _in_every_step,
    "cyclic": _in_one_order,
    "shuffled": _in_random_orders,
    "balls_in_bins": _in_bins,
    "cyclic_poisson": _in_groups,
    "b_min_sep": _apart,
}
