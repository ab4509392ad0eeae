"""Certify: the one place where mechanisms and accountants meet.

A plan is lowered to events, the quantity it leaves open (noise, steps, ε or δ) is solved
for by the first engine that covers the run, and a second, independent engine is asked
whether it agrees. The verdict uses the proved upper bound alone:

* ``certified``: ε (or δ) is at most what is stated, and the target, if any, is met.
* ``under_noised``: ε is more than the target; its proved lower bound says so.
* ``unproved``: the target lies between the bounds, so nobody knows whether it is met.
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

from affidavit.accountants import (
    AFFIDAVIT_VERSION,
    CERTAIN_ENGINE,
    ENGINE_NAMES,
    QUICK_NODES,
    SECOND_OPINIONS,
    SOLVER_NAMES,
    Accountant,
    AccountantError,
    Adjustable,
    Bracket,
    NoSolution,
    PrivacyCurve,
    Provable,
    Sampling,
    Unproved,
    accountant,
    decimal_down,
    decimal_up,
    refined_curve,
    search_witness,
)
from affidavit.certificate import plan_summary
from affidavit.certificate.assessment import Assessment, Confidence, Opinion
from affidavit.certificate.calibration import Solver, lower_open
from affidavit.certificate.utility_estimates import figures_of, warnings_of
from affidavit.mechanisms import Lowered, obligations_of
from affidavit.plan import Plan, Reason, RefusedPlan, Target, as_document, digest, exact_fraction

AGREEMENT = 1e-3
"""How far a second opinion may lie from the first, relative to it."""
DECIDING = 1e-5
"""Relative width of the bracket that decides where the target lies inside the first one."""
FAULTS = (ArithmeticError, ValueError, RuntimeWarning)
"""What an engine with a fault raises: it must decide nothing, nor take the others with it."""


def certify(
    plan: Plan, *, engine: str | None = None, second_opinion: bool = True, provable: bool = False
) -> Assessment:
    """Assess ``plan``; ``engine`` restricts the work to one accountant by name.

    With ``provable`` bounds for which the checker has no statement are left out. A ``claim`` that
    the plan carries is compared with the result (see ``with_claim``). Raises ``ValueError`` for an
    ``engine`` that does not exist.
    """
    if engine is not None and engine not in ENGINE_NAMES:
        raise ValueError(f"unknown accountant {engine!r}; choose one of {', '.join(ENGINE_NAMES)}.")
    result = _certify(plan, engine, second_opinion, provable)
    if plan.claim is None:
        return result
    # Most plans carry no claim, and need not wait for what explains one to load.
    from affidavit.certificate.diagnosis.claims import with_claim

    return with_claim(plan, plan.claim, result, lambda about: _certify(about, engine, False))


def _certify(
    plan: Plan, engine: str | None, second_opinion: bool, provable: bool = False
) -> Assessment:
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
        lowered = lower_open(plan)
        blank = replace(
            blank,
            sampling=plan_summary.sampling_of(lowered),
            warnings=plan_summary.caveats_of(lowered),
            assumptions=plan_summary.assumptions_of(lowered),
            obligations=tuple(obligation.as_dict() for obligation in obligations_of(lowered)),
        )
        if plan.target.delta is not None:
            _require_small_delta(plan, plan.target.delta)
        names = ENGINE_NAMES if engine is None else (engine,)
        return _assess(blank, lowered, names, second_opinion, provable)
    except RefusedPlan as refusal:
        return replace(blank, reasons=refusal.reasons)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    """One engine's answer to the plan's question, at the plan with nothing open."""

    engine: Accountant
    solver: Solver
    lowered: Lowered
    epsilon: Bracket
    provable: Bracket
    """Of ε, before it was narrowed to decide about the target."""
    delta: Bracket
    mu: float | None
    confidence: Confidence | None


def _assess(
    blank: Assessment,
    lowered: Lowered,
    names: tuple[str, ...],
    second_opinion: bool,
    provable: bool,
) -> Assessment:
    answer = _first_answer(lowered, names, provable)
    _require_small_delta(lowered.plan, answer.delta.upper)
    opinions = [_opinion(answer.engine, answer.epsilon, answer.confidence)]
    if second_opinion:
        opinions += _second_opinion(answer, names)
    figures = figures_of(answer.lowered.plan)
    result = replace(
        blank,
        planning=figures,
        warnings=(*blank.warnings, *warnings_of(figures)),
        epsilon=answer.epsilon,
        delta=answer.delta,
        joint=plan_summary.joint_of(answer.lowered),
        releases=plan_summary.releases_of(
            lowered.plan, answer.lowered.plan, _required_scale(lowered, answer, names)
        ),
        allocation=plan_summary.allocation_of(answer.lowered),
        sensitivity=plan_summary.sensitivity_of(answer.lowered),
        strategies=plan_summary.strategies_of(answer.lowered),
        mu=answer.mu,
        confidence=answer.confidence,
        sampling=plan_summary.sampling_of(answer.lowered),
        accountants=tuple(opinions),
    )
    return _judge(result, answer)


def _first_answer(lowered: Lowered, names: tuple[str, ...], provable: bool) -> _Answer:
    """The answer of the first engine that covers the run; raises ``RefusedPlan``."""
    failures: dict[str, Reason] = {}
    plan = lowered.plan
    for name in _solvers(names) if plan.is_open else names:
        try:
            engine = accountant(name)
            if provable and isinstance(engine, Provable):
                engine = engine.provable_alone()
            return _certain(_ask(engine, lowered, decide=not provable), lowered, names)
        except NoSolution as failure:
            raise RefusedPlan(_as_reason(failure, "/target")) from None
        except AccountantError as failure:
            failures.setdefault(failure.message, _as_reason(failure, ""))
        except FAULTS as fault:
            failures[name] = _fault(name, fault)
    reached = [reason for reason in failures.values() if reason.code != "unsupported"]
    if not reached and len(names) > 1:
        raise RefusedPlan(_covered_by_none(plan))
    raise RefusedPlan(*(reached or failures.values()))


def _covered_by_none(plan: Plan) -> Reason:
    steps = (
        phase.sampling.scheme
        + ("" if phase.noise.kind == "independent" else f" with {phase.noise.kind} noise")
        for phase in plan.phases
    )
    what = dict.fromkeys((*steps, *(extra.kind for extra in plan.extra)))
    return Reason(
        code="unsupported",
        message=f"no accountant has a bound for a run of {' and '.join(what)}.",
        remedy="Change one of these, or leave one out.",
    )


def _certain(answer: _Answer, lowered: Lowered, names: tuple[str, ...]) -> _Answer:
    """``answer``, or where it was sampled bounds that hold with certainty and are no higher."""
    if (
        not isinstance(answer.engine, Sampling)
        or CERTAIN_ENGINE not in names
        or lowered.plan.is_open
    ):
        return answer
    try:
        other = _ask(accountant(CERTAIN_ENGINE), lowered)
    except (AccountantError, *FAULTS):
        return answer
    higher = other.epsilon.upper > answer.epsilon.upper or other.delta.upper > answer.delta.upper
    return answer if higher else other


def _ask(engine: Accountant, lowered: Lowered, *, decide: bool = True) -> _Answer:
    solver = Solver(lowered=lowered, engine=engine)
    closed = solver.closed()
    curve, event = solver.enclosed(closed), closed.event()
    epsilon, delta = _question(lowered.plan.target)
    if delta is not None:
        searched = curve is solver.curve(event)
        provable = bracket = solver.epsilon(event, delta) if searched else curve.epsilon(delta)
        result = bracket
        if decide and lowered.plan.target.epsilon is not None:
            result = _decided_bracket(epsilon, bracket, curve, delta)
        elif decide and (narrower := refined_curve(curve)) is not curve:
            result = narrower.epsilon(delta)
        if not result.lower:
            result = _raised(result, solver.contained(closed).epsilon(delta))
        answer = result, Bracket(lower=delta, upper=delta)
    else:
        result = curve.delta(epsilon)
        if not result.lower:
            result = _raised(result, solver.contained(closed).delta(epsilon))
        provable = Bracket(lower=epsilon, upper=epsilon)
        answer = provable, result
    return _Answer(
        engine=engine,
        solver=solver,
        lowered=closed,
        epsilon=answer[0],
        provable=provable,
        delta=answer[1],
        mu=getattr(curve, "mu", None),
        confidence=_confidence(curve),
    )


def _raised(bracket: Bracket, contained: Bracket) -> Bracket:
    """``bracket`` from at least the lower end of what the run contains."""
    return Bracket(lower=min(contained.lower, bracket.upper), upper=bracket.upper)


def _decided_bracket(target: float, bracket: Bracket, curve: PrivacyCurve, delta: float) -> Bracket:
    """``bracket``, or a narrower bracket of ε where the target's ε lies inside it.

    How an engine rounds within the width that it promises then decides about no plan.
    """
    if not bracket.lower <= target < bracket.upper or not isinstance(curve, Adjustable):
        return bracket
    try:
        return bracket.intersect(curve.with_width(DECIDING).epsilon(delta))
    except AccountantError:
        return bracket


def _confidence(curve: PrivacyCurve) -> Confidence | None:
    """What a curve that was sampled says of itself; None where its brackets are certain."""
    level, seed = getattr(curve, "confidence", None), getattr(curve, "seed", None)
    return None if level is None or seed is None else Confidence(level=level, seed=seed)


def _solvers(names: tuple[str, ...]) -> tuple[str, ...]:
    """The engines quick enough to search with; an engine asked for by name always is."""
    return names if len(names) == 1 else SOLVER_NAMES


def _required_scale(lowered: Lowered, answer: _Answer, names: tuple[str, ...]) -> float | None:
    """The factor on the given noise that meets the target; None where none is known."""
    plan = lowered.plan
    if plan.asks_for_noise:
        return 1.0
    if plan.is_open or plan.target.epsilon is None or plan.target.delta is None:
        return None
    slow = isinstance(answer.engine, Sampling) or answer.engine.name == CERTAIN_ENGINE
    if slow and answer.epsilon.upper <= plan.target.epsilon:
        return None  # seconds a bracket are spent on what is missing, not on what could be saved
    for name in _solvers(names):
        try:
            own = answer.solver if name == answer.engine.name else None
            scale = (own or Solver(lowered=lowered, engine=accountant(name))).required_scale()
            # The search uses the wide brackets, which may ask for more than noise that suffices.
            decided = answer.epsilon.upper <= plan.target.epsilon < answer.provable.upper
            return min(scale, 1.0) if decided else scale
        except NoSolution:
            return None
        except (AccountantError, *FAULTS):
            continue
    return None


def _question(target: Target) -> tuple[float, float | None]:
    """ε and δ of the target; ε stands alone only where the plan solves for δ."""
    if target.delta is None and target.epsilon is None:
        raise ValueError("a valid plan has a target")
    return target.epsilon or 0.0, target.delta


# ---- the second opinion ------------------------------------------------------------


def _opinion(engine: Accountant, epsilon: Bracket, confidence: Confidence | None = None) -> Opinion:
    return Opinion(name=engine.name, version=engine.version, epsilon=epsilon, confidence=confidence)


def _second_opinion(answer: _Answer, names: tuple[str, ...]) -> list[Opinion]:
    """That of the checker, or of the first independent engine that reaches the run, if any does.

    A run restricted to one engine has none.
    """
    if not (0 < answer.delta.upper < 1 and math.isfinite(answer.epsilon.upper)):
        return []
    if len(names) > 1 and (proved := _proved(answer)) is not None:
        return [proved]
    for name in SECOND_OPINIONS:
        if name not in names or name == answer.engine.name:
            continue
        try:
            other = accountant(name)
            solver = Solver(lowered=answer.lowered, engine=other)
            curve = solver.enclosed(answer.lowered, alone=True)
            return [_opinion(other, curve.epsilon(answer.delta.upper))]
        except (AccountantError, *FAULTS):
            continue
    return []


def _proved(answer: _Answer) -> Opinion | None:
    """What the checker proves, where a few quick lattices come within ``AGREEMENT``."""
    event, delta, engine = answer.lowered.event(), answer.delta.upper, answer.engine
    try:
        try:
            _, proof = search_witness(event, answer.provable, delta, AGREEMENT, QUICK_NODES)
        except Unproved:
            if not isinstance(engine, Provable):
                return None
            looser = engine.provable_alone().curve(event).epsilon(delta)
            if looser.upper <= answer.provable.upper:
                return None
            _, proof = search_witness(event, looser, delta, AGREEMENT, QUICK_NODES)
    except (Unproved, AccountantError, *FAULTS):
        return None
    upper = math.nextafter(float(proof.epsilon), math.inf)
    return Opinion(
        name="checker", version=AFFIDAVIT_VERSION, epsilon=Bracket(lower=0.0, upper=upper)
    )


def _disagreement(opinions: tuple[Opinion, ...]) -> Reason | None:
    first, *others = opinions
    for other in others:
        if not first.epsilon.meets(other.epsilon, AGREEMENT):
            return Reason(
                code="engines_disagree",
                message=f"{first.name} gives ε in [{first.epsilon.lower:.6g}, "
                f"{first.epsilon.upper:.6g}] and {other.name} in [{other.epsilon.lower:.6g}, "
                f"{other.epsilon.upper:.6g}]; they do not meet.",
                remedy="Please report the plan; nothing is certified until this is resolved.",
            )
    return None


# ---- the verdict -------------------------------------------------------------------


def _judge(assessment: Assessment, answer: _Answer) -> Assessment:
    disagreement = _disagreement(assessment.accountants)
    if disagreement is not None:
        return replace(assessment, verdict="undecided", reasons=(disagreement,))
    if not math.isfinite(answer.epsilon.upper) or answer.delta.upper >= 1:
        unbounded = Reason(
            code="unbounded",
            pointer="/target",
            message="no finite guarantee is proved for this plan.",
            remedy="Add noise or run fewer steps.",
        )
        return replace(assessment, verdict="refused", reasons=(unbounded,))
    target = assessment.target_epsilon
    if target is None or answer.epsilon.upper <= target:
        return replace(assessment, verdict="certified")
    if answer.epsilon.lower <= target:
        return replace(assessment, verdict="unproved", reasons=(_unproved(assessment, answer),))
    return replace(assessment, verdict="under_noised", reasons=(_under_noised(assessment, answer),))


def _under_noised(assessment: Assessment, answer: _Answer) -> Reason:
    low, high = decimal_down(answer.epsilon.lower, 6), decimal_up(answer.epsilon.upper, 6)
    known = f" (and is at least {low})" if answer.epsilon.lower > 0 else ""
    sigma = (
        "this noise"
        if assessment.joint is None
        else f"a joint noise multiplier of {assessment.joint:.6g}"
    )
    more = _more_noise(assessment)
    return Reason(
        code="under_noised",
        pointer="/target/epsilon",
        message=f"{sigma} gives ε ≤ {high}{known} at δ = {assessment.target_delta:g}"
        f"{assessment.chance}; the target is {assessment.target_epsilon:g}.",
        remedy=more or "No noise meets this target: run fewer steps or raise target.epsilon.",
    )


def _more_noise(assessment: Assessment) -> str:
    """The remedy of more noise, or "" if no noise is known to meet the target."""
    requested = [
        f"{release.name} to {release.required:.7g}"
        for release in assessment.releases
        if release.required is not None
    ]
    return f"Raise the noise multiplier of {', '.join(requested)}." if requested else ""


def _unproved(assessment: Assessment, answer: _Answer) -> Reason:
    """The reason of a target that lies between the bounds, with what would tighten them."""
    low, high = decimal_down(answer.epsilon.lower, 6), decimal_up(answer.epsilon.upper, 6)
    phases = answer.lowered.plan.phases
    truncated = any(phase.sampling.max_lot_size is not None for phase in phases)
    remedies = [
        "A larger sampling.max_lot_size truncates fewer lots and narrows the bracket."
        if truncated
        else "",
        _more_noise(assessment) or f"Raise target.epsilon to {high}.",
    ]
    return Reason(
        code="unproved",
        pointer="/target/epsilon",
        message=f"ε is proved to lie between {low} and {high} at δ = "
        f"{assessment.target_delta:g}{assessment.chance}; whether it meets the target "
        f"{assessment.target_epsilon:g} is unknown.",
        remedy=" ".join(filter(None, remedies)),
    )


def _require_small_delta(plan: Plan, delta: float) -> None:
    size = plan.dataset.size
    if size is None or plan.allow_large_delta is not None or exact_fraction(delta) * size < 1:
        return
    raise RefusedPlan.with_reason(
        code="large_delta",
        pointer="/target/delta",
        message=f"δ = {delta:g} is not below 1/N = {float(Fraction(1, size)):.3g}: publishing "
        "one record at random would meet it.",
        remedy="Choose a smaller δ, or say why in allow_large_delta.",
    )


def _fault(name: str, fault: Exception) -> Reason:
    return Reason(
        code="engine_failed",
        message=f"the {name} accountant failed on this plan ({fault!r}).",
        remedy="Please report the plan.",
    )


def _as_reason(failure: AccountantError, pointer: str) -> Reason:
    return Reason(
        code=failure.code, pointer=pointer, message=failure.message, remedy=failure.remedy
    )
