"""Certify plans: the one place where mechanisms and accountants meet.

A plan is lowered to events, and the first engine that covers the run solves for the plan's unknown
(noise, steps, ε or δ). A second engine checks the result, by the same theorems
(``affidavit.certificate.checks``). The verdict uses the proved upper bound alone:

* ``certified``: the proved bound meets the target, if there is one.
* ``under_noised``: the proved lower bound is above the target.
* ``unproved``: the target lies between the bounds.
* ``refused``: no theorem or engine covers the plan, or its target is meaningless.
* ``undecided``: two engines contradict each other; nothing is claimed.

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
    DECIDING_WIDTH,
    ENGINE_NAMES,
    SECOND_OPINIONS,
    SOLVER_NAMES,
    Accountant,
    AccountantError,
    Adjustable,
    Bracket,
    NoSolution,
    PostProcessedCurve,
    PrivacyCurve,
    Provable,
    Sampling,
    accountant,
    attained_event,
    decimal_down,
    decimal_up,
    refined_curve,
)
from affidavit.assessment import plan_summary
from affidavit.assessment.assessment import (
    Assessment,
    CapNeeds,
    Confidence,
    Opinion,
)
from affidavit.assessment.calibration import Solver, lower_open
from affidavit.assessment.utility_estimates import figures_of, warnings_of
from affidavit.mechanisms import Lowered, obligations_of
from affidavit.plan import (
    Plan,
    Reason,
    RefusedPlan,
    as_document,
    digest_of,
    exact_fraction,
    plan_from,
)

AGREEMENT_TOLERANCE = 1e-3
"""The largest relative distance of a second opinion from the first."""
ENGINE_FAULTS = (ArithmeticError, ValueError, RuntimeWarning)
"""The errors of a faulty engine, which decides nothing and must not stop the others."""


def certify(
    plan: Plan, *, engine: str | None = None, second_opinion: bool = True, provable: bool = False
) -> Assessment:
    """Assess ``plan``; ``engine`` restricts the work to one accountant by name.

    With ``provable`` only bounds are used for which the checker has a statement. A ``claim`` in the
    plan is compared with the result (see ``with_claim``). Raises ``ValueError`` for an unknown
    ``engine``.
    """
    if engine is not None and engine not in ENGINE_NAMES:
        raise ValueError(f"unknown accountant {engine!r}; choose one of {', '.join(ENGINE_NAMES)}.")
    if plan.claim is None:
        return _certify(plan, engine, second_opinion, provable)
    from affidavit.assessment.diagnosis.claims import with_claim  # few plans have one

    largest = None if plan.claim.epsilon is None else float(plan.claim.largest)
    result = _certify(plan, engine, second_opinion, provable, near=largest)
    return with_claim(plan, plan.claim, result, lambda about: _certify(about, engine, False))


def certify_near(plan: Plan, epsilon: float) -> Assessment:
    """Assess ``plan`` without its claim, by a bracket that is narrow if ``epsilon`` is inside."""
    return _certify(plan, None, second_opinion=False, near=epsilon)


def _certify(
    plan: Plan,
    engine: str | None,
    second_opinion: bool,
    provable: bool = False,
    *,
    near: float | None = None,
) -> Assessment:
    document = as_document(plan)
    blank = Assessment(
        verdict="refused",
        plan_digest=digest_of(document),
        plan=document,
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
        return _assess(blank, lowered, names, second_opinion, provable, near)
    except RefusedPlan as refusal:
        return replace(blank, reasons=refusal.reasons)


def with_cap(assessment: Assessment, epsilon: float) -> Assessment:
    """Add what the plan of ``assessment`` needs to meet ``epsilon`` at its δ.

    That is its open quantity, or its noise if it has none; the plan with it was certified.
    """
    document = {key: value for key, value in assessment.plan.items() if key != "claim"}
    document["target"] = {**document["target"], "epsilon": epsilon}
    plan = plan_from(document)
    needs = ""
    if plan.target.delta is not None:
        needs = _needs_of(plan, _certify(plan, None, second_opinion=False))
    return replace(assessment, cap=CapNeeds(epsilon=epsilon, needs=needs))


def _needs_of(plan: Plan, answer: Assessment) -> str:
    """Return the solved quantity of ``plan``, or the noise that its target needs, in words."""
    if plan.asks_for_noise or not plan.is_open:
        sigmas = _required_noise(answer)
        return f"a noise multiplier of at least {sigmas}" if sigmas else ""
    if answer.verdict != "certified" or len(plan.phases) > 1:
        return ""
    (solved, *_) = answer.sampling
    if plan.asks_for_steps:
        return f"at most {solved['steps']} steps"
    if plan.asks_for_lot_size:
        return f"lots of at most {solved['lot_size']} records"
    return f"a sampling probability of at most {solved['probability']:.7g}"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    """One engine's bounds of the solved plan.

    ``provable`` is the bracket of ε before it was narrowed to decide about the target.
    """

    engine: Accountant
    solver: Solver
    lowered: Lowered
    epsilon: Bracket
    provable: Bracket
    delta: Bracket
    mu: float | None
    confidence: Confidence | None


def _assess(
    blank: Assessment,
    lowered: Lowered,
    names: tuple[str, ...],
    second_opinion: bool,
    provable: bool,
    near: float | None,
) -> Assessment:
    answer = _first_answer(lowered, names, provable)
    if near is not None:
        answer = _narrowed(answer, near)
    _require_small_delta(lowered.plan, answer.delta.upper)
    opinions = [
        Opinion(
            name=answer.engine.name,
            version=answer.engine.version,
            epsilon=answer.epsilon,
            confidence=answer.confidence,
        )
    ]
    if second_opinion and (second := _second_opinion(answer, names)) is not None:
        opinions.append(second)
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
    return _with_verdict(result, answer)


def _first_answer(lowered: Lowered, names: tuple[str, ...], provable: bool) -> _Answer:
    """Return the answer of the first engine that covers the run; raises ``RefusedPlan``."""
    failures: dict[str, Reason] = {}
    plan = lowered.plan
    for name in _solvers(names) if plan.is_open else names:
        try:
            engine = accountant(name)
            if provable and isinstance(engine, Provable):
                engine = engine.provable_alone()
            answer = _answer(engine, lowered, decide=not provable)
            return _prefer_certain(answer, lowered, names)
        except NoSolution as failure:
            raise RefusedPlan(_reason_of(failure, "/target")) from None
        except AccountantError as failure:
            failures.setdefault(failure.message, _reason_of(failure, ""))
        except ENGINE_FAULTS as fault:
            failures[name] = Reason(
                code="engine_failed",
                message=f"the {name} accountant failed on this plan ({fault!r}).",
                remedy="Please report the plan.",
            )
    supported = [reason for reason in failures.values() if reason.code != "unsupported"]
    if not supported and len(names) > 1:
        raise RefusedPlan(_unsupported(plan))
    raise RefusedPlan(*(supported or failures.values()))


def _reason_of(failure: AccountantError, pointer: str) -> Reason:
    return Reason(
        code=failure.code, pointer=pointer, message=failure.message, remedy=failure.remedy
    )


def _unsupported(plan: Plan) -> Reason:
    steps = (
        phase.sampling.scheme
        + ("" if phase.noise.kind == "independent" else f" with {phase.noise.kind} noise")
        for phase in plan.phases
    )
    releases = dict.fromkeys((*steps, *(extra.kind for extra in plan.extra)))
    return Reason(
        code="unsupported",
        message=f"no accountant has a bound for a run of {' and '.join(releases)}.",
        remedy="Change one of these, or leave one out.",
    )


def _prefer_certain(answer: _Answer, lowered: Lowered, names: tuple[str, ...]) -> _Answer:
    """Replace sampled bounds by certain ones if these are no higher."""
    if (
        not isinstance(answer.engine, Sampling)
        or CERTAIN_ENGINE not in names
        or lowered.plan.is_open
    ):
        return answer
    try:
        certain = _answer(accountant(CERTAIN_ENGINE), lowered)
    except (AccountantError, *ENGINE_FAULTS):
        return answer
    no_higher = (
        certain.epsilon.upper <= answer.epsilon.upper and certain.delta.upper <= answer.delta.upper
    )
    return certain if no_higher else answer


def _answer(engine: Accountant, lowered: Lowered, *, decide: bool = True) -> _Answer:
    """Solve the plan with ``engine`` and bound it; raises ``AccountantError``."""
    solver = Solver(lowered=lowered, engine=engine)
    closed = solver.solve()
    curve, event = solver.bracketing_curve(closed), closed.event()
    contained = PostProcessedCurve(event=attained_event(closed.attained()))
    target, delta = lowered.plan.target.epsilon, lowered.plan.target.delta
    if delta is not None:
        searched = curve is solver.curve(event)
        provable = epsilon = solver.epsilon(event, delta) if searched else curve.epsilon(delta)
        if decide and target is not None:
            epsilon = _deciding_bracket(target, provable, curve, delta)
        elif decide and (narrower := refined_curve(curve)) is not curve:
            epsilon = narrower.epsilon(delta)
        if not epsilon.lower:
            epsilon = _with_lower_end(epsilon, contained.epsilon(delta).lower)
        delta_bracket = Bracket(lower=delta, upper=delta)
    elif target is not None:
        provable = epsilon = Bracket(lower=target, upper=target)
        delta_bracket = curve.delta(target)
        if not delta_bracket.lower:
            delta_bracket = _with_lower_end(delta_bracket, contained.delta(target).lower)
    else:
        raise ValueError("a valid plan has a target")
    level, seed = getattr(curve, "confidence", None), getattr(curve, "seed", None)
    return _Answer(
        engine=engine,
        solver=solver,
        lowered=closed,
        epsilon=epsilon,
        provable=provable,
        delta=delta_bracket,
        mu=getattr(curve, "mu", None),
        confidence=None if level is None or seed is None else Confidence(level=level, seed=seed),
    )


def _with_lower_end(bracket: Bracket, lower: float) -> Bracket:
    return Bracket(lower=min(lower, bracket.upper), upper=bracket.upper)


def _deciding_bracket(
    target: float, bracket: Bracket, curve: PrivacyCurve, delta: float
) -> Bracket:
    """Narrow ``bracket`` if the target's ε lies inside it.

    The verdict then does not depend on how the engine rounds within its usual width.
    """
    if not bracket.lower <= target < bracket.upper or not isinstance(curve, Adjustable):
        return bracket
    try:
        return bracket.intersect(curve.with_width(DECIDING_WIDTH).epsilon(delta))
    except AccountantError:
        return bracket


def _narrowed(answer: _Answer, near: float) -> _Answer:
    """Narrow the bracket of ε if ``near`` lies inside it, as for a target."""
    curve = answer.solver.bracketing_curve(answer.lowered)
    narrow = _deciding_bracket(near, answer.epsilon, curve, answer.delta.upper)
    return replace(answer, epsilon=narrow)


def _solvers(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the engines that are quick enough to search with, or the one requested engine."""
    return names if len(names) == 1 else SOLVER_NAMES


