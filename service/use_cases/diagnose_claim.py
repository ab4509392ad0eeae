"""Diagnose a claim: which known mistakes lead from a plan to a number that it cannot have.

A diagnosis is information about a claim and guarantees nothing, so that it is answered and
neither signed nor stored. It runs in the accounting pool under the same time limit.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool

from affidavit.certificate.diagnosis import diagnose
from affidavit.plan import (
    Claim,
    MalformedPlan,
    Plan,
    Reason,
    Syntax,
    load_json,
    load_yaml,
    located,
    plan_from,
    pointer_to,
    unanswerable,
)
from affidavit.service.errors import TooBusy
from affidavit.service.pool import AccountingPool

MOST_WAITING = 64
"""Diagnoses that run or wait, beyond which a new one is turned away."""
CLAIMS = {"claimed_epsilon": "epsilon", "claimed_noise_multiplier": "noise_multiplier"}
FIELDS = ("plan", *CLAIMS)


class DiagnoseClaim:
    """The use case, with the pool it works in; it belongs to one event loop."""

    def __init__(self, pool: AccountingPool) -> None:
        self._pool = pool
        self._waiting = 0

    async def __call__(self, body: bytes, syntax: Syntax) -> dict[str, Any]:
        """The diagnosis that ``body`` asks for.

        Raises ``MalformedPlan``, ``TooBusy``, ``AccountingTimeout``, ``AccountingFailed``.
        """
        plan, claim = await run_in_threadpool(question, body, syntax)
        if self._waiting >= MOST_WAITING:
            raise TooBusy
        self._waiting += 1
        try:
            return await self._pool.run(answer, plan, claim)
        finally:
            self._waiting -= 1


def answer(plan: Plan, claim: Claim) -> dict[str, Any]:
    """The result document, which unlike the diagnosis itself can leave its process."""
    return diagnose(plan, claim).as_result()


def question(body: bytes, syntax: Syntax) -> tuple[Plan, Claim]:
    """The plan and the claim of a request; raises ``MalformedPlan`` with positions."""
    document = load_yaml(body) if syntax == "yaml" else load_json(body)
    try:
        return _read(document.data)
    except MalformedPlan as error:
        raise MalformedPlan(*located(error.reasons, document)) from None


def _read(data: Any) -> tuple[Plan, Claim]:
    if not isinstance(data, dict) or not isinstance(data.get("plan"), dict):
        raise MalformedPlan(
            _wrong("missing_field", "/plan", "plan is missing.", "Give the plan as an object.")
        )
    unknown = [str(name) for name in data if name not in FIELDS]
    if unknown:
        raise MalformedPlan(
            *(
                _wrong(
                    "unknown_field",
                    pointer_to(name),
                    f"{name[:80]} is not a field of a diagnosis.",
                    f"The fields are {', '.join(FIELDS)}.",
                )
                for name in unknown[:20]
            )
        )
    try:
        plan = plan_from(data["plan"])
    except MalformedPlan as error:
        raise MalformedPlan(*(_inside(reason) for reason in error.reasons)) from None
    claim = _claim(data, plan)
    if reasons := tuple(unanswerable(claim, plan)):
        raise MalformedPlan(*(_inside(reason) for reason in reasons))
    return plan, claim


def _claim(data: dict[str, Any], plan: Plan) -> Claim:
    names = [name for name in CLAIMS if data.get(name) is not None]
    if not names and plan.claim is not None:
        return plan.claim
    if len(names) != 1:
        raise MalformedPlan(
            _wrong(
                "missing_field" if not names else "conflict",
                pointer_to(names[-1]) if names else "",
                "a diagnosis takes exactly one claim.",
                f"Give {' or '.join(CLAIMS)}.",
            )
        )
    (name,) = names
    try:
        return Claim.model_validate({CLAIMS[name]: data[name]})
    except ValidationError:
        raise MalformedPlan(
            _wrong(
                "invalid_value",
                pointer_to(name),
                f"{name} is not a positive decimal.",
                'Give a number, or the text that was published, like "7.9852".',
            )
        ) from None


def _inside(reason: Reason) -> Reason:
    return _wrong(reason.code, "/plan" + reason.pointer, reason.message, reason.remedy)


def _wrong(code: str, pointer: str, message: str, remedy: str) -> Reason:
    return Reason(code=code, pointer=pointer, message=message, remedy=remedy)
