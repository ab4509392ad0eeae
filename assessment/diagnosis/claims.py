"""Answer a claim by the proved bounds, and search the mistakes that explain it.

A claim stands for all numbers that round to it. ``answer_to`` compares the largest of them with the
bracket of ε at the stated δ: at or above the upper end the claim holds, below the lower end it is
refuted, and between the two it is not decided. Whether a mistake explains the claim changes no
answer. Of a claim between the ends, or below them by no more than an accountant's own error, only a
mistake that gives exactly its digits is reported.

A plan with a ``claim`` is certified together with it (``with_claim``). A claim that is refuted
blocks the plan, and the mistakes that explain it are among the reasons; a claim that is not decided
leaves the plan ``unproved``.

The search finds the mistakes that reproduce a claim, alone or in pairs. Every way of every mistake
is tried alone under every reading. Pairs are tried only if no single mistake explains the claim:
the simplest explanation is preferred, and among a few thousand pairs some fit any number with few
digits. Explanations are ordered by the number of mistakes, then by ``cost``, in nats: how much was
guessed, how unusual the reading is, and how well it agrees.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import combinations

from affidavit.accountants import Bracket, decimal_down, decimal_up
from affidavit.assessment.assessment import (
    Assessment,
    Caveat,
    ClaimAnswer,
)
from affidavit.assessment.diagnosis.accountant_inputs import Account, Parts
from affidavit.assessment.diagnosis.catalogue import CATALOGUE
from affidavit.assessment.diagnosis.catalogue.reporting import beyond_one_record
from affidavit.assessment.diagnosis.mistake import (
    Case,
    Mistake,
    Way,
)
from affidavit.assessment.diagnosis.readings import (
    Agreement,
    ClaimedEpsilon,
    Effort,
    Reading,
    central_limit,
    readings,
)
from affidavit.assessment.plan_summary import narrowing_remedy
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
AGREEMENT_COSTS = {Agreement.EXACTLY: 0.0, Agreement.CUT: 1.2, Agreement.APPROXIMATELY: 1.6}
"""The cost of each agreement, in nats."""
ENGINE_ERROR = 1e-3
"""How far below the truth a common accountant may report, relatively."""
FINEST_PRECISION = 1e-3
"""The precision of a claim that distinguishes a mistake from an accountant's error."""
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
        if self.agreement is Agreement.APPROXIMATELY and self.reading.above:
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
    """The answer to a claim, and the mistakes that explain the claim unless it holds.

    ``is_near`` is True if the claim is below the lower bound by no more than rounded noise or an
    accountant's error; ``is_cut_short`` if some pairs of mistakes were not tried.
    """

    answer: ClaimAnswer
    explanations: tuple[Explanation, ...] = ()
    is_near: bool = False
    is_cut_short: bool = False

    @property
    def unexplained(self) -> str:
        """The end of a sentence that says that no mistake explains the claim."""
        tried = "; not every pair of mistakes was tried" if self.is_cut_short else ""
        error = "; rounding or an accountant's error may be the cause" if self.is_near else ""
        return f"no known mistake reproduces it{error}{tried}."


def answer_to(largest: Fraction, bounds: Bracket | None) -> ClaimAnswer:
    """Answer a claim of which ``largest`` is the largest ε that rounds to it.

    >>> bounds = Bracket(lower=7.0, upper=8.0)
    >>> [answer_to(Fraction(text), bounds) for text in ("8", "7.999", "7", "6.999")]
    ['holds', 'not_decided', 'not_decided', 'refuted']
    """
    if bounds is None:
        return "not_decided"
    if largest >= bounds.upper:
        return "holds"
    return "refuted" if largest < bounds.lower else "not_decided"


def claimed_plan(plan: Plan, claim: Claim) -> Plan:
    """Return the plan that the claim is about: without the claim, and with the claimed noise."""
    bare = plan.model_copy(update={"claim": None})
    return bare if claim.noise_multiplier is None else _with_noise(bare, float(claim.number))


def _with_noise(plan: Plan, sigma: float) -> Plan:
    return plan.with_noise_multipliers(lambda _index, _release: sigma)


