"""The evidence file of a certificate or a run: what the service has, in one file.

Every part is what another operation returns; nothing is stored for it. The log's entries are those
about the certificate, the reservation and the run, which the file reveals with their salts, so that
only an auditor may have it made.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from sqlalchemy import Engine, select
from starlette.concurrency import run_in_threadpool

from affidavit.accountants import AFFIDAVIT_VERSION, decimal_up
from affidavit.assessment import PlanNotClosed
from affidavit.certificate.policy import BUILT_IN
from affidavit.client import NoTimestamp, request_timestamp
from affidavit.evidence import check_conformance, tell_story, verifier_page
from affidavit.evidence.evidence_file import (
    AUDIT,
    REPLAY,
    STORY,
    TIMESTAMP,
    VERIFIER,
    manifest_of_files,
)
from affidavit.plan import PlanError, Reason, canonical_json
from affidavit.service.certificates.decisions import history
from affidavit.service.certificates.status_list_signing import StatusLists
from affidavit.service.certificates.store import CertificateStore, StoredCertificate
from affidavit.service.core.database import snapshot
from affidavit.service.core.errors import DomainError
from affidavit.service.core.fair_queue import outside_turn
from affidavit.service.keys.keyring import KeysetStore
from affidavit.service.ledger import repository as ledger_repository
from affidavit.service.ledger.state import LedgerState, StoredLedger
from affidavit.service.log.reader import LogReader, with_log_part
from affidavit.service.policies.store import PolicyStore
from affidavit.service.runs import repository
from affidavit.service.runs.repository import NoRecord, StoredRun
from affidavit.service.tables.ledger import ledger_events
from affidavit.trust import encode_base64, format_instant, statement_in

_STAMPING = ThreadPoolExecutor(4)
"""Threads that wait for the authority, so that one that hangs takes none from other requests."""


class NotStamped(DomainError):
    """The time-stamping authority of the settings gave no timestamp."""

    code = "not_stamped"
    status = 503


class EvidenceIncomplete(DomainError):
    """Something that the file needs is not there yet."""

    code = "evidence_incomplete"


@dataclass(frozen=True, kw_only=True, slots=True)
class EvidenceCollector:
    """The use case; ``keys`` are the public records, ``complaints`` those of the audit.

    ``authority`` is the URL of a time-stamping authority, which stamps every file, or None.
    """

    engine: Engine
    store: CertificateStore
    policies: PolicyStore
    keysets: KeysetStore
    status_lists: StatusLists
    log: LogReader
    keys: Callable[[], Sequence[Mapping[str, Any]]]
    complaints: Callable[[], Sequence[Reason]]
    authority: str | None

    async def of_certificate(self, certificate_id: str, now: datetime) -> dict[str, bytes]:
        """Return the files about the current issue of a certificate; raises ``DomainError``."""
        return await self._stamped(await run_in_threadpool(self._of_issue, certificate_id, now))

    async def of_run(self, run_id: str, now: datetime) -> dict[str, bytes]:
        """Return the files about a run that ended; raises ``DomainError``."""
        return await self._stamped(await run_in_threadpool(self._of_run, run_id, now))

    async def _stamped(self, files: dict[str, bytes]) -> dict[str, bytes]:
        """Return the files with a timestamp of their manifest, if there is an authority."""
        if self.authority is None:
            return files
        manifest = manifest_of_files(files)
        async with outside_turn():
            try:
                stamp = await asyncio.get_running_loop().run_in_executor(
                    _STAMPING, request_timestamp, manifest, self.authority
                )
            except NoTimestamp as error:
                raise NotStamped(
                    f"{error}.", "Try again, or have AFFIDAVIT_TIMESTAMP_AUTHORITY unset."
                ) from None
        return {**files, TIMESTAMP: stamp}

    def _of_issue(self, certificate_id: str, now: datetime) -> dict[str, bytes]:
        return self._with_story(self._files(self.store.get(certificate_id), None, now))

    def _of_run(self, run_id: str, now: datetime) -> dict[str, bytes]:
        with snapshot(self.engine) as connection:
            run = repository.find(connection, run_id)
            try:
                parts = repository.final_record(connection, run_id)
            except NoRecord:
                parts = []
            tests = repository.tests_of(connection, run_id)
        if not run.has_ended:
            raise EvidenceIncomplete("the run has not ended.", "Wait until it has.")
        issue = self.store.issue(run.certificate, run.issue, untrusted=run.untrusted)
        files = self._files(issue, run, now)
        for kind, name in (("replay", REPLAY), ("audit", AUDIT)):
            if kind in tests:
                files[name] = zlib.decompress(tests[kind].content)
        provenance = run.provenance
        if provenance is not None:
            files["provenance.json"] = canonical_json(provenance)
        if parts:
            record = b"".join(map(zlib.decompress, parts))
            files["record.jsonl"] = record
            try:
                result = check_conformance(record, statement_in(issue.bundle)["predicate"])
            except (PlanNotClosed, PlanError):
                raise EvidenceIncomplete(
                    "the certificate has no plan that can be run.", "Ask the operator."
                ) from None
            files["conformance.json"] = canonical_json(result.as_dict())
        files["ledger.json"] = canonical_json(self._ledger(run.reservation))
        return self._with_story(files)

    @staticmethod
    def _with_story(files: dict[str, bytes]) -> dict[str, bytes]:
        files[VERIFIER] = verifier_page()
        return {**files, STORY: tell_story(files)}

    def _files(
        self, issue: StoredCertificate, run: StoredRun | None, now: datetime
    ) -> dict[str, bytes]:
        part = self.log.part_of(issue.bundle)
        if part is None:
            raise EvidenceIncomplete(
                "the certificate has no place in the log yet.", "Try again in some seconds."
            )
        subjects = [issue.id] if run is None else [issue.id, run.reservation, run.id]
        revealed = self.log.reveal(subjects, since=part.checkpoint)
        predicate = statement_in(issue.bundle)["predicate"]
        documents = {
            "about.json": {
                "certificate": issue.id,
                "run": None if run is None else run.id,
                "at": format_instant(now),
                "release": AFFIDAVIT_VERSION,
            },
            "plan.json": predicate["plan"],
            "policy.json": self._policy(predicate["policy"]),
            "waivers.json": predicate["waived"],
            "issues.json": [
                item.model_dump(mode="json") for item in history(self.engine, issue.id)
            ],
            "keys.json": list(self.keys()),
            "keysets.json": self._keysets(),
            "audit.json": [reason.as_dict() for reason in self.complaints()],
            "log/proofs.json": {
                "checkpoint": revealed.checkpoint,
                "entries": [
                    {"index": proof.index, "hashes": list(map(encode_base64, proof.hashes))}
                    for proof, _ in revealed.entries
                ],
                "consistency": revealed.consistency.as_document(),
            },
        }
        return {
            **{name: canonical_json(document) for name, document in documents.items()},
            "bundle.json": with_log_part(issue.bundle, part),
            "status.json": self.status_lists.at(now),
            "log/entries.jsonl": b"".join(leaf + b"\n" for _, leaf in revealed.entries),
        }

    def _policy(self, reference: Mapping[str, Any]) -> dict[str, Any]:
        if reference["digest"] == BUILT_IN.digest():
            return BUILT_IN.as_document()
        stored = self.policies.version(reference["name"], reference["version"])
        if stored is None:
            raise EvidenceIncomplete(
                f"the policy {reference['name']} v{reference['version']} is not stored.",
                "Ask the operator.",
            )
        return stored.policy.as_document()

    def _keysets(self) -> list[Any]:
        newest = self.keysets.signed()
        versions = range(1, 1 if newest is None else newest.keyset.version + 1)
        return [json.loads(self.keysets.find(version) or b"null") for version in versions]

    def _ledger(self, reservation_id: str) -> dict[str, Any]:
        """Return the events of a reservation, each with the ledger's state and ε in use."""
        with snapshot(self.engine) as connection:
            reservation = ledger_repository.find_reservation(connection, reservation_id)
            assert reservation is not None
            ledger = ledger_repository.find_ledger(connection, reservation.scope)
            assert ledger is not None
            columns = (ledger_events.c.seq, ledger_events.c.kind, ledger_events.c.state)
            query = select(*columns).where(ledger_events.c.ledger_id == ledger.id)
            own = query.where(ledger_events.c.reservation_id == reservation_id)
            rows = connection.execute(own.order_by(ledger_events.c.seq)).all()
            before = [row.seq - 1 for row in rows]
            states = {
                row.seq: row.state
                for row in connection.execute(query.where(ledger_events.c.seq.in_(before)))
            }
        return {
            **reservation.scope.as_dict(),
            "events": [
                {
                    "seq": row.seq,
                    "kind": row.kind,
                    "state": row.state,
                    "epsilon_before": _in_use(ledger, row.seq - 1, states[row.seq - 1]),
                    "epsilon_after": _in_use(ledger, row.seq, row.state),
                }
                for row in rows
            ],
        }


def _in_use(ledger: StoredLedger, seq: int, state: str) -> str | None:
    """Return the ε in use in ``state``, rounded up, or None if it is not bounded."""
    then = replace(ledger, state=LedgerState.from_text(seq, state))
    epsilon = then.spent_epsilon() if then.state.runs else 0.0
    return decimal_up(epsilon, 6) if epsilon < float("inf") else None