def _required_scale(lowered: Lowered, answer: _Answer, names: tuple[str, ...]) -> float | None:
    """Return the factor on the given noise that meets the target, or None if it is unknown."""
    plan = lowered.plan
    if plan.asks_for_noise:
        return 1.0
    if plan.is_open or plan.target.epsilon is None or plan.target.delta is None:
        return None
    slow = isinstance(answer.engine, Sampling) or answer.engine.name == CERTAIN_ENGINE
    if slow and answer.epsilon.upper <= plan.target.epsilon:
        return None  # a slow engine searches only for missing noise, not for what could be saved
    for name in _solvers(names):
        try:
            if name == answer.engine.name:
                solver = answer.solver
            else:
                solver = Solver(lowered=lowered, engine=accountant(name))
            scale = solver.required_scale()
            # The search uses the wide brackets, which may require more noise than is needed.
            decided = answer.epsilon.upper <= plan.target.epsilon < answer.provable.upper
            return min(scale, 1.0) if decided else scale
        except NoSolution:
            return None
        except (AccountantError, *ENGINE_FAULTS):
            continue
    return None


# ---- the second opinion ------------------------------------------------------------


def _second_opinion(answer: _Answer, names: tuple[str, ...]) -> Opinion | None:
    """Return the opinion of the checker or of the first other engine that covers the run.

    A run restricted to one engine has none.
    """
    if not (0 < answer.delta.upper < 1 and math.isfinite(answer.epsilon.upper)):
        return None
    if len(names) > 1 and (proved := _checker_opinion(answer)) is not None:
        return proved
    for name in SECOND_OPINIONS:
        if name not in names or name == answer.engine.name:
            continue
        try:
            engine = accountant(name)
            solver = Solver(lowered=answer.lowered, engine=engine)
            curve = solver.bracketing_curve(answer.lowered, one_engine=True)
            epsilon = curve.epsilon(answer.delta.upper)
            return Opinion(name=engine.name, version=engine.version, epsilon=epsilon)
        except (AccountantError, *ENGINE_FAULTS):
            continue
    return None


