"""Judging: what accountancy found, held against a policy and the waivers in force.

* ``certified`` becomes ``refused`` when a rule is violated; the numbers stay, because they
  are still true.
* ``under_noised`` stays so, and the policy's reasons stand beside its own.
* ``refused`` and ``undecided`` stay as they are: there is nothing that could be let through.

Guarantees
    * No policy and no waiver makes ``certified`` of what accountancy does not certify.
    * A waived reason is kept, with its waiver; whatever it let through ends with the waiver.
    * The built-in policy changes no verdict.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from affidavit.certificate.assessment import Assessment
from affidavit.certificate.policy.document import BUILT_IN, Policy
from affidavit.certificate.policy.facts import Budget, Facts
from affidavit.certificate.policy.rules import violations
from affidavit.certificate.policy.waiver import Waived, Waiver
from affidavit.plan import Plan, Reason


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """By which policy, which waivers were in force, and which reasons they let pass."""

    policy: Policy = BUILT_IN
    in_force: tuple[Waiver, ...] = ()
    waived: tuple[Waived, ...] = ()

    def not_after(self, issued_at: datetime) -> datetime:
        """When a certificate that is issued now ends, by the policy and by its waivers."""
        ends = [issued_at + timedelta(days=self.policy.valid_days)]
        return min(ends + [item.waiver.expires for item in self.waived])

    def as_dict(self) -> dict[str, Any]:
        """What results and certificates say of it."""
        return {
            "policy": self.policy.reference(),
            "waived": [item.as_dict() for item in self.waived],
        }


AS_PROVED = Judgement()
"""The judgement of the built-in policy, under which what is proved is what is certified."""


def judge(
    plan: Plan,
    found: Assessment,
    policy: Policy,
    waivers: Iterable[Waiver] = (),
    budget: Budget = "unknown",
) -> tuple[Assessment, Judgement]:
    """``found`` under ``policy``; ``waivers`` are those in force for this plan and requester."""
    granted = tuple(waivers)
    if found.verdict not in ("certified", "under_noised"):
        return found, Judgement(policy=policy, in_force=granted)
    against: list[Reason] = []
    waived: list[Waived] = []
    for reason in violations(policy, Facts.of(plan, found, budget)):
        waiver = _longest(granted, reason.code)
        if waiver is None:
            against.append(reason)
        else:
            waived.append(Waived(reason=reason, waiver=waiver))
    judgement = Judgement(policy=policy, in_force=granted, waived=tuple(waived))
    if not against:
        return found, judgement
    verdict = "refused" if found.verdict == "certified" else found.verdict
    return replace(found, verdict=verdict, reasons=(*found.reasons, *against)), judgement


def _longest(granted: tuple[Waiver, ...], rule: str) -> Waiver | None:
    """The waiver of ``rule`` that holds longest."""
    return max(
        (item for item in granted if item.rule == rule),
        key=lambda each: (each.expires, each.id),
        default=None,
    )
