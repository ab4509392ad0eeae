"""Comparing a claim with what is certified.

A claim holds when the certified lower bound rounds to it or lies below: an accountant may be
looser than ours, never tighter than the truth. Where a claim is off by no more than an
accountant's own error, only a mistake that explains it exactly is reported; otherwise the claim
stands. Everything below that is wrong, whether or not the catalogue explains it.

A plan that carries a ``claim`` is certified together with it (``with_claim``): a claim that
does not hold blocks the plan, and the mistakes that explain it stand among the reasons.

The search finds which mistakes, alone and in pairs, reproduce a claim. Every way of every mistake
is tried alone under every reading. Pairs are tried only when none alone will do: the simplest
explanation is the one that is told, and among a few thousand pairs some fit any number of few
digits. Explanations are ordered by how many mistakes they need, then by what speaks against them
(``cost``, in nats): how much had to be guessed, how unusual the reading is, how well it agrees."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations

from affidavit.accountants import Bracket, decimal_down, decimal_up
from affidavit.certificate.assessment import Assessment, Caveat
from affidavit.certificate.diagnosis.account import Account, Parts
from affidavit.certificate.diagnosis.agreement import Agreement, ClaimedEpsilon
from affidavit.certificate.diagnosis.case import Case, Mistake, Way
from affidavit.certificate.diagnosis.catalogue import CATALOGUE
from affidavit.certificate.diagnosis.catalogue.reporting import beyond_one_record
from affidavit.certificate.diagnosis.readings import Effort, Reading, central_limit, readings
from affidavit.plan import PHASE_FIELDS, Claim, LargeDelta, Plan, Reason, pointer_to

MAX_ALONE = 10
MAX_PAIRS = 5
"""Explanations that are told; further ones are no help."""
ALONE_EFFORT, PAIRS_EFFORT = 40, 30
"""Tight values that a search computes at most, alone and in pairs."""
MAX_COST, MAX_BEHIND = 7.5, 5.0
"""What may speak against an explanation, and how much more than against the best, in nats."""
MAX_RELEASES = 4000
"""Kinds of release that are read in one pass, at about half a millisecond each."""
COSTLIEST_PAIR = 4.5
"""Beyond it a pair guesses so much that it would fit anything."""
AGAINST = {Agreement.EXACTLY: 0.0, Agreement.CUT: 1.2, Agreement.NEARLY: 1.6}
"""What speaks against an agreement that is not exact, in nats."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """Mistakes that lead from the plan to the claim, under one reading."""

    ways: tuple[Way, ...]
    reading: Reading
    agreement: Agreement
    differs_by: float

    @property
    def mistakes(self) -> tuple[str, ...]:
        """The mistakes' codes."""
        return tuple(way.code for way in self.ways)

    @property
    def cost(self) -> float:
        """What speaks against it, in nats; the number of mistakes counts before that."""
        against = AGAINST[self.agreement]
        if self.agreement is Agreement.NEARLY and self.reading.above:
            against /= 2  # its program is not more accurate than that
        return sum(way.cost for way in self.ways) + self.reading.cost + against


def search(
    case: Case, judgement: ClaimedEpsilon, effort: Effort | None = None
) -> tuple[Explanation, ...]:
    """The explanations of a claim, simplest first; none where the catalogue has none.

    ``effort`` is for pairs, ``PAIRS_EFFORT`` unless another is given.
    """
    ways = [way for mistake in CATALOGUE.values() for way in mistake.ways(case)]
    single = sorted(((way,) for way in ways), key=_guessed)
    if alone := _best(_explained(case, judgement, single, Effort(left=ALONE_EFFORT)), MAX_ALONE):
        return alone
    pairs = sorted(filter(_may_be_made_together, combinations(ways, 2)), key=_guessed)
    effort = effort or Effort(left=PAIRS_EFFORT)
    return _best(_explained(case, judgement, pairs, effort), MAX_PAIRS)


def _guessed(ways: tuple[Way, ...]) -> float:
    return sum(way.cost for way in ways)


def _may_be_made_together(pair: tuple[Way, ...]) -> bool:
    return pair[0].code != pair[1].code and _guessed(pair) <= COSTLIEST_PAIR


def _best(explanations: Iterable[Explanation], most: int) -> tuple[Explanation, ...]:
    """The best explanation of each set of mistakes, best first."""
    stored: dict[tuple[str, ...], Explanation] = {}
    for explanation in explanations:
        if explanation.cost > MAX_COST:
            continue
        known = stored.get(explanation.mistakes)
        if known is None or explanation.cost < known.cost:
            stored[explanation.mistakes] = explanation
    ordered = sorted(stored.values(), key=lambda item: item.cost)[:most]
    return tuple(item for item in ordered if item.cost <= ordered[0].cost + MAX_BEHIND)


