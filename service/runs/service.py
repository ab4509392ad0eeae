"""The run service: requests and completes runs, with the accounting done before the transaction."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool

from affidavit.certificate import KeyStore, provenance
from affidavit.service.command import CommandContext
from affidavit.service.errors import DomainError
from affidavit.service.ledger.service import LedgerService
from affidavit.service.ledger.store import LedgerStore
from affidavit.service.pool import AccountingPool
from affidavit.service.runs.conformance import ConformanceResult, check_record
from affidavit.service.runs.enqueue import ReservationNotUsable
from affidavit.service.runs.models import RunRequest
from affidavit.service.runs.queue import HeldLease, RunQueue
from affidavit.service.runs.repository import StoredRun
from affidavit.service.store import CertificateStore


class BadProvenance(DomainError):
    """The provenance is unsigned, signed by an unknown key, or about something else."""

    code = "bad_provenance"
    status = 422


@dataclass(frozen=True, kw_only=True, slots=True)
class _Report:
    """What a worker reported of a run that it ended: its record, and what it signed for.

    ``others`` are the records of those who had the run before, by fencing token.
    """

    run: StoredRun
    signed_for: str | None
    parts: list[bytes]
    others: dict[int, list[bytes]]
    logged: frozenset[str]
    bundle: bytes


class RunService:
    """The use cases of runs; ``worker_keys`` is where public records of workers' keys are."""

    def __init__(
        self,
        queue: RunQueue,
        ledger_store: LedgerStore,
        ledger: LedgerService,
        store: CertificateStore,
        worker_keys: Path,
        pool: AccountingPool,
    ) -> None:
        self.queue = queue
        self._ledger_store = ledger_store
        self._ledger = ledger
        self._store = store
        self._pool = pool
        self._worker_keys = KeyStore(worker_keys)

    async def request(
        self, request: RunRequest, call: CommandContext, *, any_reservation: bool
    ) -> tuple[StoredRun, bool]:
        """Queue a run, with the reservation that is named or one made in the same transaction.

        ``any_reservation`` lets a reservation be used that somebody else made.
        """
        if call.idempotency_key is not None:
            earlier = await run_in_threadpool(self.queue.repeated, call)
            if earlier is not None:
                return earlier, False
        if request.reservation is not None:
            reservation = await run_in_threadpool(
                self._ledger_store.reservation, request.reservation
            )
            if reservation.reserved_by != call.actor and not any_reservation:
                raise ReservationNotUsable(
                    "this reservation was made by somebody else.", "Leave `reservation` out."
                )
            return await run_in_threadpool(self.queue.enqueue, request, reservation.id, call)
        costed = await self._ledger.costed(None, request.certificate)
        return await run_in_threadpool(self.queue.enqueue, request, costed, call)

    async def complete(self, held: HeldLease, envelope: dict[str, Any]) -> StoredRun:
        """Settle a run by its record, which its signed provenance names.

        The record is what was sent; without one the run is charged in full. Raises
        ``BadProvenance``.
        """
        report = await run_in_threadpool(self._report, held, envelope)
        result = await self._check(report)
        cost = None
        if result.steps < report.run.certified_steps:
            reservation = await run_in_threadpool(
                self._ledger_store.reservation, report.run.reservation_id
            )
            cost = await self._ledger.cost_of_steps(reservation, result.steps)
        return await run_in_threadpool(self.queue.complete, held, result, envelope, cost)

    def _report(self, held: HeldLease, envelope: dict[str, Any]) -> _Report:
        run = self.queue.find(held.run)
        try:
            reported = provenance.read_provenance(envelope, self._worker_keys.public_keys())
        except provenance.BadProvenance as error:
            raise BadProvenance(str(error), "Sign with the worker's key.") from None
        about = (reported.run, reported.certificate, reported.plan_digest)
        if about != (run.id, run.certificate_id, run.plan_digest):
            raise BadProvenance("it is about another run.", "Send this run's.")
        others, logged = self.queue.records(run.id), self.queue.logged_records(run.id)
        parts = others.pop(held.fence, [])
        bundle = next(
            issue.bundle
            for issue in self._store.issues(run.certificate_id)
            if (issue.issue, issue.untrusted) == (run.issue, run.untrusted)
        )
        return _Report(
            run=run,
            signed_for=reported.record,
            parts=parts,
            others=others,
            logged=logged,
            bundle=bundle,
        )

    async def _check(self, report: _Report) -> ConformanceResult:
        if not report.parts:
            return ConformanceResult.nothing(report.run.certified_steps)
        return await self._pool.run(
            check_record,
            report.bundle,
            report.parts,
            signed_for=report.signed_for,
            reported=report.run.head,
            before=[attempt for attempt in report.run.attempts if attempt.granted],
            others=report.others,
            logged=report.logged,
            search=None if report.run.search is None else report.run.search.digest,
        )
