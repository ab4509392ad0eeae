"""A case: the account of a plan, and the ways in which mistakes change it.

The account describes the plan. For a refused plan it is the account that its author most likely
started from, or one that no reading covers until a mistake changes it. The strategy of correlated
noise is built even for refused plans, because most mistakes about it are made there. Nothing here
is certified.

A mistake is a wrong derivation that was really made. A new one is a function in ``catalogue/``,
decorated with ``mistake``: given a case it yields the ways in which the mistake could have been
made there. A way that is guessed among many (which accumulation? how many devices?) has a cost,
because among enough guesses one fits any number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from affidavit.accountants import leaves
from affidavit.assessment.diagnosis.accountant_inputs import (
    Account,
    Pair,
    Part,
    Parts,
    PhaseAccount,
)
from affidavit.mechanisms import (
    AdditionalEvents,
    add_same_lot_blocks,
    joint_noise_multiplier,
    lookahead_weight,
    lower_additional_releases,
    noise_multiplier,
)
from affidavit.mechanisms import correlation as correlated
from affidavit.mechanisms.strategies import (
    Participation,
    Setting,
    Strategy,
    build,
    pattern_sensitivity,
)
from affidavit.mechanisms.strategies.participation import records_per_lot, sampler_participation
from affidavit.plan import (
    FIXED_ORDER,
    Phase,
    Plan,
    RefusedPlan,
    Release,
    events,
    schedule,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Filter:
    """DP-DiSK: c = (1-κ)/(κγ) of its combination of two gradients; arXiv:2410.03883."""

    coefficient: float

    @property
    def norm(self) -> float:
        """√(c² + (1-c)²), the divisor of the noise in the public implementation."""
        return math.hypot(self.coefficient, 1 - self.coefficient)

    @property
    def distance(self) -> float:
        """|c| + |1-c|, how far a record moves sums that are combined after clipping."""
        return abs(self.coefficient) + abs(1 - self.coefficient)


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseFacts:
    """Facts about one phase beside its account.

    ``lot`` is the lot size, expected or fixed (None for a full batch); ``rate`` is the lot size
    over the size of the data set, or the given probability; ``records`` are those of one unit in a
    lot, the root mean square over its lots if they fill several of an epoch; ``epochs`` are passes
    over the data; ``lots`` are the lots of an epoch, without and with a partial last one.
    ``correlation`` is None
    for independent noise and for a strategy that cannot be built; ``independent`` noise has no
    schedule.
    """

    scheme: str
    lot: int | None
    rate: float
    records: float
    steps: int
    epochs: float
    lots: tuple[int, ...]
    releases: tuple[Release, ...]
    independent: bool
    correlation: Correlation | None

    @property
    def blocks(self) -> int:
        """The number of blocks of one step."""
        return sum(release.count for release in self.releases)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A plan with its account; ``facts`` has one entry a phase."""

    plan: Plan
    account: Account
    facts: tuple[PhaseFacts, ...]
    filter: Filter | None = None
    extras: AdditionalEvents = field(default_factory=AdditionalEvents)

    @classmethod
    def of(cls, plan: Plan, delta: float) -> Case:
        """Return the case of a plan whose noise and steps are given."""
        is_disk = plan.optimizer.name == "dp_disk"
        filtered = Filter(coefficient=lookahead_weight(plan)) if is_disk else None
        facts = tuple(_facts(plan, index) for index in range(len(plan.phases)))
        extras = _extras(plan)
        phases = tuple(
            _phase_account(plan, phase, fact, filtered, extras)
            for phase, fact in zip(plan.phases, facts, strict=True)
        )
        # No reading covers a selection; without it the account would be of another run.
        extra = metrics(extras) if extras.selection is None else None
        account = Account(phases=phases, extra=extra, delta=delta)
        return cls(plan=plan, account=account, facts=facts, filter=filtered, extras=extras)

    @property
    def first(self) -> PhaseFacts:
        """The facts of the first phase, whose numbers the mistakes use."""
        return self.facts[0]


