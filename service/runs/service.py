"""The run service: requests and completes runs, with the accounting done before the transaction."""

from __future__ import annotations

from pathlib import Path

from starlette.concurrency import run_in_threadpool

from affidavit.certificate import BadProvenance as UnsignedProvenance
from affidavit.certificate import KeyStore, read_provenance
from affidavit.service.command import CommandContext
from affidavit.service.errors import DomainError
from affidavit.service.ledger.service import LedgerService
from affidavit.service.ledger.store import LedgerStore
from affidavit.service.pool import AccountingPool
from affidavit.service.runs import repository
from affidavit.service.runs.conformance import ConformanceResult, SentRecord, check_record
from affidavit.service.runs.enqueue import ReservationNotUsable
from affidavit.service.runs.models import CompletionRequest, RunRequest
from affidavit.service.runs.queue import RunQueue
from affidavit.service.runs.repository import StoredRun
from affidavit.service.store import CertificateStore


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

    async def request(
        self, request: RunRequest, call: CommandContext, *, any_reservation: bool
    ) -> tuple[StoredRun, bool]:
        """Queue a run, with the reservation that is named or one made in the same transaction.

        ``any_reservation`` lets a reservation be used that somebody else made.
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
            return await run_in_threadpool(self.queue.enqueue, request, costed, call)
        reservation = await run_in_threadpool(self._ledger_store.reservation, request.reservation)
        if reservation.reserved_by != call.actor and not any_reservation:
            raise ReservationNotUsable(
                "this reservation was made by somebody else.", "Leave `reservation` out."
            )
        return await run_in_threadpool(self.queue.enqueue, request, reservation.id, call)

    async def complete(
        self, run_id: str, report: CompletionRequest, call: CommandContext
    ) -> StoredRun:
        """Settle a run by its record, which its signed provenance names.

        The record is what was sent; without one the run is charged in full. Raises
        ``BadProvenance``.
        """
        run, sent = await run_in_threadpool(self._sent, run_id, report)
        cost, certified = None, run.certified_steps
        result = ConformanceResult(code="no_record", steps=certified, summary="no record was sent.")
        if sent.parts:
            result = await self._pool.run(check_record, sent)
        if result.steps < certified:
            store = self._ledger_store
            reservation = await run_in_threadpool(store.reservation, run.reservation_id)
            cost = await self._ledger.cost_of_steps(reservation, result.steps)
        return await run_in_threadpool(self.queue.complete, run_id, report, result, cost, call)

    def _sent(self, run_id: str, report: CompletionRequest) -> tuple[StoredRun, SentRecord]:
        """The run with the record that its worker sent and signed for."""
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
        return run, SentRecord(
            bundle=issue.bundle,
            parts=records.pop(report.fence, []),
            others=records,
            signed_for=signed.record,
            reported=run.head,
            before=[attempt for attempt in run.attempts if attempt.granted],
            logged=self.queue.read(repository.logged_records, run.id),
            search=None if run.search is None else run.search.digest,
        )