def _checker_opinion(answer: _Answer) -> Opinion | None:
    """Return the checker's bound, if a few quick lattices come within the tolerance."""
    # Imported here because ball arithmetic loads slowly.
    from affidavit.accountants import QUICK_NODES, search_witness
    from affidavit.checker import Unproved

    event, delta, engine = answer.lowered.event(), answer.delta.upper, answer.engine
    limits = AGREEMENT_TOLERANCE, QUICK_NODES
    try:
        try:
            _, proof = search_witness(event, answer.provable, delta, *limits)
        except Unproved:
            if not isinstance(engine, Provable):
                return None
            looser = engine.provable_alone().curve(event).epsilon(delta)
            if looser.upper <= answer.provable.upper:
                return None
            _, proof = search_witness(event, looser, delta, *limits)
    except (Unproved, AccountantError, *ENGINE_FAULTS):
        return None
    upper = math.nextafter(float(proof.epsilon), math.inf)
    return Opinion(
        name="checker", version=AFFIDAVIT_VERSION, epsilon=Bracket(lower=0.0, upper=upper)
    )


# ---- the verdict -------------------------------------------------------------------


def _with_verdict(assessment: Assessment, answer: _Answer) -> Assessment:
    first, *others = assessment.accountants
    for other in others:
        if not first.epsilon.meets(other.epsilon, AGREEMENT_TOLERANCE):
            disagreement = Reason(
                code="engines_disagree",
                message=f"{first.name} gives ε in [{first.epsilon.lower:.6g}, "
                f"{first.epsilon.upper:.6g}] and {other.name} in [{other.epsilon.lower:.6g}, "
                f"{other.epsilon.upper:.6g}]; they do not meet.",
                remedy="Please report the plan; nothing is certified until this is resolved.",
            )
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
    assert assessment.target_delta is not None
    return Reason(
        code="under_noised",
        pointer="/target/epsilon",
        message=f"{sigma} gives ε ≤ {high}{known} at δ = {decimal_up(assessment.target_delta, 6)}"
        f"{assessment.confidence_suffix}; the target is {assessment.target_epsilon:g}.",
        remedy=_noise_remedy(assessment)
        or "No noise meets this target: run fewer steps or raise target.epsilon.",
    )


