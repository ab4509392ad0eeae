"""Diagnose a claim: which known mistakes lead from a plan to a number that it cannot have.

A diagnosis is information about a claim and guarantees nothing, so that it is answered and
neither signed nor stored. It runs in the accounting pool under the same time limit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool

from affidavit.certificate.diagnosis import diagnose
from affidavit.plan import (
    Claim,
    Claimed,
    Kind,
    MalformedPlan,
    Plan,
    Reason,
    StrictModel,
    Syntax,
    find_claim_conflicts,
    load_json,
    load_yaml,
    locate_in_document,
    plan_from,
)
from affidavit.service.pool import AccountingPool


class _Question(StrictModel):
    plan: dict[str, Any]
    claimed_epsilon: Claimed | None = None
    claimed_noise_multiplier: Claimed | None = None


_QUESTION = Kind("a diagnosis", lambda: dict.fromkeys(_Question.model_fields, ""), "/openapi.json")


async def diagnosis_of(pool: AccountingPool, body: bytes, syntax: Syntax) -> dict[str, Any]:
    """The diagnosis that ``body`` asks for.

    Raises ``MalformedPlan``, ``TooBusy``, ``AccountingTimeout``, ``AccountingFailed``.
    """
    plan, claim = await run_in_threadpool(question, body, syntax)
    return await pool.run(answer, plan, claim)


def answer(plan: Plan, claim: Claim) -> dict[str, Any]:
    """The result document, which unlike the diagnosis itself can leave its process."""
    return diagnose(plan, claim).as_result()


def question(body: bytes, syntax: Syntax) -> tuple[Plan, Claim]:
    """The plan and the claim of a request; raises ``MalformedPlan`` with positions."""
    document = load_yaml(body) if syntax == "yaml" else load_json(body)
    try:
        return _read(document.data)
    except MalformedPlan as error:
        raise MalformedPlan(*locate_in_document(error.reasons, document)) from None


def _read(data: Any) -> tuple[Plan, Claim]:
    try:
        asks = _Question.model_validate(data)
    except ValidationError as error:
        raise MalformedPlan(*_QUESTION.reasons(error, data)) from None
    try:
        plan = plan_from(asks.plan)
    except MalformedPlan as error:
        raise MalformedPlan(*map(_inside, error.reasons)) from None
    claim = _claim(asks, plan)
    if reasons := tuple(find_claim_conflicts(claim, plan)):
        raise MalformedPlan(*map(_inside, reasons))
    return plan, claim


def _claim(asks: _Question, plan: Plan) -> Claim:
    claims = [asks.claimed_epsilon, asks.claimed_noise_multiplier]
    missing = claims.count(None)
    if missing == 2 and plan.claim is not None:
        return plan.claim
    if missing != 1:
        raise MalformedPlan.with_reason(
            code="missing_field" if missing else "conflict",
            pointer="" if missing else "/claimed_noise_multiplier",
            message="a diagnosis takes exactly one claim.",
            remedy="Give claimed_epsilon or claimed_noise_multiplier.",
        )
    return Claim(epsilon=claims[0], noise_multiplier=claims[1])


def _inside(reason: Reason) -> Reason:
    return replace(reason, pointer="/plan" + reason.pointer)
