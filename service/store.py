"""The store: certificates as they were signed, who asked for them, and the audit log.

Rules it keeps:

- A certificate, the request that led to it and its audit entry are written in one
  transaction, or none of them is.
- What is read is what was written: ``bundle`` and ``result`` are never parsed, changed
  or written out anew.
- Two processes that certify the same plan at once end with one row; the second one gets
  the first one's, and its own request and audit entry.
- A certificate of a development key counts only as long as there is no other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Engine, Select, insert, select, tuple_
from sqlalchemy.exc import IntegrityError

from affidavit.service.database import writer
from affidavit.service.tables import audit, certificates, requests, signing_keys


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """What a list shows of a certificate; ``epsilon_upper`` in nats."""

    id: str
    untrusted: bool
    plan_digest: str
    name: str | None
    dataset: str | None
    adjacency: str
    verdict: str
    epsilon_upper: float | None
    delta: float | None
    created_at: datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredCertificate(Summary):
    """A certificate with its signed bytes and the answer that was given with it."""

    key_id: str
    bundle: bytes
    result: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Who asked, when, and the bytes of the question."""

    requester: str
    received_at: datetime
    content_type: str
    body: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Filters:
    """What a list is narrowed to; None does not narrow."""

    verdict: str | None = None
    plan_digest: str | None = None
    name: str | None = None
    created_after: datetime | None = None
    created_before: datetime | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """A row's place in the list, newest first."""

    created_at: datetime
    id: str
    untrusted: bool


class CertificateStore:
    """Certificates behind one engine; safe to call from several threads and processes."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._writer = writer(engine)

    def find(self, certificate_id: str) -> StoredCertificate | None:
        """The certificate of that id, a trusted one before an untrusted one."""
        with self._engine.connect() as connection:
            return _find(connection, certificate_id, untrusted_too=True)

    def repeat(
        self, certificate_id: str, request: Request, *, untrusted_too: bool
    ) -> StoredCertificate | None:
        """The known certificate, with this further request recorded; None if unknown."""
        with self._writer.begin() as connection:
            found = _find(connection, certificate_id, untrusted_too=untrusted_too)
            if found is not None:
                _record(connection, found, request, "certificate.requested")
            return found

    def add(
        self, certificate: StoredCertificate, key: Mapping[str, Any], request: Request
    ) -> tuple[StoredCertificate, bool]:
        """Keep ``certificate``, signed by ``key`` (a public record), asked for by ``request``.

        Returns the certificate that is now kept and whether it is this one.
        """
        try:
            return self._add(certificate, key, request), True
        except IntegrityError:
            found = self.repeat(certificate.id, request, untrusted_too=certificate.untrusted)
            if found is not None:
                return found, False
            # What another process was quicker to keep was not the certificate but its key,
            # and that is there now.
            return self._add(certificate, key, request), True

    def _add(
        self, certificate: StoredCertificate, key: Mapping[str, Any], request: Request
    ) -> StoredCertificate:
        with self._writer.begin() as connection:
            _keep_key(connection, certificate, key)
            connection.execute(insert(certificates).values(**asdict(certificate)))
            _record(connection, certificate, request, "certificate.issued")
            return certificate

    def page(self, filters: Filters, after: Place | None, limit: int) -> list[Summary]:
        """At most ``limit`` certificates that pass ``filters``, newest first, beyond ``after``."""
        with self._engine.connect() as connection:
            rows = connection.execute(_page(filters, after).limit(limit)).mappings()
            return [Summary(**row) for row in rows]

    def keys(self) -> list[dict[str, Any]]:
        """The public records of all keys that signed something here."""
        query = select(signing_keys.c.record).order_by(signing_keys.c.first_used_at)
        with self._engine.connect() as connection:
            return [json.loads(record) for record in connection.execute(query).scalars()]


def _find(
    connection: Connection, certificate_id: str, *, untrusted_too: bool
) -> StoredCertificate | None:
    query = select(certificates).where(certificates.c.id == certificate_id)
    if not untrusted_too:
        query = query.where(certificates.c.untrusted.is_(False))
    row = connection.execute(query.order_by(certificates.c.untrusted)).mappings().first()
    return None if row is None else StoredCertificate(**row)


def _keep_key(
    connection: Connection, certificate: StoredCertificate, key: Mapping[str, Any]
) -> None:
    known = select(signing_keys.c.key_id).where(signing_keys.c.key_id == certificate.key_id)
    if connection.execute(known).first() is None:
        connection.execute(
            insert(signing_keys).values(
                key_id=certificate.key_id,
                record=json.dumps(dict(key), sort_keys=True),
                first_used_at=certificate.created_at,
            )
        )


def _record(
    connection: Connection, certificate: StoredCertificate, request: Request, action: str
) -> None:
    made = connection.execute(
        insert(requests)
        .values(certificate_id=certificate.id, untrusted=certificate.untrusted, **asdict(request))
        .returning(requests.c.id)
    )
    details = {
        "request": made.scalar_one(),
        "verdict": certificate.verdict,
        "plan_digest": certificate.plan_digest,
        "key_id": certificate.key_id,
        "untrusted": certificate.untrusted,
    }
    connection.execute(
        insert(audit).values(
            at=request.received_at,
            actor=request.requester,
            action=action,
            subject=certificate.id,
            details=json.dumps(details, sort_keys=True),
        )
    )


_PLACE = (certificates.c.created_at, certificates.c.id, certificates.c.untrusted)


def _page(filters: Filters, after: Place | None) -> Select[Any]:
    query = select(*(certificates.c[field.name] for field in fields(Summary)))
    for column, wanted in (
        (certificates.c.verdict, filters.verdict),
        (certificates.c.plan_digest, filters.plan_digest),
        (certificates.c.name, filters.name),
    ):
        if wanted is not None:
            query = query.where(column == wanted)
    if filters.created_after is not None:
        query = query.where(certificates.c.created_at > filters.created_after)
    if filters.created_before is not None:
        query = query.where(certificates.c.created_at < filters.created_before)
    if after is not None:
        place = tuple_(
            after.created_at, after.id, after.untrusted, types=[column.type for column in _PLACE]
        )
        query = query.where(tuple_(*_PLACE) < place)
    return query.order_by(*(column.desc() for column in _PLACE))