def _explained(
    case: Case, judgement: ClaimedEpsilon, several: Iterable[tuple[Way, ...]], effort: Effort
) -> Iterator[Explanation]:
    truth = case.account.parts(), case.account.delta
    releases = 0
    for ways in several:
        if releases > MAX_RELEASES:
            effort.is_cut_short = True
            return
        account = case.account
        for way in ways:
            account = way.of(account, case.facts)
        parts = account.parts()
        releases += len(parts or ())
        limit = any(way.central_limit for way in ways)
        if not parts or ((parts, account.delta) == truth and not limit):
            continue
        for reading in _read(parts, account, judgement, effort, limit=limit):
            agreement = judgement.agreement(reading.epsilon, reading.below, reading.above)
            if agreement is not None:
                yield Explanation(
                    ways=ways,
                    reading=reading,
                    agreement=agreement,
                    differs_by=reading.epsilon - judgement.value,
                )


def _read(
    parts: Parts, account: Account, judgement: ClaimedEpsilon, effort: Effort, *, limit: bool
) -> tuple[Reading, ...]:
    """The readings of ``parts``; none where its numbers are beyond what doubles hold."""
    try:
        if not limit:
            return tuple(readings(parts, account.delta, judgement, effort))
        sampled = any(part.probability is not None for part, _ in parts)
        return tuple(central_limit(parts, account.delta)) if sampled else ()
    except (ArithmeticError, ValueError):
        return ()


ENGINE_ERROR = 1e-3
"""How far below the truth an accountant that is in use may report, relatively."""
FINEST = 1e-3
"""Precision of a claim that says enough to tell a mistake from an accountant's error."""

Certify = Callable[[Plan], Assessment]


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimOutcome:
    """The outcome for a claim: it holds, it is explained, or neither.

    ``is_cut_short``: some pairs of mistakes were not tried.
    """

    holds: bool
    explanations: tuple[Explanation, ...] = ()
    is_cut_short: bool = False

    @classmethod
    def searched(cls, case: Case, judgement: ClaimedEpsilon) -> ClaimOutcome:
        """What explains a claim that does not hold."""
        effort = Effort(left=PAIRS_EFFORT)
        result = search(case, judgement, effort)
        return cls(holds=False, explanations=result, is_cut_short=effort.is_cut_short)

    @property
    def unexplained(self) -> str:
        """That nothing explains the claim, as the end of a sentence."""
        tried = "; not every pair of mistakes was tried" if self.is_cut_short else ""
        return f"no known mistake reproduces it{tried}."


def stated(plan: Plan, claim: Claim) -> Plan:
    """The plan that the claim is about: without it, and with the noise that it names."""
    bare = plan.model_copy(update={"claim": None})
    if claim.noise_multiplier is None:
        return bare
    sigma = float(claim.noise_multiplier)
    return bare.with_noise_multipliers(lambda _index, _release: sigma)


WIDE = 0.01
"""How far below the certified bound a claim is one that nothing proves, though nothing refutes it.

Then it holds unless one known mistake gives exactly its digits."""


def examine(plan: Plan, claim: Claim, certify: Certify, assessment: Assessment) -> ClaimOutcome:
    """Whether ``claim`` holds for ``plan`` (``stated``), given its ``assessment``.

    Raises ``ValueError`` for a plan without ``target.delta``.
    """
    delta = plan.target.delta
    if delta is None:
        raise ValueError("a claim needs a target.delta")
    judgement = ClaimedEpsilon.of(claim, plan)
    if any(reason.code == "large_delta" for reason in assessment.reasons):
        return _at_large_delta(plan, judgement, certify)
    truth = assessment.epsilon
    undecided = truth is not None and judgement.value < truth.upper * (1 - WIDE)
    if truth is not None and _holds(judgement, truth) and not undecided:
        return ClaimOutcome(holds=True)
    searched = ClaimOutcome.searched(Case.of(plan, delta), judgement)
    if truth is not None and _within_error(judgement, truth):
        exact = tuple(
            explanation
            for explanation in searched.explanations
            if explanation.agreement is Agreement.EXACTLY
        )
        if judgement.precision > FINEST or not exact or len(exact[0].ways) > 1:
            return ClaimOutcome(holds=True)
        return ClaimOutcome(holds=False, explanations=exact)
    return searched


def _holds(judgement: ClaimedEpsilon, truth: Bracket) -> bool:
    return judgement.agreement(truth.lower) is Agreement.EXACTLY or truth.lower <= judgement.value


