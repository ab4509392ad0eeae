"""Issue again what people decided against: a decision of its own, by name.

A plan that is sent again never brings back a certificate that was revoked or rejected, for
then a retry in somebody's pipeline would undo what a person decided. Whoever may approve
can have it issued again: the plan is worked out anew, under the rules of today, and signed
as the next issue. They count as one who asked for it, so that where approvals are needed,
others have to give them.
"""

from __future__ import annotations

from datetime import datetime

from starlette.concurrency import run_in_threadpool

from affidavit.plan import as_document, canonical_json
from affidavit.service.identity.actor import Actor
from affidavit.service.lifecycle.refusals import Impossible
from affidavit.service.lifecycle.standing import DECIDED, Status
from affidavit.service.policies.judging import question
from affidavit.service.policies.store import PolicyStore
from affidavit.service.store import CertificateStore, PlanRequest, StoredCertificate
from affidavit.service.use_cases.draw_certificate import plan_of
from affidavit.service.use_cases.submit_plan import Answer, SubmitPlan

AGAIN = DECIDED | {Status.EXPIRED, Status.KEY_REVOKED}
"""What may be issued again."""


class Reissue:
    """The use case, with what it works on."""

    def __init__(
        self, store: CertificateStore, policies: PolicyStore, submit_plan: SubmitPlan
    ) -> None:
        self._store = store
        self._policies = policies
        self._submit_plan = submit_plan

    async def __call__(self, certificate_id: str, actor: Actor, at: datetime) -> Answer | None:
        """The new issue; None if there is no such certificate.

        Raises ``Impossible`` and what ``SubmitPlan`` raises.
        """
        found = await run_in_threadpool(self._store.find, certificate_id)
        if found is None:
            return None
        if not _ended(found):
            raise Impossible(
                "still_valid", f"this certificate is {found.status.value}; revoke it first."
            )
        plan = plan_of(found)
        asked = await run_in_threadpool(question, self._policies, plan, actor.name)
        if asked.id != certificate_id:
            raise Impossible(
                "rules_changed",
                f"under the rules of today this plan's certificate is {asked.id}; "
                "send the plan again.",
            )
        body = canonical_json(as_document(plan))
        request = PlanRequest(
            requester=actor.name, received_at=at, content_type="application/json", body=body
        )
        return await self._submit_plan.anew(asked, request, _ended)


def _ended(certificate: StoredCertificate) -> bool:
    return certificate.status in AGAIN
