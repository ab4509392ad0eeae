"""Runs: what the routes ask, with the reservation made and the accounting done before."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool

from affidavit.certificate import KeyStore, provenance
from affidavit.service.command import CommandContext
from affidavit.service.errors import DomainError
from affidavit.service.ledger.service import LedgerService
from affidavit.service.ledger.store import LedgerStore
from affidavit.service.pool import AccountingPool
from affidavit.service.runs.judging import Judged, judge
from affidavit.service.runs.queue import Held, RunQueue
from affidavit.service.runs.refusals import BadProvenance, ReservationNotUsable
from affidavit.service.runs.rows import Run
from affidavit.service.runs.wanted import WantedRun
from affidavit.service.store import CertificateStore


@dataclass(frozen=True, kw_only=True, slots=True)
class _Told:
    """What a worker said of a run that it ended: its record, and what it signed for.

    ``others`` are the records of those who had the run before, by fencing token.
    """

    run: Run
    signed_for: str | None
    parts: list[bytes]
    others: dict[int, list[bytes]]
    bundle: bytes


class Runs:
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
        self, wanted: WantedRun, call: CommandContext, *, anybodys: bool
    ) -> tuple[Run, bool]:
        """Queue a run, with the reservation that is named or one that is made.

        ``anybodys`` lets a reservation be used that somebody else made.
        """
        if call.idempotency_key is not None:
            known = await run_in_threadpool(self.queue.repeated, call)
            if known is not None:
                return known, False
        if wanted.reservation is not None:
            reservation = await run_in_threadpool(
                self._ledger_store.reservation, wanted.reservation
            )
            if reservation.reserved_by != call.actor and not anybodys:
                raise ReservationNotUsable(
                    "somebody else made this reservation.", "Leave `reservation` out."
                )
            return await run_in_threadpool(self.queue.enqueue, wanted, reservation.id, call)
        reservation, _ = await self._ledger.reserve(None, wanted.certificate, _its_own(call))
        try:
            return await run_in_threadpool(self.queue.enqueue, wanted, reservation.id, call)
        except DomainError:
            plain = replace(call, idempotency_key=None)
            with suppress(DomainError):
                await run_in_threadpool(
                    self._ledger_store.release, reservation.id, "the run was refused", plain
                )
            raise

    async def complete(self, held: Held, envelope: dict[str, Any]) -> Run:
        """Settle a run by its record, which its signed provenance names.

        The record is what was sent; without one the run is charged in full. Raises
        ``BadProvenance``.
        """
        told = await run_in_threadpool(self._told, held, envelope)
        judged = await self._judged(told)
        cost = None
        if judged.steps < told.run.certified_steps:
            reservation = await run_in_threadpool(
                self._ledger_store.reservation, told.run.reservation_id
            )
            cost = await self._ledger.cost_of_steps(reservation, judged.steps)
        return await run_in_threadpool(self.queue.complete, held, judged, envelope, cost)

    def _told(self, held: Held, envelope: dict[str, Any]) -> _Told:
        run = self.queue.find(held.run)
        try:
            reported = provenance.read_provenance(envelope, self._worker_keys.public_keys())
        except provenance.BadProvenance as error:
            raise BadProvenance(str(error), "Sign with the worker's key.") from None
        about = (reported.run, reported.certificate, reported.plan_digest)
        if about != (run.id, run.certificate_id, run.plan_digest):
            raise BadProvenance("it is about another run.", "Send this run's.")
        others = self.queue.records(run.id)
        parts = others.pop(held.fence, [])
        bundle = next(
            issue.bundle
            for issue in self._store.issues(run.certificate_id)
            if (issue.issue, issue.untrusted) == (run.issue, run.untrusted)
        )
        return _Told(run=run, signed_for=reported.record, parts=parts, others=others, bundle=bundle)

    async def _judged(self, told: _Told) -> Judged:
        if not told.parts:
            return Judged.nothing(told.run.certified_steps)
        return await self._pool.run(
            judge,
            told.bundle,
            told.parts,
            signed_for=told.signed_for,
            told=told.run.head,
            before=[attempt for attempt in told.run.attempts if attempt.granted],
            others=told.others,
        )


def _its_own(call: CommandContext) -> CommandContext:
    """The reservation's call: repeated where the run's is, under a key nobody else uses."""
    if call.idempotency_key is None:
        return call
    name = hashlib.sha256(call.idempotency_key.encode()).hexdigest()
    return replace(call, idempotency_key=f"run-{name}")
