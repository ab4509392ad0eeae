"""Submit a plan: the certificate that is known for it, or a new one.

The certificate's id follows from the plan and the rules that it comes under, before any
accounting, so a plan that is known is answered from the store. Otherwise it is accounted in
the pool, judged, signed, and kept together with the request and the audit entry; only then is
it answered. Should the rules change meanwhile, what was found is judged by the new ones.
Whatever the verdict, a well-formed plan gets a certificate: a signed refusal is as much an
answer as a signed guarantee. Nothing is kept when the accounting is cut off.

Requests for one plan that arrive together are accounted once. This is the one use case
that awaits instead of blocking a thread: it can wait for minutes, and threads are few.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection
from starlette.concurrency import run_in_threadpool

from affidavit.certificate import Assessment, SigningPort
from affidavit.certificate.policy import Waiver, judge
from affidavit.plan import Plan, Syntax
from affidavit.service.concurrency import Batcher, SingleFlight, in_thread_pool
from affidavit.service.errors import TooBusy
from affidavit.service.keyring import Keyring
from affidavit.service.lifecycle.issuance import sign
from affidavit.service.lifecycle.status import DECIDED, Status
from affidavit.service.policies.evaluation import (
    CertificationRequest,
    PoliciesChanged,
    budget_status,
    certification_request,
    is_pending_budget,
    require_unchanged,
)
from affidavit.service.policies.store import PolicyStore, record_waivers
from affidavit.service.pool import AccountingPool
from affidavit.service.store import (
    CertificateStore,
    Made,
    Outdated,
    Overtaken,
    PlanRequest,
    StoredCertificate,
    expired,
    repeated,
)
from affidavit.service.use_cases.read_plans import ReadPlan, ReadPlans

MOST_WAITING = 256
"""Plans being accounted or waiting for it, beyond which a new one is turned away."""
MOST_CHANGES = 10
"""Changes of the rules during one request, after which it is turned away."""


Position = Callable[[Plan, Assessment], Awaitable[dict[str, Any] | None]]
"""Where the ledger of a plan's data set stands; None where there is none."""


Asked = tuple[ReadPlan, PlanRequest]
Recalled = tuple[CertificationRequest, StoredCertificate | None]


@dataclass(frozen=True, slots=True)
class Answer:
    """A kept certificate, and whether this very request made it."""

    certificate: StoredCertificate
    created: bool


@dataclass(frozen=True, slots=True)
class Found:
    """What was found about a question, for whoever asks, and what it may supersede."""

    asked: CertificationRequest
    assessment: Assessment
    request: PlanRequest
    outdated: Outdated
    ledger: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class Signed:
    """A certificate that is to be kept, with the waivers that it rests on."""

    asked: CertificationRequest
    made: Made
    used: tuple[Waiver, ...]