def examine(plan: Plan, claim: Claim, certify: Certify, assessment: Assessment) -> ClaimOutcome:
    """Answer ``claim`` about ``plan`` (``claimed_plan``), given its ``assessment``.

    Raises ``ValueError`` for a plan without ``target.delta``.
    """
    delta = plan.target.delta
    if delta is None:
        raise ValueError("a claim needs a target.delta")
    judgement = ClaimedEpsilon.of(claim, plan)
    if any(reason.code == "large_delta" for reason in assessment.reasons):
        return _at_large_delta(plan, claim, judgement, certify)
    truth = assessment.epsilon
    answer = _answer(plan, claim, certify, truth)
    if answer == "holds":
        return ClaimOutcome(answer=answer)
    return _searched(Case.of(plan, delta), judgement, answer, truth)


def _answer(plan: Plan, claim: Claim, certify: Certify, truth: Bracket | None) -> ClaimAnswer:
    """Answer a claimed ε by ``truth``, and a claimed σ by the largest σ that rounds to it."""
    if claim.noise_multiplier is None:
        return answer_to(claim.largest, truth)
    if plan.target.epsilon is None:
        raise ValueError("a claimed noise multiplier needs a target.epsilon")
    target = Fraction(plan.target.epsilon)
    answer = answer_to(target, truth)
    if truth is None or answer == "holds":
        return answer
    return answer_to(target, certify(_with_noise(plan, float(claim.largest))).epsilon)


def _searched(
    case: Case, judgement: ClaimedEpsilon, answer: ClaimAnswer, truth: Bracket | None
) -> ClaimOutcome:
    """Search the explanations of a claim that does not hold."""
    effort = Effort(left=PAIR_EFFORT)
    explanations = search(case, judgement, effort)
    is_near = truth is not None and _is_within_error(judgement, truth)
    if is_near:
        explanations = tuple(item for item in explanations if item.agreement is Agreement.EXACTLY)
        is_pair = any(len(item.ways) > 1 for item in explanations[:1])
        if judgement.precision > FINEST_PRECISION or is_pair:
            explanations = ()
    return ClaimOutcome(
        answer=answer,
        explanations=explanations,
        is_near=is_near and answer == "refuted",
        is_cut_short=effort.is_cut_short,
    )


def _is_within_error(judgement: ClaimedEpsilon, truth: Bracket) -> bool:
    """Whether rounded noise, truncated digits or an engine's error may explain the difference."""
    uncertainty = judgement.noise_uncertainty * truth.lower
    tolerance = max(judgement.unit, ENGINE_ERROR * judgement.value, uncertainty)
    return truth.lower <= judgement.value + tolerance


def _at_large_delta(
    plan: Plan, claim: Claim, judgement: ClaimedEpsilon, certify: Certify
) -> ClaimOutcome:
    """Explain a claim at a δ of 1/N or more, which is a mistake even if the rest is right.

    Nothing is certified at such a δ, so that the claim is not decided.
    """
    allowed = plan.model_copy(update={"allow_large_delta": LargeDelta(reason="a claim")})
    truth = certify(allowed)
    answer = _answer(allowed, claim, certify, truth.epsilon)
    delta = plan.target.delta or 0.0
    if truth.epsilon is None or (
        answer == "refuted" and not _is_within_error(judgement, truth.epsilon)
    ):
        return _searched(Case.of(plan, delta), judgement, "not_decided", None)
    (engine, *_) = truth.accountants
    result = Explanation(
        ways=(beyond_one_record(delta, plan.dataset.size),),
        reading=Reading(accountant=engine.name, epsilon=truth.epsilon.upper, cost=0.0),
        agreement=judgement.agreement(truth.epsilon.upper) or Agreement.APPROXIMATELY,
        differs_by=truth.epsilon.upper - judgement.value,
    )
    return ClaimOutcome(answer="not_decided", explanations=(result,))


# ---- a plan that carries its claim --------------------------------------------------


def with_claim(plan: Plan, claim: Claim, assessment: Assessment, certify: Certify) -> Assessment:
    """Take the claim of a plan into account.

    A refuted claim turns ``certified`` or ``unproved`` into ``under_noised``, and one that is not
    decided turns ``certified`` into ``unproved``. A claim that was rounded to below the certified
    lower bound adds a warning.
    """
    about = claimed_plan(plan, claim)
    truth = assessment if claim.noise_multiplier is None else certify(about)
    if truth.verdict == "undecided":
        return assessment
    outcome = examine(about, claim, certify, truth)
    if outcome.answer == "holds":
        warnings = _rounding_warnings(claim, about, truth)
        return replace(assessment, warnings=assessment.warnings + warnings)
    if truth.epsilon is None and not outcome.explanations:
        return assessment
    verdict = assessment.verdict
    if outcome.answer == "refuted" and verdict in ("certified", "unproved"):
        verdict = "under_noised"
    elif verdict == "certified":
        verdict = "unproved"
    if outcome.answer == "refuted":
        reasons = tuple(_refutation(plan, claim, about, truth, outcome))
    else:
        reasons = (_doubt(claim, about, truth, outcome),)
    return replace(assessment, verdict=verdict, reasons=assessment.reasons + reasons)


