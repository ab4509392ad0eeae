"""The run service: requests and completes runs, with the accounting done before the transaction.

The service checks a run's record itself; the worker's own verdict does not count. It checks the
record against the certificate like ``affidavit conformance``, and against the logged events of the
run's attempts.

The check cannot show that the noise was drawn and the data read as recorded. For that the holder of
the worker's key is trusted.
"""

from __future__ import annotations

import asyncio
import json
import uuid
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, insert
from sqlalchemy.exc import IntegrityError
from starlette.concurrency import run_in_threadpool

from affidavit.assessment import (
    Execution,
    PlanNotClosed,
    certified_plan,
)
from affidavit.client import RunTest
from affidavit.evidence import (
    START,
    BadCanaries,
    BrokenLine,
    Conformance,
    ConformanceFinding,
    ReplayRecord,
    SearchOpening,
    audit_record,
    check_conformance,
    decode_line,
    losses_of,
    read_canaries,
    read_provenance,
)
from affidavit.evidence import BadProvenance as UnsignedProvenance
from affidavit.plan import canonical_json
from affidavit.service.certificates.store import CertificateStore, StoredCertificate
from affidavit.service.core.database import hold as hold_certificate
from affidavit.service.core.errors import DomainError
from affidavit.service.core.fair_queue import leave_turn
from affidavit.service.core.pool import AccountingPool
from affidavit.service.identity.actor import CommandContext
from affidavit.service.ledger.service import LedgerService
from affidavit.service.ledger.store import (
    CostedRun,
    lock_for_reservation,
    lock_reservation,
    require_reserved_usable,
    reserve,
)
from affidavit.service.runs import repository
from affidavit.service.runs.queue import LockedRun, RunQueue
from affidavit.service.runs.repository import StoredRun, TestKind
from affidavit.service.runs.wire_models import AuditRequest, CompletionRequest, RunRequest
from affidavit.service.tables.runs import run_leases, runs
from affidavit.trust import KeyStore, TrustedKeys, statement_in


class ReservationNotUsable(DomainError):
    """The reservation is for another certificate or run, or no longer open."""

    code = "reservation_not_usable"


class WrongSearch(DomainError):
    """The run has no search, but its certificate covers one, or the other way round."""

    code = "wrong_search"
    status = 422


class BadProvenance(DomainError):
    """The provenance is unsigned, signed by an unknown key, or about something else."""

    code = "bad_provenance"
    status = 422


class WrongReplay(DomainError):
    """The replay is of another plan than the run."""

    code = "wrong_replay"
    status = 422


class WrongAudit(DomainError):
    """The audit is of other canaries than the run's, or its plan cannot be audited."""

    code = "wrong_audit"
    status = 422


class HostsNotAvailable(DomainError):
    """The run requires several hosts, which this service's engine does not support."""

    code = "hosts_not_available"
    status = 422


