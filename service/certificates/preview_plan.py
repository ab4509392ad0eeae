"""Preview a plan and diagnose a claim, without certifying anything.

Results are neither signed, stored nor logged. They are computed in the accounting pool under the
time limit of a certificate, and the latest are cached. One engine accounts for a preview, as in
``affidavit check``, unless the policy of its data set requires a second opinion.

A pasted document is a plan, a training script, a notebook, or another library's JSON. Its text is
parsed in an accounting process and never run, and no other file is read. Missing fields must be
entered, as in the gate.

A diagnosis names the known mistakes that lead from a plan to a claimed number that it cannot have.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool

from affidavit.accountants import opacus_noise_multiplier
from affidavit.assessment import (
    Assessment,
    ChangeTrial,
    PlanComparison,
    certify,
    change_trials,
    comparison_of,
    path_trials,
)
from affidavit.assessment.charts import Chart
from affidavit.assessment.diagnose import diagnose
from affidavit.certificate.policy import (
    Policy,
    PolicyEvaluation,
    evaluate_policy,
)
from affidavit.certificate.requirements import is_incomplete, with_requirements
from affidavit.importers import LIBRARIES, PartialPlan, import_document, import_file
from affidavit.plan import (
    Claim,
    Claimed,
    DocumentSchema,
    MalformedPlan,
    Plan,
    Reason,
    StrictModel,
    Syntax,
    digest,
    find_claim_conflicts,
    load_json,
    load_yaml,
    locate_in_document,
    plan_from,
)
from affidavit.service.certificates.certificate_curves import Charts, NoCurve, compute_charts
from affidavit.service.certificates.submit_plan import Position
from affidavit.service.core.concurrency import ComputationCache
from affidavit.service.core.errors import AccountingUnavailable
from affidavit.service.core.pool import AccountingPool
from affidavit.service.core.teams import DEFAULT, acting_for
from affidavit.service.policies.policy_set import budget_status
from affidavit.service.policies.store import PolicyStore

MAX_RESULTS = 256
"""Cached results, about 10 KB each; curves have about 20 KB."""

Pictures = tuple[Chart, ...]
NOISE_FACTORS = tuple(2 ** (power / 4) for power in range(-6, 7))
"""Factors of a plan's noise at which its ε is shown."""
NOISE_SECONDS = 5.0
"""Time after which no further factor is tried."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Preview:
    """The assessment of a plan under the policy of its data set.

    ``ledger`` is the state of the data set's ledger, if it has a budget. ``assessment`` has the
    verdict under the policy.
    """

    assessment: Assessment
    policy: Policy
    judgement: PolicyEvaluation
    ledger: Mapping[str, Any] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class NoisePoint:
    """``epsilon``, a proved upper bound, with ``factor`` times the plan's noise.

    ``joint`` is the joint noise multiplier, ``noise`` the noise multiplier of each release.
    """

    factor: float
    joint: float | None
    noise: tuple[float, ...]
    epsilon: float


class PreviewPlan:
    """The use case; belongs to one event loop."""

    def __init__(self, pool: AccountingPool, policies: PolicyStore, position: Position) -> None:
        self._pool = pool
        self._policies = policies
        self._position = position
        self._cache: ComputationCache[Any] = ComputationCache(MAX_RESULTS)

    async def read(self, text: str, entered: Mapping[str, Any]) -> ReadDocument:
        """Read ``text`` as a plan, completed with the fields ``entered``.

        Raises ``AccountingUnavailable``.
        """
        if len(text) > MAX_TEXT_LENGTH:
            return _refused("too_large", f"it is longer than {MAX_TEXT_LENGTH:,} characters.")
        return await self._pool.run(read_document, text, entered)

    async def assess(self, plan: Plan, requester: str, team: str = DEFAULT) -> Preview:
        """Assess ``plan`` as for ``requester`` in ``team`` now.

        Raises ``AccountingUnavailable`` and ``PolicyTampered``.
        """
        requested = await run_in_threadpool(
            self._policies.certification_request, plan, requester, team
        )
        policy = requested.policy
        required = policy.second_opinion == "required"
        assessment = await self._assess(plan, second_opinion=required)
        if is_incomplete(assessment, policy):
            assessment = await self._cache(
                f"{policy.digest()} {digest(plan)}",
                lambda: self._pool.run(with_requirements, assessment, policy),
            )
        with acting_for(team):
            ledger = await self._position(plan, assessment)
        budget = budget_status(assessment, ledger)
        assessment, judgement = evaluate_policy(plan, assessment, policy, requested.waivers, budget)
        return Preview(assessment=assessment, policy=policy, judgement=judgement, ledger=ledger)

    async def draw(self, plan: Plan) -> Pictures:
        """Draw the privacy profile and the trade-off function; raises ``NoCurve`` too."""
        drawn: Charts = await self._cache(
            f"curve {digest(plan)}",
            lambda: self._pool.run_long(compute_charts, plan, None, with_steps=False),
        )
        if not drawn.charts:
            raise NoCurve(drawn.reasons)
        return tuple(drawn.charts.values())

    async def noise_points(self, plan: Plan) -> tuple[NoisePoint, ...]:
        """Return ε of ``plan`` with less and more noise, by rising noise, or nothing without noise.

        Raises ``AccountingUnavailable``.
        """
        assessment = await self._assess(plan)
        points: tuple[NoisePoint, ...] = await self._cache(
            f"noise {digest(plan)}", lambda: self._pool.run_long(noise_points, assessment)
        )
        return points

    async def compare(self, first: Plan, second: Plan) -> PlanComparison:
        """Compare both plans, and the first with each change alone; raises like ``assess``.

        The changes are tried one by one within the time limit of one computation. The others are
        marked as timed out.
        """
        sides = [await self._assess(plan) for plan in (first, second)]
        end = time.monotonic() + self._pool.time_limit
        tried: list[tuple[ChangeTrial, Assessment | None]] = []
        for trial in change_trials(first, second):
            tried.append(await self._try(trial, end))
        path = [
            (change, await self._in_time(plan, end)) for change, plan in path_trials(first, second)
        ]
        return comparison_of(sides[0], sides[1], tried, path)

    async def _try(self, trial: ChangeTrial, end: float) -> tuple[ChangeTrial, Assessment | None]:
        if trial.plan is None:
            return trial, None
        assessment = await self._in_time(trial.plan, end)
        if assessment is None:
            trial = ChangeTrial(change=trial.change, plan=None, reasons=(_timeout_reason(trial),))
        return trial, assessment

    async def _in_time(self, plan: Plan, end: float) -> Assessment | None:
        """Assess ``plan``; return None after ``end``, or if the accounting takes too long."""
        if time.monotonic() < end:
            try:
                return await self._assess(plan)
            except AccountingUnavailable:
                pass
        return None

    async def _assess(self, plan: Plan, *, second_opinion: bool = False) -> Assessment:
        assessment: Assessment = await self._cache(
            f"{'both' if second_opinion else 'one'} {digest(plan)}",
            lambda: self._pool.run(certify, plan, second_opinion=second_opinion),
        )
        return assessment


def noise_points(assessment: Assessment) -> tuple[NoisePoint, ...]:
    """Compute, in the pool, ε at each of ``NOISE_FACTORS``, starting with the plan's own noise."""
    noise = [release.given or release.required for release in assessment.releases]
    document = {**assessment.plan, "claim": None, "allocation": "uniform"}
    releases = document.get("releases", ())
    if not noise or len(releases) != len(noise) or document.get("steps") is None:
        return ()
    delta = document["target"].get("delta")
    if delta is None:
        return ()
    document["target"] = {"delta": delta}
    points, end = [], time.monotonic() + NOISE_SECONDS
    for factor in sorted(NOISE_FACTORS, key=lambda factor: abs(math.log(factor))):
        if time.monotonic() > end:
            break
        scaled = tuple(factor * (sigma or math.nan) for sigma in noise)
        if not all(map(math.isfinite, scaled)):
            return ()
        document["releases"] = [
            {**release, "noise_multiplier": sigma, "noise_std": None}
            for release, sigma in zip(releases, scaled, strict=True)
        ]
        result = certify(plan_from(document), second_opinion=False)
        bracket = result.epsilon
        if result.verdict == "certified" and bracket and math.isfinite(bracket.upper):
            points.append(
                NoisePoint(factor=factor, joint=result.joint, noise=scaled, epsilon=bracket.upper)
            )
    return tuple(sorted(points, key=lambda point: point.factor))


