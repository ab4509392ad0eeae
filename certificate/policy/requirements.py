"""What a policy requires of an assessment beside its bracket: a proof, and the bound of a group.

Both take as long as accounting or longer, so that they are computed before ``judge``, and only
where the policy that will judge requires them.
"""

from __future__ import annotations

from affidavit.certificate.assessment import Assessment
from affidavit.certificate.group_privacy import with_group
from affidavit.certificate.policy.document import Policy
from affidavit.certificate.proof import with_proof


def lacks(assessment: Assessment, policy: Policy) -> bool:
    """Whether ``policy`` requires something that nobody searched for yet."""
    return _lacks_proof(assessment, policy) or _lacks_group(assessment, policy)


def with_requirements(assessment: Assessment, policy: Policy) -> Assessment:
    """``assessment`` with what ``policy`` requires, or with the reasons why there is none."""
    if _lacks_proof(assessment, policy):
        assessment = with_proof(assessment)
    cap = policy.group_cap
    if cap is not None and _lacks_group(assessment, policy):
        relation = cap.relation or assessment.adjacency
        assessment = with_group(assessment, cap.records, relation)
    return assessment


def _lacks_proof(assessment: Assessment, policy: Policy) -> bool:
    return policy.proof == "required" and not assessment.sought_proof


def _lacks_group(assessment: Assessment, policy: Policy) -> bool:
    cap = policy.group_cap
    if cap is None or assessment.epsilon is None:
        return False
    required = cap.records, cap.relation or assessment.adjacency
    return required not in {(bound.records, bound.relation) for bound in assessment.groups}
