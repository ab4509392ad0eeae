"""Compare a claim with the certified bounds, and search the mistakes that explain it.

A claim holds if the certified lower bound rounds to it or lies below it: an accountant may be
looser than Affidavit's, but never tighter than the truth. If a claim is off by no more than an
accountant's own error, only a mistake that explains it exactly is reported; otherwise the claim
holds. Any lower claim is wrong, whether or not the catalogue explains it.

A plan with a ``claim`` is certified together with it (``with_claim``): a claim that does not hold
blocks the plan, and the mistakes that explain it are among the reasons.

The search finds the mistakes that reproduce a claim, alone or in pairs. Every way of every mistake
is tried alone under every reading. Pairs are tried only if no single mistake explains the claim:
the simplest explanation is preferred, and among a few thousand pairs some fit any number with few
digits. Explanations are ordered by the number of mistakes, then by ``cost``, in nats: how much was
guessed, how unusual the reading is, and how well it agrees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations

from affidavit.accountants import Bracket, decimal_down, decimal_up
from affidavit.certificate.assessment import Assessment, Caveat
from affidavit.certificate.diagnosis.accountant_inputs import Account, Parts
from affidavit.certificate.diagnosis.catalogue import CATALOGUE
from affidavit.certificate.diagnosis.catalogue.reporting import beyond_one_record
from affidavit.certificate.diagnosis.mistake import Case, Mistake, Way
from affidavit.certificate.diagnosis.readings import (
    Agreement,
    ClaimedEpsilon,
    Effort,
    Reading,
    central_limit,
    readings,
)
from affidavit.plan import PHASE_FIELDS, Claim, LargeDelta, Plan, Reason, pointer_to

MAX_SINGLE_EXPLANATIONS, MAX_PAIR_EXPLANATIONS = 10, 5
SINGLE_EFFORT, PAIR_EFFORT = 40, 30
"""The most tight values that a search computes, for single mistakes and for pairs."""
MAX_COST, MAX_EXTRA_COST = 7.5, 5.0
"""The largest cost of an explanation, and of what it exceeds the best one's, in nats."""
MAX_RELEASES = 4000
"""The most kinds of release that one pass reads, at about half a millisecond each."""
MAX_PAIR_COST = 4.5
"""The largest cost of a pair of ways; a costlier pair would fit any number."""
AGREEMENT_COSTS = {Agreement.EXACTLY: 0.0, Agreement.CUT: 1.2, Agreement.NEARLY: 1.6}
"""The cost of each agreement, in nats."""
ENGINE_ERROR = 1e-3
"""How far below the truth a common accountant may report, relatively."""
FINEST_PRECISION = 1e-3
"""The precision of a claim that distinguishes a mistake from an accountant's error."""
UNPROVED_MARGIN = 0.01
"""How far below the certified bound a claim is neither proved nor refuted, relatively.

It holds unless one known mistake gives exactly its digits.
"""

Certify = Callable[[Plan], Assessment]


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """Mistakes that lead from the plan to the claim, under one reading."""

    ways: tuple[Way, ...]
    reading: Reading
    agreement: Agreement
    differs_by: float

    @property
    def mistakes(self) -> tuple[str, ...]:
        """The codes of the mistakes."""
        return tuple(way.code for way in self.ways)

    @property
    def cost(self) -> float:
        """How unlikely the explanation is, in nats, among those with as many mistakes."""
        agreement = AGREEMENT_COSTS[self.agreement]
        if self.agreement is Agreement.NEARLY and self.reading.above:
            agreement /= 2  # the program is no more accurate
        return _guess_cost(self.ways) + self.reading.cost + agreement


def search(
    case: Case, judgement: ClaimedEpsilon, effort: Effort | None = None
) -> tuple[Explanation, ...]:
    """Return the explanations of a claim, simplest first.

    ``effort`` is the effort for pairs, by default ``PAIR_EFFORT``.
    """
    ways = [way for mistake in CATALOGUE.values() for way in mistake.ways(case)]
    single = sorted(((way,) for way in ways), key=_guess_cost)
    explanations = _explain(case, judgement, single, Effort(left=SINGLE_EFFORT))
    if best := _best(explanations, MAX_SINGLE_EXPLANATIONS):
        return best
    pairs = [
        (one, other)
        for one, other in combinations(ways, 2)
        if one.code != other.code and one.cost + other.cost <= MAX_PAIR_COST
    ]
    effort = effort or Effort(left=PAIR_EFFORT)
    explanations = _explain(case, judgement, sorted(pairs, key=_guess_cost), effort)
    return _best(explanations, MAX_PAIR_EXPLANATIONS)


def _guess_cost(ways: tuple[Way, ...]) -> float:
    return sum(way.cost for way in ways)


