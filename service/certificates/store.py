"""The store of certificates and their requests.

A certificate id has issues, numbered from 1. Where no issue is named, the latest one, which is the
current issue, is meant.

Rules:

- A certificate, its log entry and its request are written in one transaction.
- Signed bytes and results are never changed or re-encoded. A row that was not signed and logged
  is not read at all (``integrity``).
- Two processes that issue the same certificate concurrently end with one issue; the second one
  gets the first one's issue and records its own request.
- Issuing, approving and revoking one certificate happen one after the other (``hold``).
- An untrusted certificate counts only while there is no trusted one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import (
    Connection,
    Row,
    RowMapping,
    Select,
    bindparam,
    exists,
    insert,
    or_,
    select,
)
from sqlalchemy.exc import IntegrityError

from affidavit.service.certificates.integrity import require_genuine, signed_facets
from affidavit.service.certificates.issue_status import SUPERSEDED, status_at
from affidavit.service.core.clock import NOW
from affidavit.service.core.database import (
    Store,
    hold,
    page_of,
)
from affidavit.service.core.problems import Problem
from affidavit.service.core.teams import DEFAULT, acting_for
from affidavit.service.core.wire_models import Status
from affidavit.service.log.entries import append_certificates
from affidavit.service.log.signing_keys import insert_signing_key
from affidavit.service.tables.certificates import (
    certificate_facets,
    certificates,
    requests,
    signing_keys,
)
from affidavit.trust import statement_in


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredCertificate:
    """An issue with its signed bytes and its result.

    ``status`` is the status when the row was read; everything else never changes.
    ``epsilon_upper`` is in nats.
    """

    id: str
    untrusted: bool
    issue: int
    status: Status
    plan_digest: str
    name: str | None
    dataset: str | None
    adjacency: str
    verdict: str
    epsilon_upper: float | None
    delta: float | None
    created_at: datetime
    not_after: datetime
    envelope_digest: str
    approvals_required: int
    approvals_given: int
    key_id: str
    bundle: bytes
    result: str
    team: str = DEFAULT


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """A submitted plan: its bytes, requester, team and time."""

    requester: str
    received_at: datetime
    content_type: str
    body: bytes
    team: str = DEFAULT


class ConcurrentUpdate(Exception):
    """Another issue was stored first, or a decision about the previous one."""


IsStale = Callable[[StoredCertificate], bool]
"""Whether submitting the plan again creates another issue after this one."""


def is_expired(certificate: StoredCertificate) -> bool:
    """Return whether a certificate has expired; a decision takes precedence over expiry."""
    return certificate.status is Status.EXPIRED


@dataclass(frozen=True, kw_only=True, slots=True)
class NewCertificate:
    """A new issue, the request for it, and which previous issue it may supersede."""

    certificate: StoredCertificate
    request: PlanRequest
    is_stale: IsStale = is_expired


class CertificateStore(Store):
    """Reads and writes certificates."""

    def find(self, certificate_id: str) -> StoredCertificate | None:
        """Return the current issue, preferring a trusted one, or None."""
        return self.read(current, certificate_id)

    def get(self, certificate_id: str) -> StoredCertificate:
        """Return the current issue, as ``find`` does; raises ``Problem`` if there is none."""
        return self.read(get, certificate_id)

    def last(
        self, certificate_ids: Iterable[str], *, untrusted: bool
    ) -> dict[str, StoredCertificate]:
        """Return by id the issues that new issues of that trust would supersede."""
        return self.read(currents, certificate_ids, untrusted=untrusted)

    def issues(self, certificate_id: str) -> list[StoredCertificate]:
        """Return all issues, trusted ones first, each latest first."""
        return self.read(issues, certificate_id)

    def issue(self, certificate_id: str, number: int, *, untrusted: bool) -> StoredCertificate:
        """Return one issue, to which a reservation or a run refers."""
        query = _ISSUES.where(certificates.c.issue == number, certificates.c.untrusted == untrusted)
        with self._reader.connect() as connection:
            row = connection.execute(query, {"certificate_id": certificate_id}).mappings().one()
            return _stored(connection, row)

    def repeat(
        self,
        certificate_id: str,
        request: PlanRequest,
        *,
        untrusted_too: bool,
        is_stale: IsStale = is_expired,
    ) -> StoredCertificate | None:
        """Record another request for the current issue and return that issue.

        Returns None if there is no issue or it ``is_stale``.
        """
        with self.writing() as connection:
            requests_by_id = [(certificate_id, request)]
            return find_and_record(connection, requests_by_id, untrusted_too, is_stale)[0]

    def add(
        self,
        certificate: StoredCertificate,
        key: Mapping[str, Any],
        request: PlanRequest,
        *,
        is_stale: IsStale = is_expired,
        precondition: Callable[[Connection], None] | None = None,
    ) -> tuple[StoredCertificate, bool]:
        """Store ``certificate``, signed by ``key`` (a public record), for ``request``.

        The previous issue, if any, must be stale. ``precondition`` runs first in the transaction
        and may raise to abort it. Returns the stored certificate and whether it is the given one.
        """
        new = [NewCertificate(certificate=certificate, request=request, is_stale=is_stale)]
        try:
            self.add_all(new, key, precondition=precondition)
        except (IntegrityError, ConcurrentUpdate):
            stored = self.repeat(
                certificate.id, request, untrusted_too=certificate.untrusted, is_stale=is_stale
            )
            if stored is not None:
                return stored, False
            # Another process stored not the certificate but its key, which exists now.
            self.add_all(new, key, precondition=precondition)
        return certificate, True

    def add_all(
        self,
        new: Sequence[NewCertificate],
        key: Mapping[str, Any],
        *,
        precondition: Callable[[Connection], None] | None = None,
    ) -> None:
        """Store certificates of one key in one transaction, each as ``add`` would.

        Raises ``ConcurrentUpdate``, ``IntegrityError`` or what ``precondition`` raises; then none
        of them is stored.
        """
        ids = sorted({item.certificate.id for item in new})
        with self._writer.begin() as connection:
            if precondition is not None:
                precondition(connection)
            for certificate_id in ids:  # sorted, so that two batches never deadlock
                hold(connection, certificate_id)
            previous = currents(connection, ids, untrusted=new[0].certificate.untrusted)
            for item in new:
                before = previous.get(item.certificate.id)
                if before is not None and not item.is_stale(before):
                    raise ConcurrentUpdate
            insert_issues(
                connection,
                [(item.certificate, previous.get(item.certificate.id)) for item in new],
                key,
            )
            record_requests(connection, [(item.certificate, item.request) for item in new])

    def page(
        self, cursor: str | None, limit: int, **filters: Any
    ) -> tuple[Sequence[Row[Any]], str | None]:
        """Return certificates that match ``filters``, newest first, and the next page's cursor.

        Raises ``InvalidCursor``.
        """
        return self.read(page_of, _select_current(**filters), _SORT_KEY, cursor, limit)

    def keys(self, key_ids: Collection[str] = ()) -> list[dict[str, Any]]:
        """Return the public records of keys that signed certificates, and of ``key_ids``.

        A signed checkpoint is no evidence for its key: an attacker with write access to the
        database can insert one. Certificates are, because monitors see them in the log.
        """
        certified = exists().where(certificates.c.key_id == signing_keys.c.key_id)
        query = (
            select(signing_keys.c.record)
            .where(or_(certified, signing_keys.c.key_id.in_(key_ids)))
            .order_by(signing_keys.c.first_used_at)
        )
        with acting_for(None), self._reader.connect() as connection:
            return [json.loads(record) for record in connection.execute(query).scalars()]


# ---- in the transaction of a connection ----------------------------------------------


def current(
    connection: Connection, certificate_id: str, *, untrusted: bool | None = None
) -> StoredCertificate | None:
    """Return the current issue of that trust, or for None a trusted before an untrusted one."""
    return currents(connection, [certificate_id], untrusted=untrusted).get(certificate_id)


def get(connection: Connection, certificate_id: str) -> StoredCertificate:
    """Return the current issue, as ``current`` does; raises ``Problem`` if there is none."""
    certificate = current(connection, certificate_id)
    if certificate is None:
        raise no_such(certificate_id)
    return certificate


def no_such(certificate_id: str) -> Problem:
    """Return the problem for a certificate that does not exist."""
    message = f"Certificate {certificate_id} not found; GET /v1/certificates lists them."
    return Problem(404, "not_found", message)


def currents(
    connection: Connection, certificate_ids: Iterable[str], *, untrusted: bool | None = None
) -> dict[str, StoredCertificate]:
    """Return the current issues of several ids, by id; ids without an issue are omitted."""
    issues_by_id: dict[str, StoredCertificate] = {}
    ids = {"ids": sorted(set(certificate_ids))}
    for row in connection.execute(_CURRENTS, ids).mappings():
        matches = untrusted is None or row["untrusted"] is untrusted
        if matches and row["id"] not in issues_by_id:  # only a row that is used is verified
            issues_by_id[row["id"]] = _stored(connection, row)
    return issues_by_id


def issues(connection: Connection, certificate_id: str) -> list[StoredCertificate]:
    """Return all issues, trusted ones first, each latest first."""
    parameters = {"certificate_id": certificate_id}
    rows = connection.execute(_ISSUES, parameters).mappings().all()
    return [_stored(connection, row) for row in rows]


def has_requested(connection: Connection, requester: str, plan_digest: str) -> bool:
    """Return whether ``requester`` ever submitted this plan, whatever the policy and verdict."""
    query = (
        select(requests.c.id)
        .join(certificates, certificates.c.id == requests.c.certificate_id)
        .where(certificates.c.plan_digest == plan_digest, requests.c.requester == requester)
        .limit(1)
    )
    return connection.execute(query).first() is not None


def insert_issues(
    connection: Connection,
    issues_and_previous: Sequence[tuple[StoredCertificate, StoredCertificate | None]],
    key: Mapping[str, Any],
) -> None:
    """Insert new issues signed by one key, each with its predecessor or None, and the key.

    Raises ``ConcurrentUpdate`` if another issue was stored meanwhile.
    """
    for certificate, before in issues_and_previous:
        if certificate.issue != 1 + (0 if before is None else before.issue):
            raise ConcurrentUpdate
    new = [certificate for certificate, _ in issues_and_previous]
    insert_signing_key(connection, key, new[0].created_at)
    connection.execute(
        _CERTIFICATES, [{name: getattr(item, name) for name in _COLUMNS} for item in new]
    )
    connection.execute(insert(certificate_facets), [facets_of(item) for item in new])
    append_certificates(connection, [item.bundle for item in new])


def facets_of(certificate: StoredCertificate) -> dict[str, Any]:
    """Return the row of ``certificate_facets`` of an issue."""
    return {
        "certificate_id": certificate.id,
        "untrusted": certificate.untrusted,
        "issue": certificate.issue,
        "created_at": certificate.created_at,
        **signed_facets(statement_in(certificate.bundle)["predicate"]),
    }


def _stored(connection: Connection, row: RowMapping) -> StoredCertificate:
    require_genuine(connection, row)
    return StoredCertificate(**{**row, "status": Status(row["status"])})


# Constants, because building a statement takes as long as executing it.
_ISSUES = (
    select(certificates, status_at(NOW).label("status"))
    .where(certificates.c.id == bindparam("certificate_id"))
    .order_by(certificates.c.untrusted, certificates.c.issue.desc())
)
"""All issues with their status, the current one first."""

_CURRENTS = (
    select(certificates, status_at(NOW).label("status"))
    .where(certificates.c.id.in_(bindparam("ids", expanding=True)), ~SUPERSEDED)
    .order_by(certificates.c.id, certificates.c.untrusted)
)
"""The current issues of several ids, at most one trusted and one untrusted."""

_CERTIFICATES = insert(certificates)
_COLUMNS = tuple(column.name for column in certificates.columns)


def find_and_record(
    connection: Connection,
    requests_by_id: Sequence[tuple[str, PlanRequest]],
    untrusted_too: bool,
    is_stale: IsStale,
) -> list[StoredCertificate | None]:
    """Do ``CertificateStore.repeat`` for several ids and requests."""
    trust = None if untrusted_too else False
    issues_by_id = currents(connection, (item for item, _ in requests_by_id), untrusted=trust)
    fresh = {item: issue for item, issue in issues_by_id.items() if not is_stale(issue)}
    results = [fresh.get(item) for item, _ in requests_by_id]
    answered = [
        (stored, request)
        for stored, (_, request) in zip(results, requests_by_id, strict=True)
        if stored is not None
    ]
    record_requests(connection, answered)
    return results


def record_requests(
    connection: Connection, answered: Sequence[tuple[StoredCertificate, PlanRequest]]
) -> None:
    """Record the requests that were answered with these certificates."""
    rows = [
        {
            "certificate_id": certificate.id,
            "untrusted": certificate.untrusted,
            "issue": certificate.issue,
            "requester": request.requester,
            "received_at": request.received_at,
            "content_type": request.content_type,
            "body": request.body,
        }
        for certificate, request in answered
    ]
    if rows:
        connection.execute(_REQUESTS, rows)


_REQUESTS = insert(requests)

_SORT_KEY = (certificates.c.created_at, certificates.c.id, certificates.c.untrusted)


def _select_current(
    *,
    status: Status | None = None,
    created_after: datetime | None = None,
    created_before: datetime | None = None,
    **equal: str | None,
) -> Select[Any]:
    """Return a query of current issues.

    ``equal`` are values of columns, None for any. The bounds of ``created_at`` are exclusive.
    """
    now = status_at(NOW)
    columns = [column for column in certificates.c if column.name not in ("bundle", "result")]
    query = select(*columns, now.label("status")).where(~SUPERSEDED)
    values = [(name, value) for name, value in equal.items() if value is not None]
    query = query.where(*(certificates.c[name] == value for name, value in values))
    if status is not None:
        query = query.where(now == status.value)
    if created_after is not None:
        query = query.where(certificates.c.created_at > created_after)
    if created_before is not None:
        query = query.where(certificates.c.created_at < created_before)
    return query