def describe_claim(claim: Claim, about: Plan) -> str:
    """Return the claim in words."""
    assert about.target.delta is not None  # a claim is about one
    delta = f"δ = {decimal_up(about.target.delta, 6)}"
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


def describe_reading(explanation: Explanation) -> str:
    """Return an explanation in words: its mistakes, its accountant and the ε that they give."""
    reading = explanation.reading
    mistakes = " and ".join(explanation.mistakes)
    return f"{mistakes} under {reading.accountant} gives {reading.epsilon:.6g}"


def what_decides(claim: Claim, about: Plan, truth: Assessment) -> str:
    """Return what would decide a claim that is not decided, as sentences."""
    if truth.epsilon is None:
        return "Nothing is certified for this plan; correct the plan first."
    if claim.noise_multiplier is not None:
        more = "A claimed noise multiplier holds if the upper bound with it meets the target."
    elif math.isfinite(truth.epsilon.upper):
        high = decimal_up(truth.epsilon.upper, 6)
        more = f"A claim of {high} holds; with more noise, so does this one."
    else:
        more = "No claim holds without more noise."
    return f"{narrowing_remedy(about)}{more}"


def is_rounded_down(claim: Claim, about: Plan, truth: Assessment) -> bool:
    """Whether ε is above the claimed one, though it may round to it."""
    return truth.epsilon is not None and truth.epsilon.lower > ClaimedEpsilon.of(claim, about).value


def _rounding_warnings(claim: Claim, about: Plan, truth: Assessment) -> tuple[Caveat, ...]:
    if not is_rounded_down(claim, about, truth):
        return ()
    return (
        Caveat(
            code="claim_rounded_down",
            message=f"{describe_claim(claim, about)}; {describe_bounds(truth)}. It is right to its "
            "digits, and rounded up it would be a bound.",
        ),
    )


def _doubt(claim: Claim, about: Plan, truth: Assessment, outcome: ClaimOutcome) -> Reason:
    """Return the reason for a claim that is not decided."""
    mistakes = "".join(f" {describe_reading(best)}." for best in outcome.explanations[:1])
    if truth.epsilon is None:
        return Reason(
            code="claim_not_decided",
            pointer=_pointer_of_claim(claim),
            message=f"{describe_claim(claim, about)}; {describe_bounds(truth)}.{mistakes}",
            remedy="Correct the plan first: nothing is certified for it.",
        )
    return Reason(
        code="claim_not_decided",
        pointer=_pointer_of_claim(claim),
        message=f"{describe_claim(claim, about)}; {describe_bounds(truth)}. "
        f"Whether the claim holds is not decided.{mistakes}",
        remedy=f"{what_decides(claim, about, truth)} Correct the claim, or add noise; "
        "`affidavit diagnose` says how much.",
    )


def _refutation(
    plan: Plan, claim: Claim, about: Plan, truth: Assessment, outcome: ClaimOutcome
) -> Iterator[Reason]:
    """Yield the reasons for a refuted claim: the claim, then its likeliest mistakes."""
    unexplained = "" if outcome.explanations else f" {outcome.unexplained.capitalize()}"
    yield Reason(
        code="claim_below_certified",
        pointer=_pointer_of_claim(claim),
        message=f"{describe_claim(claim, about)}; {describe_bounds(truth)}. "
        f"The claim is refuted.{unexplained}",
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


def _pointer_of_claim(claim: Claim) -> str:
    return f"/claim/{'epsilon' if claim.noise_multiplier is None else 'noise_multiplier'}"


def pointer_of(mistake: Mistake, plan: Plan) -> str:
    """Return the pointer to the mistake's field in the plan."""
    top, *rest = mistake.field
    if top == "steps" and plan.phases[0].epochs is not None:
        top = "epochs"
    return plan.pointer(0, top, *rest) if top in PHASE_FIELDS else pointer_to(top, *rest)