def _best(explanations: Iterable[Explanation], limit: int) -> tuple[Explanation, ...]:
    """Return the best explanation of each set of mistakes, best first."""
    stored: dict[tuple[str, ...], Explanation] = {}
    for explanation in explanations:
        if explanation.cost > MAX_COST:
            continue
        known = stored.get(explanation.mistakes)
        if known is None or explanation.cost < known.cost:
            stored[explanation.mistakes] = explanation
    ordered = sorted(stored.values(), key=lambda item: item.cost)[:limit]
    return tuple(item for item in ordered if item.cost <= ordered[0].cost + MAX_EXTRA_COST)


def _explain(
    case: Case, judgement: ClaimedEpsilon, candidates: Iterable[tuple[Way, ...]], effort: Effort
) -> Iterator[Explanation]:
    """Yield the candidates that reproduce the claim, with each agreeing reading."""
    truth = case.account.parts(), case.account.delta
    releases = 0
    for ways in candidates:
        if releases > MAX_RELEASES:
            effort.is_cut_short = True
            return
        account = case.account
        for way in ways:
            account = way.of(account, case.facts)
        parts = account.parts()
        releases += len(parts or ())
        clt = any(way.central_limit for way in ways)
        if not parts or ((parts, account.delta) == truth and not clt):
            continue
        for reading in _readings(parts, account, judgement, effort, clt=clt):
            agreement = judgement.agreement(reading.epsilon, reading.below, reading.above)
            if agreement is not None:
                yield Explanation(
                    ways=ways,
                    reading=reading,
                    agreement=agreement,
                    differs_by=reading.epsilon - judgement.value,
                )


def _readings(
    parts: Parts, account: Account, judgement: ClaimedEpsilon, effort: Effort, *, clt: bool
) -> tuple[Reading, ...]:
    """Return the readings of ``parts``; none if their numbers overflow."""
    try:
        if not clt:
            return tuple(readings(parts, account.delta, judgement, effort))
        sampled = any(part.probability is not None for part, _ in parts)
        return tuple(central_limit(parts, account.delta)) if sampled else ()
    except (ArithmeticError, ValueError):
        return ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimOutcome:
    """The outcome for a claim: it holds, it is explained, or neither.

    ``is_cut_short`` is True if some pairs of mistakes were not tried.
    """

    holds: bool
    explanations: tuple[Explanation, ...] = ()
    is_cut_short: bool = False

    @classmethod
    def searched(cls, case: Case, judgement: ClaimedEpsilon) -> ClaimOutcome:
        """Search the explanations of a claim that does not hold."""
        effort = Effort(left=PAIR_EFFORT)
        result = search(case, judgement, effort)
        return cls(holds=False, explanations=result, is_cut_short=effort.is_cut_short)

    @property
    def unexplained(self) -> str:
        """The end of a sentence that says that no mistake explains the claim."""
        tried = "; not every pair of mistakes was tried" if self.is_cut_short else ""
        return f"no known mistake reproduces it{tried}."


def claimed_plan(plan: Plan, claim: Claim) -> Plan:
    """Return the plan that the claim is about: without the claim, and with the claimed noise."""
    bare = plan.model_copy(update={"claim": None})
    if claim.noise_multiplier is None:
        return bare
    sigma = float(claim.noise_multiplier)
    return bare.with_noise_multipliers(lambda _index, _release: sigma)


def examine(plan: Plan, claim: Claim, certify: Certify, assessment: Assessment) -> ClaimOutcome:
    """Determine whether ``claim`` holds for ``plan`` (``claimed_plan``), given its ``assessment``.

    Raises ``ValueError`` for a plan without ``target.delta``.
    """
    delta = plan.target.delta
    if delta is None:
        raise ValueError("a claim needs a target.delta")
    judgement = ClaimedEpsilon.of(claim, plan)
    if any(reason.code == "large_delta" for reason in assessment.reasons):
        return _at_large_delta(plan, judgement, certify)
    truth = assessment.epsilon
    undecided = truth is not None and judgement.value < truth.upper * (1 - UNPROVED_MARGIN)
    if truth is not None and _holds(judgement, truth) and not undecided:
        return ClaimOutcome(holds=True)
    searched = ClaimOutcome.searched(Case.of(plan, delta), judgement)
    if truth is not None and _is_within_error(judgement, truth):
        exact = tuple(
            explanation
            for explanation in searched.explanations
            if explanation.agreement is Agreement.EXACTLY
        )
        if judgement.precision > FINEST_PRECISION or not exact or len(exact[0].ways) > 1:
            return ClaimOutcome(holds=True)
        return ClaimOutcome(holds=False, explanations=exact)
    return searched


def _holds(judgement: ClaimedEpsilon, truth: Bracket) -> bool:
    return judgement.agreement(truth.lower) is Agreement.EXACTLY or truth.lower <= judgement.value


def _is_within_error(judgement: ClaimedEpsilon, truth: Bracket) -> bool:
    """Whether rounded noise, truncated digits or an engine's error may explain the difference."""
    uncertainty = judgement.noise_uncertainty * truth.lower
    tolerance = max(judgement.unit, ENGINE_ERROR * judgement.value, uncertainty)
    return truth.lower <= judgement.value + tolerance