def _facts(plan: Plan, index: int) -> PhaseFacts:
    phase = plan.phases[index]
    steps = schedule.steps(plan, phase)
    if steps is None:
        raise ValueError("a diagnosis needs the steps")
    rate = float(schedule.sampling_probability(plan, phase))
    size, lot = plan.dataset.size, phase.sampling.lot_size
    lots = (
        () if size is None or lot is None else tuple(dict.fromkeys((size // lot, -(-size // lot))))
    )
    return PhaseFacts(
        scheme=phase.sampling.scheme,
        lot=lot,
        rate=rate,
        records=_records(plan, index, steps),
        steps=steps,
        epochs=phase.epochs if phase.epochs is not None else steps * rate,
        lots=lots,
        releases=phase.releases,
        independent=phase.noise.kind == "independent" and phase.clip_schedule is None,
        correlation=correlation(plan, index, steps),
    )


def _records(plan: Plan, index: int, steps: int) -> float:
    """Return how many records of one unit are in a lot of phase ``index``."""
    phase, records = plan.phases[index], float(records_per_lot(plan, index))
    if records == plan.dataset.records_per_unit or phase.noise.kind != "independent":
        return records
    if phase.sampling.scheme not in FIXED_ORDER or not steps:
        return records
    squares = sampler_participation(plan, index, steps).squares(steps)
    return records * math.sqrt(squares / schedule.participations(plan, phase, steps))


def _phase_account(
    plan: Plan, phase: Phase, facts: PhaseFacts, filtered: Filter | None, extras: AdditionalEvents
) -> PhaseAccount:
    sigmas = tuple((float(noise_multiplier(release)), release.count) for release in phase.releases)
    joint = joint_noise_multiplier(phase)
    if joint is None:
        raise ValueError("a diagnosis needs the noise")
    replaces = plan.adjacency == "replace_one"
    optimizer = plan.optimizer
    lots = tuple((sigma, 1) for sigma in extras.same_lot_multipliers)
    account = PhaseAccount(
        sigmas=(*(sigmas if phase.clipping == "per_block" else ((joint, 1),)), *lots),
        joint=add_same_lot_blocks(joint, extras.same_lot_multipliers),
        steps=facts.steps,
        participations=facts.steps,
        distance=facts.records * (2.0 if replaces else 1.0),
        several=plan.dataset.records_per_unit > 1,
    )
    if filtered is not None and optimizer.noise_divisor == "filter_norm":
        account = replace(account, scale=1 / filtered.norm)
    if filtered is not None and optimizer.combine == "after_clipping":
        account = replace(account, distance=account.distance * filtered.distance)
    if optimizer.name == "dp_dice":
        account = replace(account, known=False)
    return _sampled(account, facts, replaces=replaces)


def _sampled(account: PhaseAccount, facts: PhaseFacts, *, replaces: bool) -> PhaseAccount:
    """Return the account with the facts of its sampler."""
    if facts.scheme in FIXED_ORDER and facts.lots:
        account = replace(account, participations=math.ceil(facts.steps / facts.lots[0]))
    if not facts.independent and facts.correlation is None:
        return replace(account, known=False)
    if facts.correlation is not None:
        sampled = facts.scheme not in FIXED_ORDER and facts.rate < 1
        return replace(
            account,
            sensitivity=facts.correlation.sensitivity,
            participations=facts.correlation.participations,
            known=account.known and not sampled,
        )
    if facts.scheme in FIXED_ORDER or facts.rate >= 1:
        return account
    pair: Pair = "replace_one" if replaces else "add_remove"
    known = facts.scheme in {"poisson", "truncated_poisson"}
    if facts.scheme == "fixed_size" and replaces:
        pair, known = "without_replacement", True
    return replace(account, probability=facts.rate, pair=pair, known=account.known and known)


def _extras(plan: Plan) -> AdditionalEvents:
    """Return the events beside the steps; none if they are refused."""
    try:
        return lower_additional_releases(plan)
    except RefusedPlan:
        return AdditionalEvents()


def metrics(extras: AdditionalEvents) -> Parts | None:
    """Return the metrics, each once, or None if one of them has Laplace noise."""
    result = []
    for event, times in leaves(
        events.Composed(events=(*extras.released_per_repetition, *extras.released_once))
    ):
        if isinstance(event, events.PoissonSubsampledGaussian):
            q: float | None = event.sampling_probability
        elif isinstance(event, events.Gaussian):
            q = None
        else:
            return None
        result.append((Part(noise_multiplier=event.noise_multiplier, probability=q), times))
    return tuple(result)


@dataclass(frozen=True, kw_only=True, slots=True)
class Correlation:
    """A strategy's numbers, all in clip norms.

    ``sensitivity`` is that of the run, ``column`` that of one participation (the largest column
    norm of C = N⁻¹), ``injected`` the largest column norm of N itself, and ``participations`` the
    most steps in which one record takes part.
    """

    kind: str
    sensitivity: float
    column: float
    injected: float
    participations: int


def correlation(plan: Plan, index: int, steps: int) -> Correlation | None:
    """Return the numbers of phase ``index``, or None if its noise is independent or not built."""
    phase = plan.phases[index]
    if phase.noise.kind == "independent":
        return None
    try:
        strategy, takes_part = _streamed(plan, index, steps)
        return Correlation(
            kind=phase.noise.kind,
            sensitivity=pattern_sensitivity(strategy, takes_part).value,
            column=strategy.sensitivity(Participation.single()).value,
            injected=_column_norm_of_noise(strategy),
            participations=takes_part.max_participations(steps),
        )
    except (LookupError, ValueError):
        return None


def _streamed(plan: Plan, index: int, steps: int) -> tuple[Strategy, Participation]:
    """Return the strategy and its participation, as certified or as a refused plan suggests."""
    certified = correlated.Correlation(plan=plan, index=index)
    try:
        result = certified.at(steps)
        if result.route != "white_noise":
            return result.strategy, result.participation
        return result.strategy, _participation(plan, plan.phases[index], steps)
    except RefusedPlan:
        phase = plan.phases[index]
        takes_part = _participation(plan, phase, steps)
        setting = Setting(steps=steps, participation=takes_part, workload=certified.workload)
        return build(phase.noise, setting), takes_part


def _participation(plan: Plan, phase: Phase, steps: int) -> Participation:
    """Return the participation that the plan states or that its sampler suggests."""
    provided = phase.participation
    if provided is not None:
        return Participation(
            schema=provided.schema_,
            participations=provided.participations or 1,
            separation=provided.separation or 1,
        )
    if phase.sampling.scheme in FIXED_ORDER and plan.dataset.size and phase.sampling.lot_size:
        lots = schedule.lots_per_epoch(plan.dataset.size, phase.sampling.lot_size)
        times = math.ceil(steps / lots)
        if phase.sampling.scheme == "cyclic" or times == 1:
            return Participation.fixed_epoch(participations=times, separation=lots)
        return Participation.min_separation(participations=times, separation=1)
    if schedule.sampling_probability(plan, phase) >= 1:
        return Participation.min_separation(participations=steps, separation=1)
    return Participation.single()


def _column_norm_of_noise(strategy: Strategy) -> float:
    """Return the largest column norm of N, which is that of the first column if N is Toeplitz."""
    first = strategy.noise_coefficients
    if first is not None:
        return float(np.linalg.norm(first))
    return float(np.linalg.norm(strategy.noise_matrix(), axis=0).max())


Change = Callable[[PhaseAccount, PhaseFacts], PhaseAccount]


def keep_phase(account: PhaseAccount, _facts: PhaseFacts) -> PhaseAccount:
    """Return the phase unchanged, for mistakes that are not about a phase."""
    return account


def scale_noise(factor: float) -> Change:
    """Return the change that multiplies the noise of a phase by ``factor``."""
    return lambda account, _: replace(account, scale=account.scale * factor)


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """One way of making a mistake.

    ``text`` is a sentence about what was accounted instead, with numbers; ``cost`` is how unlikely
    the way is, in nats, regardless of the claim. The mistake sets ``code``. ``delta`` and
    ``extra`` replace those of the account unless they are None.
    """

    text: str
    code: str = ""
    change: Change = keep_phase
    delta: float | None = None
    extra: Parts | None = None
    central_limit: bool = False
    cost: float = 1.0

    def of(self, account: Account, facts: tuple[PhaseFacts, ...]) -> Account:
        """Apply the mistake to ``account``."""
        phases = tuple(
            self.change(phase, fact) for phase, fact in zip(account.phases, facts, strict=True)
        )
        return replace(
            account,
            phases=phases,
            extra=account.extra if self.extra is None else self.extra,
            delta=account.delta if self.delta is None else self.delta,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Mistake:
    """A known mistake.

    ``wrong`` is the invalid step and the reason, ``source`` where it was made or corrected, ``fix``
    the remedy, ``field`` the plan's field that it is about.
    """

    code: str
    wrong: str
    source: str
    fix: str
    field: tuple[str, ...]
    derive: Callable[[Case], Iterator[Way]]

    def ways(self, case: Case) -> Iterator[Way]:
        """Yield the ways to make the mistake in a case."""
        return (replace(way, code=self.code) for way in self.derive(case))


def mistake(
    *, wrong: str, source: str, fix: str, field: tuple[str, ...]
) -> Callable[[Callable[[Case], Iterator[Way]]], Mistake]:
    """Register a function as the known mistake of its name."""
    return lambda derive: Mistake(
        code=derive.__name__, wrong=wrong, source=source, fix=fix, field=field, derive=derive
    )