class RunService:
    """The use cases of runs.

    ``worker_keys`` is the folder with the workers' public keys. ``revoked`` returns the ids of keys
    that the keyset revokes. ``multi_host`` tells whether the engine supports several hosts.
    """

    def __init__(
        self,
        queue: RunQueue,
        ledger: LedgerService,
        store: CertificateStore,
        worker_keys: Path,
        revoked: Callable[[], Collection[str]],
        pool: AccountingPool,
        *,
        multi_host: bool,
    ) -> None:
        self.queue = queue
        self._ledger = ledger
        self._store = store
        self._pool = pool
        self._worker_keys = KeyStore(worker_keys)
        self._revoked = revoked
        self._multi_host = multi_host
        self._completions: dict[tuple[str, int, str, str], asyncio.Task[StoredRun]] = {}

    async def request(
        self, request: RunRequest, context: CommandContext, *, any_reservation: bool
    ) -> tuple[StoredRun, bool]:
        """Queue a run on the named reservation, or on one made in the same transaction.

        ``any_reservation`` allows other people's reservations. Returns the run and whether it was
        queued now. Raises ``DomainError``.
        """
        earlier = await run_in_threadpool(self.queue.read, repository.find_repeated, context)
        if earlier is not None:
            return earlier, False
        if request.requirements.hosts > 1 and not self._multi_host:
            raise HostsNotAvailable(
                f"no engine of this service can give a run {request.requirements.hosts} hosts.",
                "Omit requirements.hosts, or set AFFIDAVIT_DISPATCH to a Ray cluster.",
                pointer="/requirements/hosts",
            )
        if request.reservation is None:
            costed = await self._ledger.cost_run(None, request.certificate)
            return await run_in_threadpool(self._enqueue, request, costed, context)
        reservation = await run_in_threadpool(self._ledger.store.reservation, request.reservation)
        if reservation.reserved_by != context.actor and not any_reservation:
            raise ReservationNotUsable(
                "this reservation was made by somebody else.", "Leave `reservation` out."
            )
        return await run_in_threadpool(self._enqueue, request, reservation.id, context)

    def _enqueue(
        self, request: RunRequest, reservation: str | CostedRun, context: CommandContext
    ) -> tuple[StoredRun, bool]:
        """Queue a run on a reservation, which is made in the same transaction if needed."""
        try:
            with self.queue.writing() as connection:
                if isinstance(reservation, CostedRun):
                    lock_for_reservation(connection, reservation)
                if (earlier := repository.find_repeated(connection, context)) is not None:
                    return earlier, False
                if isinstance(reservation, CostedRun):
                    # The idempotency key belongs to the run, not to its reservation.
                    unkeyed = CommandContext(actor=context.actor, at=context.at)
                    reservation = reserve(connection, reservation, unkeyed).id
                return _insert_run(connection, request, reservation, context), True
        except IntegrityError:
            if (earlier := self.queue.read(repository.find_repeated, context)) is not None:
                return earlier, False
            raise ReservationNotUsable(
                f"reservation {reservation} belongs to another run.", "Reserve for each run."
            ) from None

    async def complete(
        self, run_id: str, report: CompletionRequest, context: CommandContext
    ) -> StoredRun:
        """Settle a run by the record that it sent and that its signed provenance names.

        Without a record the run is charged in full. The check of a long record continues if the
        worker's request ends, and the same report sent again waits for it. Raises
        ``BadProvenance``.
        """
        key = (run_id, report.fence, report.secret, json.dumps(report.provenance, sort_keys=True))
        if key not in self._completions:
            task = asyncio.create_task(self._complete(run_id, report, context))
            self._completions[key] = task
            task.add_done_callback(lambda _: self._completions.pop(key))
        leave_turn()
        return await asyncio.shield(self._completions[key])

    async def _complete(
        self, run_id: str, report: CompletionRequest, context: CommandContext
    ) -> StoredRun:
        sent = await run_in_threadpool(self._read_record, run_id, report)
        if (run := sent.run).was_ended_by(report.provenance):
            return run
        checked = await self._pool.run(check_record, sent) if sent.parts else None
        cost = None
        if checked is not None and checked.steps_to_charge < run.steps.certified:
            store = self._ledger.store
            reservation = await run_in_threadpool(store.reservation, run.reservation)
            cost = await self._ledger.cost_of_steps(reservation, checked.steps_to_charge)
        complete = LockedRun.complete
        return await run_in_threadpool(
            self.queue.change, run_id, context, complete, report, checked, cost
        )

    def _read_record(self, run_id: str, report: CompletionRequest) -> SentRecord:
        """Read the record that the worker of the run sent, and verify its signature."""
        run = self.queue.find(run_id)
        try:
            signed = read_provenance(
                report.provenance, TrustedKeys(self._worker_keys.public_keys(), policy=None)
            )
        except UnsignedProvenance as error:
            raise BadProvenance(str(error), "Sign with the worker's key.") from None
        if signed.key in self._revoked():
            raise BadProvenance(
                "a keyset revokes the key that signed it.", "Give the worker a new key."
            )
        subject = (signed.run, signed.certificate, signed.plan_digest)
        if subject != (run.id, run.certificate, run.plan_digest):
            raise BadProvenance("it is about another run.", "Send this run's.")
        records = self.queue.read(repository.records_of, run.id)
        issue = self._store.issue(run.certificate, run.issue, untrusted=run.untrusted)
        return SentRecord(
            run=run,
            bundle=issue.bundle,
            parts=records.pop(report.fence, []),
            others=records,
            signed_head=signed.record,
            logged=self.queue.read(repository.logged_records, run.id),
        )

    # ---- tests -----------------------------------------------------------------------

    async def add_replay(
        self, run: StoredRun, record: ReplayRecord, context: CommandContext
    ) -> RunTest:
        """Store what a replay on the run's plan showed; raises ``WrongReplay``, ``WrongState``."""
        if record.plan != run.plan_digest:
            raise WrongReplay(
                "the replay is of another plan than the run, or of none.",
                "Run affidavit replay --plan with the run's plan.",
                pointer="/plan",
            )
        return await self._add_test(run.id, "replay", record.model_dump(mode="json"), context)

    async def add_audit(
        self, run: StoredRun, request: AuditRequest, context: CommandContext
    ) -> RunTest:
        """Store what the canaries of the run's record showed.

        Raises ``WrongAudit``, ``WrongState`` and ``NoRecord``.
        """
        parts, issue = await run_in_threadpool(self._record_of, run)
        predicate = statement_in(issue.bundle)["predicate"]
        sent = request.model_dump(mode="json")
        try:
            record = await self._pool.run(audit_of_run, sent, parts[0], predicate)
        except (BadCanaries, PlanNotClosed) as error:
            raise WrongAudit(
                f"{error}", "Send the canaries and the losses that the run left."
            ) from None
        return await self._add_test(run.id, "audit", record, context)

    def _record_of(self, run: StoredRun) -> tuple[list[bytes], StoredCertificate]:
        parts = self.queue.read(repository.final_record, run.id)
        return parts, self._store.issue(run.certificate, run.issue, untrusted=run.untrusted)

    async def _add_test(
        self, run_id: str, kind: TestKind, record: Any, context: CommandContext
    ) -> RunTest:
        add, content = LockedRun.add_test, canonical_json(record)
        return await run_in_threadpool(self.queue.change, run_id, context, add, kind, content)


