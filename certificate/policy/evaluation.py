"""The evaluation of a policy: on an assessment, and as a verifier's floor on a signed certificate.

``evaluate_policy`` applies a policy and the waivers in force to an assessment:

* ``certified`` becomes ``refused`` if a rule is violated; the numbers stay, because they hold.
* ``under_noised`` and ``unproved`` stay, with the policy's reasons added.
* ``refused`` and ``undecided`` stay: there is no guarantee to allow.

``policy_floor`` checks a signed certificate against a verifier's policy, which need not be the one
it was issued under: every rule, validity, and approvals. A waived reason counts as satisfied only
under the exact policy (by digest) that the waiver was granted for. Whether the run can be reserved
does not follow from a certificate and is not checked.

If a policy requires approvals, a certified plan is first issued without any, and ``verify`` rejects
it. Each approval names the digest of the approved envelope, so that it cannot be moved to another.
When all are given, the same statement is signed again with the approvals in it, as the next issue.

Guarantees
    * A policy or a waiver never turns a plan into ``certified`` that accounting does not certify.
    * A waived reason stays in the certificate, which expires no later than the waiver.
    * The built-in policy changes no verdict.

>>> alice = Approval("alice", "2026-01-01T00:00:00Z", "agreed with the DPO", "sha256:…")
>>> Approvals(required=2, given=(alice,)).complete
False
>>> Approvals.of({"approvals": []})  # certificates from before there were approvals
Approvals(required=0, given=())
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from affidavit.assessment import Assessment
from affidavit.certificate.policy.document import BUILT_IN, Policy
from affidavit.certificate.policy.rules import Budget, PolicyFacts, violations
from affidavit.certificate.policy.waiver import WaivedReason, Waiver
from affidavit.plan import Plan, PlanError, Reason
from affidavit.trust import parse_instant


@dataclass(frozen=True, slots=True)
class Approval:
    """One person's approval: ``at`` in UTC, ``envelope`` the digest of the reviewed envelope."""

    name: str
    at: str
    comment: str
    envelope: str


@dataclass(frozen=True, slots=True)
class Approvals:
    """The number of approvals that a certificate requires, and the approvals that it has."""

    required: int = 0
    given: tuple[Approval, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether enough people approved."""
        return len({item.name for item in self.given}) >= self.required

    def as_document(self) -> dict[str, Any]:
        """Return the ``approvals`` of a statement."""
        return {"required": self.required, "given": [asdict(item) for item in self.given]}

    @classmethod
    def of(cls, predicate: Mapping[str, Any]) -> Approvals:
        """Return the approvals of a statement's predicate; raises ``ValueError`` if malformed."""
        stated = predicate.get("approvals")
        if stated == []:
            return cls()
        try:
            required, provided = stated["required"], stated["given"]  # type: ignore[index]  # tried
            result = cls(required, tuple(Approval(**entry) for entry in provided))
        except (TypeError, KeyError):
            raise ValueError("its approvals cannot be read") from None
        texts = [text for item in result.given for text in asdict(item).values()]
        is_count = type(required) is int and required >= 0
        if not is_count or not all(isinstance(text, str) for text in texts):
            raise ValueError("its approvals cannot be read")
        return result


NO_APPROVALS: Approvals = Approvals()


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyEvaluation:
    """The applicable policy, the waivers in force, and the reasons that they waived."""

    policy: Policy = BUILT_IN
    in_force: tuple[Waiver, ...] = ()
    waived: tuple[WaivedReason, ...] = ()

    def not_after(self, issued_at: datetime) -> datetime:
        """Return when a certificate issued at ``issued_at`` expires, by policy and waivers."""
        ends = [issued_at + timedelta(days=self.policy.valid_days)]
        return min(ends + [item.waiver.expires for item in self.waived])

    def as_dict(self) -> dict[str, Any]:
        """Return the evaluation as results and certificates have it."""
        return {
            "policy": self.policy.reference(),
            "waived": [item.as_dict() for item in self.waived],
        }


BUILT_IN_EVALUATION: PolicyEvaluation = PolicyEvaluation()
"""The evaluation under the built-in policy, which allows everything that is proved."""


def evaluate_policy(
    plan: Plan,
    assessment: Assessment,
    policy: Policy,
    waivers: Iterable[Waiver] = (),
    budget: Budget = "unknown",
) -> tuple[Assessment, PolicyEvaluation]:
    """Evaluate ``policy`` on ``assessment`` with the ``waivers`` in force for its requester."""
    granted = tuple(waivers)
    if assessment.verdict not in ("certified", "under_noised", "unproved"):
        return assessment, PolicyEvaluation(policy=policy, in_force=granted)
    violated: list[Reason] = []
    waived: list[WaivedReason] = []
    # Of several waivers of a rule the one that expires last applies.
    waiver_of = {
        waiver.rule: waiver for waiver in sorted(granted, key=lambda item: (item.expires, item.id))
    }
    for reason in violations(policy, PolicyFacts.of(plan, assessment, budget)):
        if (waiver := waiver_of.get(reason.code)) is None:
            violated.append(reason)
        else:
            waived.append(WaivedReason(reason=reason, waiver=waiver))
    evaluation = PolicyEvaluation(policy=policy, in_force=granted, waived=tuple(waived))
    if violated:
        verdict = "refused" if assessment.verdict == "certified" else assessment.verdict
        reasons = (*assessment.reasons, *violated)
        assessment = replace(assessment, verdict=verdict, reasons=reasons)
    return assessment, evaluation


def policy_floor(predicate: Mapping[str, Any], policy: Policy) -> tuple[Reason, ...]:
    """Return the rules of ``policy`` that a certificate's ``predicate`` violates.

    Only a certified plan is checked: any other verdict allows nothing.
    """
    if predicate.get("verdict") != "certified":
        return ()
    try:
        result = violations(policy, PolicyFacts.from_predicate(predicate, budget="fits"))
        waived: set[tuple[str, str]] = set()
        if predicate["policy"].get("digest") == policy.digest():
            waived = {(item["code"], item["pointer"]) for item in predicate.get("waived", ())}
        return (
            *(reason for reason in result if (reason.code, reason.pointer) not in waived),
            *_validity(predicate, policy),
            *_approvals(predicate, policy),
        )
    except (KeyError, TypeError, ValueError, AttributeError, PlanError) as error:
        return (
            Reason(
                code="policy_unreadable",
                message=f"the statement lacks fields the policy needs ({type(error).__name__}).",
                remedy="Ask for a new certificate.",
            ),
        )


def _validity(predicate: Mapping[str, Any], policy: Policy) -> Iterator[Reason]:
    validity = predicate["validity"]
    length = parse_instant(validity["not_after"]) - parse_instant(validity["not_before"])
    if length > timedelta(days=policy.valid_days):
        yield Reason(
            code="policy_validity",
            message=f"it is valid for {length.days} days; the policy {policy.name} allows "
            f"{policy.valid_days}.",
            remedy="Ask for a certificate under this policy.",
        )


def _approvals(predicate: Mapping[str, Any], policy: Policy) -> Iterator[Reason]:
    people = len({item.name for item in Approvals.of(predicate).given})
    if people < policy.approvals:
        yield Reason(
            code="policy_approvals",
            message=f"{people} people approved it; the policy {policy.name} asks for "
            f"{policy.approvals}.",
            remedy="Have it approved, and fetch the bundle again.",
        )
