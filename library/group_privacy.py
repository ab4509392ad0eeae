"""ε of data sets that are further apart than a plan's neighbours, or in another relation.

The run is accounted anew for the other relation, and for the records of a group as for those of
one user. Where that is refused or only bounded, a chain of neighbours from one data set to the
other bounds it as well (docs/theorems/group-privacy.md).

>>> plan = {"version": 1, "adjacency": "zero_out", "sampling": {"scheme": "full_batch"},
...     "steps": 1, "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": 2}],
...     "target": {"delta": 1e-6}}
>>> f"{group_epsilon(plan):.3f}", f"{group_epsilon(plan, records=2):.3f}"
('2.255', '4.887')
>>> group_epsilon(plan, relation="replace_one") == group_epsilon(plan, records=2)
True
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Unpack

from affidavit.library.bounds import Bound
from affidavit.library.certification import NotCertified
from affidavit.library.questions import certify, epsilon
from affidavit.library.sources import Source, load
from affidavit.plan import Adjacency, Plan, PlanFields

LINKS: dict[tuple[Adjacency, Adjacency], int] = {
    ("add_remove", "add_remove"): 1,
    ("zero_out", "zero_out"): 1,
    ("replace_one", "replace_one"): 1,
    ("add_remove", "replace_one"): 2,
    ("add_remove", "zero_out"): 2,
    ("zero_out", "replace_one"): 2,
    ("replace_one", "zero_out"): 1,
}
"""How many neighbours of a plan's relation lead to one of another; the rest are not reached."""
_NARROW = 1e-2


def group_epsilon(
    source: Source,
    /,
    *,
    records: int = 1,
    relation: Adjacency | None = None,
    **fields: Unpack[PlanFields],
) -> Bound:
    """ε in nats of data sets that differ in up to so many ``records``, at the plan's δ.

    They differ by ``relation``, the plan's own adjacency where None, and the run then has the
    obligations of a plan of that adjacency. Where the unit is a user, ``records`` counts users.

    Guarantees
        * The bound holds for every adaptive run of the plan.
        * The lower end is attained by data sets of the relation.

    Raises ``NotCertified`` where nothing may be claimed, ``MalformedPlan``, and ``ValueError``
    for less than one record.
    """
    if records < 1:
        raise ValueError(f"records must be at least 1, got {records!r}")
    plan = load(source, **fields)
    if plan.is_open:
        # What is left open is solved for the plan's own neighbours, once.
        plan = certify(plan, second_opinion=False).plan
    related = relation or plan.adjacency
    if records == 1 and related == plan.adjacency:
        return epsilon(plan)
    try:
        bound = epsilon(_anew(plan, records, related))
    except NotCertified:
        if (chain := _chained(plan, records, related)) is None:
            raise
        return chain
    if bound.lower >= bound * (1 - _NARROW) or bound.confidence is not None:
        return bound
    chain = _chained(plan, records, related)
    if chain is None:
        return bound
    upper = min(bound, chain)
    return Bound(upper, lower=min(upper, max(bound.lower, chain.lower)))


def _anew(plan: Plan, records: int, relation: Adjacency) -> Plan:
    """``plan`` under ``relation`` for users of as many records as a group has."""
    count = records * plan.dataset.records_per_unit
    if count == 1:
        return load(plan, adjacency=relation)
    return load(plan, adjacency=relation, unit="user", contributions_per_user=count)


def _chained(plan: Plan, records: int, relation: Adjacency) -> Bound | None:
    """The bound by neighbours of ``plan``; None where none lead there or theirs is unknown."""
    links, delta = LINKS.get((plan.adjacency, relation)), plan.target.delta
    if links is None or delta is None:
        return None
    try:
        own = epsilon(plan)
        if own.confidence is not None:
            return None
        upper = chained_epsilon(lambda at: epsilon(plan, delta=at), delta, links * records)
    except NotCertified:
        return None
    contains = relation == plan.adjacency or (plan.adjacency, relation) == (
        "zero_out",
        "replace_one",
    )
    return Bound(upper, lower=min(upper, own.lower if contains else 0.0))


def chained_epsilon(neighbours: Callable[[float], float], delta: float, links: int) -> float:
    """An upper bound of ε (nats) at ``delta`` between data sets so many ``links`` apart.

    ``neighbours`` bounds ε between neighbours, in either order, at the δ that it is called with.
    """
    total = 0.0
    for _ in range(links):
        at = delta / links * math.exp(-total) * (1 - 1e-9)
        total = (total + float(neighbours(at))) * (1 + 2.0**-50)
    return total
