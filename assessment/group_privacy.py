"""ε of data sets that are further apart than a plan's neighbours, or in another relation.

The run is accounted for the other relation, with the records of a group as those of one user. If
that is refused or the bracket is wide, a chain of neighbours from one data set to the other bounds
ε as well (docs/theorems/group-privacy.md).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Unpack

from affidavit.accountants import Bracket
from affidavit.accountants.chains import NARROW_WIDTH, chained_epsilon
from affidavit.assessment.assessment import (
    Assessment,
    Confidence,
    GroupBound,
)
from affidavit.assessment.certification import certify
from affidavit.assessment.step_requirements import PlanNotClosed, closed_plan
from affidavit.plan import (
    Adjacency,
    MalformedPlan,
    Plan,
    PlanFields,
    Reason,
    RefusedPlan,
    as_document,
    plan_from,
    with_fields,
)

CHAIN_LINKS: dict[tuple[Adjacency, Adjacency], int] = {
    ("add_remove", "add_remove"): 1,
    ("zero_out", "zero_out"): 1,
    ("replace_one", "replace_one"): 1,
    ("add_remove", "replace_one"): 2,
    ("add_remove", "zero_out"): 2,
    ("zero_out", "replace_one"): 2,
    ("replace_one", "zero_out"): 1,
}
"""The neighbours in a plan's relation that lead to a neighbour in another relation.

A pair of relations that is missing has no such chain.
"""
_UNBOUNDED = Reason(
    code="group_unbounded",
    message="no finite ε bounds a group of this size.",
    remedy="Add noise, or ask about a smaller group.",
)


def with_group(assessment: Assessment, records: int, relation: Adjacency) -> Assessment:
    """Add the bound of a group at its δ to ``assessment``, if it has a guarantee."""
    if assessment.epsilon is None or assessment.delta is None:
        return assessment
    try:
        plan = closed_plan(assessment)
    except PlanNotClosed:
        bound = GroupBound(
            records=records, relation=relation, epsilon=None, reasons=assessment.reasons
        )
    else:
        bound = group_bound(plan, assessment.delta.upper, records, relation)
    return replace(assessment, groups=(*assessment.groups, bound))


def group_bound(plan: Plan, delta: float, records: int, relation: Adjacency) -> GroupBound:
    """Bound ε at ``delta`` for data sets that differ in up to ``records`` records by ``relation``.

    ``plan`` has no unknowns. Under another relation than its own the run has the obligations of a
    plan of that adjacency.

    Guarantees
        * The bound holds for every adaptive run of the plan.
        * The lower end is attained by data sets of the relation.
    """
    plan = _changed(plan, target={"delta": delta})
    try:
        epsilon, confidence = _bound(plan, delta, records, relation)
    except RefusedPlan as refusal:
        return GroupBound(records=records, relation=relation, epsilon=None, reasons=refusal.reasons)
    return GroupBound(records=records, relation=relation, epsilon=epsilon, confidence=confidence)


def _bound(
    plan: Plan, delta: float, records: int, relation: Adjacency
) -> tuple[Bracket, Confidence | None]:
    try:
        bound, confidence = _epsilon(_group_plan(plan, records, relation))
    except RefusedPlan as refusal:
        if (chain := _chained(plan, delta, records, relation)) is None:
            raise
        if not math.isfinite(chain.upper):
            raise refusal from None
        return chain, None
    if bound.lower >= bound.upper * (1 - NARROW_WIDTH) or confidence is not None:
        return bound, confidence
    if (records, relation) != (1, plan.adjacency):
        chain = _chained(plan, delta, records, relation)
        if chain is not None:
            upper = min(bound.upper, chain.upper)
            bound = Bracket(lower=min(upper, max(bound.lower, chain.lower)), upper=upper)
    return bound, None


def _group_plan(plan: Plan, records: int, relation: Adjacency) -> Plan:
    """Return ``plan`` under ``relation`` for users with as many records as the group."""
    count = records * plan.dataset.records_per_unit
    try:
        if count == 1:
            return _changed(plan, adjacency=relation)
        return _changed(plan, adjacency=relation, unit="user", contributions_per_user=count)
    except MalformedPlan as error:
        raise RefusedPlan(*error.reasons) from None


def _epsilon(plan: Plan) -> tuple[Bracket, Confidence | None]:
    result = certify(plan, second_opinion=False)
    if (
        result.epsilon is None
        or result.verdict in ("refused", "undecided")
        or not math.isfinite(result.epsilon.upper)
    ):
        raise RefusedPlan(*(result.reasons or (_UNBOUNDED,)))
    return result.epsilon, result.confidence


def _chained(plan: Plan, delta: float, records: int, relation: Adjacency) -> Bracket | None:
    """Return the bound by a chain of neighbours of ``plan``, or None if there is none."""
    links = CHAIN_LINKS.get((plan.adjacency, relation))
    if links is None:
        return None
    try:
        own, confidence = _epsilon(plan)
        if confidence is not None:
            return None
        upper = chained_epsilon(
            lambda at: _epsilon(_changed(plan, target={"delta": at}))[0].upper,
            delta,
            links * records,
        )
    except RefusedPlan:
        return None
    relations = plan.adjacency, relation
    contains = relation == plan.adjacency or relations == ("zero_out", "replace_one")
    return Bracket(lower=min(upper, own.lower if contains else 0.0), upper=upper)


def _changed(plan: Plan, **fields: Unpack[PlanFields]) -> Plan:
    document = with_fields(as_document(plan), **fields)
    document.pop("claim", None)
    return plan_from(document)
