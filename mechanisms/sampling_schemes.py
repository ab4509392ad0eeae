"""Samplers: what may be claimed for each sampling scheme under each adjacency.

A scheme is one entry of ``SCHEMES``: one function for independent noise, which returns the cost
of one release and the number of releases, and one for correlated noise, which returns how a
record is drawn over the whole run. A pair that no theorem covers is refused. Distances are in
clip norms: replacing a record moves the sum by up to 2C; adding, removing or zeroing one, by up
to C.

==================  =====================  ====================================================
scheme              adjacency              certified as, with independent noise
==================  =====================  ====================================================
poisson             add_remove, zero_out   subsampled Gaussian at q, per step; for users with
                                           several records, a mixture over how many are drawn
poisson             replace_one            the replace-one pair at q, per step
full_batch          any                    Gaussian, per step
cyclic              zero_out, replace_one  Gaussian, per participation (k = epochs); for users of
                                           more records than a lot, Gaussian for the lots that they
                                           fill
shuffled            zero_out, replace_one  the same, or one sample without replacement per epoch,
                                           of all its lots, or one random allocation to these
fixed_size          zero_out, replace_one  sampling without replacement, per step, or under zero_out
                                           a record in the place of another
truncated_poisson   any                    truncated Poisson at q and the largest lot, per step
balls_in_bins       add_remove, zero_out   one random allocation to b bins at σ_joint / √E for E
                                           epochs, and at σ_joint / √(E+1) in the bins of a last,
                                           partial one; with ``bins_drawn: each_epoch``, E
                                           allocations at σ_joint and those of the last epoch
balls_in_bins       replace_one            Gaussian, per epoch, or a replaced record, or a chain
                                           of neighbours (``lowering``)
random_allocation   add_remove, zero_out   k random allocations, one step in each of k blocks of
                                           ⌊T/k⌋ or ⌈T/k⌉ steps
random_allocation   replace_one            Gaussian, k times, or a chain of neighbours
==================  =====================  ====================================================

Given the permutation or the bins, the run is one Gaussian mechanism with μ = √k / σ_joint, and
mixing over them cannot raise δ(ε). Shuffling amplifies by what an epoch leaves out: lots, or a
record that others can stand in for. Lower bounds for such runs come from attacks
(docs/theorems/shuffled-lots.md).

References: docs/theorems/poisson-add-remove.md, poisson-replace-one.md, truncated-poisson.md and
without-replacement.md; arXiv:2210.00597 and arXiv:2403.17673 (shuffled batches); dp_accounting's
``PoissonSampledDpEvent`` and ``SampledWithoutReplacementDpEvent``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from affidavit.mechanisms.fixed_size_lots import FixedSize, at_least_drawn
from affidavit.mechanisms.strategies.lots_apart import log_divergence
from affidavit.mechanisms.strategies.participation import records_per_lot, sampler_participation
from affidavit.mechanisms.strategies.strategy import has_gram
from affidavit.plan import (
    Phase,
    Plan,
    RefusedPlan,
    Sampling,
    events,
    schedule,
)

if TYPE_CHECKING:
    from affidavit.mechanisms.strategies.strategy import Strategy

DISTANCE = 2.0
"""How far a record moves a lot in which it takes the place of another, in clip norms."""
SAMPLED_SHARES = {"replace_one": 0.9, "zero_out": 0.5}
"""Share of the records in the lots of an epoch below which they are bounded as a sample. A larger
sample costs as much as a known lot, which moves half as far if a record is set to zero."""
_MAX_RATIO = 0.5
"""The estimated divergence of a slow bound, over that of a known lot, up to which it is computed.
"""
_UP, _DOWN = 1 + 4 * 2.0**-53, 1 - 4 * 2.0**-53
"""Round a root, a product and a quotient."""
Place = Literal["replace_one", "zero_out"]
Route = Literal["gaussian", "cyclic_poisson", "white_noise", "balls_in_bins"]
"""How a run of correlated noise is certified (``correlation``)."""
StepEvent = Callable[[float], events.Leaf]
"""From σ_joint (noise standard deviation over clip norm, all blocks) to the event of a release."""
RunEvent = Callable[[float, int], events.Event]
"""From σ_joint and the steps to the event of the whole phase."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """The certified sampler of a phase: the cost of one release, and the number of releases.

    ``times`` maps steps to the number of releases that touch one record, each with ``probability``
    if it is sampled. ``distance`` is how far one record moves the sum, in clip norms, if the event
    is a plain Gaussian. ``run`` is the whole phase, if that is not ``event`` repeated ``times``.
    ``reach`` is how far one unit moves a run, if that is not ``distance`` · √``times``.
    ``attained`` is the effect of one record, if the event does not use how its lots are drawn.
    ``attack`` returns an epoch, or a record that is allocated to steps, whose effect bounds the
    loss from below, and the number of such.
    """

    event: StepEvent
    times: Callable[[int], int] = lambda steps: steps
    probability: float | None
    distance: float
    assumption: str
    run: RunEvent | None = None
    reach: Callable[[int], float] | None = None
    attained: RunEvent | None = None
    attack: Callable[[float, int], tuple[events.TestedSums, int]] | None = None

    def of_run(self, joint: float, steps: int) -> events.Event:
        """Return the event of a phase of ``steps`` at σ_joint."""
        if self.run is not None:
            return self.run(joint, steps)
        return events.Repeated(event=self.event(joint), count=self.times(steps))

    def attained_by_run(self, joint: float, steps: int) -> events.Event:
        """Return an effect of one record on the phase, which ``of_run`` bounds from above."""
        return (self.attained or self.of_run)(joint, steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSampler:
    """How a record is drawn over a phase of correlated noise, for any length and strategy.

    ``turn`` is b, the number of steps after which the turn of a record may come again, and
    ``claimed`` the sampler in the certificate. ``step`` is the sampler of a step in which the
    record may take part, if it amplifies; ``fresh`` is true if these are all steps.
    ``probability`` is that of the record in such a step, or None if it is certain or given by
    ``step``. ``strategies_restart`` is true if strategies may restart at each turn. ``route``
    returns the route of a strategy that is neither one Gaussian nor certified by ``step``.
    """

    turn: int
    claimed: Sampled
    step: Sampled | None = None
    fresh: bool = False
    probability: Fraction | None = None
    strategies_restart: bool = False
    route: Callable[[Strategy], Route] = lambda _: "gaussian"


@dataclass(frozen=True, kw_only=True, slots=True)
class SchemeSamplers:
    """The samplers of a scheme, with independent and with correlated noise."""

    independent: Callable[[Plan, int], Sampled] | None = None
    correlated: Callable[[Plan, int], RunSampler]


def with_simplest_sampling(plan: Plan, index: int) -> Plan:
    """Return ``plan`` with the simplest sampling that draws the same lots in phase ``index``.

    The same lots have several descriptions, and each theorem is about one of them. Lots of all
    records are full batches, one group and a separation of one are Poisson lots, and so are lots
    that are never cut. A cut sample of all records, and the only lot of each new order, are lots of
    a fixed size.
    """
    phase = plan.phases[index]
    sampling = _simplest_sampling(plan, phase)
    if sampling == phase.sampling:
        return plan
    changes = {"sampling": sampling, "steps": schedule.steps(plan, phase), "epochs": None}
    phases = list(plan.phases)
    phases[index] = phase.model_copy(update=changes)
    return plan.model_copy(update={"phases": tuple(phases)})


def _simplest_sampling(plan: Plan, phase: Phase) -> Sampling:
    sampling, size = phase.sampling, plan.dataset.size
    if phase.asks_for_lot_size or phase.asks_for_probability:
        return sampling
    scheme, lot, probability = sampling.scheme, sampling.lot_size, sampling.probability
    # Under add_remove one of two neighbours has more or fewer records than the plan says.
    has_fixed_size = plan.adjacency != "add_remove"
    if sampling.groups == 1 or sampling.separation == 1:
        scheme = "poisson"
    elif scheme == "truncated_poisson":
        most, largest = size or 0, sampling.max_lot_size or 0
        if not has_fixed_size:
            most += plan.dataset.records_per_unit - 1
        if largest > most:
            scheme = "poisson"
        elif has_fixed_size and schedule.sampling_probability(plan, phase) == 1:
            scheme, lot, probability = "fixed_size", largest, None
    elif (
        scheme == "shuffled"
        and has_fixed_size
        and 1
        in (
            schedule.lots_in_turn(plan, phase),
            schedule.steps(plan, phase),
        )
    ):
        scheme = "fixed_size"
    if scheme == "random_allocation" and sampling.participations == phase.steps:
        return Sampling(scheme="full_batch")
    takes_all = scheme in _EVERY_RECORD or (has_fixed_size and scheme in _EVERY_OF_FIXED_SIZE)
    if takes_all and (probability == 1 or (lot is not None and lot == size)):
        return Sampling(scheme="full_batch")
    return (
        sampling
        if scheme == sampling.scheme
        else Sampling(scheme=scheme, lot_size=lot, probability=probability)
    )


_EVERY_RECORD = "poisson", "balls_in_bins"
"""Schemes whose lots of the size of the data set have all records."""
_EVERY_OF_FIXED_SIZE = "fixed_size", "cyclic", "shuffled"
"""The same among neighbours of one size."""


def sample(plan: Plan, index: int) -> Sampled:
    """Return the sampler of phase ``index`` with independent noise; raises ``RefusedPlan``."""
    scheme = plan.phases[index].sampling.scheme
    if (sampler := SCHEMES[scheme].independent) is not None:
        return sampler(plan, index)
    supported = [name for name, scheme in SCHEMES.items() if scheme.independent is not None]
    raise _refused(
        plan,
        index,
        "unsupported",
        f"the sampling scheme {scheme} is not supported yet.",
        f"Supported: {', '.join(supported)}.",
    )


def sample_run(plan: Plan, index: int) -> RunSampler:
    """Return the sampler of phase ``index`` with correlated noise; raises ``RefusedPlan``."""
    result = SCHEMES[plan.phases[index].sampling.scheme].correlated(plan, index)
    probability = result.probability
    is_certain = probability is not None and probability >= 1
    return replace(result, probability=None) if is_certain else result


def distance_of(plan: Plan) -> float:
    """Return how far one privacy unit moves the sum of all records, in clip norms.

    The records of a user move it by at most the sum of their distances (triangle inequality).
    """
    return plan.dataset.records_per_unit * record_distance(plan)


def lot_distance(plan: Plan, index: int) -> float:
    """Return how far one privacy unit moves the sum of one lot of phase ``index``."""
    return records_per_lot(plan, index) * record_distance(plan)


def record_distance(plan: Plan) -> float:
    """Return how far one record moves a sum, in clip norms."""
    return 2.0 if plan.adjacency == "replace_one" else 1.0


def subsampled_pair(plan: Plan) -> events.SubsampledPair:
    """Return the dominating pair of a Poisson sample."""
    return "replace_one" if plan.adjacency == "replace_one" else "add_remove"


def is_amplified(plan: Plan) -> bool:
    """Whether neighbours differ in one record that one of them lacks.

    Balls in bins and cyclic Poisson sampling are proved to amplify only in this case.
    """
    return distance_of(plan) == 1


def _poisson(plan: Plan, index: int) -> Sampled:
    probability = schedule.double_up(schedule.sampling_probability(plan, plan.phases[index]))
    if probability >= 1:
        return _full_batch(plan, index)
    return Sampled(
        event=_draw_each_record(
            plan,
            index,
            plan.dataset.records_per_unit,
            (events.PoissonSubsampledGaussian, events.PoissonSampledGroupGaussian),
            sampling_probability=probability,
            pair=subsampled_pair(plan),
        ),
        probability=probability,
        distance=distance_of(plan),
        assumption="each record enters each lot independently with probability q, and the sum is "
        "divided by the fixed expected lot size, never by the realised one",
    )


def _draw_each_record(
    plan: Plan, index: int, records: int, kinds: tuple[Any, Any], **fields: Any
) -> StepEvent:
    """Return the event of a step that draws the records of a user one by one.

    ``kinds`` are the event classes for one record and for several. Raises ``RefusedPlan``.
    """
    if records > events.MAX_RECORDS:
        raise _refused(
            plan,
            index,
            "user_level_sampling",
            f"a user has up to {records} records, and sampling them one by one is accounted for at "
            f"most {events.MAX_RECORDS} records.",
            f"Keep at most {events.MAX_RECORDS} records a user, or sample users: clip each user's "
            "sum once, with contributions_per_user: 1.",
        )
    one, several = kinds
    kind = one if records == 1 else partial(several, records=records)
    return lambda joint: kind(noise_multiplier=joint, **fields)


def _full_batch(plan: Plan, _index: int) -> Sampled:
    distance = distance_of(plan)
    return Sampled(
        event=lambda joint: events.Gaussian(noise_multiplier=joint / distance),
        probability=1.0,
        distance=distance,
        assumption="every record is in every lot",
    )


def _fixed_order(plan: Plan, index: int) -> Sampled:
    if plan.adjacency == "add_remove":
        raise _removal_moves_records(plan, index)
    distance, phase = lot_distance(plan, index), plan.phases[index]

    def reach(steps: int) -> float:
        squares = sampler_participation(plan, index, steps).squares(steps)
        return distance * math.sqrt(squares) * (1 + 4 * 2.0**-53)

    in_one_lot = distance == distance_of(plan)
    return Sampled(
        event=lambda joint: events.Gaussian(noise_multiplier=joint / distance),
        times=lambda steps: schedule.participations(plan, phase, steps),
        probability=None,
        distance=distance,
        run=None
        if in_one_lot
        else lambda joint, steps: events.Gaussian(noise_multiplier=joint / reach(steps)),
        reach=None if in_one_lot else reach,
        assumption="each record is in exactly one lot of each epoch; no amplification by "
        "shuffling is claimed",
    )


_SHUFFLED_WITH_ALL = (
    "each epoch has an order of its own, uniformly random and independent of the data, and each "
    "record is in exactly one lot of it, the last of which may be smaller; each phase begins a new "
    "epoch; no amplification by shuffling is claimed"
)
_SHUFFLED = (
    "each epoch has an order of its own, uniformly random and independent of the data, and each "
    "record is in at most one lot of it; what does not fill a last lot is left out; each phase "
    "begins a new epoch; shuffling is claimed to amplify by the lots and the records that an epoch "
    "leaves out, and by nothing else"
)


def sample_of_lots(
    plan: Plan, index: int, released: int, joint: float
) -> events.WithoutReplacementGaussian | None:
    """Return what the first ``released`` lots of a shuffled epoch cost as one sample.

    None for users of several records, and if a known lot costs no more. Source:
    docs/theorems/shuffled-lots.md, Theorem 2.
    """
    size, lot = _sizes(plan, index)
    sample = released * lot
    if plan.dataset.records_per_unit > 1 or sample >= size * SAMPLED_SHARES[plan.adjacency]:
        return None
    return events.WithoutReplacementGaussian(
        dataset_size=size, sample_size=sample, noise_multiplier=joint
    )


def is_placed_at_random(plan: Plan, index: int, steps: int) -> bool:
    """Whether other records fill all lots of a shuffled epoch, so that one may be in any of them.

    Only a unit of one record is bounded so.
    """
    size, lot = _sizes(plan, index)
    lots = schedule.lots_in_turn(plan, plan.phases[index])
    return plan.dataset.records_per_unit == 1 and lots > 1 and min(steps, lots) * lot < size


def place_of(plan: Plan) -> Place:
    """Return what a record in the place of another is compared with, at a fixed size."""
    return "replace_one" if plan.adjacency == "replace_one" else "zero_out"


def _shuffled(plan: Plan, index: int) -> Sampled:
    """A fixed order that is drawn for each epoch.

    The lots of one epoch amplify as one sample without replacement, so that only the lots that are
    left out count. If others fill the lots of each epoch, a record takes the place of one of them
    in a random lot, as does what replaces it, or a record that contributes nothing. For lower
    bounds, a record is in a random lot of each epoch. Under replace_one all others have the
    opposite gradient, and so has its replacement.
    Without ``drop_last`` an epoch leaves out nothing; the attacks then look at full lots.
    Source: docs/theorems/shuffled-lots.md.
    """
    in_order, (size, lot) = _fixed_order(plan, index), _sizes(plan, index)
    has_all = plan.phases[index].sampling.drop_last is False
    turn = schedule.lots_in_turn(plan, plan.phases[index])
    lots = schedule.lots_per_epoch(size, lot)
    places = -(-size // lot)
    if places == 1:
        return in_order
    distance = 2.0 if plan.adjacency == "replace_one" else 1.0

    def composed(epoch: Callable[[int], events.Leaf], steps: int) -> events.Composed:
        """Return the epochs of a run, by what one costs of which some lots are released."""
        epochs, rest = divmod(steps, turn)
        parts = (lots, epochs), (min(rest, lots), 1 if rest else 0)
        return events.Composed(
            events=tuple(
                events.Repeated(event=epoch(released), count=count)
                for released, count in parts
                if count
            )
        )

    def in_place(joint: float, released: int) -> events.ReplacedAllocationGaussian:
        drawn = schedule.double_up(Fraction(released * lot, size))
        return events.ReplacedAllocationGaussian(
            bins=released, noise_multiplier=joint, drawn=drawn, place=place_of(plan)
        )

    def placed_at_random(joint: float, steps: int) -> Iterator[events.Event]:
        known, alone = (distance / joint) ** 2, joint / DISTANCE
        if log_divergence(lots, known) < _MAX_RATIO * known:
            yield composed(partial(in_place, joint), steps)
        # The checker has a statement for a record that is not there, twice as far from others.
        if log_divergence(lots, 1 / alone**2) < _MAX_RATIO * known / 4:
            passes = composed(partial(_allocation, lots, alone), steps)
            yield events.ChainOfNeighbours(event=passes, links=2)

    def run(joint: float, steps: int) -> events.Event:
        in_full, known = in_order.of_run(joint, steps), in_order.event(joint)
        if has_all:
            return in_full

        def sampled(released: int) -> events.Leaf:
            return sample_of_lots(plan, index, released, joint) or known

        least = steps % lots or lots  # of the lots that an epoch releases
        bounds: list[events.Event] = [in_full]
        bounds += [] if sampled(least) == known else [composed(sampled, steps)]
        if is_placed_at_random(plan, index, steps):
            bounds += placed_at_random(joint, steps)
        return events.EitherBound(events=tuple(bounds)) if len(bounds) > 1 else in_full

    def attained(joint: float, steps: int) -> events.Event:
        return composed(partial(_allocation, places, joint / distance), steps)

    def attack(joint: float, steps: int) -> tuple[events.ShuffledEpoch, int]:
        released = min(steps, lots)
        return _largest_sum(plan, index, joint, released), max(1, steps // turn)

    return replace(
        in_order,
        run=run,
        attained=attained,
        attack=attack,
        assumption=_SHUFFLED_WITH_ALL if has_all else _SHUFFLED,
    )


def _allocation(
    bins: int, noise_multiplier: float, released: int
) -> events.RandomAllocationGaussian:
    return events.RandomAllocationGaussian(
        bins=bins,
        noise_multiplier=noise_multiplier,
        released=released if released < bins else None,
    )


def _fixed_size(plan: Plan, index: int) -> Sampled:
    """A fresh sample of the lot size, without replacement, in each step.

    A record that is set to zero is replaced by one, so that the bound of ``replace_one`` holds, as
    do that of a lot that is known and that of a record in the place of another. It is in the lot
    with probability B/N, which is attained where all others contribute nothing. Source:
    docs/theorems/without-replacement.md; shuffled-lots.md, Theorem 6.
    """
    if plan.adjacency == "add_remove":
        raise _refused(
            plan,
            index,
            "fixed_size_needs_replace_one",
            "lots of fixed size without replacement are not certified under add_remove: "
            "removing a record changes the sampling probability of all others.",
            "Write adjacency: replace_one or zero_out, or sample by poisson.",
        )
    size, lot = _sizes(plan, index)
    result = Sampled(
        event=_draw_each_record(
            plan,
            index,
            plan.dataset.records_per_unit,
            (events.WithoutReplacementGaussian, events.WithoutReplacementGroupGaussian),
            dataset_size=size,
            sample_size=lot,
        ),
        probability=lot / size,
        distance=lot_distance(plan, index),
        assumption="each lot is a fresh uniform sample of exactly the lot size, without "
        "replacement",
    )
    if plan.adjacency == "replace_one":
        return result

    def run(joint: float, steps: int) -> events.Event:
        drawn = result.event(joint)
        sampled = events.Repeated(event=drawn, count=steps)
        known = events.Repeated(
            event=events.Gaussian(noise_multiplier=joint / result.distance), count=steps
        )
        if isinstance(drawn, events.WithoutReplacementGroupGaussian):
            zeroed = events.Repeated(event=replace(drawn, zeroed=True), count=steps)
            return events.EitherBound(events=(sampled, zeroed, known))
        placed = events.ReplacedAllocationGaussian(
            bins=1,
            noise_multiplier=joint,
            drawn=schedule.double_up(Fraction(lot, size)),
            place="zero_out",
        )
        return events.EitherBound(
            events=(sampled, known, events.Repeated(event=placed, count=steps))
        )

    def attained(joint: float, steps: int) -> events.Event:
        drawn = result.event(joint)
        assert isinstance(drawn, FixedSize)
        return events.Repeated(event=at_least_drawn(drawn), count=steps)

    return replace(
        result,
        run=run,
        attained=attained,
        attack=lambda joint, steps: (_largest_sum(plan, index, joint, 1), steps),
    )


def _largest_sum(plan: Plan, index: int, joint: float, lots: int) -> events.ShuffledEpoch:
    """Return the attack on the largest sum of ``lots`` lots of an order."""
    size, lot = _sizes(plan, index)
    return events.ShuffledEpoch(
        lots=lots,
        drawn=lots * lot / size * (1 - 2.0**-52),
        noise_multiplier=joint,
        without=0.0 if plan.adjacency == "replace_one" else 1.0,
    )


def _truncated_poisson(plan: Plan, index: int) -> Sampled:
    phase = plan.phases[index]
    size, largest = plan.dataset.size, phase.sampling.max_lot_size
    assert size is not None
    assert largest is not None
    records = plan.dataset.records_per_unit
    probability = schedule.double_up(schedule.sampling_probability(plan, phase))
    if probability >= 1:
        raise _refused(
            plan,
            index,
            "unsupported",
            "every record is drawn and every lot is truncated, and under add_remove removing a "
            "record changes the chance of all others to stay in it.",
            "Write adjacency: zero_out or replace_one, or draw records with a smaller probability.",
        )
    most = "one more" if records == 1 else f"{records} more"
    return Sampled(
        event=_draw_each_record(
            plan,
            index,
            records,
            (events.TruncatedPoissonGaussian, events.TruncatedPoissonGroupGaussian),
            dataset_size=size,
            sampling_probability=probability,
            max_lot_size=largest,
            neighbours=plan.adjacency,
        ),
        probability=probability,
        distance=lot_distance(plan, index),
        assumption="each record enters each sample independently with probability q; a sample of "
        f"more than {largest} records is cut to a uniformly random part of exactly {largest}, and "
        "the sum is divided by the fixed expected lot size, never by the realised one; the data "
        f"set has at most {size} records, its neighbours at most {most}",
    )


def _balls_in_bins(plan: Plan, index: int) -> Sampled:
    phase, distance = plan.phases[index], distance_of(plan)
    bins = schedule.lots_in_turn(plan, phase)
    amplified = bins > 1 and is_amplified(plan)
    drawn = "afresh for each epoch"
    if phase.sampling.bins_drawn != "each_epoch":
        # Phases are composed as if their draws were independent, so they must be.
        several = len(plan.phases) > 1
        within = "phase, and anew for each phase," if several else "run"
        drawn = f"for the whole {within} or {drawn}"

    def epochs(steps: int) -> int:
        return schedule.participations(plan, phase, steps)

    def allocation(joint: float, steps: int) -> events.Event:
        whole, rest = divmod(steps, bins)
        first = events.RandomAllocationGaussian(
            bins=bins, noise_multiplier=joint, released=rest or None
        )
        if not whole:
            return first
        if phase.sampling.bins_drawn == "each_epoch":
            once = events.RandomAllocationGaussian(bins=bins, noise_multiplier=joint)
            passes = events.Repeated(event=once, count=whole)
            return events.Composed(events=(passes, first)) if rest else passes
        return events.RandomAllocationGaussian(
            bins=bins,
            # Rounds down past the roundings of the root and of the quotient.
            noise_multiplier=joint / math.sqrt(epochs(steps)) * _DOWN,
            attained_at=joint / math.sqrt(whole) * _DOWN if rest else None,
            longer=rest or None,
        )

    def attack(joint: float, steps: int) -> tuple[events.AllocatedRecord, int]:
        whole, rest = divmod(steps, bins)
        distinct = math.prod(1 - taken / bins for taken in range(records)) * (1 - 1e-12)
        if phase.sampling.bins_drawn == "each_epoch":
            once = events.AllocatedRecord(
                steps=bins, participations=records, noise_multiplier=joint, distinct=distinct
            )
            return once, whole
        of_bins = events.AllocatedRecord(
            steps=bins,
            participations=records,
            noise_multiplier=joint / math.sqrt(whole) * _UP,
            distinct=distinct,
            longer=rest,
            noise_of_longer=joint / math.sqrt(whole + 1) * _UP,
        )
        return of_bins, 1

    records = plan.dataset.records_per_unit
    is_shown = 1 < records < bins and (schedule.steps(plan, phase) or 0) >= bins
    return Sampled(
        event=lambda joint: events.Gaussian(noise_multiplier=joint / distance),
        times=epochs,
        probability=None,
        distance=distance,
        assumption=f"each record is thrown into one of {bins} lots of an epoch, uniformly and "
        f"independently of all other records and of the data, {drawn}; lots keep "
        "the size they come to, and the sum is divided by the fixed expected lot size, never by "
        "the realised one",
        run=allocation if amplified else None,
        attained=allocation if bins > 1 and not amplified else None,
        attack=attack if is_shown else None,
    )


def _random_allocation(plan: Plan, index: int) -> Sampled:
    """Each record in k of T steps, every k-subset with the same probability.

    Given a uniformly random partition of the steps into blocks, the record is in one uniformly
    random step of each, and the partition tells nothing without the record. Source:
    docs/theorems/random-allocation.md, Theorem 8.
    """
    phase, distance = plan.phases[index], distance_of(plan)
    taken = phase.sampling.participations
    assert taken is not None

    def blocks(joint: float, steps: int) -> events.Event:
        length, longer = divmod(steps, taken)
        counts = (length + 1, longer), (length, taken - longer)
        parts = tuple(
            events.Repeated(event=_one_of(length, joint), count=count)
            for length, count in counts
            if count
        )
        return events.Composed(events=parts) if taken > 1 else parts[0].event

    def sum_of_steps(joint: float, steps: int) -> events.Event:
        # All releases added up: k shifts against the noise of T steps.
        return events.Gaussian(noise_multiplier=joint * math.sqrt(steps) / (taken * distance) * _UP)

    def attack(joint: float, steps: int) -> tuple[events.AllocatedRecord, int]:
        return events.AllocatedRecord(steps=steps, participations=taken, noise_multiplier=joint), 1

    return Sampled(
        event=lambda joint: events.Gaussian(noise_multiplier=joint / distance),
        times=lambda _: taken,
        probability=schedule.double_up(schedule.sampling_probability(plan, phase)),
        distance=distance,
        assumption=f"each record takes part in exactly {taken} of the {phase.steps} steps; every "
        "such set of steps has the same probability, independently of all other records and of the "
        "data, and is kept secret; lots keep the size they come to, and the sum is divided by the "
        "fixed expected lot size, never by the realised one",
        run=blocks if is_amplified(plan) else None,
        attained=None if taken == 1 and is_amplified(plan) else sum_of_steps,
        attack=None if taken == 1 else attack,
    )


def _one_of(steps: int, joint: float) -> events.Leaf:
    """Return the cost of a record that is in one of ``steps``."""
    if steps == 1:
        return events.Gaussian(noise_multiplier=joint)
    return events.RandomAllocationGaussian(bins=steps, noise_multiplier=joint)


def _fresh_run(plan: Plan, index: int) -> RunSampler:
    sampled = sample(plan, index)
    # Other samples attain their event; here a record that is set to zero is drawn or not.
    is_attained = sampled.attained is None
    return RunSampler(
        turn=1,
        claimed=sampled,
        step=sampled,
        fresh=True,
        probability=None
        if is_attained
        else schedule.sampling_probability(plan, plan.phases[index]),
    )


def _full_batch_run(plan: Plan, index: int) -> RunSampler:
    claimed = _unsampled(plan, index, 1, "every record is in every lot")
    return RunSampler(turn=1, claimed=claimed, strategies_restart=True)


def _cyclic_run(plan: Plan, index: int) -> RunSampler:
    if plan.adjacency == "add_remove":
        raise _removal_moves_records(plan, index)
    turn = schedule.lots_in_turn(plan, plan.phases[index])
    assumption = (
        "each record is in exactly one lot of each epoch, at the same place in every epoch; what "
        "does not fill a last lot is left out; no amplification by shuffling is claimed"
    )
    claimed = _unsampled(plan, index, turn, assumption)
    return RunSampler(turn=turn, claimed=claimed, strategies_restart=True)


def _shuffled_run(plan: Plan, index: int) -> RunSampler:
    in_order = _cyclic_run(plan, index)
    return replace(
        in_order,
        claimed=replace(in_order.claimed, assumption=_SHUFFLED),
        probability=schedule.sampling_probability(plan, plan.phases[index]),
    )


def _balls_in_bins_run(plan: Plan, index: int) -> RunSampler:
    turn = schedule.lots_in_turn(plan, plan.phases[index])
    assumption = (
        "each record is thrown into one uniformly random lot of the epoch, independently of all "
        "other records, and is in that lot in every epoch of its phase; another phase throws the "
        "records anew"
    )

    def route(strategy: Strategy) -> Route:
        bins = is_amplified(plan) and turn <= events.MAX_BINS and has_gram(strategy, turn)
        return "balls_in_bins" if bins else "gaussian"

    return RunSampler(
        turn=turn,
        claimed=_unsampled(plan, index, turn, assumption),
        probability=Fraction(1, turn),
        strategies_restart=True,
        route=route,
    )


def _random_allocation_run(plan: Plan, index: int) -> RunSampler:
    raise _refused(
        plan,
        index,
        "unsupported",
        "random_allocation is certified for independent noise only, without a participation or a "
        "clip_schedule.",
        "Write noise: {kind: independent}, or use scheme: balls_in_bins.",
    )


def _cyclic_poisson_run(plan: Plan, index: int) -> RunSampler:
    phase = plan.phases[index]
    turn = schedule.lots_in_turn(plan, phase)
    probability = schedule.sampling_probability(plan, phase) * turn
    assumption = (
        "each record belongs to one group for the whole run, chosen independently of all other "
        "records (by a hash or a draw of its own; under zero_out, groups may be split evenly); "
        "step t takes each record of group t mod b independently with probability p, and the sum "
        "is divided by the fixed expected lot size"
    )
    claimed = replace(_unsampled(plan, index, turn, assumption), probability=float(probability))
    amplified = is_amplified(plan)
    return RunSampler(
        turn=turn,
        claimed=claimed,
        step=replace(claimed, event=_poisson_step(probability)) if amplified else None,
        probability=probability,
        strategies_restart=True,
        route=lambda strategy: (
            "cyclic_poisson" if amplified and strategy.bands <= turn else "gaussian"
        ),
    )


def _b_min_sep_run(plan: Plan, index: int) -> RunSampler:
    """The draw of a step depends on earlier ones; ``step`` has its largest probability."""
    phase = plan.phases[index]
    largest, separation = schedule.highest_probability(plan, phase), phase.sampling.separation
    assert separation is not None
    assumption = (
        "a record that took part in none of the last b - 1 steps takes part in a step with "
        "probability p, independently of all other records, and is not drawn otherwise; before "
        "the first step records have waited as after many steps (a warm start; the upper end holds "
        "for any start); the sum is divided by the fixed expected lot size"
    )
    claimed, step = _unsampled(plan, index, separation, assumption), None
    records = plan.dataset.records_per_unit
    if largest < 1 and records <= events.MAX_RECORDS:
        rounded = schedule.double_up(largest)
        step = Sampled(
            event=_draw_each_record(
                plan,
                index,
                records,
                (events.PoissonSubsampledGaussian, events.PoissonSampledGroupGaussian),
                sampling_probability=rounded,
                pair=subsampled_pair(plan),
            ),
            probability=rounded,
            distance=distance_of(plan),
            assumption=assumption,
        )
    is_one = step is not None and records == 1
    return RunSampler(
        turn=1,
        claimed=step if step is not None and is_one else claimed,
        step=step,
        fresh=is_one,
        probability=schedule.sampling_probability(plan, phase),
    )


def _unsampled(plan: Plan, index: int, separation: int, assumption: str) -> Sampled:
    distance = lot_distance(plan, index)
    return Sampled(
        event=lambda joint: events.Gaussian(noise_multiplier=joint / distance),
        times=lambda steps: -(-steps // separation),
        probability=None,
        distance=distance,
        assumption=assumption,
    )


def _poisson_step(probability: Fraction, pair: events.SubsampledPair = "add_remove") -> StepEvent:
    if probability >= 1:
        return lambda joint: events.Gaussian(noise_multiplier=joint)
    rounded = schedule.double_up(probability)
    return lambda joint: events.PoissonSubsampledGaussian(
        sampling_probability=rounded, noise_multiplier=joint, pair=pair
    )


def _sizes(plan: Plan, index: int) -> tuple[int, int]:
    """Return the data set size and the lot size, which a valid plan of the scheme has."""
    size, lot = plan.dataset.size, plan.phases[index].sampling.lot_size
    assert size is not None
    assert lot is not None
    return size, lot


def _removal_moves_records(plan: Plan, index: int) -> RefusedPlan:
    return _refused(
        plan,
        index,
        "removal_moves_records",
        f"under add_remove, removing a record moves other records of a "
        f"{plan.phases[index].sampling.scheme} run to other lots, so its effect is not bounded by "
        "its clip norm.",
        "Write adjacency: zero_out or replace_one, or sample by poisson.",
    )


def _refused(plan: Plan, index: int, code: str, message: str, remedy: str) -> RefusedPlan:
    return RefusedPlan.with_reason(
        code=code,
        pointer=plan.pointer(index, "sampling", "scheme"),
        message=message,
        remedy=remedy,
    )


SCHEMES: dict[str, SchemeSamplers] = {
    "poisson": SchemeSamplers(independent=_poisson, correlated=_fresh_run),
    "truncated_poisson": SchemeSamplers(independent=_truncated_poisson, correlated=_fresh_run),
    "fixed_size": SchemeSamplers(independent=_fixed_size, correlated=_fresh_run),
    "full_batch": SchemeSamplers(independent=_full_batch, correlated=_full_batch_run),
    "cyclic": SchemeSamplers(independent=_fixed_order, correlated=_cyclic_run),
    "shuffled": SchemeSamplers(independent=_shuffled, correlated=_shuffled_run),
    "balls_in_bins": SchemeSamplers(independent=_balls_in_bins, correlated=_balls_in_bins_run),
    "random_allocation": SchemeSamplers(
        independent=_random_allocation, correlated=_random_allocation_run
    ),
    "cyclic_poisson": SchemeSamplers(correlated=_cyclic_poisson_run),
    "b_min_sep": SchemeSamplers(correlated=_b_min_sep_run),
}
"""The samplers of each scheme. Without an entry for independent noise, a run of it counts as
correlated by the identity."""
