"""A run that one transaction changes: what is written about it, and what its end costs.

A run ends by its record, without one, or before it began. A run whose worker was lost, or gave it
back, is requeued. If it began, another worker continues it under a new token; the steps that its
workers were ever granted are spent, whether or not they were taken, because the lost worker may be
taking them still. It is over, and charged in full, when no step is left, when it was cancelled, or
when ``MOST_FAILED_ATTEMPTS`` attempts in a row made no progress: it may be what kills workers.

A run continues from its checkpoint, in the output folder that the workers of a queue share.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from datetime import timedelta
from hmac import compare_digest
from itertools import takewhile
from typing import Any

from sqlalchemy import Connection

from affidavit.accountants.privacy_filter import Cost
from affidavit.certificate import SearchOpening
from affidavit.service.command import CommandContext
from affidavit.service.errors import DomainError
from affidavit.service.ledger import transitions
from affidavit.service.runs import repository
from affidavit.service.runs.conformance import ConformanceResult
from affidavit.service.runs.models import FencedRequest
from affidavit.service.runs.repository import End, Kind, StoredRun
from affidavit.service.store import current
from affidavit.service.store import hold as hold_certificate

MOST_FAILED_ATTEMPTS = 5
HELD = ("claimed", "running")


class LeaseLost(DomainError):
    """The run is held under another fencing token, by another, or is over."""

    code = "lease_lost"


@dataclass(frozen=True, slots=True)
class LockedRun:
    """``run``, whose lease the transaction of ``connection`` holds, and who changes it."""

    connection: Connection
    run: StoredRun
    call: CommandContext

    def changed(self) -> StoredRun:
        """The run after what was written."""
        return repository.find(self.connection, self.run.id)

    def change_lease(self, **values: Any) -> None:
        """Change what is known of who holds it."""
        repository.change_lease(self.connection, self.run.id, **values)

    def renew(self, **values: Any) -> None:
        """Let its lease start again now."""
        seconds = timedelta(seconds=self.run.seconds or 0)
        self.change_lease(expires_at=self.call.at + seconds, **values)

    def add_event(self, kind: Kind, body: dict[str, Any], **lease: Any) -> None:
        """Write what happened, with its log entry, and change the lease."""
        self.change_lease(**lease)
        fence = None if kind == "cancel_asked" else self.run.fence or None
        begun = self.run.begun
        repository.add_event(
            self.connection, self.run.id, kind, body, self.call, fence=fence, begun=begun
        )

    def require_held(self, report: FencedRequest, *states: str) -> None:
        """Raises ``LeaseLost`` unless the caller holds it under that token."""
        run = self.run
        genuine = run.secret is not None and compare_digest(run.secret, digest_of(report.secret))
        current_claim = (run.fence, run.holder) == (report.fence, self.call.actor)
        if not (genuine and current_claim and run.state in (states or HELD)):
            raise LeaseLost(
                f"fencing token {report.fence} of run {run.id} is no longer valid, or not in "
                "this state.",
                "Stop the run: further work does not count.",
            )

    def obstacle(self, plan_digest: str) -> dict[str, str] | None:
        """Why it must not begin or go on; commits its budget if nothing stands against it."""
        run = self.run
        if run.cancel_asked:
            return {"code": "cancelled", "message": "it was cancelled before it began."}
        if plan_digest != run.plan_digest:
            return {"code": "other_plan", "message": "the plan at hand is not the certified one."}
        hold_certificate(self.connection, run.certificate_id)
        ledger, reservation = transitions.hold_reservation(self.connection, run.reservation_id)
        if run.begun and reservation.state != "committed":
            return {"code": "reservation_not_usable", "message": f"it is {reservation.state}."}
        try:
            transitions.require_usable(
                current(self.connection, run.certificate_id),
                reservation.scope.dataset,
                allow_untrusted=run.untrusted,
                issue=reservation,
            )
            if run.begun or transitions.commit(self.connection, ledger, reservation, self.call):
                return None
        except DomainError as refusal:
            return {"code": refusal.code, "message": refusal.message}
        return {"code": "reservation_not_usable", "message": "the reservation was used already."}

    def begin(self, plan_digest: str, wants: int | None) -> None:
        """Write that it begins or goes on; draws what a search tries."""
        run, search = self.run, self.run.request.get("search")
        body: dict[str, Any] = {"fence": run.fence, "plan_digest": plan_digest}
        lease: dict[str, Any] = {"state": "running", "previous": run.fence, "head": None}
        if search is not None:
            # Trials that a lost worker ran cannot be taken up, nor another number drawn.
            wants = None
            opening = SearchOpening.drawn(run.certificate_id, search["choices"], search["score"])
            lease["search"], body["search"] = json.dumps(opening.as_document()), opening.digest
        granted = run.certified_steps if wants is None else self.granted(wants)
        body["granted"] = granted
        self.add_event("resumed" if run.begun else "running", body, granted=granted, **lease)

    def granted(self, wants: int) -> int:
        """How many steps may be charged from now on: never fewer, and none uncertified."""
        return max(self.run.granted, min(wants, self.run.certified_steps))

    def complete(
        self, result: ConformanceResult, provenance: dict[str, Any], cost: Cost | None
    ) -> None:
        """End it by its record; it costs ``cost``, None for all of its steps."""
        steps = self.run.certified_steps if cost is None else result.steps
        charged = self._settle(steps, result.record, cost)
        kind, code = self._verdict(result)
        body = {
            "code": code,
            "message": result.summary,
            "fence": self.run.fence,
            "steps_charged": charged,
            "record": result.record,
            "provenance": provenance,
        }
        self.add_event(kind, body, state="ended")

    def _verdict(self, result: ConformanceResult) -> tuple[End, str]:
        """How a run with a record ended, and why."""
        if result.code == "conformant" and not result.stopped:
            return "settled", result.code
        if self.run.cancel_asked:
            return "cancelled", "cancelled"
        if result.code != "conformant":
            return "failed", result.code
        limit, began = self.run.request["time_limit"], self.run.began_at
        if limit is not None and began is not None:
            late = self.call.at >= began + timedelta(seconds=limit)
            return "failed", "time_limit" if late else "stopped"
        return "failed", "stopped"

    def _settle(self, steps: int, record: str | None, cost: Cost | None) -> int:
        """Charge it for ``steps``, never twice; returns what was charged."""
        ledger, reservation = transitions.hold_reservation(self.connection, self.run.reservation_id)
        if reservation.state == "settled":
            return int(reservation.steps_run or 0)
        transitions.settle(
            self.connection,
            ledger,
            reservation,
            self.call,
            steps_run=steps,
            record=record,
            cost=cost,
        )
        return steps

    def give_up(self, body: dict[str, Any]) -> None:
        """End it without a record: charged in full if it began, released if it did not."""
        if self.run.begun:
            charged = self._settle(self.run.certified_steps, None, None)
            body = {**body, "steps_charged": charged}
        else:
            held = transitions.hold_reservation(self.connection, self.run.reservation_id)
            _, reservation = held
            if reservation.state == "reserved":
                reason = f"run {self.run.id}: {body['code']}"
                transitions.release(self.connection, *held, self.call, reason=reason)
        self.add_event("cancelled" if self.run.cancel_asked else "failed", body, state="ended")

    def give_back(self, body: dict[str, Any]) -> None:
        """Queue it for another worker, unless it is over."""
        run = self.run
        earlier = (attempt.body.get("further", False) for attempt in reversed(run.attempts))
        progress = (run.made_progress, *earlier)
        failed = sum(1 for _ in takewhile(lambda further: not further, progress))
        spent = run.begun and run.granted >= run.certified_steps
        if run.cancel_asked or spent or failed >= MOST_FAILED_ATTEMPTS:
            self.give_up(body)
            return
        attempt = {"granted": run.granted, "steps": run.steps, "head": run.head}
        body = {**body, **attempt, "begun": run.begun, "further": run.made_progress}
        self.add_event("requeued", body, state="queued", expires_at=None, secret=None)


def digest_of(secret: str) -> str:
    """What is stored of a claim's secret."""
    return "sha256:" + hashlib.sha256(secret.encode()).hexdigest()
