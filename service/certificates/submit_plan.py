"""Submit a plan: return its stored certificate, or create one.

The certificate's id follows from the plan and its rules before any accounting, so a known plan is
answered from the store. A new plan is accounted in the pool, evaluated under the policy, signed,
and stored together with the request and the log entry; only then is it returned. If the rules
change meanwhile, the assessment is evaluated under the new rules. Every well-formed plan gets a
certificate, whatever the verdict: a signed refusal is a result. Nothing is stored if the accounting
is cut off.

Concurrent requests for one plan are accounted once. This use case is asynchronous, because it can
wait for minutes and threads are few.

``PlanCache`` holds the latest parsed plans by their bytes, and the id of each under the last rules,
because pipelines send the same plan at every commit. Access, rules, certificates and their status
are looked up for every request.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from sqlalchemy import Connection
from starlette.concurrency import run_in_threadpool

from affidavit.assessment import Assessment
from affidavit.certificate import Approvals, issue
from affidavit.certificate.policy import (
    BUILT_IN_EVALUATION,
    PolicyEvaluation,
    Waiver,
    evaluate_policy,
)
from affidavit.certificate.requirements import (
    is_incomplete,
    lacks_requirements,
    with_requirements,
)
from affidavit.plan import Plan, Syntax, parse_plan
from affidavit.service.certificates.integrity import signed_columns
from affidavit.service.certificates.issue_status import DECIDED
from affidavit.service.certificates.store import (
    CertificateStore,
    ConcurrentUpdate,
    IsStale,
    NewCertificate,
    PlanRequest,
    StoredCertificate,
    find_and_record,
    is_expired,
)
from affidavit.service.core.clock import MAX_SKEW
from affidavit.service.core.concurrency import (
    Batcher,
    SingleFlight,
    in_thread_pool,
)
from affidavit.service.core.errors import TooBusy
from affidavit.service.core.fair_queue import another_turn
from affidavit.service.core.pool import AccountingPool
from affidavit.service.core.teams import (
    DEFAULT,
    acting_for,
    team_in_id,
)
from affidavit.service.core.wire_models import Status
from affidavit.service.keys.keyring import Keyring
from affidavit.service.policies.policy_set import (
    CertificationRequest,
    Head,
    PoliciesChanged,
    PolicySet,
    budget_status,
)
from affidavit.service.policies.store import PolicyStore, record_waivers
from affidavit.trust import SigningPort

# ---- plans parsed before -------------------------------------------------------------

MAX_CACHE_BYTES = 4 * 1024 * 1024
"""Total size of the cached bodies; a parsed plan takes about ten times its text."""
MAX_BODY_BYTES = 64 * 1024
"""Size of a cached body."""

Rules = tuple[Head, tuple[str, ...], str]
"""The policy set, the ids of the waivers in force for a plan and requester, and the team."""


@dataclass(slots=True)
class CachedPlan:
    """A plan with its last computed certificate id."""

    plan: Plan
    _last_id: tuple[Rules, str] | None = field(default=None)

    def request_under(
        self, rules: PolicySet, requester: str, team: str = DEFAULT
    ) -> CertificationRequest:
        """Return the request for the plan under ``rules``, whose id is computed once."""
        request = CertificationRequest.under(rules, self.plan, requester, team)
        in_force = rules.head, tuple(waiver.id for waiver in request.waivers), team
        last_id = self._last_id
        if last_id is None or last_id[0] != in_force:
            self._last_id = in_force, request.id
            return request
        return request.with_id(last_id[1])


class PlanCache:
    """The latest plans; belongs to one event loop."""

    def __init__(self, max_bytes: int = MAX_CACHE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._plans: OrderedDict[tuple[Syntax, bytes], CachedPlan] = OrderedDict()
        self._bytes = 0

    async def __call__(self, body: bytes, syntax: Syntax) -> CachedPlan:
        """Return the plan in ``body``; raises ``MalformedPlan``."""
        cached = self._plans.get((syntax, body))
        if cached is not None:
            self._plans.move_to_end((syntax, body))
            return cached
        plan = CachedPlan(await run_in_threadpool(parse_plan, body, syntax))
        if len(body) <= MAX_BODY_BYTES:
            self._store(syntax, body, plan)
        return plan

    def _store(self, syntax: Syntax, body: bytes, plan: CachedPlan) -> None:
        if (syntax, body) not in self._plans:  # two callers may have parsed it
            self._bytes += len(body)
        self._plans[syntax, body] = plan
        while self._bytes > self._max_bytes:
            (_, removed), _ = self._plans.popitem(last=False)
            self._bytes -= len(removed)


# ---- the use case --------------------------------------------------------------------

MAX_WAITING = 1024
"""Plans being accounted or waiting, above which new plans are refused.

