"""The run service: requests and completes runs, with the accounting done before the transaction."""

from __future__ import annotations

import asyncio
import json
import uuid
from pathlib import Path

from sqlalchemy import Connection, insert
from sqlalchemy.exc import IntegrityError
from starlette.concurrency import run_in_threadpool

from affidavit.certificate import BadProvenance as UnsignedProvenance
from affidavit.certificate import KeyStore, read_provenance, statement_in
from affidavit.service.command import CommandContext
from affidavit.service.database import hold as hold_certificate
from affidavit.service.errors import DomainError
from affidavit.service.fair_queue import leave_turn
from affidavit.service.ledger import transitions
from affidavit.service.ledger.service import LedgerService
from affidavit.service.ledger.store import LedgerStore
from affidavit.service.ledger.transitions import CostedRun
from affidavit.service.pool import AccountingPool
from affidavit.service.runs import repository
from affidavit.service.runs.conformance import SentRecord, check_record
from affidavit.service.runs.locked_run import LockedRun
from affidavit.service.runs.models import CompletionRequest, RunRequest
from affidavit.service.runs.queue import RunQueue
from affidavit.service.runs.repository import StoredRun
from affidavit.service.runs.run_tables import run_leases, runs
from affidavit.service.store import CertificateStore, current


class ReservationNotUsable(DomainError):
    """The reservation is of another certificate, not open any more, or another run's."""

    code = "reservation_not_usable"


class WrongSearch(DomainError):
    """A run of a certificate for searches says nothing of a search, or the other way round."""

    code = "wrong_search"
    status = 422


class BadProvenance(DomainError):
    """The provenance is unsigned, signed by an unknown key, or about something else."""

    code = "bad_provenance"
    status = 422


class HostsNotAvailable(DomainError):
    """The run wants several hosts, and no engine here gives them to one run."""

    code = "hosts_not_available"
    status = 422


class RunService:
    """The use cases of runs; ``worker_keys`` is where public records of workers' keys are.

    ``spreads`` says whether runs can be given several hosts.
    """

    def __init__(
        self,
        queue: RunQueue,
        ledger_store: LedgerStore,
        ledger: LedgerService,
        store: CertificateStore,
        worker_keys: Path,
        pool: AccountingPool,
        *,
        spreads: bool = False,
    ) -> None:
        self.queue = queue
        self._ledger_store = ledger_store
        self._ledger = ledger
        self._store = store
        self._pool = pool
        self._worker_keys = KeyStore(worker_keys)
        self._spreads = spreads
        self._completions: dict[tuple[str, int, str, str], asyncio.Task[StoredRun]] = {}

    async def request(
        self, request: RunRequest, call: CommandContext, *, any_reservation: bool
    ) -> tuple[StoredRun, bool]:
        """Queue a run, with the reservation that is named or one made in the same transaction.

        ``any_reservation`` lets a reservation be used that somebody else made. Returns the run and
        whether it was queued now. Raises ``DomainError``.
        """
        earlier = await run_in_threadpool(self.queue.read, repository.repeated, call)
        if earlier is not None:
            return earlier, False
        if request.requirements.hosts > 1 and not self._spreads:
            raise HostsNotAvailable(
                f"no engine here gives a run {request.requirements.hosts} hosts.",
                "Leave requirements.hosts out, or set AFFIDAVIT_DISPATCH to a Ray cluster.",
                pointer="/requirements/hosts",
            )
        if request.reservation is None:
            costed = await self._ledger.costed(None, request.certificate)
            return await run_in_threadpool(self._enqueue, request, costed, call)
        reservation = await run_in_threadpool(self._ledger_store.reservation, request.reservation)
        if reservation.reserved_by != call.actor and not any_reservation:
            raise ReservationNotUsable(
                "this reservation was made by somebody else.", "Leave `reservation` out."
            )
        return await run_in_threadpool(self._enqueue, request, reservation.id, call)

    def _enqueue(
        self, request: RunRequest, reservation: str | CostedRun, call: CommandContext
    ) -> tuple[StoredRun, bool]:
        """Queue a run on a reservation that exists, or is made in the same transaction."""
        try:
            with self.queue.transaction() as connection:
                if isinstance(reservation, CostedRun):
                    transitions.hold_for(connection, reservation)
                if (earlier := repository.repeated(connection, call)) is not None:
                    return earlier, False
                if isinstance(reservation, CostedRun):
                    # The run has the key; its reservation is no request of its own.
                    unkeyed = CommandContext(actor=call.actor, at=call.at)
                    reservation = transitions.reserve_usable(connection, reservation, unkeyed).id
                return _enqueue(connection, request, reservation, call), True
        except IntegrityError:
            if (earlier := self.queue.read(repository.repeated, call)) is not None:
                return earlier, False
            raise ReservationNotUsable(
                f"reservation {reservation} belongs to another run.", "Reserve for each run."
            ) from None

    async def complete(
        self, run_id: str, report: CompletionRequest, call: CommandContext
    ) -> StoredRun:
        """Settle a run by its record, which its signed provenance names.

        The record is what was sent; without one the run is charged in full. A worker's request
        may end before the check of a long record: it goes on, and the same report sent again
        waits for it. Raises ``BadProvenance``.
        """
        key = (run_id, report.fence, report.secret, json.dumps(report.provenance, sort_keys=True))
        if key not in self._completions:
            task = asyncio.create_task(self._complete(run_id, report, call))
            self._completions[key] = task
            task.add_done_callback(lambda _: self._completions.pop(key))
        leave_turn()
        return await asyncio.shield(self._completions[key])

    async def _complete(
        self, run_id: str, report: CompletionRequest, call: CommandContext
    ) -> StoredRun:
        sent = await run_in_threadpool(self._sent, run_id, report)
        if (run := sent.run).ended_by(report.provenance):
            return run
        checked = await self._pool.run(check_record, sent) if sent.parts else None
        cost = None
        if checked is not None and checked.steps_to_charge < run.certified_steps:
            store = self._ledger_store
            reservation = await run_in_threadpool(store.reservation, run.reservation_id)
            cost = await self._ledger.cost_of_steps(reservation, checked.steps_to_charge)
        complete = LockedRun.complete
        return await run_in_threadpool(
            self.queue.change, run_id, call, complete, report, checked, cost
        )

    def _sent(self, run_id: str, report: CompletionRequest) -> SentRecord:
        """The record that the worker of the run sent and signed for."""
        run = self.queue.find(run_id)
        try:
            signed = read_provenance(report.provenance, self._worker_keys.public_keys())
        except UnsignedProvenance as error:
            raise BadProvenance(str(error), "Sign with the worker's key.") from None
        about = (signed.run, signed.certificate, signed.plan_digest)
        if about != (run.id, run.certificate_id, run.plan_digest):
            raise BadProvenance("it is about another run.", "Send this run's.")
        records = self.queue.read(repository.records_of, run.id)
        issue = self._store.issue(run.certificate_id, run.issue, untrusted=run.untrusted)
        return SentRecord(
            run=run,
            bundle=issue.bundle,
            parts=records.pop(report.fence, []),
            others=records,
            signed_for=signed.record,
            logged=self.queue.read(repository.logged_records, run.id),
        )


