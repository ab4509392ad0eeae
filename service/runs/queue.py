"""The queue of runs in the service's own tables: leases, fencing, and the end of a run.

Every change is one transaction (``LockedRun``): it locks the lease's row, verifies the claim, and
writes the lease, the event, its log entry and the ledger's event together. A worker claims the
oldest run of its queue, or the run that an engine gave it. Concurrent claims skip locked rows
(``FOR UPDATE SKIP LOCKED``; SQLite has one writer at a time). A worker reports on its run under the
claim's ``fence`` and ``secret``.

A run ends by its record, without a record, or before it began. A run whose worker was lost or
returned it is requeued. If it had begun, another worker continues it under a new token from its
checkpoint, in the output folder that the workers of a queue share. All steps ever granted are
spent, because the lost worker may still be taking them. The run ends with the full charge if no
step is left, if it was cancelled, or if ``MAX_FAILED_ATTEMPTS`` attempts in a row made no progress,
because it may be killing its workers.
"""

from __future__ import annotations

import json
import secrets
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from hmac import compare_digest
from itertools import takewhile
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection, select

from affidavit.accountants.privacy_filter import Cost
from affidavit.client import RunTest
from affidavit.evidence import Conformance, SearchOpening
from affidavit.plan import digest_of_bytes
from affidavit.service.core.database import Store
from affidavit.service.core.database import hold as hold_certificate
from affidavit.service.core.errors import DomainError, WrongState
from affidavit.service.identity.actor import CommandContext
from affidavit.service.ledger.store import (
    LockedReservation,
    lock_reservation,
    require_reserved_usable,
)
from affidavit.service.runs import repository
from affidavit.service.runs.repository import (
    End,
    Kind,
    StoredRun,
    TestKind,
    round_up_steps,
)
from affidavit.service.runs.wire_models import (
    CompletionRequest,
    FailureRequest,
    FencedRequest,
    HeartbeatRequest,
    RecordPartRequest,
    RunClaimRequest,
    StartRequest,
)
from affidavit.service.tables.runs import run_leases
from affidavit.worker import Renewal

MAX_FAILED_ATTEMPTS = 5
MAX_REPORTED_CODES = 8
HELD_STATES = ("claimed", "running")


class LeaseLost(DomainError):
    """The run is held under another fencing token or by another worker, or has ended."""

    code = "lease_lost"


