"""A case: a plan as its own author would account it, with the facts that mistakes need.

The account here is of what the plan says; for a run that is refused (because nothing may be
claimed about it) it is the account that its author most likely started from, or one that no
reading can take until a mistake has turned it into another run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from affidavit.accountants import leaves
from affidavit.certificate.diagnosis.account import Account, Pair, Part, Parts, PhaseAccount
from affidavit.certificate.diagnosis.correlation import Correlation, correlation
from affidavit.mechanisms import (
    Extras,
    combination,
    joint_noise_multiplier,
    jointly,
    lower_extra,
    noise_multiplier,
)
from affidavit.plan import (
    FIXED_ORDER,
    Composed,
    Gaussian,
    Phase,
    Plan,
    PoissonSubsampledGaussian,
    RefusedPlan,
    Release,
    schedule,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Filter:
    """DP-DiSK: c = (1-κ)/(κγ) of its combination of two gradients; arXiv:2410.03883."""

    coefficient: float

    @property
    def norm(self) -> float:
        """√(c² + (1-c)²), by which the public implementation divides the noise."""
        return math.hypot(self.coefficient, 1 - self.coefficient)

    @property
    def distance(self) -> float:
        """|c| + |1-c|: how far a record moves sums that are combined after clipping."""
        return abs(self.coefficient) + abs(1 - self.coefficient)


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What is known of one phase beside its account.

    ``lot`` is the lot size, expected or fixed (None for a full batch); ``rate`` is lot over
    data set, or the given probability; ``epochs`` are passes over the data; ``lots`` are the
    lots of one, without and with a partial last one. ``correlation`` is None for independent
    noise, and for a strategy that cannot be built here; ``independent`` noise has no schedule.
    """

    scheme: str
    lot: int | None
    rate: float
    steps: int
    epochs: float
    lots: tuple[int, ...]
    releases: tuple[Release, ...]
    independent: bool
    correlation: Correlation | None

    @property
    def blocks(self) -> int:
        """Blocks of one step."""
        return sum(release.count for release in self.releases)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A plan with its account; ``facts`` has one entry a phase."""

    plan: Plan
    account: Account
    facts: tuple[Facts, ...]
    filter: Filter | None = None

    @classmethod
    def of(cls, plan: Plan, delta: float) -> Case:
        """The case of a plan whose noise and steps are given."""
        filtered = _filter(plan)
        facts = tuple(_facts(plan, index) for index in range(len(plan.phases)))
        extras = _extras(plan)
        phases = tuple(
            _phase_account(plan, phase, fact, filtered, extras)
            for phase, fact in zip(plan.phases, facts, strict=True)
        )
        account = Account(phases=phases, extra=_beside(extras), delta=delta)
        return cls(plan=plan, account=account, facts=facts, filter=filtered)

    @property
    def first(self) -> Facts:
        """The facts of the first phase, after which mistakes with numbers are searched."""
        return self.facts[0]


def _facts(plan: Plan, index: int) -> Facts:
    phase = plan.phases[index]
    steps = schedule.steps(plan, phase)
    if steps is None:
        raise ValueError("a diagnosis needs the steps")
    rate = float(schedule.sampling_probability(plan, phase))
    size, lot = plan.dataset.size, phase.sampling.lot_size
    lots = (
        () if size is None or lot is None else tuple(dict.fromkeys((size // lot, -(-size // lot))))
    )
    return Facts(
        scheme=phase.sampling.scheme,
        lot=lot,
        rate=rate,
        steps=steps,
        epochs=phase.epochs if phase.epochs is not None else steps * rate,
        lots=lots,
        releases=phase.releases,
        independent=phase.noise.kind == "independent" and phase.clip_schedule is None,
        correlation=correlation(plan, index, steps),
    )


def _phase_account(
    plan: Plan, phase: Phase, facts: Facts, filtered: Filter | None, extras: Extras
) -> PhaseAccount:
    sigmas = tuple((float(noise_multiplier(release)), release.count) for release in phase.releases)
    joint = joint_noise_multiplier(phase)
    if joint is None:
        raise ValueError("a diagnosis needs the noise")
    replaces = plan.adjacency == "replace_one"
    records = plan.dataset.contributions_per_user or 1
    optimizer = plan.optimizer
    lots = tuple((sigma, 1) for sigma in extras.same_lot)
    account = PhaseAccount(
        sigmas=(*(sigmas if phase.clipping == "per_block" else ((joint, 1),)), *lots),
        joint=jointly(joint, extras.same_lot),
        steps=facts.steps,
        participations=facts.steps,
        distance=records * (2.0 if replaces else 1.0),
    )
    if filtered is not None and optimizer.noise_divisor == "filter_norm":
        account = replace(account, scale=1 / filtered.norm)
    if filtered is not None and optimizer.combine == "after_clipping":
        account = replace(account, distance=account.distance * filtered.distance)
    if optimizer.name == "dp_dice":
        account = replace(account, known=False)
    return _sampled(account, facts, replaces=replaces)


def _sampled(account: PhaseAccount, facts: Facts, *, replaces: bool) -> PhaseAccount:
    """The account with what its sampler adds."""
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


def _filter(plan: Plan) -> Filter | None:
    if plan.optimizer.name != "dp_disk":
        return None
    return Filter(coefficient=combination(plan))


def _extras(plan: Plan) -> Extras:
    """What is accounted beside the steps; nothing where that is refused."""
    try:
        return lower_extra(plan)
    except RefusedPlan:
        return Extras()


def _beside(extras: Extras) -> Parts | None:
    """The metrics as parts of the account; None beside a selection or Laplace noise.

    No reading takes either, and leaving them out would explain claims about another run.
    """
    if extras.selection is not None:
        return None
    found = []
    for event, times in leaves(Composed(events=(*extras.repeated, *extras.beside))):
        if isinstance(event, PoissonSubsampledGaussian):
            q: float | None = event.sampling_probability
        elif isinstance(event, Gaussian):
            q = None
        else:
            return None
        found.append((Part(noise_multiplier=event.noise_multiplier, probability=q), times))
    return tuple(found)
