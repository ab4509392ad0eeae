"""Costs and compositions, computed in the accounting pool from signed bytes.

Each function takes JSON data or bytes and returns JSON data, so that it can run in another process
and be killed there.
"""

from __future__ import annotations

from typing import Any

from affidavit.accountants import AccountantError
from affidavit.accountants.privacy_filter import Cost
from affidavit.certificate import (
    Assessment,
    CertificateDiffers,
    CertifiedRun,
    composed_epsilon,
    interval,
    run_of,
    statement_in,
)
from affidavit.plan import (
    Composed,
    Plan,
    RefusedPlan,
    Repeated,
    event_document,
    event_from,
    plan_from,
)

RunCost = dict[str, Any]
"""``steps``, ``cost``, ``event``, ``certain``, ``unit`` and ``adjacency``; or ``refused``."""

_FAILURES = (AccountantError, CertificateDiffers, RefusedPlan, ArithmeticError, ValueError)


def cost_of_bundle(bundle: bytes, steps_run: int | None = None) -> RunCost:
    """What the run of a certified bundle costs, whole or up to ``steps_run``."""
    predicate = statement_in(bundle)["predicate"]
    plan = plan_from(predicate["plan"])
    try:
        run = run_of(plan, predicate["accountants"][0]["name"], predicate=predicate)
        return _costed(run, run.steps if steps_run is None else steps_run)
    except _FAILURES as failure:
        return _refused(failure)


def cost_of_assessment(plan: Plan, assessment: Assessment) -> RunCost:
    """What the run of a plan that was just certified will cost."""
    epsilon, delta = assessment.epsilon, assessment.delta
    if assessment.verdict != "certified" or epsilon is None or delta is None:
        return {"refused": f"the verdict is {assessment.verdict}"}
    try:
        run = run_of(plan, assessment.accountants[0].name)
        assessed = CertifiedRun(
            lowered=run.lowered,
            epsilon=epsilon.upper,
            delta=delta.upper,
            certain=assessment.confidence is None,
        )
        return _costed(assessed, assessed.steps)
    except _FAILURES as failure:
        return _refused(failure)


def composition(events: list[tuple[dict[str, Any], int]], delta: float) -> dict[str, Any]:
    """ε of all ``events``, each so many times, composed as if fixed in advance.

    Returns ``engine`` and ``epsilon`` with its two ends, or nulls where no engine reaches them.
    """
    parts = tuple(Repeated(event=event_from(event), count=count) for event, count in events)
    try:
        engine, epsilon = composed_epsilon([Composed(events=parts)], delta)
    except AccountantError:
        return {"engine": None, "epsilon": None}
    return {"engine": engine, "epsilon": interval(epsilon)}


def _costed(run: CertifiedRun, steps_run: int) -> RunCost:
    if not 0 <= steps_run <= run.steps:
        return {"refused": f"{steps_run} steps are not between 0 and {run.steps}"}
    cost: Cost = run.cost_of(steps_run)
    plan = run.lowered.plan
    return {
        "steps": run.steps,
        "cost": cost.as_document(),
        "event": event_document(run.event_of(steps_run)),
        "certain": run.certain,
        "unit": plan.dataset.unit,
        "adjacency": plan.adjacency,
    }


def _refused(failure: Exception) -> RunCost:
    return {"refused": str(failure) or type(failure).__name__}
