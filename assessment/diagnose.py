"""A diagnosis: a claim, the certified bounds, and the mistakes that explain the difference.

>>> from affidavit.plan.parse import plan_from
>>> plan = plan_from({"version": 1, "dataset": {"size": 42043}, "adjacency": "add_remove",
...     "sampling": {"scheme": "poisson", "lot_size": 1024}, "steps": 410,
...     "releases": [{"name": "all", "count": 49, "clip_norm": 0.1, "noise_multiplier": 2.3395}],
...     "target": {"epsilon": 8, "delta": 8e-6}})
>>> [each.mistakes for each in diagnose(plan, Claim(epsilon="7.9852")).explanations]
[('independent_blocks',)]

Guarantees
    * Everything that is called certified, including the corrected noise, was certified.
    * A claim holds only if the certified upper bound is at most the largest number that rounds to
      it, and is called refuted only if the lower bound is above that number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from affidavit.accountants import decimal_up
from affidavit.assessment.assessment import Assessment, ClaimAnswer
from affidavit.assessment.certification import certify, certify_near
from affidavit.assessment.diagnosis.catalogue import CATALOGUE
from affidavit.assessment.diagnosis.claims import (
    ClaimOutcome,
    Explanation,
    claimed_plan,
    describe_bounds,
    describe_claim,
    describe_reading,
    examine,
    is_rounded_down,
    pointer_of,
    what_decides,
)
from affidavit.assessment.diagnosis.readings import ClaimedEpsilon
from affidavit.plan import Claim, MalformedPlan, Plan, Target, find_claim_conflicts, html_table


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Diagnosis:
    """The outcome for one claim; ``corrected`` is the plan with noise that makes the claim true."""

    claim: Claim
    plan: Plan
    certified: Assessment
    outcome: ClaimOutcome
    corrected: Assessment | None

    @property
    def answer(self) -> ClaimAnswer:
        """Whether the claim holds, is refuted, or is not decided."""
        return self.outcome.answer

    @property
    def holds(self) -> bool:
        """Whether the claim holds, which it does not if it is merely not refuted."""
        return self.answer == "holds"

    @property
    def explanations(self) -> tuple[Explanation, ...]:
        """The explanations of the claim, simplest first."""
        return self.outcome.explanations

    @property
    def summary(self) -> str:
        """The outcome in a sentence or two."""
        message = f"{describe_claim(self.claim, self.plan)}; {describe_bounds(self.certified)}."
        if self.holds:
            is_below = is_rounded_down(self.claim, self.plan, self.certified)
            digits = " only as a number rounded down" if is_below else ", to the digits given"
            return f"{message} The claim holds{digits}."
        best = "".join(f" {describe_reading(item)}." for item in self.explanations[:1])
        if self.answer == "not_decided":
            decided = what_decides(self.claim, self.plan, self.certified)
            return f"{message} Whether the claim holds is not decided.{best} {decided}"
        unexplained = "" if best else f" {self.outcome.unexplained}"
        return f"{message} The claim is refuted{'.' if best else ', and'}{best}{unexplained}"

    def __repr__(self) -> str:
        return f"<{self.summary}>"

    def _repr_html_(self) -> str:
        steps = [
            (
                explanation.reading.accountant,
                f"{explanation.reading.epsilon:.6g}",
                step["code"],
                step["fix"],
            )
            for explanation in self.explanations
            for step in self.as_steps(explanation)
        ]
        headings = ("accountant", "ε", "mistake", "fix") if steps else ()
        return html_table(steps, headings=headings, title=self.summary)

    def as_result(self) -> dict[str, Any]:
        """Return the diagnosis as the command line prints and the service returns it."""
        return {
            "claim": self.claim.model_dump(mode="json", exclude_none=True),
            "answer": self.answer,
            "summary": self.summary,
            "certified": self.certified.as_result(),
            "explanations": [{"mistakes": ["none"]}]
            if self.holds
            else [self._explanation(explanation) for explanation in self.explanations],
            "corrected": None if self.corrected is None else self._corrected(self.corrected),
        }

    @property
    def corrected_summary(self) -> str | None:
        """The certified bound with the corrected noise, in words."""
        if self.corrected is None or self.corrected.epsilon is None:
            return None
        upper = decimal_up(self.corrected.epsilon.upper, 6)
        return f"with them ε ≤ {upper} is certified{self.corrected.confidence_suffix}"

    def as_steps(self, explanation: Explanation) -> list[dict[str, str]]:
        """Return the mistakes of one explanation, each with its error, its source and its fix."""
        mistakes = [(way, CATALOGUE[way.code]) for way in explanation.ways]
        return [
            {
                "code": way.code,
                "pointer": pointer_of(mistake, self.plan),
                "accounted": way.text,
                "wrong": mistake.wrong,
                "source": mistake.source,
                "fix": mistake.fix,
            }
            for way, mistake in mistakes
        ]

    def _explanation(self, explanation: Explanation) -> dict[str, Any]:
        return {
            "mistakes": list(explanation.mistakes),
            "accountant": explanation.reading.accountant,
            "reproduces": explanation.reading.epsilon,
            "differs_by": explanation.differs_by,
            "agreement": explanation.agreement.word,
            "steps": self.as_steps(explanation),
        }

    def _corrected(self, assessment: Assessment) -> dict[str, Any]:
        result = assessment.as_result()
        return {
            "summary": self.corrected_summary,
            "verdict": assessment.verdict,
            "plan_digest": assessment.plan_digest,
            "epsilon": result["epsilon"],
            "delta": result["delta"],
            "noise_multiplier": {
                "joint": assessment.joint,
                "releases": [
                    {"name": release.name, "count": release.count, "required": release.given}
                    for release in assessment.releases
                ],
            },
        }


def diagnose(plan: Plan, claim: Claim) -> Diagnosis:
    """Compare ``claim`` with ``plan``; raises ``MalformedPlan`` if either is incomplete."""
    if reasons := tuple(find_claim_conflicts(claim, plan)):
        raise MalformedPlan(*reasons)
    about = claimed_plan(plan, claim)
    result = _certify(about) if claim.epsilon is None else certify_near(about, float(claim.largest))
    outcome = examine(about, claim, _certify, result)
    return Diagnosis(
        claim=claim,
        plan=about,
        certified=result,
        outcome=outcome,
        corrected=None if outcome.answer == "holds" else _correct(about, claim, result),
    )


def _certify(plan: Plan) -> Assessment:
    return certify(plan, second_opinion=False)


def _correct(plan: Plan, claim: Claim, assessment: Assessment) -> Assessment | None:
    """Certify the plan with the noise that the claim needs; return None if there is none."""
    if assessment.epsilon is None:
        return None
    requested = Target(epsilon=ClaimedEpsilon.of(claim, plan).value, delta=plan.target.delta)
    plan = plan.model_copy(update={"target": requested})
    sigmas = [release.required for release in _certify(plan).releases]
    required = iter([sigma for sigma in sigmas if sigma is not None])
    if not sigmas or None in sigmas:
        return None
    corrected = _certify(plan.with_noise_multipliers(lambda _index, _release: next(required)))
    return corrected if corrected.verdict == "certified" else None
