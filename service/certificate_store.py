"""The store: certificates as they were signed, and who asked for them.

A certificate id has issues, numbered from 1; the latest is the current one, and is what a
certificate of that id means wherever no issue is named.

Rules it keeps:

- A certificate, its entry in the log and the request that led to it are written in one
  transaction, or none of them is.
- What is read is what was written: ``bundle`` and ``result`` are never changed or written
  out anew, and a row that nobody signed or logged is not read at all (``genuine``).
- Two processes that issue the same certificate at once end with one issue; the second one
  gets the first one's, and its own request.
- Issuing, approving and revoking one certificate happen one after the other (``hold``).
- A certificate of a development key counts only as long as there is no other.
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

from affidavit.certificate import statement_in
from affidavit.service.certificate_tables import (
    certificate_facets,
    certificates,
    insert_signing_key,
    requests,
    signing_keys,
)
from affidavit.service.certificates.status import SUPERSEDED, Status, status_at
from affidavit.service.clock import NOW
from affidavit.service.database import Store, hold, page_of
from affidavit.service.genuine import require_genuine, signed_facets
from affidavit.service.log.entries import append_certificates
from affidavit.service.problems import Problem
from affidavit.service.teams import DEFAULT, acting_for


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredCertificate:
    """An issue with its signed bytes and the result that was returned with it.

    ``status`` is what it was when it was read; everything else never changes. ``epsilon_upper`` is
    in nats.
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
    """A plan as it was sent: by whom, in which team, when, and its bytes."""

    requester: str
    received_at: datetime
    content_type: str
    body: bytes
    team: str = DEFAULT


class ConcurrentUpdate(Exception):
    """Another issue came first, or a decision about the former one."""


IsStale = Callable[[StoredCertificate], bool]
"""Whether an issue is to be followed by another when its plan is sent again."""


def expired(certificate: StoredCertificate) -> bool:
    """Whether its time is over; what people decided about it is not a matter of time."""
    return certificate.status is Status.EXPIRED


@dataclass(frozen=True, kw_only=True, slots=True)
class NewCertificate:
    """A new issue, the request that led to it, and which issue it may supersede."""

    certificate: StoredCertificate
    request: PlanRequest
    is_stale: IsStale = expired


def _no_further_writes(connection: Connection) -> None:
    """A transaction that only stores certificates."""


