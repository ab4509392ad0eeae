"""Certify: the one place where mechanisms and accountants meet.

A plan is lowered to events, the quantity it leaves open (noise, steps, ε or δ) is solved
for by the first engine that covers the run, and a second, independent engine is asked
whether it agrees. The verdict uses the proved upper bound alone:

* ``certified``: ε (or δ) is at most what is stated, and the target, if any, is met.
* ``under_noised``: the proved bound does not meet the target.
* ``refused``: no theorem or engine covers the plan, or the plan may not be claimed.
* ``undecided``: two independent engines contradict each other; nothing is claimed.

Guarantees
    * A well-formed plan always gets an assessment; nothing is raised for its content.
    * Every number stated is an end of a bracket, and upper ends are proved bounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction

from affidavit.accountants.bracket import Bracket, decimal_down, decimal_up
from affidavit.accountants.protocol import Accountant, AccountantError, NoSolution
from affidavit.accountants.registry import NAMES, SECOND_OPINIONS, accountant
from affidavit.certificate import describe
from affidavit.certificate.assessment import Assessment, Opinion
from affidavit.certificate.solving import Solved, solve
from affidavit.mechanisms.lowering import Lowered, lower
from affidavit.mechanisms.obligations import obligations
from affidavit.plan.canonical import as_document, digest
from affidavit.plan.events import Event
from affidavit.plan.model import Plan, Target
from affidavit.plan.reasons import Reason, RefusedPlan
from affidavit.plan.schedule import exactly

AGREEMENT = 1e-3
"""Documented relative accuracy of the engines that serve as second opinion."""


def certify(plan: Plan, *, engine: str | None = None, second_opinion: bool = True) -> Assessment:
    """Assess ``plan``; ``engine`` restricts the work to one accountant by name."""
    blank = Assessment(
        verdict="refused",
        plan_digest=digest(plan),
        plan=as_document(plan),
        adjacency=plan.adjacency,
        unit=plan.dataset.unit,
        target_epsilon=plan.target.epsilon,
        target_delta=plan.target.delta,
    )
    try:
        lowered = lower(plan)
        blank = replace(
            blank,
            sampling=describe.sampling_of(lowered),
            warnings=describe.caveats_of(lowered),
            assumptions=describe.assumptions_of(lowered),
            obligations=tuple(each.as_dict() for each in obligations(lowered)),
        )
        if plan.target.delta is not None:
            _require_small_delta(plan, plan.target.delta)
        names = NAMES if engine is None else (engine,)
        return _assess(blank, lowered, names, second_opinion)
    except RefusedPlan as refusal:
        return replace(blank, reasons=refusal.reasons)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    """One engine's answer to the plan's question, at the closed plan."""

    engine: Accountant
    solved: Solved
    lowered: Lowered
    epsilon: Bracket
    delta: Bracket
    mu: float | None


def _assess(
    blank: Assessment, lowered: Lowered, names: tuple[str, ...], second_opinion: bool
) -> Assessment:
    answer = _first_answer(lowered, names)
    _require_small_delta(lowered.plan, answer.delta.upper)
    event = answer.lowered.event()
    opinions = [_opinion(answer.engine, event, answer.delta.upper)]
    if second_opinion:
        opinions += _second_opinion(answer, names, event)
    found = replace(
        blank,
        epsilon=answer.epsilon,
        delta=answer.delta,
        joint=describe.joint_of(answer.lowered),
        releases=describe.releases_of(
            lowered.plan, answer.solved.plan, answer.solved.required_scale
        ),
        allocation=describe.allocation_of(answer.lowered),
        sensitivity=describe.sensitivity_of(answer.lowered),
        mu=answer.mu,
        sampling=describe.sampling_of(answer.lowered),
        accountants=tuple(opinions),
    )
    return _judge(found, answer)


def _first_answer(lowered: Lowered, names: tuple[str, ...]) -> _Answer:
    """The answer of the first engine that covers the run; raises ``RefusedPlan``."""
    failures: dict[str, Reason] = {}
    for name in names:
        try:
            return _ask(accountant(name), lowered)
        except NoSolution as failure:
            raise RefusedPlan(_as_reason(failure, "/target")) from None
        except AccountantError as failure:
            failures.setdefault(failure.message, _as_reason(failure, ""))
        except (ArithmeticError, ValueError) as fault:
            # A fault of an engine must not decide anything, nor take the others with it.
            failures[name] = _fault(name, fault)
    reached = [reason for reason in failures.values() if reason.code != "unsupported"]
    raise RefusedPlan(*(reached or failures.values()))


def _ask(engine: Accountant, lowered: Lowered) -> _Answer:
    solved = solve(lowered, engine)
    closed = lower(solved.plan)
    curve = engine.curve(closed.event())
    epsilon, delta = _question(lowered.plan.target)
    if delta is not None:
        answer = curve.epsilon(delta), Bracket(lower=delta, upper=delta)
    else:
        answer = Bracket(lower=epsilon, upper=epsilon), curve.delta(epsilon)
    return _Answer(
        engine=engine,
        solved=solved,
        lowered=closed,
        epsilon=answer[0],
        delta=answer[1],
        mu=getattr(curve, "mu", None),
    )


def _question(target: Target) -> tuple[float, float | None]:
    """ε and δ of the target; ε stands alone only where δ is what is asked for."""
    if target.delta is None and target.epsilon is None:
        raise ValueError("a valid plan has a target")
    return target.epsilon or 0.0, target.delta


# ---- the second opinion ------------------------------------------------------------


def _opinion(engine: Accountant, event: Event, delta: float) -> Opinion:
    return Opinion(
        name=engine.name,
        version=engine.version,
        epsilon=engine.curve(event).epsilon(delta),
    )


def _second_opinion(answer: _Answer, names: tuple[str, ...], event: Event) -> list[Opinion]:
    """The opinion of the first independent engine that reaches the run, if there is one."""
    if not 0 < answer.delta.upper < 1:
        return []
    for name in SECOND_OPINIONS:
        if name not in names or name == answer.engine.name:
            continue
        try:
            return [_opinion(accountant(name), event, answer.delta.upper)]
        except AccountantError:
            continue
    return []


def _disagreement(opinions: tuple[Opinion, ...]) -> Reason | None:
    first, *others = opinions
    for other in others:
        if not first.epsilon.meets(other.epsilon, AGREEMENT):
            return Reason(
                code="engines_disagree",
                pointer="",
                message=f"{first.name} gives ε in [{first.epsilon.lower:.6g}, "
                f"{first.epsilon.upper:.6g}] and {other.name} in [{other.epsilon.lower:.6g}, "
                f"{other.epsilon.upper:.6g}]; they do not meet.",
                remedy="Please report the plan; until it is understood nothing is certified.",
            )
    return None


# ---- the verdict -------------------------------------------------------------------


def _judge(found: Assessment, answer: _Answer) -> Assessment:
    disagreement = _disagreement(found.accountants)
    if disagreement is not None:
        return replace(found, verdict="undecided", reasons=(disagreement,))
    if not math.isfinite(answer.epsilon.upper) or answer.delta.upper >= 1:
        unbounded = Reason(
            code="unbounded",
            pointer="/target",
            message="no finite guarantee is proved for this plan.",
            remedy="Add noise or run fewer steps.",
        )
        return replace(found, verdict="refused", reasons=(unbounded,))
    target = found.target_epsilon
    if target is None or answer.epsilon.upper <= target:
        return replace(found, verdict="certified")
    return replace(found, verdict="under_noised", reasons=(_under_noised(found, answer),))


def _under_noised(found: Assessment, answer: _Answer) -> Reason:
    low, high = decimal_down(answer.epsilon.lower, 6), decimal_up(answer.epsilon.upper, 6)
    known = f" (and is at least {low})" if answer.epsilon.lower > 0 else ""
    sigma = (
        "this noise" if found.joint is None else f"a joint noise multiplier of {found.joint:.6g}"
    )
    wanted = [
        f"{release.name} to {release.required:.7g}"
        for release in found.releases
        if release.required is not None
    ]
    return Reason(
        code="under_noised",
        pointer="/target/epsilon",
        message=f"{sigma} gives ε ≤ {high}{known} at δ = {found.target_delta:g}; "
        f"the target is {found.target_epsilon:g}.",
        remedy=(
            f"Raise the noise multiplier of {', '.join(wanted)}."
            if wanted
            else "No noise meets this target: run fewer steps or raise target.epsilon."
        ),
    )


def _require_small_delta(plan: Plan, delta: float) -> None:
    size = plan.dataset.size
    if size is None or plan.allow_large_delta is not None or exactly(delta) * size < 1:
        return
    raise RefusedPlan(
        Reason(
            code="large_delta",
            pointer="/target/delta",
            message=f"δ = {delta:g} is not below 1/N = {float(Fraction(1, size)):.3g}: publishing "
            "one record at random would meet it.",
            remedy="Choose a smaller δ, or say why in allow_large_delta.",
        )
    )


def _fault(name: str, fault: Exception) -> Reason:
    return Reason(
        code="engine_failed",
        pointer="",
        message=f"the {name} accountant failed on this plan ({fault!r}).",
        remedy="Please report the plan.",
    )


def _as_reason(failure: AccountantError, pointer: str) -> Reason:
    return Reason(
        code=failure.code, pointer=pointer, message=failure.message, remedy=failure.remedy
    )