def _timeout_reason(trial: ChangeTrial) -> Reason:
    return Reason(
        code="accounting_timeout",
        pointer=trial.change.pointer,
        message="this change was not tried alone: the accounting took too long.",
        remedy="Compare plans that differ in fewer fields, or run `affidavit compare`.",
    )


MAX_TEXT_LENGTH = 256 * 1024
"""Maximum length of a pasted document."""
PLAN_FIELDS = frozenset(
    {"version", "dataset", "adjacency", "sampling", "releases", "phases", "target"}
)
"""Fields by which a mapping is recognised as a plan."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadDocument:
    """The complete ``document`` of a plan, or the reasons why there is none.

    ``kind`` is the kind of the pasted document, or None for a plan. ``assumed`` are sentences.
    ``broken`` are obligations that the document's library is known to violate.
    """

    kind: str | None = None
    document: Mapping[str, Any] | None = None
    reasons: tuple[Reason, ...] = ()
    assumed: tuple[str, ...] = ()
    broken: tuple[tuple[str, str], ...] = ()


def read_document(text: str, entered: Mapping[str, Any]) -> ReadDocument:
    """Read, in the pool, a pasted text, completed with the fields ``entered``."""
    partial: PartialPlan | None = None
    try:
        plan, partial = _recognise(text)
        document = (
            plan
            if partial is None
            else partial.completed(dict(entered), "the document", opacus_noise_multiplier)
        )
        completed = plan_from(document)
    except MalformedPlan as error:
        reasons = error.reasons if partial is None else _with_unread(error.reasons, partial)
        return ReadDocument(kind=None if partial is None else partial.kind, reasons=reasons)
    except (RecursionError, MemoryError):
        return _refused("not_imported", "it is nested too deeply to be read.")
    if partial is None:
        return ReadDocument(document=document)
    schemes = {phase.sampling.scheme for phase in completed.phases}
    return ReadDocument(
        kind=partial.kind,
        document=document,
        assumed=partial.assumed,
        broken=tuple(
            (fault.message, fault.remedy)
            for fault in partial.broken
            if fault.applies(completed.adjacency, schemes)
        ),
    )


def _recognise(text: str) -> tuple[Any, PartialPlan | None]:
    """Return the text as a plan, or as another library's settings; raises ``MalformedPlan``."""
    raw = text.encode("utf-8", "replace")
    if text.lstrip().startswith("{"):
        data = load_json(raw).data
        if "cells" in data:
            return None, _require_partial(import_file("notebook.ipynb", raw))
        return data, import_document(data)
    try:
        data = load_yaml(raw).data
    except MalformedPlan as error:
        partial = import_file("script.py", raw)
        if partial is None:
            raise error
        return None, partial
    if isinstance(data, dict) and not PLAN_FIELDS.isdisjoint(data):
        return data, None
    return None, _require_partial(import_file("script.py", raw))


