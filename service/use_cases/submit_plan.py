"""Submit a plan: the certificate that is known for it, or a new one.

The certificate's id follows from the plan alone, before any accounting, so a plan that is
known is answered from the store. Otherwise it is accounted in the pool, signed, and kept
together with the request and the audit entry; only then is it answered. Whatever the
verdict, a well-formed plan gets a certificate: a signed refusal is as much an answer as a
signed guarantee. Nothing is kept when the accounting is cut off.

Requests for one plan that arrive together are accounted once. This is the one use case
that awaits instead of blocking a thread: it can wait for minutes, and threads are few.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from starlette.concurrency import run_in_threadpool

from affidavit.certificate.assessment import Assessment
from affidavit.certificate.issue import certificate_id
from affidavit.plan.model import Plan
from affidavit.plan.parse import Syntax, parse_plan
from affidavit.service.lifecycle.issuing import sign
from affidavit.service.pool import AccountingPool
from affidavit.service.signer import Signers
from affidavit.service.single_flight import SingleFlight
from affidavit.service.store import CertificateStore, Request, StoredCertificate

MOST_WAITING = 256
"""Plans being accounted or waiting for it, beyond which a new one is turned away."""


class TooBusy(Exception):
    """So many plans are waiting that another would wait too long."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A kept certificate, and whether this very request made it."""

    certificate: StoredCertificate
    created: bool


class SubmitPlan:
    """The use case, with what it works on."""

    def __init__(self, store: CertificateStore, pool: AccountingPool, signers: Signers) -> None:
        self._store = store
        self._pool = pool
        self._signers = signers
        self._flights: SingleFlight[Answer] = SingleFlight()

    async def __call__(self, request: Request, syntax: Syntax) -> Answer:
        """The answer to ``request``.

        Raises ``MalformedPlan``, ``TooBusy``, ``AccountingTimeout``, ``AccountingFailed``.
        """
        plan = await run_in_threadpool(parse_plan, request.body, syntax)
        wanted = certificate_id(plan)
        if wanted not in self._flights and len(self._flights) >= MOST_WAITING:
            raise TooBusy
        answer, started = await self._flights.run(wanted, lambda: self._answer(plan, request))
        if started:
            return answer
        # The other caller's request is recorded; ours is not yet.
        return await self._known(answer.certificate.id, request) or replace(answer, created=False)

    async def _answer(self, plan: Plan, request: Request) -> Answer:
        known = await self._known(certificate_id(plan), request)
        if known is not None:
            return known
        assessment = await self._pool.assess(plan)
        return await run_in_threadpool(self._keep, plan, assessment, request)

    async def _known(self, wanted: str, request: Request) -> Answer | None:
        found = await run_in_threadpool(self._repeat, wanted, request)
        return None if found is None else Answer(found, created=False)

    def _repeat(self, wanted: str, request: Request) -> StoredCertificate | None:
        untrusted = self._signers.current().public.development
        return self._store.repeat(wanted, request, untrusted_too=untrusted)

    def _keep(self, plan: Plan, assessment: Assessment, request: Request) -> Answer:
        key = self._signers.current()
        former = self._store.last(certificate_id(plan), untrusted=key.public.development)
        certificate = sign(plan, assessment, key, requester=request.requester, former=former)
        kept, created = self._store.add(certificate, key.public.as_record(), request)
        return Answer(kept, created)