def _at_large_delta(plan: Plan, judgement: ClaimedEpsilon, certify: Certify) -> ClaimOutcome:
    """Examine a claim at a δ of 1/N or more, which is a mistake even if the rest is right."""
    allowed = plan.model_copy(update={"allow_large_delta": LargeDelta(reason="a claim")})
    truth = certify(allowed)
    delta = plan.target.delta or 0.0
    if truth.epsilon is None or not (
        _holds(judgement, truth.epsilon) or _is_within_error(judgement, truth.epsilon)
    ):
        return ClaimOutcome.searched(Case.of(plan, delta), judgement)
    (engine, *_) = truth.accountants
    result = Explanation(
        ways=(beyond_one_record(delta, plan.dataset.size),),
        reading=Reading(accountant=engine.name, epsilon=truth.epsilon.upper, cost=0.0),
        agreement=judgement.agreement(truth.epsilon.upper) or Agreement.NEARLY,
        differs_by=truth.epsilon.upper - judgement.value,
    )
    return ClaimOutcome(holds=False, explanations=(result,))


# ---- a plan that carries its claim --------------------------------------------------


def with_claim(plan: Plan, claim: Claim, assessment: Assessment, certify: Certify) -> Assessment:
    """Take the claim of a plan into account.

    A claim that does not hold turns ``certified`` or ``unproved`` into ``under_noised``; a claim
    that was rounded to below the certified lower bound adds a warning.
    """
    about = claimed_plan(plan, claim)
    truth = assessment if claim.noise_multiplier is None else certify(about)
    if truth.verdict == "undecided":
        return assessment
    outcome = examine(about, claim, certify, truth)
    if outcome.holds:
        warnings = _rounding_warnings(claim, about, truth)
        return replace(assessment, warnings=assessment.warnings + warnings)
    if truth.epsilon is None and not outcome.explanations:
        return assessment
    is_blocked = assessment.verdict in ("certified", "unproved")
    return replace(
        assessment,
        verdict="under_noised" if is_blocked else assessment.verdict,
        reasons=(*assessment.reasons, *_reasons(plan, claim, about, truth, outcome)),
    )


def describe_claim(claim: Claim, about: Plan) -> str:
    """Return the claim in words."""
    delta = f"δ = {about.target.delta:g}"
    if claim.noise_multiplier is None:
        return f"ε = {claim.text} at {delta} is claimed"
    return f"σ = {claim.text} is claimed to reach ε = {about.target.epsilon:g} at {delta}"


def describe_bounds(truth: Assessment) -> str:
    """Return the certified bounds in words; the lower bound alone can contradict a claim."""
    if truth.epsilon is None:
        return "no claim can be made about this plan"
    high = decimal_up(truth.epsilon.upper, 6)
    if truth.epsilon.lower <= 0:
        return f"ε ≤ {high} is certified{truth.confidence_suffix}"
    return (
        f"ε is at least {decimal_down(truth.epsilon.lower, 6)} and certified to be at most "
        f"{high}{truth.confidence_suffix}"
    )


def _rounding_warnings(claim: Claim, about: Plan, truth: Assessment) -> tuple[Caveat, ...]:
    if truth.epsilon is None or truth.epsilon.lower <= ClaimedEpsilon.of(claim, about).value:
        return ()
    return (
        Caveat(
            code="claim_rounded_down",
            message=f"{describe_claim(claim, about)}; {describe_bounds(truth)}. It is right to its "
            "digits, and rounded up it would be a bound.",
        ),
    )


def _reasons(
    plan: Plan, claim: Claim, about: Plan, truth: Assessment, outcome: ClaimOutcome
) -> Iterator[Reason]:
    name = "epsilon" if claim.noise_multiplier is None else "noise_multiplier"
    unexplained = "" if outcome.explanations else f" {outcome.unexplained.capitalize()}"
    yield Reason(
        code="claim_below_certified",
        pointer=f"/claim/{name}",
        message=f"{describe_claim(claim, about)}; {describe_bounds(truth)}.{unexplained}",
        remedy="Correct the claim, or add the noise that it needs; "
        "`affidavit diagnose` says how much.",
    )
    for best in outcome.explanations[:1]:
        reading = best.reading
        for way in best.ways:
            mistake = CATALOGUE[way.code]
            yield Reason(
                code=way.code,
                pointer=pointer_of(mistake, plan),
                message=f"{way.text}; {reading.accountant} then gives ε = {reading.epsilon:.6g}. "
                f"{mistake.wrong} Source: {mistake.source}.",
                remedy=mistake.fix,
            )


def pointer_of(mistake: Mistake, plan: Plan) -> str:
    """Return the pointer to the mistake's field in the plan."""
    top, *rest = mistake.field
    if top == "steps" and plan.phases[0].epochs is not None:
        top = "epochs"
    return plan.pointer(0, top, *rest) if top in PHASE_FIELDS else pointer_to(top, *rest)
