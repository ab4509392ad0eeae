"""Attacks: the pairs of data sets whose ε a lower end is.

A lower end of ε is that of an attack on the run: two neighbouring data sets, lots as the sampler
of the plan draws them, and a test of what the run releases. Contributions are in clip norms, along
one direction of the gradients (or, of other records, at a right angle to it). The test is the
likelihood ratio of the release between the two data sets, or counts epochs of shuffled lots whose
largest sum is large, or adds up a score of each step of a random allocation.

=========================  =====================================================================
lots                       what attains the lower end
=========================  =====================================================================
``poisson``                others contribute nothing; a user's records all one vector
``truncated_poisson``      the same, or others all one vector at a right angle
``fixed_size``             others opposite to the unit, whose lots move by twice its records; under
                           zero_out others nothing or, with correlated noise, opposite
``full_batch``             the unit in every step, with the signs of the worst pattern
``cyclic``                 the same in the steps of its lots, at one place in all phases
``shuffled``               others nothing (opposite under replace_one); or others opposite, and
                           the test counts epochs whose largest sum is large
``balls_in_bins``          others nothing, and the record or nothing, also under replace_one; of
                           users, the sum of a score of each bin
``random_allocation``      others nothing, and the record or nothing; or the sum of all steps
``cyclic_poisson``         the record in steps of its group, which the attacker knows: it may be a
                           hash of the record
``b_min_sep``              the record in one step, in steps that are far apart, or in all of them
correlated noise, random   one step; steps whose columns hardly overlap, or of one bin; or all
lots                       steps, along one direction or as if they showed nothing together
DP-Dice                    a first raw gradient that is huge, so that the error state stays clipped
metrics, quantiles         move as far as they can, with the unit
repeat-and-select          a score that selects a run with a small ratio, then one with a large one
=========================  =====================================================================

Users of several records also have the attack on one of their records. ``tests/assessment/attacks``
executes each on small plans: lots of the trainer's samplers, noisy sums, and the test.

``attacks_of`` lists the attacks on a closed run. Accountants bound the curve of ``Attack.event``
from below, and ``Attack.sentences`` says in words what attains it.

>>> from affidavit.mechanisms.lowering import lower
>>> from affidavit.plan.parse import plan_from
>>> plan = plan_from({"version": 1, "adjacency": "replace_one", "steps": 10,
...     "sampling": {"scheme": "poisson", "probability": 0.1}, "target": {"delta": 1e-5},
...     "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": 4}]})
>>> first, *_ = attacks_of(lower(plan))
>>> first.phases[0].others, first.phases[0].absent
('nothing', -1.0)

References: docs/theorems/ has the proof of each: group-sampling.md, without-replacement.md,
truncated-poisson.md, shuffled-lots.md, random-allocation.md, correlated-noise.md (Theorems 9, 12,
13 and 21), dp-dice.md.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from affidavit.mechanisms.lowered_phase import LoweredPhase
from affidavit.mechanisms.lowering import Lowered
from affidavit.plan import (
    Plan,
    events,
)

Others = Literal["nothing", "opposite", "nothing_or_right_angle"]
"""What every other record contributes: nothing, the opposite of the unit's records, or (whichever
shows more) nothing or a vector of the clip norm at a right angle to theirs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseAttack:
    """What the records of both data sets contribute to the lots of one phase.

    ``records`` of the unit contribute one clip norm each, and in the other data set ``absent`` (0
    or -1) times that. With ``steps``, they contribute to so many steps that the attacker chooses,
    and nothing to others; ``in_one_bin`` if these are the steps of a bin. If they are ``signed``,
    the attacker chooses a sign for each step, such that the columns of the strategy add up. If it
    ``keeps_error``, the first raw gradient is so large that the error state of DP-Dice keeps its
    direction.
    """

    records: int
    absent: float
    others: Others = "nothing"
    steps: int | None = None
    in_one_bin: bool = False
    signed: bool = False
    keeps_error: bool = False

    def sentences(self, unit: str) -> Iterator[str]:
        """Yield the contributions in words, for the plan's ``unit``."""
        if self.records == 0:
            yield "Both data sets contribute the same in this phase."
            return
        who = "the record" if unit == "example" else "one record of the user"
        if self.records > 1:
            who = f"each of {self.records} records of the user"
        lots = "every lot that it is in"
        if self.in_one_bin:
            lots = "its lots in one bin, and nothing if it is in another,"
        elif self.steps is not None:
            lots = "its lot in the step with the longest column of the strategy"
            if self.steps > 1:
                lots = f"its lots among {self.steps} steps whose columns hardly overlap"
        signs = ", with the signs for which the columns of the strategy add up" * self.signed
        yield (
            f"In one data set, {who} contributes the clip norm along one direction to {lots}"
            f"{signs}."
        )
        if self.keeps_error:
            yield "Its first raw gradient is so large that the error state keeps this direction."
        yield f"In the other, it contributes {'the opposite' if self.absent else 'nothing'}."
        match self.others:
            case "nothing":
                yield "All other records contribute nothing."
            case "opposite":
                yield "All other records contribute the opposite in both."
            case "nothing_or_right_angle":
                yield (
                    "All other records contribute nothing, or all the same vector at a right "
                    "angle, which shows how full a lot is."
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class Attack:
    """Two data sets of ``run``, and a test of what it releases on them.

    ``run`` is the run of the plan's unit, or that of one of its records. The test is the likelihood
    ratio; the curve of the two data sets is at least that of ``event``. With ``tested``, a number
    of epochs or phases of one law, the test looks at the sums of the phases ``counted`` only.
    """

    run: Lowered
    phases: tuple[PhaseAttack, ...]
    event: events.Event
    tested: tuple[events.TestedSums, int] | None = None
    counted: tuple[int, ...] = ()

    @property
    def sentences(self) -> tuple[str, ...]:
        """The data sets, the lots and the test in words."""
        result, plan = [], self.run.plan
        for index, phase in enumerate(self.phases):
            several = f"Phase {index + 1}: " if len(self.phases) > 1 else ""
            result += [several + sentence for sentence in phase.sentences(plan.dataset.unit)]
            result.append(f"{several}Lots: {self.run.phases[index].sampled.assumption}.")
        match self.tested:
            case (events.ShuffledEpoch(lots=lots), number):
                result.append(
                    f"The test counts the epochs whose largest sum of {lots} lots along this "
                    f"direction is above a threshold, of {number} in all."
                )
            case (events.AllocatedRecord(steps=steps, distinct=distinct), number):
                what = "steps" if distinct == 1 else "lots, each that of a bin in whole epochs"
                result.append(
                    "The test adds up a score of the sum along this direction for each of "
                    f"{steps * number} {what}."
                )
            case (events.DisplacedSum(), _):
                result.append(
                    "The test is whether the outputs are large along the sum of the strategy's "
                    "columns."
                )
            case None:
                result.append(
                    "The test is the likelihood ratio of all that the run releases between the two "
                    "data sets. It knows how lots are drawn, but not who is in a lot, except in a "
                    "fixed order; of groups it knows that of the record."
                )
        if self.run.extra.selection is not None:
            result.append(
                "The score selects a run with a small ratio if there is one, and otherwise one "
                "with a large ratio; the test is whether the ratio of the released run is large."
            )
        return tuple(result)


def attacks_of(closed: Lowered) -> tuple[Attack, ...]:
    """Return the attacks on a closed run: those of its unit, and of one of the unit's records.

    Raises ``ValueError`` if steps or noise are open.
    """
    one = closed.single_record_run
    # A selection takes long, so that only the first attack on each run is computed.
    limit = None if closed.extra.selection is None else 1
    by_event: dict[events.Event, Attack] = {}
    for run in (closed,) if one is None else (closed, one):
        for attack in islice(_attacks_on(run), limit):
            by_event.setdefault(attack.event, attack)
    # The quickest come first; a slow one is not computed where it surely shows less.
    return (*_attacks_on_sums(closed), *by_event.values())


def _attacks_on(run: Lowered) -> Iterator[Attack]:
    for chosen in events.alternatives(events.Composed(events=run.attained_phases())):
        assert isinstance(chosen, events.Composed)
        phases = zip(run.phases, chosen.events, strict=True)
        yield Attack(
            run=run,
            phases=tuple(_phase_attack(run.plan, *phase) for phase in phases),
            event=run.extra.compose_with(chosen.events),
        )


def _attacks_on_sums(closed: Lowered) -> Iterator[Attack]:
    if closed.extra.selection is not None:
        return
    times: Counter[events.TestedSums] = Counter()
    phases: defaultdict[events.TestedSums, list[int]] = defaultdict(list)
    for index, phase in enumerate(closed.phases):
        if phase.attack is not None:
            sums, number = phase.attack
            times[sums] += number
            phases[sums].append(index)
    for sums, number in times.items():
        one = PhaseAttack(records=1, absent=0.0)
        if isinstance(sums, events.AllocatedRecord) and sums.distinct < 1:
            one = PhaseAttack(records=sums.participations, absent=0.0)
        if isinstance(sums, events.DisplacedSum):
            one = PhaseAttack(records=1, absent=0.0, others="opposite", signed=True)
        if isinstance(sums, events.ShuffledEpoch):
            one = PhaseAttack(records=1, absent=0.0 if sums.without else -1.0, others="opposite")
        yield Attack(
            run=closed,
            phases=(one,) * len(closed.phases),
            event=closed.attained(),
            tested=(sums, number),
            counted=tuple(phases[sums]),
        )


def _phase_attack(plan: Plan, phase: LoweredPhase, event: events.Event) -> PhaseAttack:
    """Return the contributions whose effect on ``phase`` is ``event``."""
    leaves = list(_leaves(event))
    kinds = {type(leaf) for leaf, _ in leaves}
    scheme, replaced = phase.scheme, plan.adjacency == "replace_one"
    is_correlated, is_whole = phase.correlation is not None, phase.whole is not None
    of_runs = {
        events.Gaussian,
        events.GaussianMixture,
        events.BallsInBinsGaussian,
        events.RandomAllocationGaussian,
    }
    steps = sum(count for _, count in leaves)
    in_one_bin = is_correlated and scheme == "balls_in_bins" and not kinds & of_runs
    if in_one_bin and phase.correlation is not None and phase.steps is not None:
        steps = -(-phase.steps // phase.correlation.at(phase.steps).turn)
    records = max((getattr(leaf, "records", 1) for leaf, _ in leaves), default=0)
    if kinds & {events.Gaussian, events.GaussianMixture} and not is_whole:
        records = plan.dataset.records_per_unit
    allocated = events.RandomAllocationGaussian in kinds
    # Without an error that is kept, the run is that of DP-SGD.
    keeps_error = is_whole and plan.optimizer.pre_clip_norm is None
    keeps_error &= events.Gaussian in kinds or not isinstance(event, events.Repeated)
    others: Others = "nothing"
    fixed_size = scheme == "fixed_size" and not keeps_error
    in_random_order = scheme == "shuffled" and not is_whole
    if replaced and (fixed_size or in_random_order):
        others = "opposite"
    elif events.TruncatedPoissonGaussian in kinds and plan.adjacency != "add_remove":
        others = "nothing_or_right_angle"
    return PhaseAttack(
        records=records,
        absent=-1.0 if replaced and not (allocated and scheme == "balls_in_bins") else 0.0,
        others=others,
        steps=steps if is_correlated and not kinds & of_runs else None,
        in_one_bin=in_one_bin,
        signed=is_correlated
        and not kinds & {events.BallsInBinsGaussian, events.RandomAllocationGaussian},
        keeps_error=keeps_error,
    )


def _leaves(event: events.Event) -> Iterator[tuple[events.Leaf, int]]:
    match event:
        case events.Composed(events=members):
            for inner in members:
                yield from _leaves(inner)
        case events.Repeated(event=inner, count=times):
            for leaf, count in _leaves(inner):
                yield leaf, count * times
        case _:
            if not isinstance(event, events.Leaf):
                raise TypeError(f"a phase of an attack is made of releases, not of {event!r}.")
            yield event, 1