It exceeds the accounting queue, which refuses the callers with the most entries first.
"""
MAX_RULE_CHANGES = 10
"""Changes of the rules during one request, after which it is refused."""

Position = Callable[[Plan, Assessment], Awaitable[dict[str, Any] | None]]
"""Returns the state of the ledger for the plan's data set, or None without a budget."""

Lookup = tuple[CertificationRequest, StoredCertificate | None]


@dataclass(frozen=True, slots=True)
class Submission:
    """A stored certificate, and whether this request created it."""

    certificate: StoredCertificate
    created: bool


@dataclass(frozen=True, slots=True)
class CertificationJob:
    """An assessed plan to be signed and stored, and which issue it may supersede."""

    certification: CertificationRequest
    assessment: Assessment
    request: PlanRequest
    is_stale: IsStale
    ledger: Mapping[str, Any] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SignedCertificate(NewCertificate):
    """A certificate to store, with its certification request and waivers."""

    certification: CertificationRequest
    waivers: tuple[Waiver, ...]


class SubmitPlan:
    """The use case; belongs to one event loop."""

    def __init__(
        self,
        store: CertificateStore,
        pool: AccountingPool,
        keyring: Keyring,
        policies: PolicyStore,
        position: Position,
    ) -> None:
        self._store = store
        self._pool = pool
        self._keyring = keyring
        self._policies = policies
        self._position = position
        self._plans = PlanCache()
        self._flights: SingleFlight[Submission] = SingleFlight()
        self._lookup: Batcher[tuple[CachedPlan, PlanRequest], Lookup] = Batcher(
            in_thread_pool(self._look_up)
        )
        self._persist: Batcher[CertificationJob, Submission] = Batcher(
            in_thread_pool(self._persist_batch)
        )

    @property
    def waiting(self) -> int:
        """The number of plans being accounted or waiting."""
        return len(self._flights)

    async def __call__(self, request: PlanRequest, syntax: Syntax) -> Submission:
        """Return the certificate of the plan in ``request``.

        Raises ``MalformedPlan``, ``AccountingUnavailable`` and ``PolicyTampered``.
        """
        plan = await self._plans(request.body, syntax)
        with acting_for(request.team):
            for _ in range(MAX_RULE_CHANGES):
                requested, stored = await self._lookup((plan, request))
                if stored is not None:
                    return Submission(stored, created=False)
                submission = await self._certify_once(requested, request)
                if submission is not None:
                    return submission
        raise TooBusy

    async def _certify_once(
        self, certification: CertificationRequest, request: PlanRequest
    ) -> Submission | None:
        """Create a certificate; return None if a concurrent caller's rules were different."""
        if certification.id not in self._flights and len(self._flights) >= MAX_WAITING:
            raise TooBusy
        submission, started = await self._flights.run(
            certification.id, lambda: self.certify(certification, request, self._is_stale)
        )
        if started:
            return submission
        if submission.certificate.id != certification.id:
            return None
        # Only the other caller's request is recorded so far.
        stored = await run_in_threadpool(self._repeat, certification.id, request)
        return Submission(stored or submission.certificate, created=False)

    def _look_up(self, requests: Sequence[tuple[CachedPlan, PlanRequest]]) -> list[Lookup]:
        """Find the certificate of each plan under the policies in force, and record the request."""
        untrusted = self._keyring.current().public.development
        with self._store.writing() as connection:
            rules = self._policies.policy_set_in(connection)
            certifications = [
                plan.request_under(rules, request.requester, request.team)
                for plan, request in requests
            ]
            ids = [
                (item.id, request)
                for item, (_, request) in zip(certifications, requests, strict=True)
            ]
            stored = find_and_record(connection, ids, untrusted, self._is_stale)
        return list(zip(certifications, stored, strict=True))

    async def certify(
        self, certification: CertificationRequest, request: PlanRequest, is_stale: IsStale
    ) -> Submission:
        """Account, evaluate, sign and store, as the issue after one that ``is_stale``."""
        assessment = await self._pool.assess(certification.plan)
        if is_incomplete(assessment, certification.policy):
            assessment = await self._pool.run(with_requirements, assessment, certification.policy)
        ledger = await self._position(certification.plan, assessment)
        async with another_turn():
            job = CertificationJob(certification, assessment, request, is_stale, ledger)
            return await self._persist(job)

    def _repeat(self, certificate_id: str, request: PlanRequest) -> StoredCertificate | None:
        untrusted = self._keyring.current().public.development
        return self._store.repeat(certificate_id, request, untrusted_too=untrusted)

    def _is_stale(self, certificate: StoredCertificate) -> bool:
        """Return whether a plan that is sent again gets a new issue; never against a decision."""
        if certificate.status in DECIDED:
            return False
        if _is_budget_refusal(certificate):
            return True
        if certificate.status is Status.KEY_REVOKED or is_expired(certificate):
            return True
        if certificate.created_at > self._keyring.now() + MAX_SKEW:
            return True  # dated by a wrong clock, so nobody accepts it yet
        return certificate.key_id in self._keyring.revoked()

    def _persist_batch(self, jobs: Sequence[CertificationJob]) -> list[Submission]:
        """Store the certificates of several jobs in one transaction, or none of them.

        If one was issued or the rules changed meanwhile, each is then stored by itself.
        """
        if len(jobs) == 1:
            return [self._persist_one(jobs[0])]
        key = self._keyring.current()
        results = self._sign_all(jobs, key)
        signed = [result for result in results if isinstance(result, SignedCertificate)]
        if len(signed) < len(results):
            raise ConcurrentUpdate
        self._store.add_all(signed, key.public.as_record(), precondition=self._revalidate(signed))
        return [Submission(item.certificate, created=True) for item in signed]

    def _persist_one(self, job: CertificationJob) -> Submission:
        """Store the certificate of one job, evaluated under the current rules."""
        for _ in range(MAX_RULE_CHANGES):
            key = self._keyring.current()
            (signed,) = self._sign_all([job], key)
            if isinstance(signed, Submission):
                return signed
            try:
                stored, created = self._store.add(
                    signed.certificate,
                    key.public.as_record(),
                    signed.request,
                    is_stale=signed.is_stale,
                    precondition=self._revalidate([signed]),
                )
            except PoliciesChanged:
                requested = self._policies.certification_request(
                    job.certification.plan,
                    job.certification.requester,
                    job.certification.team,
                )
                if lacks_requirements(job.assessment, requested.policy):
                    raise TooBusy from None
                # A decision to reissue does not apply to the certificate under other rules.
                job = replace(job, certification=requested, is_stale=self._is_stale)
            else:
                return Submission(stored, created)
        raise TooBusy

    def _sign_all(
        self, jobs: Sequence[CertificationJob], key: SigningPort
    ) -> list[SignedCertificate | Submission]:
        """Evaluate each job under its policy, and sign it.

        A job whose current issue is a valid refusal for the same reasons gives that submission.
        """
        untrusted = key.public.development
        previous_issues = self._store.last(
            [job.certification.id for job in jobs], untrusted=untrusted
        )
        return [self._sign(job, key, previous_issues.get(job.certification.id)) for job in jobs]

    def _sign(
        self, job: CertificationJob, key: SigningPort, previous: StoredCertificate | None
    ) -> SignedCertificate | Submission:
        requested, ledger = job.certification, job.ledger
        budget = budget_status(job.assessment, ledger)
        assessment, judgement = evaluate_policy(
            requested.plan, job.assessment, requested.policy, requested.waivers, budget
        )
        if (
            previous is not None
            and _is_budget_refusal(previous)
            and _has_same_reasons(previous, assessment)
        ):
            stored = self._repeat(requested.id, job.request)
            return Submission(stored or previous, created=False)
        certificate = sign(
            assessment,
            key,
            requester=job.request.requester,
            issued_at=self._keyring.now(),
            previous=previous,
            under=judgement,
            ledger=ledger if assessment.verdict == "certified" else None,
            team=requested.team,
        )
        return SignedCertificate(
            certificate=certificate,
            request=job.request,
            is_stale=job.is_stale,
            certification=requested,
            waivers=tuple(waived.waiver for waived in judgement.waived),
        )

    def _revalidate(self, signed: Sequence[SignedCertificate]) -> Callable[[Connection], None]:
        """Return the check, in the storing transaction, that the rules are unchanged."""

        def revalidate(connection: Connection) -> None:
            self._policies.require_unchanged(connection, *(item.certification for item in signed))
            for item in signed:
                record_waivers(connection, item.certificate.id, item.waivers, self._keyring.now())

        return revalidate


