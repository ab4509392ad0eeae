"""How every page shows verdicts and states: their colours, and the sentence of a draft."""

from __future__ import annotations

import math

from affidavit.certificate import Assessment, verdict_sentence
from affidavit.certificate.policy import refused_by_policy
from affidavit.service.pages.text import up, words

TONES = {
    **dict.fromkeys(("certified", "active", "settled", "signing"), "good"),
    **dict.fromkeys(("unproved", "undecided", "awaiting_approval", "expired"), "warn"),
    **dict.fromkeys(("in_force", "running", "reserved", "committed", "not_yet_valid"), "warn"),
    **dict.fromkeys(("under_noised", "refused", "rejected", "revoked", "key_revoked"), "bad"),
    **dict.fromkeys(("failed", "cancelled"), "bad"),
}
"""The colours of verdicts and states that are not plain."""


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
    sentence = verdict_sentence(
        assessment.verdict,
        bound,
        "the plan claims less" if target is None else f"the target is ε = {target:g}",
        by_policy=refused_by_policy(
            assessment.verdict, [reason.code for reason in assessment.reasons]
        ),
    )
    return sentence.replace("Certified", "Would be certified", 1)