@dataclass(frozen=True, slots=True)
class LockedRun:
    """A run whose lease is locked by the transaction of ``connection``, and the caller.

    Methods for workers raise ``LeaseLost`` unless the report has the lease's token and secret.
    """

    connection: Connection
    run: StoredRun
    context: CommandContext

    # ---- people ----------------------------------------------------------------------

    def cancel(self, reason: str) -> StoredRun:
        """End a queued run, or ask the worker of another run to stop. Raises ``WrongState``."""
        run, body = self.run, {"code": "cancelled", "message": reason}
        if run.state == "cancelled" or (run.cancel_asked and not run.has_ended):
            return run
        if run.has_ended:
            raise WrongState(
                f"run {run.id} is {run.state}.", "Only a run that has not ended can be cancelled."
            )
        if run.state == "queued":
            marked = run.model_copy(update={"cancel_asked": True})
            return replace(self, run=marked)._end_without_record(body)
        return self._write("cancel_asked", body, cancel=True)

    def add_test(self, kind: TestKind, record: bytes) -> RunTest:
        """Store what a test of the run showed; one that is stored stays.

        Raises ``WrongState``.
        """
        stored = repository.tests_of(self.connection, self.run.id).get(kind)
        if stored is not None and zlib.decompress(stored.content) != record:
            raise WrongState(
                f"run {self.run.id} has the record of another {kind}.",
                "The first record stays. Keep the later one outside of the run.",
            )
        if stored is None:
            stored = repository.add_test(self.connection, self.run.id, kind, record, self.context)
        return RunTest.model_validate(stored)

    # ---- workers ---------------------------------------------------------------------

    def claim(self, worker: str, lease: int, secret: str) -> StoredRun:
        """Lease a queued run to a worker for ``lease`` seconds, under the next fencing token."""
        fence = self.run.claims + 1
        claimed = self.run.model_copy(update={"claims": fence})
        return replace(self, run=claimed)._write(
            "claimed",
            {"fence": fence, "worker": worker},
            state="claimed",
            fence=fence,
            secret=_digest_of(secret),
            holder=self.context.actor,
            worker=worker,
            seconds=lease,
            expires_at=self.context.at + timedelta(seconds=lease),
        )

    def start(self, request: StartRequest) -> StoredRun:
        """Start or continue a run after checking everything again, or end it if it may not begin.

        The first start commits the budget. A search draws its number of trials, and the log has the
        digest of the draw before the first trial. Without ``wants`` every step is granted, and no
        other worker can continue the run.
        """
        self._require_claim(request)
        run, search, wants = self.run, self.run.request.get("search"), request.wants
        if run.state == "running":
            return run  # it was started under this token, and the response was lost
        if (obstacle := self._find_obstacle(request.plan_digest)) is not None:
            return self._end_without_record(obstacle)
        body: dict[str, Any] = {"fence": run.claims, "plan_digest": run.plan_digest}
        lease: dict[str, Any] = {"state": "running", "previous": run.claims, "head": None}
        if search is not None:
            # Trials of a lost worker cannot be continued, and the number cannot be drawn again.
            wants = None
            opening = SearchOpening.create(run.certificate, search["choices"], search["score"])
            lease["search"], body["search"] = json.dumps(opening.as_document()), opening.digest
        body["granted"] = granted = (
            run.steps.certified if wants is None else self._compute_grant(wants)
        )
        return self._write(
            "resumed" if run.has_begun else "running", body, granted=granted, **lease
        )

    def renew(self, report: HeartbeatRequest) -> Renewal:
        """Renew the lease, record the charged steps, and grant the next ones.

        ``head`` is the digest of a line of the record; the first one, of the first line, is logged.
        Granted steps are spent if another worker has to continue the run.
        """
        self._require_claim(report)
        run, granted = self.run, self.run.steps.granted
        if run.state == "running":
            # Logged only before this attempt is granted a step.
            before = max((attempt.granted for attempt in run.attempts), default=0)
            if report.head is not None and run.head is None and granted == before:
                repository.log_record_head(self.connection, run, report.head, self.context)
            granted = self._compute_grant(max(report.steps, report.wants))
            if granted > run.steps.granted:
                repository.log_grant(self.connection, run, granted, self.context)
        return self._renew(
            granted, steps=max(run.steps.reported, report.steps), head=report.head or run.head
        )

    def add_record_part(self, report: RecordPartRequest) -> Renewal:
        """Store a part of the run's record and renew the lease; raises ``RecordRefused``."""
        self._require_claim(report, running=True)
        content = report.lines.encode("utf-8", "surrogatepass")
        repository.add_record_part(self.connection, self.run.id, report.fence, report.part, content)
        return self._renew(self.run.steps.granted)

    def complete(
        self, report: CompletionRequest, checked: Conformance | None, cost: Cost | None
    ) -> StoredRun:
        """End a run by its record; ``cost`` is None for all steps, ``checked`` without a record.

        A run that does not conform has failed and keeps its charge. A repeated report returns the
        run unchanged.
        """
        if self.run.was_ended_by(report.provenance):
            return self.run
        self._require_claim(report, running=True)
        end, code = self._classify_end(checked)
        steps, record, message = self.run.steps.certified, None, "no record was sent."
        if checked is not None:
            steps = steps if cost is None else checked.steps_to_charge
            record = checked.head
            codes = sorted({finding.code for finding in checked.findings})
            message = ", ".join(codes[:MAX_REPORTED_CODES]) or "the record conforms."
        body = {
            "code": code,
            "message": message,
            "fence": self.run.claims,
            "steps_charged": self._settle(steps, record, cost),
            "record": record,
            "provenance": report.provenance,
        }
        return self._write(end, body, state="ended")

    def fail(self, report: FailureRequest) -> StoredRun:
        """End a run: released before its first step, charged in full after it.

        With ``again`` the run is requeued instead, unless it has to end.
        """
        self._require_claim(report)
        body = {"code": report.code, "message": report.message, "fence": report.fence}
        return self._requeue(body) if report.again else self._end_without_record(body)

    # ---- the dispatcher --------------------------------------------------------------

    def end_lease(self, fence: int, reason: str, *, expired: bool = False) -> bool:
        """End a current lease under ``fence``; with ``expired`` only if it was not renewed."""
        run = self.run
        renewed = expired and run.expires_at is not None and run.expires_at >= self.context.at
        if run.claims != fence or run.state not in HELD_STATES or renewed:
            return False
        message = f"worker {run.worker}: {reason}"
        self._requeue({"code": "lease_lost", "message": message, "fence": fence})
        return True

    def next_job(self, number: int, *, refusal: str | None = None) -> StoredRun | None:
        """Count the next job of a queued run whose ``number``-th job ended.

        Returns None if there is none: after too many jobs, or the engine's final ``refusal``.
        """
        if (self.run.state, self.run.job) != ("queued", number):
            return None
        unclaimed = number - self.run.claims
        if refusal is None and unclaimed < MAX_FAILED_ATTEMPTS:
            self._change_lease(job=number + 1)
            return self._changed()
        message = refusal or f"{unclaimed} jobs ended and never claimed it."
        self._end_without_record(
            {"code": "job_refused" if refusal else "job_failed", "message": message}
        )
        return None

    # ---- helpers ---------------------------------------------------------------------

    def _changed(self) -> StoredRun:
        return repository.find(self.connection, self.run.id)

    def _change_lease(self, **values: Any) -> None:
        repository.change_lease(self.connection, self.run.id, **values)

    def _renew(self, granted: int, **values: Any) -> Renewal:
        expires_at = self.context.at + timedelta(seconds=self.run.seconds or 0)
        self._change_lease(expires_at=expires_at, granted=granted, **values)
        return Renewal(cancel=self.run.cancel_asked, granted=granted)

    def _write(self, kind: Kind, body: dict[str, Any], **lease: Any) -> StoredRun:
        """Change the lease, insert the event with its log entry, and return the run."""
        self._change_lease(**lease)
        fence = None if kind == "cancel_asked" else self.run.claims or None
        begun = self.run.has_begun
        repository.add_event(
            self.connection, self.run.id, kind, body, self.context, fence=fence, begun=begun
        )
        return self._changed()

    def _require_claim(self, report: FencedRequest, *, running: bool = False) -> None:
        run = self.run
        genuine = run.secret is not None and compare_digest(run.secret, _digest_of(report.secret))
        current_claim = (run.claims, run.holder) == (report.fence, self.context.actor)
        states = ("running",) if running else HELD_STATES
        if not (genuine and current_claim and run.state in states):
            raise LeaseLost(
                f"fencing token {report.fence} of run {run.id} is no longer valid, or the "
                "run's state does not allow this.",
                "Stop the run: further work does not count.",
            )

    def _find_obstacle(self, plan_digest: str) -> dict[str, str] | None:
        """Return why the run must not start or continue; otherwise commit its budget."""
        run = self.run
        if run.cancel_asked:
            return {"code": "cancelled", "message": "it was cancelled before it began."}
        if plan_digest != run.plan_digest:
            return {"code": "other_plan", "message": "the plan at hand is not the certified one."}
        hold_certificate(self.connection, run.certificate)
        locked = self._lock_reservation()
        reservation = locked.reservation
        if reservation.state != ("committed" if run.has_begun else "reserved"):
            message = f"the reservation is {reservation.state}."
            return {"code": "reservation_not_usable", "message": message}
        try:
            require_reserved_usable(self.connection, reservation)
        except DomainError as refusal:
            return {"code": refusal.code, "message": refusal.message}
        locked.commit()
        return None

    def _lock_reservation(self) -> LockedReservation:
        return lock_reservation(self.connection, self.run.reservation, self.context)

    def _compute_grant(self, wants: int) -> int:
        """Return the new number of granted steps: never fewer, and never uncertified steps.

        It is rounded up to hundredths of the run, because each grant is logged.
        """
        return max(self.run.steps.granted, round_up_steps(wants, self.run.steps.certified))

    def _classify_end(self, checked: Conformance | None) -> tuple[End, str]:
        """Return how a run ended by its worker's report, and the code of the reason."""
        conformant = checked is not None and checked.conformant
        stopped = checked is None or any(item.code == "stopped" for item in checked.findings)
        if conformant and not stopped:
            return "settled", "conformant"
        if self.run.cancel_asked:
            return "cancelled", "cancelled"
        if not conformant:
            return "failed", "no_record" if checked is None else "not_conformant"
        limit, began = self.run.time_limit, self.run.began_at
        late = limit and began and self.context.at >= began + timedelta(seconds=limit)
        return "failed", "time_limit" if late else "stopped"

    def _settle(self, steps: int, record: str | None, cost: Cost | None) -> int:
        """Charge the run for ``steps``, at most once; return the charged steps."""
        locked = self._lock_reservation()
        if locked.reservation.state == "settled":
            return int(locked.reservation.steps.run or 0)
        locked.settle(steps, record, cost)
        return steps

    def _end_without_record(self, body: dict[str, Any]) -> StoredRun:
        """End the run: charged in full if it has begun, else released."""
        if self.run.has_begun:
            charged = self._settle(self.run.steps.certified, None, None)
            body = {**body, "steps_charged": charged}
        else:
            locked = self._lock_reservation()
            if locked.reservation.state == "reserved":
                locked.release(f"run {self.run.id}: {body['code']}")
        return self._write("cancelled" if self.run.cancel_asked else "failed", body, state="ended")

    def _requeue(self, body: dict[str, Any]) -> StoredRun:
        """Queue the run for another worker, unless it has to end."""
        run = self.run
        earlier = (attempt.body.get("further", False) for attempt in reversed(run.attempts))
        progress = (run.made_progress, *earlier)
        failed = sum(1 for _ in takewhile(lambda further: not further, progress))
        spent = run.has_begun and run.steps.granted >= run.steps.certified
        if run.cancel_asked or spent or failed >= MAX_FAILED_ATTEMPTS:
            return self._end_without_record(body)
        steps = run.steps
        attempt = {"granted": steps.granted, "steps": steps.reported, "head": run.head}
        body = {**body, **attempt, "begun": run.has_begun, "further": run.made_progress}
        return self._write("requeued", body, state="queued", expires_at=None, secret=None)


