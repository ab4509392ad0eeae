"""Keysets: published versions, the keys that they revoke, and their wire models.

The service cannot create a keyset, because it has no root key. It verifies one before it
stores it as every verifier does: by the previous version, whose roots must have signed it.
The first version is only vouched for by its own roots; verifiers must have the roots from
elsewhere and do not rely on the service for that.

Two tables, both append-only:

``keysets``
    One row per version, without gaps, with the document as it was signed.
``revoked_keys``
    The keys that each version revokes, and since when, so that a query can compute the
    status of certificates. Later versions revoke at least as much.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from datetime import UTC, datetime

from pydantic import ConfigDict, Field
from sqlalchemy import (
    CheckConstraint,
    Column,
    Connection,
    Engine,
    ForeignKey,
    Index,
    LargeBinary,
    String,
    Table,
    insert,
    select,
)

from affidavit.certificate import (
    PAYLOAD_TYPE,
    KeysetError,
    SignedKeyset,
    accept_keyset,
    read_keyset,
)
from affidavit.client import ResponseModel
from affidavit.service.database import reader, write
from affidavit.service.identity.second_person import Approve, alone
from affidavit.service.log.entries import append
from affidavit.service.tables import Sequence, UtcDateTime, metadata

FRESH_SECONDS = 1.0

keysets = Table(
    "keysets",
    metadata,
    Column("version", Sequence, primary_key=True, autoincrement=False),
    Column("follows", Sequence, ForeignKey("keysets.version", name="keysets_follows")),
    Column("digest", String(71), nullable=False, unique=True),
    Column("document", LargeBinary, nullable=False),
    Column("published_at", UtcDateTime, nullable=False),
    Column("publisher", String(255), nullable=False),
    CheckConstraint(
        "(version = 1 AND follows IS NULL) OR (follows IS NOT NULL AND version = follows + 1)",
        name="keysets_in_order",
    ),
)

revoked_keys = Table(
    "revoked_keys",
    metadata,
    Column(
        "version",
        Sequence,
        ForeignKey("keysets.version", name="revoked_keys_keyset"),
        primary_key=True,
        autoincrement=False,
    ),
    Column("key_id", String(64), primary_key=True),
    Column("since", UtcDateTime, nullable=False),
    Index("revoked_keys_by_key", "key_id"),
)


class KeysetStore:
    """Keysets behind one engine; safe to call from several threads and processes."""

    def __init__(self, engine: Engine) -> None:
        self._reader = reader(engine)
        self._engine = engine

    def newest(self) -> bytes | None:
        """The newest version, byte for byte."""
        with self._reader.connect() as connection:
            return _newest(connection)

    def administrators(self) -> int:
        """How many people a budget or a policy needs; 1 without a keyset."""
        newest = self.newest()
        return 1 if newest is None else read_keyset(newest).keyset.administrators or 1

    def find(self, version: int) -> bytes | None:
        """That version, byte for byte."""
        query = select(keysets.c.document).where(keysets.c.version == version)
        with self._reader.connect() as connection:
            return connection.execute(query).scalar_one_or_none()

    def publish(
        self, content: bytes, *, actor: str, at: datetime, approve: Approve = alone
    ) -> tuple[SignedKeyset, bool]:
        """Store the keyset in ``content``; returns it and whether it is new.

        Raises ``KeysetError``: that of ``accept_keyset``, or ``keyset_gap`` if a version between is
        missing. Publishing the newest version again is not an error.
        """
        signed = read_keyset(content)

        def work(connection: Connection) -> bool:
            newest = _newest(connection)
            last = None if newest is None else read_keyset(newest)
            accept_keyset([signed], last, at)
            if last is not None and signed.digest == last.digest:
                return False
            version = signed.keyset.version
            expected = 1 if last is None else last.keyset.version + 1
            if version != expected:
                raise KeysetError(
                    "keyset_gap",
                    f"The keyset has version {version}, but the next version is {expected}.",
                    "Publish the versions between first, oldest first.",
                )
            approve(connection)
            _insert_rows(connection, signed, content, actor, at)
            return True

        return signed, write(self._engine, work)


def _insert_rows(
    connection: Connection, signed: SignedKeyset, content: bytes, actor: str, at: datetime
) -> None:
    version = signed.keyset.version
    connection.execute(
        insert(keysets).values(
            version=version,
            follows=None if version == 1 else version - 1,
            digest=signed.digest,
            document=content,
            published_at=at,
            publisher=actor,
        )
    )
    revoked = [
        {"version": version, "key_id": key_id, "since": since}
        for key_id, since in signed.keyset.revoked_since().items()
    ]
    if revoked:
        connection.execute(insert(revoked_keys), revoked)
    body = {
        "version": version,
        "digest": signed.digest,
        "keys": [key.key_id for key in signed.keyset.keys],
        "revoked": [key.model_dump(mode="json") for key in signed.keyset.revoked],
    }
    append(connection, "keyset", f"keyset:{version}", body, actor=actor, at=at)


def _newest(connection: Connection) -> bytes | None:
    query = select(keysets.c.document).order_by(keysets.c.version.desc()).limit(1)
    return connection.execute(query).scalar_one_or_none()


class RevokedKeys:
    """The keys that the newest keyset revokes, queried at most once in ``FRESH_SECONDS``.

    Called for every signature.
    """

    def __init__(
        self, store: KeysetStore, now: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        self._store = store
        self._now = now
        self._read_at: float | None = None
        self._key_ids: Collection[str] = frozenset()

    def __call__(self) -> Collection[str]:
        """Key ids; raises SQLAlchemy's errors if the database cannot be reached."""
        now = time.monotonic()
        if self._read_at is None or now - self._read_at >= FRESH_SECONDS:
            self._key_ids = _revoked_keys(self._store.newest(), self._now())
            self._read_at = now
        return self._key_ids


def _revoked_keys(newest: bytes | None, now: datetime) -> frozenset[str]:
    if newest is None:
        return frozenset()
    since = read_keyset(newest).keyset.revoked_since()
    return frozenset(key_id for key_id, moment in since.items() if moment <= now)


class EnvelopeSignature(ResponseModel):
    """A signature of a DSSE envelope."""

    model_config = ConfigDict(extra="forbid")

    keyid: str
    sig: str = Field(json_schema_extra={"format": "byte"})


class SignedKeysetEnvelope(ResponseModel):
    """A DSSE envelope; its payload is the canonical JSON of a keyset version.

    That is root keys and threshold, signing keys with windows, revoked keys, and dates.
    """

    model_config = ConfigDict(extra="forbid")

    payload: str = Field(json_schema_extra={"format": "byte"})
    payload_type: str = Field(alias="payloadType", json_schema_extra={"const": PAYLOAD_TYPE})
    signatures: list[EnvelopeSignature]
