"""Evaluating a policy: on a fresh assessment, and as a verifier's floor on a signed certificate.

``judge`` applies a policy and the waivers in force to an assessment:

* ``certified`` becomes ``refused`` when a rule is violated; the numbers stay, because they
  are still true.
* ``under_noised`` and ``unproved`` stay, with the policy's reasons beside its own.
* ``refused`` and ``undecided`` stay: there is no guarantee to allow.

``policy_floor`` checks a signed certificate against a verifier's policy, which need not be
the one it was issued under: plan, numbers and engines against every rule, validity,
and approvals. A waived reason counts as satisfied only under the exact policy (by digest) that
the waiver was granted for. Whether a reservation is possible does not follow from a certificate
and is not checked.

Where a policy requires approvals, a certified plan is first issued without any, and ``verify``
rejects it. Each approval names the digest of the approved envelope, so it cannot be moved to
another. Once all are given, the same statement is signed again with the approvals in it, as the
next issue.

Guarantees
    * No policy and no waiver makes ``certified`` of what accounting does not certify.
    * A waived reason stays in the certificate, which ends no later than the waiver.
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

from affidavit.certificate.assessment import Assessment
from affidavit.certificate.keys.key import parse_instant
from affidavit.certificate.policy.document import BUILT_IN, Policy
from affidavit.certificate.policy.rules import Budget, PolicyFacts, violations
from affidavit.certificate.policy.waiver import Waived, Waiver
from affidavit.plan import Plan, PlanError, Reason


@dataclass(frozen=True, slots=True)
class Approval:
    """One person's approval: ``at`` in UTC, ``envelope`` the digest of what they reviewed."""

    name: str
    at: str
    comment: str
    envelope: str


@dataclass(frozen=True, slots=True)
class Approvals:
    """How many approvals a certificate needs and which it has."""

    required: int = 0
    given: tuple[Approval, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether as many people approved as are required."""
        return len({item.name for item in self.given}) >= self.required

    def as_document(self) -> dict[str, Any]:
        """The ``approvals`` of a statement."""
        return {"required": self.required, "given": [asdict(item) for item in self.given]}

    @classmethod
    def of(cls, predicate: Mapping[str, Any]) -> Approvals:
        """Those of a statement's predicate; raises ``ValueError`` for any other shape."""
        stated = predicate.get("approvals")
        if stated == []:
            return cls()
        try:
            required, provided = stated["required"], stated["given"]  # type: ignore[index]  # tried
            result = cls(required, tuple(Approval(**entry) for entry in provided))
        except (TypeError, KeyError):
            raise ValueError("its approvals cannot be read") from None
        words = [word for item in result.given for word in asdict(item).values()]
        plain = isinstance(required, int) and not isinstance(required, bool) and required >= 0
        if not plain or not all(isinstance(word, str) for word in words):
            raise ValueError("its approvals cannot be read")
        return result


NONE_NEEDED: Approvals = Approvals()


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyEvaluation:
    """The policy that applied, the waivers in force, and the reasons that they waived."""

    policy: Policy = BUILT_IN
    in_force: tuple[Waiver, ...] = ()
    waived: tuple[Waived, ...] = ()

    def not_after(self, issued_at: datetime) -> datetime:
        """When a certificate that is issued now expires, by the policy and its waivers."""
        ends = [issued_at + timedelta(days=self.policy.valid_days)]
        return min(ends + [item.waiver.expires for item in self.waived])

    def as_dict(self) -> dict[str, Any]:
        """The evaluation in results and certificates."""
        return {
            "policy": self.policy.reference(),
            "waived": [item.as_dict() for item in self.waived],
        }


AS_PROVED: PolicyEvaluation = PolicyEvaluation()
"""The judgement of the built-in policy, under which what is proved is what is certified."""


def lacks_requirements(assessment: Assessment, policy: Policy) -> bool:
    """Whether ``policy`` requires a proof or the bound of a group that was not computed yet."""
    return _lacks_proof(assessment, policy) or _lacks_group(assessment, policy)


def with_requirements(assessment: Assessment, policy: Policy) -> Assessment:
    """Return ``assessment`` with the proof and the group's bound that ``policy`` requires.

    Each takes as long as accounting or longer. What cannot be proved has its reasons.
    """
    from affidavit.certificate.group_privacy import with_group
    from affidavit.certificate.proof import with_proof  # both load much, and few policies need them

    if _lacks_proof(assessment, policy):
        assessment = with_proof(assessment)
    cap = policy.group_cap
    if cap is not None and _lacks_group(assessment, policy):
        assessment = with_group(assessment, cap.records, cap.relation or assessment.adjacency)
    return assessment


def _lacks_proof(assessment: Assessment, policy: Policy) -> bool:
    searched = assessment.proof is not None or assessment.proof_problem is not None
    return policy.proof == "required" and not searched


def _lacks_group(assessment: Assessment, policy: Policy) -> bool:
    cap = policy.group_cap
    if cap is None or assessment.epsilon is None:
        return False
    required = cap.records, cap.relation or assessment.adjacency
    return required not in {(bound.records, bound.relation) for bound in assessment.groups}


def judge(
    plan: Plan,
    assessment: Assessment,
    policy: Policy,
    waivers: Iterable[Waiver] = (),
    budget: Budget = "unknown",
) -> tuple[Assessment, PolicyEvaluation]:
    """``assessment`` under ``policy`` with the ``waivers`` in force for plan and requester."""
    granted = tuple(waivers)
    if assessment.verdict not in ("certified", "under_noised", "unproved"):
        return assessment, PolicyEvaluation(policy=policy, in_force=granted)
    against: list[Reason] = []
    waived: list[Waived] = []
    for reason in violations(policy, PolicyFacts.of(plan, assessment, budget)):
        waiver = _longest(granted, reason.code)
        if waiver is None:
            against.append(reason)
        else:
            waived.append(Waived(reason=reason, waiver=waiver))
    judgement = PolicyEvaluation(policy=policy, in_force=granted, waived=tuple(waived))
    if not against:
        return assessment, judgement
    verdict = "refused" if assessment.verdict == "certified" else assessment.verdict
    return replace(assessment, verdict=verdict, reasons=(*assessment.reasons, *against)), judgement


def _longest(granted: tuple[Waiver, ...], rule: str) -> Waiver | None:
    """The waiver of ``rule`` that expires last."""
    return max(
        (item for item in granted if item.rule == rule),
        key=lambda item: (item.expires, item.id),
        default=None,
    )


def policy_floor(predicate: Mapping[str, Any], policy: Policy) -> tuple[Reason, ...]:
    """The rules of ``policy`` that a certificate's ``predicate`` violates.

    A certificate of a refused or under-noised plan claims nothing that could be too much, so
    only one that certifies is held against the rules.
    """
    if predicate.get("verdict") != "certified":
        return ()
    try:
        result = violations(policy, PolicyFacts.said_in(predicate, budget="fits"))
        granted = _waived_under(predicate, policy)
        return (
            *(reason for reason in result if (reason.code, reason.pointer) not in granted),
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


def _waived_under(predicate: Mapping[str, Any], policy: Policy) -> set[tuple[str, str]]:
    if predicate["policy"].get("digest") != policy.digest():
        return set()
    return {(item["code"], item["pointer"]) for item in predicate.get("waived", ())}


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