def _digest_of(secret: str) -> str:
    """Return the stored digest of a claim's secret."""
    return digest_of_bytes(secret.encode())


P = ParamSpec("P")
T = TypeVar("T")


class RunNotStarted(DomainError):
    """The run can no longer begin and has ended."""

    code = "run_not_started"


class RunQueue(Store):
    """The queue of runs; ``repository`` has what is read of it."""

    def change(
        self,
        run_id: str,
        context: CommandContext,
        change: Callable[Concatenate[LockedRun, P], T],
        *values: P.args,
        **named: P.kwargs,
    ) -> T:
        """Return the result of ``change`` on the locked run; raises ``UnknownRun``."""
        with self._writer.begin() as connection:
            locked = LockedRun(
                connection, repository.find(connection, run_id, locked=True), context
            )
            return change(locked, *values, **named)

    def find(self, run_id: str) -> StoredRun:
        """Return the run of that id; raises ``UnknownRun``."""
        return self.read(repository.find, run_id)

    def claim(
        self, queue: str, request: RunClaimRequest, context: CommandContext
    ) -> tuple[StoredRun, str] | None:
        """Claim the oldest run or the named one; return it with the claim's secret."""
        query = select(run_leases.c.run_id).where(
            run_leases.c.queue == queue, run_leases.c.state == "queued"
        )
        if request.run is not None:
            query = query.where(run_leases.c.run_id == request.run)
        query = query.order_by(run_leases.c.requested_at, run_leases.c.run_id).limit(1)
        with self._reader.connect() as connection:
            if connection.scalar(query) is None:
                return None  # so that polling workers take no lock
        with self._writer.begin() as connection:
            run_id = connection.scalar(query.with_for_update(skip_locked=True))
            if run_id is None:
                return None
            locked = LockedRun(connection, repository.find(connection, run_id), context)
            secret = secrets.token_hex(32)
            return locked.claim(request.worker, request.lease, secret), secret

    def start(self, run_id: str, request: StartRequest, context: CommandContext) -> StoredRun:
        """Start or continue a run; raises ``RunNotStarted`` if it was ended instead."""
        run = self.change(run_id, context, LockedRun.start, request)
        if run.has_ended:
            raise RunNotStarted(f"{run.code}: {run.message}", "Claim another run.")
        return run

    def expire_leases(self, context: CommandContext) -> int:
        """End expired leases, each in its own transaction; return how many."""
        expired = run_leases.c.state.in_(HELD_STATES) & (run_leases.c.expires_at < context.at)
        with self._reader.connect() as connection:
            leases = connection.execute(
                select(run_leases.c.run_id, run_leases.c.fence).where(expired)
            ).all()
        end, reason = LockedRun.end_lease, "did not renew its lease."
        return sum(
            self.change(run, context, end, fence, reason, expired=True) for run, fence in leases
        )