def _within_error(judgement: ClaimedEpsilon, truth: Bracket) -> bool:
    """Whether rounding of the noise, cutting off, or an engine's error may account for it."""
    slack = max(judgement.unit, ENGINE_ERROR * judgement.value, judgement.loose * truth.lower)
    return truth.lower <= judgement.value + slack


def _at_large_delta(plan: Plan, judgement: ClaimedEpsilon, certify: Certify) -> ClaimOutcome:
    """A claim at a δ of 1/N or more: that alone is a mistake, if the rest is right."""
    allowed = plan.model_copy(update={"allow_large_delta": LargeDelta(reason="a claim")})
    truth = certify(allowed)
    delta = plan.target.delta or 0.0
    if truth.epsilon is None or not (
        _holds(judgement, truth.epsilon) or _within_error(judgement, truth.epsilon)
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
    """``assessment`` with its plan's claim taken into account.

    A claim that does not hold turns ``certified`` or ``unproved`` into ``under_noised``; one that
    was rounded to below the certified lower bound is told of in a warning.
    """
    about = stated(plan, claim)
    truth = assessment if claim.noise_multiplier is None else certify(about)
    if truth.verdict == "undecided":
        return assessment
    finding = examine(about, claim, certify, truth)
    if finding.holds:
        return replace(
            assessment, warnings=assessment.warnings + _rounded_away(claim, about, truth)
        )
    if truth.epsilon is None and not finding.explanations:
        return assessment
    return replace(
        assessment,
        verdict="under_noised"
        if assessment.verdict in ("certified", "unproved")
        else assessment.verdict,
        reasons=(*assessment.reasons, *_reasons(plan, claim, about, truth, finding)),
    )


def claimed(claim: Claim, about: Plan) -> str:
    """The claim in words."""
    delta = f"δ = {about.target.delta:g}"
    if claim.noise_multiplier is None:
        return f"ε = {claim.text} at {delta} is claimed"
    return f"σ = {claim.text} is claimed to reach ε = {about.target.epsilon:g} at {delta}"


def known(truth: Assessment) -> str:
    """What is certified, in words; the lower bound alone can contradict a claim."""
    if truth.epsilon is None:
        return "no claim can be made about this plan"
    high = decimal_up(truth.epsilon.upper, 6)
    if truth.epsilon.lower <= 0:
        return f"ε ≤ {high} is certified{truth.confidence_suffix}"
    return (
        f"ε is at least {decimal_down(truth.epsilon.lower, 6)} and certified to be at most "
        f"{high}{truth.confidence_suffix}"
    )


def _rounded_away(claim: Claim, about: Plan, truth: Assessment) -> tuple[Caveat, ...]:
    if truth.epsilon is None or truth.epsilon.lower <= ClaimedEpsilon.of(claim, about).value:
        return ()
    return (
        Caveat(
            code="claim_rounded_down",
            message=f"{claimed(claim, about)}; {known(truth)}. It is right to its digits, and "
            "rounded up it would be a bound.",
        ),
    )


def _reasons(
    plan: Plan, claim: Claim, about: Plan, truth: Assessment, finding: ClaimOutcome
) -> tuple[Reason, ...]:
    name = "epsilon" if claim.noise_multiplier is None else "noise_multiplier"
    best = finding.explanations[:1]
    why = "" if best else f" {finding.unexplained.capitalize()}"
    first = Reason(
        code="claim_below_certified",
        pointer=f"/claim/{name}",
        message=f"{claimed(claim, about)}; {known(truth)}.{why}",
        remedy="Correct the claim, or add the noise that it needs; "
        "`affidavit diagnose` says how much.",
    )
    return first, *(reason_of(way.code, way.text, item, plan) for item in best for way in item.ways)


def reason_of(code: str, text: str, explanation: Explanation, plan: Plan) -> Reason:
    """One mistake of an explanation, as a reason with its remedy."""
    mistake = CATALOGUE[code]
    reading = explanation.reading
    return Reason(
        code=code,
        pointer=pointer_of(mistake, plan),
        message=f"{text}; {reading.accountant} then gives ε = {reading.epsilon:.6g}. "
        f"{mistake.wrong} Source: {mistake.source}.",
        remedy=mistake.fix,
    )


def pointer_of(mistake: Mistake, plan: Plan) -> str:
    """Where in the plan the mistake's field stands."""
    top, *rest = mistake.field
    if top == "steps" and plan.phases[0].epochs is not None:
        top = "epochs"
    return plan.pointer(0, top, *rest) if top in PHASE_FIELDS else pointer_to(top, *rest)