def _require_partial(partial: PartialPlan | None) -> PartialPlan:
    if partial is None:
        libraries = ", ".join(LIBRARIES)
        raise MalformedPlan.with_reason(
            code="no_plan",
            message=f"it is neither a plan nor a file with a private call of {libraries}.",
            remedy="Paste the file that makes the private call, or a plan.",
        )
    return partial


def _with_unread(reasons: tuple[Reason, ...], partial: PartialPlan) -> tuple[Reason, ...]:
    """Add the unread expressions to the reasons that they concern."""
    return tuple(
        replace(
            reason,
            message=" ".join(
                (reason.message, *(note for at, note in partial.unread if _overlaps(at, reason)))
            ),
        )
        for reason in reasons
    )


def _overlaps(pointer: str, reason: Reason) -> bool:
    """Return whether one field contains the other."""
    return bool(reason.pointer) and (
        pointer.startswith(reason.pointer) or reason.pointer.startswith(pointer)
    )


def _refused(code: str, message: str) -> ReadDocument:
    reason = Reason(
        code=code, message=message, remedy="Paste the part that makes the private call."
    )
    return ReadDocument(reasons=(reason,))


# ---- diagnose a claim ----------------------------------------------------------------


class DiagnosisRequest(StrictModel):
    """The body of a request for a diagnosis."""

    plan: dict[str, Any]
    claimed_epsilon: Claimed | None = None
    claimed_noise_multiplier: Claimed | None = None


DIAGNOSIS_SCHEMA = DocumentSchema(
    "a diagnosis", lambda: dict.fromkeys(DiagnosisRequest.model_fields, ""), "/openapi.json"
)


async def diagnose_request(pool: AccountingPool, body: bytes, syntax: Syntax) -> dict[str, Any]:
    """Diagnose the claim in a request's body.

    Raises ``MalformedPlan``, ``TooBusy``, ``AccountingTimeout``, ``AccountingFailed``.
    """
    plan, claim = await run_in_threadpool(read_diagnosis_request, body, syntax)
    return await pool.run(diagnose_document, plan, claim)


def diagnose_document(plan: Plan, claim: Claim) -> dict[str, Any]:
    """Compute, in the pool, the result document of a diagnosis."""
    return diagnose(plan, claim).as_result()


def read_diagnosis_request(body: bytes, syntax: Syntax) -> tuple[Plan, Claim]:
    """Read the plan and the claim of a request; raises ``MalformedPlan`` with positions."""
    document = load_yaml(body) if syntax == "yaml" else load_json(body)
    try:
        return _read(document.data)
    except MalformedPlan as error:
        raise MalformedPlan(*locate_in_document(error.reasons, document)) from None


def _read(data: Any) -> tuple[Plan, Claim]:
    try:
        request = DiagnosisRequest.model_validate(data)
    except ValidationError as error:
        raise MalformedPlan(*DIAGNOSIS_SCHEMA.reasons(error, data)) from None
    try:
        plan = plan_from(request.plan)
    except MalformedPlan as error:
        raise MalformedPlan(*map(_below_plan, error.reasons)) from None
    claim = _claim(request, plan)
    if reasons := tuple(find_claim_conflicts(claim, plan)):
        raise MalformedPlan(*map(_below_plan, reasons))
    return plan, claim


def _claim(request: DiagnosisRequest, plan: Plan) -> Claim:
    claims = [request.claimed_epsilon, request.claimed_noise_multiplier]
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


def _below_plan(reason: Reason) -> Reason:
    return replace(reason, pointer="/plan" + reason.pointer)
