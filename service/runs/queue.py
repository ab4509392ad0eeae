"""The queue of runs in the service's own tables: leases, fencing, a reaper, and how a run ends.

Every change is one transaction: the lease's row is locked, what is claimed of it checked, and
the lease, the event, its log entry and what the ledger must say of it are written together
(``LockedRun``).
A worker claims the oldest run of its queue, or the one that an engine handed it; two that ask at
once skip what the other has locked (``FOR UPDATE SKIP LOCKED``; SQLite has one writer at a time).
Each claim has a secret of its own: a worker reports on its run under ``fence`` and ``secret``.

A run ends by its record, without one, or before it began. A run whose worker was lost, or gave it
back, is requeued. If it began, another worker continues it under a new token; the steps that its
workers were ever granted are spent, whether or not they were taken, because the lost worker may be
taking them still. It is over, and charged in full, when no step is left, when it was cancelled, or
when ``MAX_FAILED_ATTEMPTS`` attempts in a row made no progress: it may be what kills workers.

A run continues from its checkpoint, in the output folder that the workers of a queue share.
The dispatcher takes back leases. A run that is over without a record is charged in full.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from hmac import compare_digest
from itertools import takewhile
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection, select

from affidavit.accountants.privacy_filter import Cost
from affidavit.certificate import Conformance, SearchOpening
from affidavit.service.database import Store
from affidavit.service.database import hold as hold_certificate
from affidavit.service.errors import DomainError, WrongState
from affidavit.service.identity.actor import CommandContext
from affidavit.service.ledger.store import (
    LockedReservation,
    lock_reservation,
    require_reserved_usable,
)
from affidavit.service.runs import repository
from affidavit.service.runs.models import (
    CompletionRequest,
    FailureRequest,
    FencedRequest,
    HeartbeatRequest,
    RecordPartRequest,
    RunClaimRequest,
    StartRequest,
)
from affidavit.service.runs.repository import End, Kind, StoredRun, rounded_up, run_leases
from affidavit.worker import Renewal

MAX_FAILED_ATTEMPTS = 5
MAX_NAMED = 8
HELD = ("claimed", "running")


class LeaseLost(DomainError):
    """The run is held under another fencing token or by another worker, or has ended."""

    code = "lease_lost"


@dataclass(frozen=True, slots=True)
class LockedRun:
    """``run``, whose lease the transaction of ``connection`` holds, and who changes it.

    What workers report raises ``LeaseLost`` unless it is under the token and secret of the lease.
    """

    connection: Connection
    run: StoredRun
    call: CommandContext

    # ---- people ----------------------------------------------------------------------

    def cancel(self, reason: str) -> StoredRun:
        """End a run that waits; tell the worker of one that does not. Raises ``WrongState``."""
        run, body = self.run, {"code": "cancelled", "message": reason}
        if run.state == "cancelled" or (run.cancel_asked and run.outcome is None):
            return run
        if run.outcome is not None:
            raise WrongState(
                f"run {run.id} is {run.state}.", "Only a run that has not ended can be cancelled."
            )
        if run.state == "queued":
            return replace(self, run=replace(run, cancel_asked=True))._give_up(body)
        return self._write("cancel_asked", body, cancel=True)

    # ---- workers ---------------------------------------------------------------------

    def claim(self, worker: str, lease: int, secret: str) -> StoredRun:
        """Give a queued run to a worker for ``lease`` seconds, under the next fencing token."""
        fence = self.run.fence + 1
        return replace(self, run=replace(self.run, fence=fence))._write(
            "claimed",
            {"fence": fence, "worker": worker},
            state="claimed",
            fence=fence,
            secret=_digest_of(secret),
            holder=self.call.actor,
            worker=worker,
            seconds=lease,
            expires_at=self.call.at + timedelta(seconds=lease),
        )

    def start(self, request: StartRequest) -> StoredRun:
        """Start or continue a run, or end it if it may not begin: check everything again.

        The first time its budget is committed; the number of trials of a search is drawn then, and
        the digest of what was drawn stands in the log before any of them. Without ``wants`` every
        step is granted, and the run is not handed over.
        """
        self._require_held(request)
        run, search, wants = self.run, self.run.request.get("search"), request.wants
        if run.state == "running":
            return run  # it was begun under this token, and the answer was lost
        if (obstacle := self._obstacle(request.plan_digest)) is not None:
            return self._give_up(obstacle)
        body: dict[str, Any] = {"fence": run.fence, "plan_digest": run.plan_digest}
        lease: dict[str, Any] = {"state": "running", "previous": run.fence, "head": None}
        if search is not None:
            # Trials that a lost worker ran cannot be taken up, nor another number drawn.
            wants = None
            opening = SearchOpening.drawn(run.certificate_id, search["choices"], search["score"])
            lease["search"], body["search"] = json.dumps(opening.as_document()), opening.digest
        body["granted"] = granted = run.certified_steps if wants is None else self._granted(wants)
        return self._write("resumed" if run.begun else "running", body, granted=granted, **lease)

    def renew(self, report: HeartbeatRequest) -> Renewal:
        """Hold the run longer, having charged ``steps``.

        ``wants`` is how many steps to have charged by the next time, and ``head`` the digest of a
        line of its record: first of the first line, which is logged. Whatever is granted here is
        spent if another has to continue the run.
        """
        self._require_held(report)
        run, granted = self.run, self.run.granted
        if run.state == "running":
            # Logged only as long as this attempt was granted no step.
            before = max((attempt.granted for attempt in run.attempts), default=0)
            if report.head is not None and run.head is None and granted == before:
                repository.log_record(self.connection, run, report.head, self.call)
            granted = self._granted(max(report.steps, report.wants))
            if granted > run.granted:
                repository.log_granted(self.connection, run, granted, self.call)
        return self._renew(
            granted, steps=max(run.steps, report.steps), head=report.head or run.head
        )

    def add_record_part(self, report: RecordPartRequest) -> Renewal:
        """Store a part of the run's record, and renew the lease; raises ``RecordRefused``."""
        self._require_held(report, running=True)
        content = report.lines.encode("utf-8", "surrogatepass")
        repository.add_record_part(self.connection, self.run.id, report.fence, report.part, content)
        return self._renew(self.run.granted)

    def complete(
        self, report: CompletionRequest, checked: Conformance | None, cost: Cost | None
    ) -> StoredRun:
        """End a run by its record, None if none was sent; ``cost`` is None for all steps.

        A run that does not conform has failed, and keeps its charge. A report that came before is
        answered as it was.
        """
        if self.run.ended_by(report.provenance):
            return self.run
        self._require_held(report, running=True)
        end, code = self._verdict(checked)
        steps, record, message = self.run.certified_steps, None, "no record was sent."
        if checked is not None:
            steps = steps if cost is None else checked.steps_to_charge
            record = checked.head
            codes = sorted({finding.code for finding in checked.findings})
            message = ", ".join(codes[:MAX_NAMED]) or "the record conforms."
        body = {
            "code": code,
            "message": message,
            "fence": self.run.fence,
            "steps_charged": self._settle(steps, record, cost),
            "record": record,
            "provenance": report.provenance,
        }
        return self._write(end, body, state="ended")

    def fail(self, report: FailureRequest) -> StoredRun:
        """End a run: free if it was not begun, charged in full if it was.

        With ``again`` it is given back instead, unless it is over anyhow.
        """
        self._require_held(report)
        body = {"code": report.code, "message": report.message, "fence": report.fence}
        return self._give_back(body) if report.again else self._give_up(body)

    # ---- the dispatcher --------------------------------------------------------------

    def lose(self, fence: int, why: str, *, expired: bool = False) -> bool:
        """Take a run from its worker, if it still holds it, or if its lease ``expired`` by now."""
        run = self.run
        renewed = expired and run.expires_at is not None and run.expires_at >= self.call.at
        if run.fence != fence or run.state not in HELD or renewed:
            return False
        message = f"worker {run.worker}: {why}"
        self._give_back({"code": "lease_lost", "message": message, "fence": fence})
        return True

    def next_job(self, number: int, *, refusal: str | None = None) -> StoredRun | None:
        """Count the next job of a waiting run, whose ``number``-th ended; None if there is none.

        There is none after a ``refusal``, the engine's last word.
        """
        if (self.run.state, self.run.job) != ("queued", number):
            return None
        unclaimed = number - self.run.fence
        if refusal is None and unclaimed < MAX_FAILED_ATTEMPTS:
            self._change_lease(job=number + 1)
            return self._changed()
        message = refusal or f"{unclaimed} jobs ended and never claimed it."
        self._give_up({"code": "job_refused" if refusal else "job_failed", "message": message})
        return None

    # ---- what they share -------------------------------------------------------------

    def _changed(self) -> StoredRun:
        return repository.find(self.connection, self.run.id)

    def _change_lease(self, **values: Any) -> None:
        repository.change_lease(self.connection, self.run.id, **values)

    def _renew(self, granted: int, **values: Any) -> Renewal:
        expires_at = self.call.at + timedelta(seconds=self.run.seconds or 0)
        self._change_lease(expires_at=expires_at, granted=granted, **values)
        return Renewal(cancel=self.run.cancel_asked, granted=granted)

    def _write(self, kind: Kind, body: dict[str, Any], **lease: Any) -> StoredRun:
        """Write what happened, with its log entry, and change the lease; the run after it."""
        self._change_lease(**lease)
        fence = None if kind == "cancel_asked" else self.run.fence or None
        begun = self.run.begun
        repository.add_event(
            self.connection, self.run.id, kind, body, self.call, fence=fence, begun=begun
        )
        return self._changed()

    def _require_held(self, report: FencedRequest, *, running: bool = False) -> None:
        run = self.run
        genuine = run.secret is not None and compare_digest(run.secret, _digest_of(report.secret))
        current_claim = (run.fence, run.holder) == (report.fence, self.call.actor)
        states = ("running",) if running else HELD
        if not (genuine and current_claim and run.state in states):
            raise LeaseLost(
                f"fencing token {report.fence} of run {run.id} is no longer valid, or the "
                "run's state does not allow this.",
                "Stop the run: further work does not count.",
            )

    def _obstacle(self, plan_digest: str) -> dict[str, str] | None:
        """Why it must not begin or go on; commits its budget if nothing stands against it."""
        run = self.run
        if run.cancel_asked:
            return {"code": "cancelled", "message": "it was cancelled before it began."}
        if plan_digest != run.plan_digest:
            return {"code": "other_plan", "message": "the plan at hand is not the certified one."}
        hold_certificate(self.connection, run.certificate_id)
        held = self._held()
        reservation = held.reservation
        if reservation.state != ("committed" if run.begun else "reserved"):
            message = f"the reservation is {reservation.state}."
            return {"code": "reservation_not_usable", "message": message}
        try:
            require_reserved_usable(self.connection, reservation)
        except DomainError as refusal:
            return {"code": refusal.code, "message": refusal.message}
        held.commit()
        return None

    def _held(self) -> LockedReservation:
        return lock_reservation(self.connection, self.run.reservation_id, self.call)

    def _granted(self, wants: int) -> int:
        """How many steps may be charged from now on: never fewer, and none uncertified.

        In hundredths of the run, because each grant is logged.
        """
        return max(self.run.granted, rounded_up(wants, self.run.certified_steps))

    def _verdict(self, checked: Conformance | None) -> tuple[End, str]:
        """How a run whose worker reports its end has ended, and the code of why."""
        conformant = checked is not None and checked.conformant
        stopped = checked is None or any(item.code == "stopped" for item in checked.findings)
        if conformant and not stopped:
            return "settled", "conformant"
        if self.run.cancel_asked:
            return "cancelled", "cancelled"
        if not conformant:
            return "failed", "no_record" if checked is None else "not_conformant"
        limit, began = self.run.request["time_limit"], self.run.began_at
        late = limit and began and self.call.at >= began + timedelta(seconds=limit)
        return "failed", "time_limit" if late else "stopped"

    def _settle(self, steps: int, record: str | None, cost: Cost | None) -> int:
        """Charge it for ``steps``, never twice; returns what was charged."""
        held = self._held()
        if held.reservation.state == "settled":
            return int(held.reservation.steps_run or 0)
        held.settle(steps, record, cost)
        return steps

    def _give_up(self, body: dict[str, Any]) -> StoredRun:
        """End it without a record: charged in full if it began, released if it did not."""
        if self.run.begun:
            charged = self._settle(self.run.certified_steps, None, None)
            body = {**body, "steps_charged": charged}
        else:
            held = self._held()
            if held.reservation.state == "reserved":
                held.release(f"run {self.run.id}: {body['code']}")
        return self._write("cancelled" if self.run.cancel_asked else "failed", body, state="ended")

    def _give_back(self, body: dict[str, Any]) -> StoredRun:
        """Queue it for another worker, unless it is over."""
        run = self.run
        earlier = (attempt.body.get("further", False) for attempt in reversed(run.attempts))
        progress = (run.made_progress, *earlier)
        failed = sum(1 for _ in takewhile(lambda further: not further, progress))
        spent = run.begun and run.granted >= run.certified_steps
        if run.cancel_asked or spent or failed >= MAX_FAILED_ATTEMPTS:
            return self._give_up(body)
        attempt = {"granted": run.granted, "steps": run.steps, "head": run.head}
        body = {**body, **attempt, "begun": run.begun, "further": run.made_progress}
        return self._write("requeued", body, state="queued", expires_at=None, secret=None)