class CertificateStore(Store):
    """The certificates."""

    def find(self, certificate_id: str) -> StoredCertificate | None:
        """The current issue of that id, a trusted one before an untrusted one."""
        return self.read(current, certificate_id)

    def get(self, certificate_id: str) -> StoredCertificate:
        """What ``find`` returns; raises ``Problem`` where there is none."""
        return self.read(get, certificate_id)

    def last(
        self, certificate_ids: Iterable[str], *, untrusted: bool
    ) -> dict[str, StoredCertificate]:
        """The issues that new ones of that trust would supersede, by id, where there are any."""
        return self.read(currents, certificate_ids, untrusted=untrusted)

    def issues(self, certificate_id: str) -> list[StoredCertificate]:
        """All issues of that id, the untrusted ones after the trusted, latest first."""
        return self.read(issues, certificate_id)

    def issue(self, certificate_id: str, number: int, *, untrusted: bool) -> StoredCertificate:
        """One issue of that id, which a reservation or a run refers to."""
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
        is_stale: IsStale = expired,
    ) -> StoredCertificate | None:
        """The current issue, with this further request recorded.

        None if there is no issue, or it ``is_stale``.
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
        is_stale: IsStale = expired,
        within: Callable[[Connection], None] = _no_further_writes,
    ) -> tuple[StoredCertificate, bool]:
        """Store ``certificate``, signed by ``key`` (a public record), for ``request``.

        The issue before it, if there is one, must be stale. ``within`` is called first in the
        transaction; what it raises ends it. Returns the certificate that is now stored and
        whether it is this one.
        """
        new = [NewCertificate(certificate=certificate, request=request, is_stale=is_stale)]
        try:
            self.add_all(new, key, within=within)
        except (IntegrityError, ConcurrentUpdate):
            stored = self.repeat(
                certificate.id, request, untrusted_too=certificate.untrusted, is_stale=is_stale
            )
            if stored is not None:
                return stored, False
            # What another process was quicker to store was not the certificate but its key,
            # and that is there now.
            self.add_all(new, key, within=within)
        return certificate, True

    def add_all(
        self,
        new: Sequence[NewCertificate],
        key: Mapping[str, Any],
        *,
        within: Callable[[Connection], None] = _no_further_writes,
    ) -> None:
        """Store certificates of one key in one transaction, each as ``add`` would.

        Where it raises ``ConcurrentUpdate``, ``IntegrityError`` or what ``within`` raises, it
        has stored none of them.
        """
        ids = sorted({item.certificate.id for item in new})
        with self._writer.begin() as connection:
            within(connection)
            for certificate_id in ids:  # in one order, so that two batches never deadlock
                hold(connection, certificate_id)
            formers = currents(connection, ids, untrusted=new[0].certificate.untrusted)
            for item in new:
                former = formers.get(item.certificate.id)
                if former is not None and not item.is_stale(former):
                    raise ConcurrentUpdate
            insert_issues(
                connection,
                [(item.certificate, formers.get(item.certificate.id)) for item in new],
                key,
            )
            record_requests(connection, [(item.certificate, item.request) for item in new])

    def page(
        self, cursor: str | None, limit: int, **filters: Any
    ) -> tuple[Sequence[Row[Any]], str | None]:
        """Certificates that pass ``filters``, newest first, and the cursor of the next page.

        Raises ``InvalidCursor``.
        """
        return self.read(page_of, _listed(**filters), _PLACE, cursor, limit)

    def keys(self, others: Collection[str] = ()) -> list[dict[str, Any]]:
        """The public records of the keys that signed certificates here, and of ``others`` by id.

        Monitors see what is certified. A checkpoint vouches for no key: whoever can write to the
        database can insert one of a key of theirs.
        """
        certified = exists().where(certificates.c.key_id == signing_keys.c.key_id)
        query = (
            select(signing_keys.c.record)
            .where(or_(certified, signing_keys.c.key_id.in_(others)))
            .order_by(signing_keys.c.first_used_at)
        )
        with acting_for(None), self._reader.connect() as connection:
            return [json.loads(record) for record in connection.execute(query).scalars()]


# ---- in the transaction of a connection ----------------------------------------------


def current(
    connection: Connection, certificate_id: str, *, untrusted: bool | None = None
) -> StoredCertificate | None:
    """The current issue as it stands now, of that trust; trusted before untrusted for None."""
    parameters = {"certificate_id": certificate_id}
    row = connection.execute(_CURRENT[untrusted], parameters).mappings().first()
    return None if row is None else _stored(connection, row)


def get(connection: Connection, certificate_id: str) -> StoredCertificate:
    """What ``current`` returns; raises ``Problem`` where there is none."""
    certificate = current(connection, certificate_id)
    if certificate is None:
        raise no_such(certificate_id)
    return certificate


def no_such(certificate_id: str) -> Problem:
    """The problem of there being no such certificate."""
    message = f"Certificate {certificate_id} not found; GET /v1/certificates lists them."
    return Problem(404, "not_found", message)


def currents(
    connection: Connection, certificate_ids: Iterable[str], *, untrusted: bool | None = None
) -> dict[str, StoredCertificate]:
    """As ``current``, for several ids in one look; those that have none are left out."""
    issues_by_id: dict[str, StoredCertificate] = {}
    ids = {"ids": sorted(set(certificate_ids))}
    for row in connection.execute(_CURRENTS, ids).mappings():
        if untrusted is None or row["untrusted"] is untrusted:
            issues_by_id.setdefault(row["id"], _stored(connection, row))
    return issues_by_id


def issues(connection: Connection, certificate_id: str) -> list[StoredCertificate]:
    """All issues of that id, the untrusted ones after the trusted, latest first."""
    parameters = {"certificate_id": certificate_id}
    rows = connection.execute(_ISSUES, parameters).mappings().all()
    return [_stored(connection, row) for row in rows]


def has_requested(connection: Connection, requester: str, plan_digest: str) -> bool:
    """Whether ``requester`` ever sent this plan, under any rules and with any verdict."""
    query = (
        select(requests.c.id)
        .join(certificates, certificates.c.id == requests.c.certificate_id)
        .where(certificates.c.plan_digest == plan_digest, requests.c.requester == requester)
        .limit(1)
    )
    return connection.execute(query).first() is not None


def insert_issues(
    connection: Connection,
    issues_and_formers: Sequence[tuple[StoredCertificate, StoredCertificate | None]],
    key: Mapping[str, Any],
) -> None:
    """Insert new issues of one key, each after its former one, and the key where it is new.

    Raises ``ConcurrentUpdate`` where another issue came between.
    """
    for certificate, former in issues_and_formers:
        if certificate.issue != 1 + (0 if former is None else former.issue):
            raise ConcurrentUpdate
    new = [certificate for certificate, _ in issues_and_formers]
    insert_signing_key(connection, key, new[0].created_at)
    connection.execute(
        _CERTIFICATES, [{name: getattr(item, name) for name in _COLUMNS} for item in new]
    )
    connection.execute(insert(certificate_facets), [facets_of(item) for item in new])
    append_certificates(connection, [item.bundle for item in new])


def facets_of(certificate: StoredCertificate) -> dict[str, Any]:
    """The row of ``certificate_facets`` of an issue."""
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


# Built once: putting a statement together takes as long as running it.
_ISSUES = (
    select(certificates, status_at(NOW).label("status"))
    .where(certificates.c.id == bindparam("certificate_id"))
    .order_by(certificates.c.untrusted, certificates.c.issue.desc())
)
"""All issues, with where they stand now; the current one first."""

_CURRENTS = (
    select(certificates, status_at(NOW).label("status"))
    .where(certificates.c.id.in_(bindparam("ids", expanding=True)), ~SUPERSEDED)
    .order_by(certificates.c.id, certificates.c.untrusted)
)
"""The current issues of several ids, at most one of each trust."""

_CERTIFICATES = insert(certificates)
_COLUMNS = tuple(column.name for column in certificates.columns)

_CURRENT: dict[bool | None, Select[Any]] = {
    None: _ISSUES.limit(1),
    True: _ISSUES.where(certificates.c.untrusted.is_(True)).limit(1),
    False: _ISSUES.where(certificates.c.untrusted.is_(False)).limit(1),
}


def find_and_record(
    connection: Connection,
    requests_by_id: Sequence[tuple[str, PlanRequest]],
    untrusted_too: bool,
    is_stale: IsStale,
) -> list[StoredCertificate | None]:
    """What ``CertificateStore.repeat`` returns, for several ids and requests."""
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
    """Record who requested each certificate and received it."""
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

_PLACE = (certificates.c.created_at, certificates.c.id, certificates.c.untrusted)


def _listed(
    *,
    status: Status | None = None,
    created_after: datetime | None = None,
    created_before: datetime | None = None,
    **equal: str | None,
) -> Select[Any]:
    """The current issues; the earlier ones are listed with their certificate.

    ``equal`` are values of columns; None lets all through. The times themselves are left out.
    """
    now = status_at(NOW)
    shown = [column for column in certificates.c if column.name not in ("bundle", "result")]
    query = select(*shown, now.label("status")).where(~SUPERSEDED)
    values = [(name, value) for name, value in equal.items() if value is not None]
    query = query.where(*(certificates.c[name] == value for name, value in values))
    if status is not None:
        query = query.where(now == status.value)
    if created_after is not None:
        query = query.where(certificates.c.created_at > created_after)
    if created_before is not None:
        query = query.where(certificates.c.created_at < created_before)
    return query
