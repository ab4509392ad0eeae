"""The status list that is handed out: signed anew when something changed, or it grows old.

A list is good for an hour. It is signed again once it is five minutes old and somebody
asks, at once when something was revoked, and not while nobody asks. Numbers are given by
the database: of two processes that sign at once, one keeps its list and both answer that.
"""

from __future__ import annotations

import secrets
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection, Engine, Row, bindparam, insert, select
from sqlalchemy.exc import IntegrityError

from affidavit.certificate import (
    MOST_BYTES,
    TIME_FORMAT,
    Listed,
    SigningPort,
    StatusList,
    read_envelope,
    seal_status,
)
from affidavit.plan import digest_of, load_json
from affidavit.service.database import reader, writer
from affidavit.service.keyring import Keyring
from affidavit.service.keysets import keysets
from affidavit.service.lifecycle.lifecycle_tables import revocations, status_lists
from affidavit.service.lifecycle.status import REVOKED, SUPERSEDED
from affidavit.service.tables import UtcDateTime, certificates, signing_keys

GOOD_FOR = timedelta(hours=1)
OLD = timedelta(minutes=5)
KEPT = timedelta(days=1)
"""How long an issue stays listed after its validity; a verifier's clock may be behind."""


class StatusLists:
    """The lists of one service, for several threads and processes."""

    def __init__(self, engine: Engine, signers: Keyring, issuer: str | None) -> None:
        self._reader = reader(engine)
        self._writer = writer(engine)
        self._signers = signers
        self._issuer = issuer

    def at(self, now: datetime) -> bytes:
        """The list that is good at ``now``; raises ``KeyFailure`` when nothing can be signed."""
        key = self._signers.current()
        with self._reader.connect() as connection:
            newest = _newest(connection)
            if newest is not None and _still_good(newest, _content(connection, key, now), key, now):
                return bytes(newest.envelope)
        try:
            return self._sign(key, now)
        except IntegrityError:  # another process has just signed one
            with self._reader.connect() as connection:
                newest = _newest(connection)
                assert newest is not None
                return bytes(newest.envelope)

    def _sign(self, key: SigningPort, now: datetime) -> bytes:
        """A new list under the next number.

        The newest is read before the content. A list that misses what was revoked
        meanwhile thus follows one that misses it too, or its number is taken.
        """
        with self._writer.begin() as connection:
            newest = _newest(connection)
            content = _content(connection, key, now)
            issued_at = now.replace(microsecond=0)
            times = {"issued_at": issued_at, "next_update": issued_at + GOOD_FOR}
            sequence = 1 if newest is None else newest.sequence + 1
            envelope = seal_status(
                {
                    "issuer": self._name(newest),
                    "sequence": sequence,
                    **{name: at.strftime(TIME_FORMAT) for name, at in times.items()},
                    **content,
                },
                key,
            )
            connection.execute(
                insert(status_lists).values(
                    sequence=sequence,
                    **times,
                    content_digest=digest_of(content),
                    key_id=key.key_id,
                    envelope=envelope,
                )
            )
            return envelope

    def _name(self, newest: Row[Any] | None) -> str:
        """Who issues the lists: as in the last one, else the log's name, else any name."""
        if newest is None:
            return self._issuer or f"affidavit.invalid/{secrets.token_hex(8)}"
        payload = read_envelope(load_json(bytes(newest.envelope), MOST_BYTES).data).payload
        return StatusList.model_validate_json(payload).issuer


def _newest(connection: Connection) -> Row[Any] | None:
    return connection.execute(_NEWEST).first()


def _still_good(newest: Row[Any], content: dict[str, Any], key: SigningPort, now: datetime) -> bool:
    return bool(
        newest.issued_at <= now < newest.issued_at + OLD
        and newest.key_id == key.key_id
        and newest.content_digest == digest_of(content)
    )


def _content(connection: Connection, key: SigningPort, now: datetime) -> dict[str, Any]:
    """What a list says beside its number and times."""
    known = connection.execute(select(signing_keys.c.key_id)).scalars()
    version = connection.execute(select(sa.func.max(keysets.c.version))).scalar_one()
    listed = [*_revoked(connection, now), *_superseded(connection, now)]
    return {
        "keyset_version": version,
        "keys": tuple(sorted({*known, key.key_id})),
        "listed": tuple(item.model_dump() for item in listed),
    }


_ISSUE = (
    certificates.c.id,
    certificates.c.untrusted,
    certificates.c.issue,
    certificates.c.envelope_digest,
)


# Built once: putting a statement together takes as long as running it.
_NEWEST = select(status_lists).order_by(status_lists.c.sequence.desc()).limit(1)
_SINCE = bindparam("since", type_=UtcDateTime)
_REVOKED = (
    select(*_ISSUE, revocations.c.code, revocations.c.at)
    .join_from(
        certificates,
        revocations,
        (revocations.c.certificate_id == certificates.c.id)
        & (revocations.c.untrusted == certificates.c.untrusted)
        & (revocations.c.issue >= certificates.c.issue),
    )
    .where(certificates.c.not_after > _SINCE)
    .order_by(*_ISSUE, revocations.c.issue.desc())
)

_later = certificates.alias("following")
_SUPERSEDED = (
    select(*_ISSUE, _later.c.created_at.label("at"))
    .join_from(
        certificates,
        _later,
        (_later.c.id == certificates.c.id)
        & (_later.c.untrusted == certificates.c.untrusted)
        & (_later.c.issue == certificates.c.issue + 1),
    )
    .where(
        SUPERSEDED,
        ~REVOKED,
        certificates.c.not_after > _SINCE,
        certificates.c.verdict == "certified",
        certificates.c.approvals_given >= certificates.c.approvals_required,
    )
    .order_by(*_ISSUE)
)


def _revoked(connection: Connection, now: datetime) -> list[Listed]:
    """Each revoked issue, with the first revocation that is about it."""
    found = connection.execute(_REVOKED, {"since": now - KEPT})
    first = {tuple(row[:3]): row for row in found}
    return [_listed(row, "revoked", row.code) for row in first.values()]


def _superseded(connection: Connection, now: datetime) -> list[Listed]:
    """Each issue that a later one took the place of, though it could still pass by itself."""
    found = connection.execute(_SUPERSEDED, {"since": now - KEPT})
    return [_listed(row, "superseded", "issued_again") for row in found]


def _listed(row: Any, status: Any, reason: str) -> Listed:
    return Listed(
        envelope=row.envelope_digest,
        certificate_id=row.id,
        issue=row.issue,
        status=status,
        reason=reason,
        since=row.at.strftime(TIME_FORMAT),
    )
