"""What a policy requires of a certificate beyond the plan."""

from __future__ import annotations

from affidavit.assessment import Assessment
from affidavit.certificate.policy.document import Policy


def lacks_requirements(assessment: Assessment, policy: Policy) -> bool:
    """Whether ``policy`` requires a proof, a group's bound or a μ that was not computed yet."""
    return (
        _lacks_proof(assessment, policy)
        or _lacks_group(assessment, policy)
        or _lacks_gaussian_bound(assessment, policy)
    )


def is_incomplete(assessment: Assessment, policy: Policy) -> bool:
    """Whether ``with_requirements`` adds anything: a requirement, or what a cap on ε needs."""
    return lacks_requirements(assessment, policy) or _exceeded_cap(assessment, policy) is not None


def with_requirements(assessment: Assessment, policy: Policy) -> Assessment:
    """Return ``assessment`` with the proof, the group's bound and the μ that ``policy`` requires.

    Each takes as long as accounting or longer. A missing proof or bound has its reasons. A plan
    that exceeds the policy's cap on ε is given what the cap needs.
    """
    # Imported where they are needed: they load much, and few policies need them.
    if _lacks_proof(assessment, policy):
        from affidavit.certificate.certificate_proof import with_proof

        assessment = with_proof(assessment)
    cap = policy.group_cap
    if cap is not None and _lacks_group(assessment, policy):
        from affidavit.assessment import with_group

        assessment = with_group(assessment, cap.records, cap.relation or assessment.adjacency)
    if _lacks_gaussian_bound(assessment, policy):
        from affidavit.assessment import with_gaussian_bound

        assessment = with_gaussian_bound(assessment)
    exceeded = _exceeded_cap(assessment, policy)
    if exceeded is not None:
        from affidavit.assessment import with_cap

        assessment = with_cap(assessment, exceeded)
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


def _lacks_gaussian_bound(assessment: Assessment, policy: Policy) -> bool:
    searched = assessment.gaussian is not None or assessment.gaussian_problem is not None
    return (
        not searched
        and assessment.mu is None
        and assessment.epsilon is not None
        and policy.cap(_dataset_of(assessment)).mu is not None
    )


def _exceeded_cap(assessment: Assessment, policy: Policy) -> float | None:
    """Return the cap on ε that the plan exceeds, if what it needs is to be computed.

    A plan whose target is below the cap needs what its target needs. A sampled bound takes too long
    to search with.
    """
    if assessment.verdict not in ("certified", "under_noised", "unproved"):
        return None
    cap = policy.cap(_dataset_of(assessment)).epsilon
    if cap is None or assessment.epsilon is None or assessment.confidence is not None:
        return None
    if assessment.target_epsilon is not None and assessment.target_epsilon <= cap:
        return None
    known = assessment.cap is not None and assessment.cap.epsilon == cap
    return cap if assessment.epsilon.upper > cap and not known else None


def _dataset_of(assessment: Assessment) -> str | None:
    name: str | None = assessment.plan.get("dataset", {}).get("name")
    return name