def _digest_of(secret: str) -> str:
    """What is stored of a claim's secret."""
    return "sha256:" + hashlib.sha256(secret.encode()).hexdigest()


_lease = run_leases.c

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
        call: CommandContext,
        change: Callable[Concatenate[LockedRun, P], T],
        *values: P.args,
        **named: P.kwargs,
    ) -> T:
        """The result of ``change`` in a transaction that holds the run; raises ``UnknownRun``."""
        with self._writer.begin() as connection:
            locked = LockedRun(connection, repository.find(connection, run_id, locked=True), call)
            return change(locked, *values, **named)

    def find(self, run_id: str) -> StoredRun:
        """The run of that id; raises ``UnknownRun``."""
        return self.read(repository.find, run_id)

    def claim(
        self, queue: str, request: RunClaimRequest, call: CommandContext
    ) -> tuple[StoredRun, str] | None:
        """The oldest run, or the one named, under a new fencing token; and the claim's secret."""
        query = select(_lease.run_id).where(_lease.queue == queue, _lease.state == "queued")
        if request.run is not None:
            query = query.where(_lease.run_id == request.run)
        query = query.order_by(_lease.requested_at, _lease.run_id).limit(1)
        with self._reader.connect() as connection:
            if connection.scalar(query) is None:
                return None  # without a lock, for workers that poll
        with self._writer.begin() as connection:
            run_id = connection.scalar(query.with_for_update(skip_locked=True))
            if run_id is None:
                return None
            locked = LockedRun(connection, repository.find(connection, run_id), call)
            secret = secrets.token_hex(32)
            return locked.claim(request.worker, request.lease, secret), secret

    def start(self, run_id: str, request: StartRequest, call: CommandContext) -> StoredRun:
        """Start or continue a run; raises ``RunNotStarted`` once it was ended instead."""
        run = self.change(run_id, call, LockedRun.start, request)
        if run.outcome is not None:
            why = f"{run.outcome['code']}: {run.outcome['message']}"
            raise RunNotStarted(why, "Claim another run.")
        return run

    def reap(self, call: CommandContext) -> int:
        """Take back expired leases, each in a transaction; returns how many."""
        expired = _lease.state.in_(HELD) & (_lease.expires_at < call.at)
        with self._reader.connect() as connection:
            leases = connection.execute(select(_lease.run_id, _lease.fence).where(expired)).all()
        why, lose = "did not renew its lease.", LockedRun.lose
        return sum(self.change(run, call, lose, fence, why, expired=True) for run, fence in leases)
