"""Runs: what the routes ask, with the reservation made and the accounting done before."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool

from affidavit.certificate import provenance
from affidavit.certificate.keys import KeyStore
from affidavit.service.calls import Call
from affidavit.service.ledger.desk import Desk
from affidavit.service.ledger.ledger import Ledger, require_usable
from affidavit.service.pool import AccountingPool
from affidavit.service.refusals import Refusal
from affidavit.service.runs.judging import Judged, judge
from affidavit.service.runs.queue import Held, RunQueue
from affidavit.service.runs.refusals import BadProvenance, ReservationNotUsable
from affidavit.service.runs.rows import Run
from affidavit.service.runs.wanted import WantedRun
from affidavit.service.store import CertificateStore


class Runs:
    """The use cases of runs; ``worker_keys`` is where public records of workers' keys are."""

    def __init__(
        self,
        queue: RunQueue,
        ledger: Ledger,
        desk: Desk,
        store: CertificateStore,
        worker_keys: Path,
        pool: AccountingPool,
    ) -> None:
        self.queue = queue
        self._ledger = ledger
        self._desk = desk
        self._store = store
        self._pool = pool
        self._worker_keys = KeyStore(worker_keys)

    async def request(self, wanted: WantedRun, call: Call, *, anybodys: bool) -> tuple[Run, bool]:
        """Queue a run, with the reservation that is named or one that is made.

        ``anybodys`` lets a reservation be used that somebody else made.
        """
        known = await run_in_threadpool(self.queue.repeated, call)
        if known is not None:
            return known, False
        if wanted.reservation is not None:
            reservation = await run_in_threadpool(self._ledger.reservation, wanted.reservation)
            if reservation.reserved_by != call.actor and not anybodys:
                raise ReservationNotUsable(
                    "somebody else made this reservation.", "Leave `reservation` out."
                )
            return await run_in_threadpool(self.queue.enqueue, wanted, reservation.id, call)
        certificate = await run_in_threadpool(self._store.find, wanted.certificate)
        dataset = (certificate.dataset if certificate else None) or ""
        require_usable(certificate, dataset, untrusted_too=True)
        reservation, _ = await self._desk.reserve(dataset, wanted.certificate, _its_own(call))
        try:
            return await run_in_threadpool(self.queue.enqueue, wanted, reservation.id, call)
        except Refusal:
            plain = replace(call, idempotency_key=None)
            with suppress(Refusal):
                await run_in_threadpool(
                    self._ledger.release, reservation.id, "the run was refused", plain
                )
            raise

    async def complete(self, held: Held, envelope: dict[str, Any]) -> Run:
        """Settle a run by its record, which its signed provenance names.

        The record is what was sent; without one the run is charged in full. Raises
        ``BadProvenance``.
        """
        run = await run_in_threadpool(self.queue.find, held.run)
        trusted = await run_in_threadpool(self._worker_keys.public_keys)
        try:
            reported = provenance.read_provenance(envelope, trusted)
        except provenance.BadProvenance as error:
            raise BadProvenance(str(error), "Sign with the worker's key.") from None
        about = (reported.run, reported.certificate, reported.plan_digest)
        if about != (run.id, run.certificate_id, run.plan_digest):
            raise BadProvenance("it is about another run.", "Send this run's.")
        judged = await self._judged(run, held.fence, reported.record)
        reservation = await run_in_threadpool(self._ledger.reservation, run.reservation_id)
        cost = await self._desk.cost_of_steps(reservation, judged.steps)
        return await run_in_threadpool(self.queue.complete, held, judged, envelope, cost)

    async def _judged(self, run: Run, fence: int, signed_for: str | None) -> Judged:
        others = await run_in_threadpool(self.queue.records, run.id)
        parts = others.pop(fence, [])
        if not parts:
            return Judged.nothing(run.certified_steps)
        issues = await run_in_threadpool(self._store.issues, run.certificate_id)
        bundle = next(
            each.bundle
            for each in issues
            if (each.issue, each.untrusted) == (run.issue, run.untrusted)
        )
        return await self._pool.run(
            judge,
            bundle,
            parts,
            signed_for=signed_for,
            told=run.head,
            before=[each for each in run.attempts if each.granted],
            others=others,
        )


def _its_own(call: Call) -> Call:
    """The reservation's call: repeated where the run's is, under a key nobody else uses."""
    if call.idempotency_key is None:
        return call
    name = hashlib.sha256(call.idempotency_key.encode()).hexdigest()
    return replace(call, idempotency_key=f"run-{name}")