class SubmitPlan:
    """The use case, with what it works on."""

    def __init__(
        self,
        store: CertificateStore,
        pool: AccountingPool,
        signers: Keyring,
        policies: PolicyStore,
        position: Position,
    ) -> None:
        self._store = store
        self._pool = pool
        self._signers = signers
        self._policies = policies
        self._position = position
        self._read = ReadPlans()
        self._flights: SingleFlight[Answer] = SingleFlight()
        self._recalled: Batcher[Asked, Recalled] = Batcher(in_thread_pool(self._recall))
        self._keeping: Batcher[Found, Answer] = Batcher(in_thread_pool(self._keep_all))

    @property
    def waiting(self) -> int:
        """Plans that are being accounted or wait for it."""
        return len(self._flights)

    async def __call__(self, request: PlanRequest, syntax: Syntax) -> Answer:
        """The answer to ``request``.

        Raises ``MalformedPlan``, ``TooBusy``, ``AccountingTimeout``, ``AccountingFailed``,
        ``PolicyTampered``.
        """
        plan = await self._read(request.body, syntax)
        for _ in range(MOST_CHANGES):
            asked, known = await self._recalled((plan, request))
            if known is not None:
                return Answer(known, created=False)
            answer = await self._once(asked, request)
            if answer is not None:
                return answer
        raise TooBusy

    async def _once(self, asked: CertificationRequest, request: PlanRequest) -> Answer | None:
        """The answer to ``asked``; None if another caller's question became another one."""
        if asked.id not in self._flights and len(self._flights) >= MOST_WAITING:
            raise TooBusy
        answer, started = await self._flights.run(
            asked.id, lambda: self.anew(asked, request, self._outdated)
        )
        if started:
            return answer
        if answer.certificate.id != asked.id:
            return None
        # The other caller's request is recorded; ours is not yet.
        kept = await run_in_threadpool(self._repeat, asked.id, request, expired)
        return replace(answer, certificate=kept or answer.certificate, created=False)

    def _recall(self, wanted: Sequence[Asked]) -> list[Recalled]:
        """The question of each plan as it stands now, and what is known of it, recorded."""
        untrusted = self._signers.current().public.development
        with self._store.writing() as connection:
            rules = self._policies.policy_set_in(connection)
            asked = [plan.request_under(rules, request.requester) for plan, request in wanted]
            ids = [(each.id, request) for each, (_, request) in zip(asked, wanted, strict=True)]
            return list(
                zip(asked, repeated(connection, ids, untrusted, self._outdated), strict=True)
            )

    async def anew(
        self, asked: CertificationRequest, request: PlanRequest, outdated: Outdated
    ) -> Answer:
        """The answer to ``asked``, worked out and kept as the issue after an ``outdated`` one."""
        assessment = await self._pool.assess(asked.plan)
        ledger = await self._position(asked.plan, assessment)
        return await self._keeping(Found(asked, assessment, request, outdated, ledger))

    def _repeat(
        self, wanted: str, request: PlanRequest, outdated: Outdated
    ) -> StoredCertificate | None:
        untrusted = self._signers.current().public.development
        return self._store.repeat(wanted, request, untrusted_too=untrusted, outdated=outdated)

    def _outdated(self, certificate: StoredCertificate) -> bool:
        """Whether a plan that is sent again gets a new issue; never against a decision."""
        if certificate.status in DECIDED:
            return False
        if _waits(certificate):
            return True
        if certificate.status is Status.KEY_REVOKED or expired(certificate):
            return True
        return certificate.key_id in self._signers.revoked()

    def _keep_all(self, found: Sequence[Found]) -> list[Answer]:
        """Keep what was found about several plans, by one transaction; or do nothing.

        Where one of them needs a second look, because it was issued or the rules changed
        meanwhile, each is then kept by itself.
        """
        if len(found) == 1:
            return [self._keep(found[0])]
        key = self._signers.current()
        made = self._signed(found, key)
        if not all(isinstance(member, Signed) for member in made):
            raise Overtaken
        signed = [item for item in made if isinstance(item, Signed)]
        self._store.add_all(
            [element.made for element in signed],
            key.public.as_record(),
            within=self._still_so(signed),
        )
        return [Answer(entry.made[0], created=True) for entry in signed]

    def _keep(self, found: Found) -> Answer:
        """Keep what was found about one plan, judged by the rules of now."""
        for _ in range(MOST_CHANGES):
            key = self._signers.current()
            (made,) = self._signed([found], key)
            if isinstance(made, Answer):
                return made
            certificate, request, outdated = made.made
            try:
                kept, created = self._store.add(
                    certificate,
                    key.public.as_record(),
                    request,
                    outdated=outdated,
                    within=self._still_so([made]),
                )
            except PoliciesChanged:
                asked = certification_request(
                    self._policies, found.asked.plan, found.asked.requester
                )
                found = replace(found, asked=asked)
            else:
                return Answer(kept, created)
        raise TooBusy

    def _signed(self, found: Sequence[Found], key: SigningPort) -> list[Signed | Answer]:
        """What was found, judged by the rules of its question and signed.

        An answer where the current issue says the same and goes on saying it.
        """
        untrusted = key.public.development
        formers = self._store.last([entry.asked.id for entry in found], untrusted=untrusted)
        return [self._sign(item, key, formers.get(item.asked.id)) for item in found]

    def _sign(
        self, given: Found, key: SigningPort, former: StoredCertificate | None
    ) -> Signed | Answer:
        asked, ledger = given.asked, given.ledger
        budget = budget_status(given.assessment, ledger)
        found, judgement = judge(asked.plan, given.assessment, asked.policy, asked.waivers, budget)
        if former is not None and _waits(former) and _says(former, found):
            kept = self._repeat(asked.id, given.request, expired)
            return Answer(kept or former, created=False)
        certificate = sign(
            asked.plan,
            found,
            key,
            requester=given.request.requester,
            former=former,
            under=judgement,
            ledger=ledger if found.verdict == "certified" else None,
        )
        used = tuple(item.waiver for item in judgement.waived)
        return Signed(asked, (certificate, given.request, given.outdated), used)

    def _still_so(self, signed: Sequence[Signed]) -> Callable[[Connection], None]:
        """Holds the rules by which they were judged, in the transaction that keeps them."""

        def still_so(connection: Connection) -> None:
            require_unchanged(self._policies, connection, *(entry.asked for entry in signed))
            for item in signed:
                record_waivers(connection, item.made[0].id, item.used, datetime.now(UTC))

        return still_so


def _waits(certificate: StoredCertificate) -> bool:
    return is_pending_budget(certificate.verdict, certificate.result)


def _says(certificate: StoredCertificate, found: Assessment) -> bool:
    """Whether a kept refusal gives the very reasons of ``found``, and still counts."""
    told = json.loads(certificate.result)["reasons"]
    return not expired(certificate) and told == [reason.as_dict() for reason in found.reasons]