def sign(
    assessment: Assessment,
    key: SigningPort,
    *,
    requester: str,
    issued_at: datetime,
    previous: StoredCertificate | None,
    under: PolicyEvaluation = BUILT_IN_EVALUATION,
    ledger: Mapping[str, Any] | None = None,
    team: str = DEFAULT,
) -> StoredCertificate:
    """Sign the assessment of a plan as the issue after ``previous``, or as the first.

    ``under`` is the evaluation that ``evaluate_policy`` returned with ``assessment``. ``ledger`` is
    the state of the data set's ledger. ``team`` owns the certificate.
    """
    certificate = issue(
        assessment,
        key,
        requester=requester,
        issued_at=issued_at,
        evaluation=under,
        previous=previous,
        ledger=ledger,
        team=team_in_id(team),
    )
    result, predicate = certificate.as_result(assessment), certificate.statement["predicate"]
    approved = Approvals.of(predicate).complete
    return StoredCertificate(
        **signed_columns(predicate),
        status=Status.ACTIVE if approved else Status.AWAITING_APPROVAL,
        epsilon_upper=(result["epsilon"] or {}).get("upper"),
        delta=(result["delta"] or {}).get("upper"),
        created_at=issued_at,
        envelope_digest=certificate.envelope_digest,
        key_id=key.key_id,
        bundle=certificate.bundle,
        result=json.dumps(result, allow_nan=False),
        team=team,
    )


def result_document(certificate: StoredCertificate) -> str:
    """Return the result document of an issue, with its number, digest and status.

    The result is stored as text whose last field is ``certificate``. The current facts are appended
    to that field, so the text is not parsed for every response. Raises ``ValueError`` for a text
    with another last field.
    """
    if not certificate.result.endswith("}}"):
        raise ValueError("this is not a result that ends with its certificate")
    facts = {
        "issue": certificate.issue,
        "envelope_digest": certificate.envelope_digest,
        "status": certificate.status.value,
    }
    return f"{certificate.result[:-2]}, {json.dumps(facts)[1:]}}}"


def _is_budget_refusal(certificate: StoredCertificate) -> bool:
    """Return whether a stored result is a refusal that a larger budget could end.

    The budget is not part of the request, so such a plan is evaluated again when it is resent.
    """
    return certificate.verdict == "refused" and '"code": "policy_budget"' in certificate.result


def _has_same_reasons(certificate: StoredCertificate, assessment: Assessment) -> bool:
    """Return whether a stored refusal is valid and has the reasons of ``assessment``."""
    reasons = json.loads(certificate.result)["reasons"]
    return not is_expired(certificate) and reasons == [
        item.as_dict() for item in assessment.reasons
    ]
