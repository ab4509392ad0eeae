"""How every page shows a verdict: its sentence, and the colours of verdicts and statuses.

>>> verdict_sentence("under_noised", "ε ≤ 3 at δ = 1e-5", "the target is ε = 2")
'Under-noised: ε ≤ 3 at δ = 1e-5 is proved, but the target is ε = 2.'
>>> verdict_sentence("refused", None, "")
'Refused: no guarantee can be certified for this plan.'
"""

from __future__ import annotations

import math

from affidavit.certificate import Assessment
from affidavit.certificate.policy import refused_by_policy
from affidavit.service.pages.text import up, words

VERDICT_TONES = {
    "certified": "good",
    "under_noised": "bad",
    "unproved": "warn",
    "refused": "bad",
    "undecided": "warn",
}
STATUS_TONES = {
    "active": "good",
    "awaiting_approval": "warn",
    "expired": "warn",
    "superseded": "plain",
    "rejected": "bad",
    "revoked": "bad",
    "key_revoked": "bad",
}


def verdict_sentence(
    verdict: str, bound: str | None, target: str, *, by_policy: bool = True, is_draft: bool = False
) -> str:
    """The verdict in one sentence; it never claims a lower bound.

    ``bound`` is the proved guarantee with everything that gives it a meaning, or None;
    ``target`` says what it is compared with. A refusal that is not ``by_policy`` has no bound.
    """
    if verdict == "undecided":
        return "Undecided: independent engines contradict each other, so nothing is certified."
    if bound is None or (verdict == "refused" and not by_policy):
        return "Refused: no guarantee can be certified for this plan."
    match verdict:
        case "certified":
            return f"{'Would be certified' if is_draft else 'Certified'}: {bound}."
        case "under_noised":
            return f"Under-noised: {bound} is proved, but {target}."
        case "unproved":
            return f"Unproved: {bound} is proved; {target}, which may hold or not."
        case _:
            return f"Refused by the policy, although {bound} is proved."


def draft_sentence(assessment: Assessment) -> str:
    """The verdict that a plan would get if it were submitted now."""
    epsilon, delta, target = assessment.epsilon, assessment.delta, assessment.target_epsilon
    bound = None
    if epsilon is not None and delta is not None and math.isfinite(epsilon.upper):
        chance = "" if assessment.confidence is None else f" {assessment.confidence}"
        bound = (
            f"ε ≤ {up(epsilon.upper)} at δ = {up(delta.upper)}{chance} "
            f"({words(assessment.adjacency)}, per {assessment.unit})"
        )
    return verdict_sentence(
        assessment.verdict,
        bound,
        "the plan claims less" if target is None else f"the target is ε = {target:g}",
        by_policy=refused_by_policy(
            assessment.verdict, [reason.code for reason in assessment.reasons]
        ),
        is_draft=True,
    )