def audit_of_run(
    sent: Mapping[str, Any], part: bytes, predicate: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the audit of a run of which ``part`` is the first of its record.

    Raises ``BadCanaries`` and ``PlanNotClosed``.
    """
    canaries = read_canaries(canonical_json(sent["canaries"]))
    return audit_record(canaries, losses_of(sent), zlib.decompress(part), predicate)


def _insert_run(
    connection: Connection, request: RunRequest, reservation_id: str, context: CommandContext
) -> StoredRun:
    """Insert a run on a reservation of its own and a usable certificate; raises ``DomainError``."""
    hold_certificate(connection, request.certificate)
    # Held, so that it is not released meanwhile.
    reservation = lock_reservation(connection, reservation_id, context).reservation
    if reservation.certificate != request.certificate:
        raise ReservationNotUsable(
            f"reservation {reservation_id} is not for this certificate.",
            "Leave `reservation` out to have one made.",
        )
    if reservation.state != "reserved":
        raise ReservationNotUsable(
            f"reservation {reservation_id} is {reservation.state}.", "Reserve for each run."
        )
    certificate = require_reserved_usable(connection, reservation)
    _require_search(request, certificate.bundle)
    run_id, document = str(uuid.uuid4()), request.model_dump(mode="json")
    shared = {"queue": request.queue, "requested_at": context.at}
    row = {
        "id": run_id,
        "certificate_id": request.certificate,
        "issue": reservation.issue,
        "untrusted": reservation.untrusted,
        "plan_digest": reservation.plan_digest,
        "reservation_id": reservation_id,
        "request": json.dumps(document, sort_keys=True),
        "requested_by": context.actor,
        "idempotency_key": context.idempotency_key,
        "request_digest": context.request_digest,
        "team": certificate.team,
        **shared,
    }
    connection.execute(insert(runs), row)
    lease = {"run_id": run_id, "state": "queued", "fence": 0, "steps": 0, "cancel": False}
    connection.execute(insert(run_leases), {**lease, **shared})
    body = {
        "certificate": request.certificate,
        "issue": reservation.issue,
        "reservation": reservation_id,
        "request": document,
    }
    repository.add_event(connection, run_id, "queued", body, context)
    return repository.find(connection, run_id)


def _require_search(request: RunRequest, bundle: bytes) -> None:
    plan = statement_in(bundle)["predicate"]["plan"]
    searches = any(event["kind"] == "repeat_and_select" for event in plan.get("extra", ()))
    if searches != (request.search is not None):
        raise WrongSearch(
            f"the certificate covers {'a search' if searches else 'one run and no search'}.",
            "Send search (choices, and public data as score) only for a plan with "
            "repeat_and_select.",
        )
    if searches and plan.get("canaries") is not None:
        raise WrongSearch(
            "the canaries of a search cannot be logged before its trials.",
            "Certify the plan without canaries.",
        )
    if searches and request.time_limit is not None:
        raise WrongSearch(
            "a search cannot have a time limit: the limit would reveal the number of trials.",
            "Leave time_limit out.",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SentRecord:
    """The record that the worker of ``run`` sent, in ``parts``, and the evidence about it.

    ``bundle`` is the certificate's, ``others`` are the records of earlier attempts as far as sent,
    ``signed_head`` is the head that the worker signed, and ``logged`` are the logged digests of the
    run's first lines.
    """

    run: StoredRun
    bundle: bytes
    parts: Sequence[bytes]
    others: Mapping[int, Sequence[bytes]]
    signed_head: str | None
    logged: frozenset[str]


def check_record(sent: SentRecord) -> Conformance:
    """Check the record against the certificate and the events of the run."""
    predicate = statement_in(sent.bundle)["predicate"]
    record = _decompress(sent.parts)
    checked = check_conformance(record, predicate)
    contradictions = tuple(_find_contradictions(sent, record, checked.head, predicate))
    if not contradictions:
        return checked
    steps = max(checked.steps_certified, checked.steps_charged)
    return replace(checked, findings=checked.findings + contradictions, steps_to_charge=steps)


def _find_contradictions(
    sent: SentRecord, record: bytes, head: str | None, predicate: dict[str, Any]
) -> Iterator[ConformanceFinding]:
    """Yield contradictions to the signature, the search, the log, and the earlier attempts.

    A continued run may start over only if its steps are independent; its record then contains
    nothing of the earlier record. In both cases the record has a ``resumed`` line for every earlier
    grant.
    """
    try:
        header = decode_line(record.partition(b"\n")[0] + b"\n", START)
    except BrokenLine:  # already a finding
        header = {}
    if head != sent.signed_head:
        yield ConformanceFinding(
            code="other_record",
            line=0,
            message="The worker signed another record than it sent.",
        )
    if predicate["plan"].get("canaries") is not None and header.get("digest") not in sent.logged:
        yield ConformanceFinding(
            code="canaries_not_logged",
            line=1,
            message="The log did not have the record's first line, which commits to the plan's "
            "canaries, before a step was granted.",
        )
    search = sent.run.search
    opening = None if search is None else SearchOpening.read(search)
    if header.get("search") != (None if opening is None else opening.digest):
        yield ConformanceFinding(
            code="other_search",
            line=1,
            message="The record is not of the search that the service drew.",
        )
    before = [attempt for attempt in sent.run.attempts if attempt.granted]
    resumed = {entry["step"] for entry in _entries(record, b"resumed")}
    if any(attempt.granted not in resumed for attempt in before):
        yield ConformanceFinding(
            code="granted_not_passed",
            line=0,
            message="An earlier worker was granted steps that the record does not pass over.",
        )
    heads = [sent.run.head]
    if not (before and _has_independent_steps(predicate)):
        heads += [attempt.body.get("head") for attempt in before]
    if any(f'"digest":"{head}"'.encode() not in record for head in heads if head is not None):
        yield ConformanceFinding(
            code="other_history",
            line=0,
            message="The record does not contain what was reported of it while it was written.",
        )
    keys = dict(_noise_keys(record)) if sent.others else {}
    earlier = (_noise_keys(_decompress(parts)) for parts in sent.others.values())
    if any(keys.get(key, step) != step for record in earlier for key, step in record):
        yield ConformanceFinding(
            code="key_in_two_steps",
            line=0,
            message="Another record of the run has one of its noise keys, at another step.",
        )


def _noise_keys(record: bytes) -> Iterator[tuple[str, int]]:
    for entry in _entries(record, b"charge"):
        if isinstance(key := entry.get("key_commitment"), str):
            yield key, entry["step"]


def _entries(record: bytes, kind: bytes) -> Iterator[dict[str, Any]]:
    """Yield the readable lines of a kind; conformance reports the others."""
    for line in record.split(b"\n"):
        if b'"type":"%b"' % kind in line:
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(entry, dict) and isinstance(entry.get("step"), int):
                yield entry


def _has_independent_steps(predicate: dict[str, Any]) -> bool:
    try:
        return Execution.of(certified_plan(predicate)).has_independent_steps
    except (PlanNotClosed, ValueError):
        return False


def _decompress(parts: Sequence[bytes]) -> bytes:
    return b"".join(zlib.decompress(part) for part in parts)
