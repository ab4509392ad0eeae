"""The signed status list, signed again when its content changes or it is five minutes old.

A list is valid for an hour. It is signed on request: immediately after a revocation, otherwise when
the last one is five minutes old. The database assigns the sequence numbers: if two processes sign
at once, one stores its list and both return it.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any, Literal

import sqlalchemy as sa
from pydantic import Field
from sqlalchemy import Connection, Engine, Row, bindparam, insert, select
from sqlalchemy.exc import IntegrityError

from affidavit.certificate import (
    MAX_BYTES,
    StatusEntry,
    StatusList,
    sign_status,
)
from affidavit.client import ResponseModel
from affidavit.plan import digest_of, load_json
from affidavit.service.certificates.issue_status import (
    COVERED,
    REVOKED,
    SUPERSEDED,
    revocation_entry,
)
from affidavit.service.core.database import Store, UtcDateTime
from affidavit.service.core.errors import LogDamaged
from affidavit.service.core.teams import acting_for
from affidavit.service.keys.keyring import Keyring
from affidavit.service.tables.certificates import (
    certificates,
    revocations,
    signing_keys,
    status_lists,
)
from affidavit.service.tables.keys import keysets
from affidavit.service.tables.log import log_entries
from affidavit.trust import (
    KeyRole,
    SigningPort,
    format_instant,
    read_envelope,
)

LIST_VALIDITY = timedelta(hours=1)
MAX_LIST_AGE = timedelta(minutes=5)
LISTED_AFTER = timedelta(days=1)
"""Time for which an issue stays listed after its validity, for verifiers with slow clocks."""


class SignedStatusList(ResponseModel):
    """A DSSE envelope; its payload is the status list, which is valid for an hour."""

    payload: str
    payload_type: Literal["application/vnd.affidavit.status-list.v1+json"] = Field(
        alias="payloadType"
    )
    signatures: list[dict[str, str]]


class StatusLists(Store):
    """The status lists of one service."""

    def __init__(self, engine: Engine, signers: Keyring, issuer: str | None) -> None:
        super().__init__(engine)
        self._signers = signers
        self._issuer = issuer

    def at(self, now: datetime) -> bytes:
        """Return the list that is valid at ``now``.

        Raises ``KeyFailure`` if no key can sign, and ``LogDamaged`` if a revocation is missing.
        """
        with acting_for(None):
            return self._at(now)

    def _at(self, now: datetime) -> bytes:
        key = self._signers.current(KeyRole.STATUS)
        signers = (self._signers.current().key_id, key.key_id)
        with self._reader.connect() as connection:
            newest = _newest(connection)
            if newest is not None and _is_fresh(
                newest, _content(connection, signers, now), key, now
            ):
                return bytes(newest.envelope)
        try:
            return self._sign(key, signers, now)
        except IntegrityError:  # another process signed one first
            with self._reader.connect() as connection:
                newest = _newest(connection)
                assert newest is not None
                return bytes(newest.envelope)

    def _sign(self, key: SigningPort, signers: Iterable[str], now: datetime) -> bytes:
        """Sign a list under the next number.

        The newest list is read before the content, so a list that misses a concurrent revocation
        cannot follow a list that has it.
        """
        with self._writer.begin() as connection:
            newest = _newest(connection)
            _require_logged_revocations(connection)
            content = _content(connection, signers, now)
            issued_at = now.replace(microsecond=0)
            times = {"issued_at": issued_at, "next_update": issued_at + LIST_VALIDITY}
            sequence = 1 if newest is None else newest.sequence + 1
            envelope = sign_status(
                {
                    "issuer": self._issuer_after(newest),
                    "sequence": sequence,
                    **{name: format_instant(at) for name, at in times.items()},
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

    def _issuer_after(self, newest: Row[Any] | None) -> str:
        """Return the issuer of the last list, else the log's origin, else a random name."""
        if newest is None:
            return self._issuer or f"affidavit.invalid/{secrets.token_hex(8)}"
        payload = read_envelope(load_json(bytes(newest.envelope), MAX_BYTES).data).payload
        return StatusList.model_validate_json(payload).issuer


def _newest(connection: Connection) -> Row[Any] | None:
    return connection.execute(_NEWEST).first()


def _is_fresh(newest: Row[Any], content: dict[str, Any], key: SigningPort, now: datetime) -> bool:
    return bool(
        newest.issued_at <= now < newest.issued_at + MAX_LIST_AGE
        and newest.key_id == key.key_id
        and newest.content_digest == digest_of(content)
    )


def _require_logged_revocations(connection: Connection) -> None:
    """Raise ``LogDamaged`` if a logged revocation is not in the database."""
    query = select(log_entries.c.content).where(log_entries.c.kind == "revocation")
    logged = set(
        connection.execute(query).scalars()
    )  # read first, so that concurrent revocations are only in the rows
    rows = connection.execute(select(revocations))
    if not logged <= {revocation_entry(row).content.decode() for row in rows}:
        raise LogDamaged("a revocation that was logged is not in the database")


def _content(connection: Connection, signers: Iterable[str], now: datetime) -> dict[str, Any]:
    """Build the list without its number and times; ``signers`` are the current keys."""
    key_ids = connection.execute(select(signing_keys.c.key_id)).scalars()
    version = connection.execute(select(sa.func.max(keysets.c.version))).scalar_one()
    listed = _revoked_entries(connection, now)
    for row in connection.execute(_SUPERSEDED, {"since": now - LISTED_AFTER}):
        listed.append(_build_entry(row, "superseded", "issued_again"))
    return {
        "keyset_version": version,
        "keys": tuple(sorted({*key_ids, *signers})),
        "listed": tuple(issue.model_dump() for issue in listed),
    }


_ISSUE = (
    certificates.c.id,
    certificates.c.untrusted,
    certificates.c.issue,
    certificates.c.envelope_digest,
)


# Built once, because building a statement takes as long as running it.
_NEWEST = select(status_lists).order_by(status_lists.c.sequence.desc()).limit(1)
_SINCE = bindparam("since", type_=UtcDateTime)
_REVOKED = (
    select(*_ISSUE, revocations.c.code, revocations.c.at)
    .join_from(certificates, revocations, COVERED)
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


def _revoked_entries(connection: Connection, now: datetime) -> list[StatusEntry]:
    """Build the entry of each revoked issue, with the first revocation that covers it."""
    rows = connection.execute(_REVOKED, {"since": now - LISTED_AFTER})
    first = {tuple(row[:3]): row for row in rows}
    return [_build_entry(row, "revoked", row.code) for row in first.values()]


def _build_entry(row: Any, status: Any, reason: str) -> StatusEntry:
    return StatusEntry(
        envelope=row.envelope_digest,
        certificate_id=row.id,
        issue=row.issue,
        status=status,
        reason=reason,
        since=format_instant(row.at),
    )