def _noise_remedy(assessment: Assessment) -> str:
    """Return the remedy of more noise; empty if no noise is known to meet the target."""
    requested = _required_noise(assessment, "{name} to {sigma}")
    return f"Raise the noise multiplier of {requested}." if requested else ""


def _required_noise(assessment: Assessment, phrase: str = "{sigma} for {name}") -> str:
    """Return the noise multipliers that the target needs as a list; empty if none is known."""
    return ", ".join(
        phrase.format(name=release.name, sigma=f"{release.required:.7g}")
        for release in assessment.releases
        if release.required is not None
    )


def _unproved(assessment: Assessment, answer: _Answer) -> Reason:
    """Return the reason for a target between the bounds, with remedies."""
    low, high = decimal_down(answer.epsilon.lower, 6), decimal_up(answer.epsilon.upper, 6)
    noise = _noise_remedy(assessment)
    assert assessment.target_delta is not None
    return Reason(
        code="unproved",
        pointer="/target/epsilon",
        message=f"ε is proved to lie between {low} and {high} at δ = "
        f"{decimal_up(assessment.target_delta, 6)}{assessment.confidence_suffix}; whether it meets "
        f"the target {assessment.target_epsilon:g} is unknown.",
        remedy=plan_summary.narrowing_remedy(answer.lowered.plan)
        + (noise if noise else f"Raise target.epsilon to {high}."),
    )


def _require_small_delta(plan: Plan, delta: float) -> None:
    size = plan.dataset.size
    if size is None or plan.allow_large_delta is not None or exact_fraction(delta) * size < 1:
        return
    raise RefusedPlan.with_reason(
        code="large_delta",
        pointer="/target/delta",
        message=f"δ = {decimal_up(delta, 6)} is not below 1/N = {float(Fraction(1, size)):.3g}: "
        "publishing one record at random would meet it.",
        remedy="Choose a smaller δ, or say why in allow_large_delta.",
    )