def _enqueue(
    connection: Connection, request: RunRequest, reservation_id: str, call: CommandContext
) -> StoredRun:
    """Queue a run on its own reservation and a usable certificate; raises ``DomainError``."""
    hold_certificate(connection, request.certificate)
    # Held, so that it is not released meanwhile.
    _, reservation = transitions.hold_reservation(connection, reservation_id)
    if reservation.certificate_id != request.certificate:
        raise ReservationNotUsable(
            f"reservation {reservation_id} is not for this certificate.",
            "Leave `reservation` out to have one made.",
        )
    if reservation.state != "reserved":
        raise ReservationNotUsable(
            f"reservation {reservation_id} is {reservation.state}.", "Reserve for each run."
        )
    certificate = current(connection, request.certificate)
    transitions.require_usable(
        certificate,
        reservation.scope.dataset,
        allow_untrusted=reservation.untrusted,
        issue=reservation,
    )
    assert certificate is not None
    _require_search(request, certificate.bundle)
    run_id, document = str(uuid.uuid4()), request.model_dump(mode="json")
    same = {"queue": request.queue, "requested_at": call.at}
    row = {
        "id": run_id,
        "certificate_id": request.certificate,
        "issue": reservation.issue,
        "untrusted": reservation.untrusted,
        "plan_digest": reservation.plan_digest,
        "reservation_id": reservation_id,
        "request": json.dumps(document, sort_keys=True),
        "requested_by": call.actor,
        "idempotency_key": call.idempotency_key,
        "request_digest": call.request_digest,
        "team": certificate.team,
        **same,
    }
    connection.execute(insert(runs), row)
    lease = {"run_id": run_id, "state": "queued", "fence": 0, "steps": 0, "cancel": False}
    connection.execute(insert(run_leases), {**lease, **same})
    body = {
        "certificate": request.certificate,
        "issue": reservation.issue,
        "reservation": reservation_id,
        "request": document,
    }
    repository.add_event(connection, run_id, "queued", body, call)
    return repository.find(connection, run_id)


def _require_search(request: RunRequest, bundle: bytes) -> None:
    plan = statement_in(bundle)["predicate"]["plan"]
    searches = any(event["kind"] == "repeat_and_select" for event in plan.get("extra", ()))
    if searches != (request.search is not None):
        raise WrongSearch(
            f"the certificate covers {'a search' if searches else 'one run and no search'}.",
            "Send search (choices, and public data as score) for a plan with repeat_and_select, "
            "and for no other.",
        )
    if searches and plan.get("canaries") is not None:
        raise WrongSearch(
            "the canaries of a search cannot be logged before its trials.",
            "Certify the plan without canaries.",
        )
    if searches and request.time_limit is not None:
        raise WrongSearch(
            "a search has no time limit: trials that it ends would tell how many there were.",
            "Leave time_limit out.",
        )
