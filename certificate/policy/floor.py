"""The floor: whether a signed certificate satisfies the policy that its verifier asks for.

The verifier's policy need not be the one under which the certificate was issued. What counts
is what the certificate says: its plan, numbers and engines against every rule, how long it
holds, and how many approved it. A reason that was waived counts as satisfied only under the
very policy (by digest) that the waiver was granted against. A certificate that was issued
under a laxer policy is thus caught by what it lets through, not by its policy's name.

Whether a reservation is possible is no fact of a certificate, and is not asked here.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from affidavit.certificate.approval import Approvals
from affidavit.certificate.policy.document import Policy
from affidavit.certificate.policy.facts import Facts
from affidavit.certificate.policy.rules import violations
from affidavit.certificate.policy.waiver import instant
from affidavit.plan import PlanError, Reason


def policy_floor(predicate: Mapping[str, Any], policy: Policy) -> tuple[Reason, ...]:
    """Where a certificate's ``predicate`` falls below ``policy``; nothing if it does not.

    A certificate of a refused or under-noised plan claims nothing that could be too much, so
    only one that certifies is held against the rules.
    """
    if predicate.get("verdict") != "certified":
        return ()
    try:
        found = violations(policy, Facts.said_in(predicate, budget="fits"))
        granted = _waived_under(predicate, policy)
        return (
            *(reason for reason in found if (reason.code, reason.pointer) not in granted),
            *_validity(predicate, policy),
            *_approvals(predicate, policy),
        )
    except (KeyError, TypeError, ValueError, AttributeError, PlanError) as error:
        return (
            Reason(
                code="policy_unreadable",
                pointer="",
                message=f"the statement lacks what the policy judges by ({type(error).__name__}).",
                remedy="Ask for a new certificate.",
            ),
        )


def _waived_under(predicate: Mapping[str, Any], policy: Policy) -> set[tuple[str, str]]:
    if predicate["policy"].get("digest") != policy.digest():
        return set()
    return {(item["code"], item["pointer"]) for item in predicate.get("waived", ())}


def _validity(predicate: Mapping[str, Any], policy: Policy) -> tuple[Reason, ...]:
    validity = predicate["validity"]
    length = instant(validity["not_after"]) - instant(validity["not_before"])
    if length <= timedelta(days=policy.valid_days):
        return ()
    reason = Reason(
        code="policy_validity",
        pointer="",
        message=f"it is valid for {length.days} days; the policy {policy.name} allows "
        f"{policy.valid_days}.",
        remedy="Ask for a certificate under this policy.",
    )
    return (reason,)


def _approvals(predicate: Mapping[str, Any], policy: Policy) -> tuple[Reason, ...]:
    people = len({item.name for item in Approvals.of(predicate).given})
    if people >= policy.approvals:
        return ()
    reason = Reason(
        code="policy_approvals",
        pointer="",
        message=f"{people} people approved it; the policy {policy.name} asks for "
        f"{policy.approvals}.",
        remedy="Have it approved, and fetch the bundle again.",
    )
    return (reason,)
