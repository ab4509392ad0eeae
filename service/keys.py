"""The keys that the service signs with, and the keysets that publish and revoke them.

The key directory says which keys there are; ``affidavit keys new`` makes them. It is looked
at for every certificate, so that a new key or the end of an old one's window needs no
restart, and read again only when something in it has changed. Where the private halves
are kept is a setting (``certificate.keys.signers``). A key that the published keyset revokes
does not sign.

While there is no key at all, keys that live in this process alone sign instead, and every
certificate that it signs carries the warning ``untrusted``: nobody outside this process
can know the keys, so the signature proves nothing to them. Once there are keys and none of
them may sign, nothing is signed: falling back to development keys would hide that from
those who trust the service.

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

import json
import logging
import os
import time
from collections.abc import Callable, Collection
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import sqlalchemy as sa
from pydantic import ConfigDict, Field
from sqlalchemy import Connection, insert, select

from affidavit.certificate import (
    PAYLOAD_TYPE,
    SERVICE_ROLES,
    KeyFailure,
    KeyRole,
    KeysetError,
    KeyStore,
    PrivateKeySource,
    PublicKey,
    SignedKeyset,
    SigningPort,
    accept_keyset,
    development_key,
    follow_keyset,
    now_in_seconds,
    read_envelope,
    read_keyset,
)
from affidavit.client import ResponseModel
from affidavit.service.certificate_tables import Sequence, UtcDateTime, metadata
from affidavit.service.database import Store, write
from affidavit.service.identity.four_eyes import Approve, alone
from affidavit.service.log.entries import append

log = logging.getLogger("affidavit.service")

Fingerprint = tuple[tuple[str, int, int, int, int], ...]


class Keyring:
    """The keys of one service process.

    Every method raises ``KeyFailure`` when the directory holds a key that cannot be used,
    or keys of which none may sign.
    """

    def __init__(
        self,
        directory: Path,
        halves: PrivateKeySource | None = None,
        revoked: Callable[[], Collection[str]] = frozenset,
        now: Callable[[], datetime] = now_in_seconds,
    ) -> None:
        self._directory = directory
        self._store = KeyStore(directory)
        self._halves = halves or self._store
        self._revoked = revoked
        self.now = now
        self._development = {role: development_key(role) for role in KeyRole}
        self._lock = Lock()
        self._seen: Fingerprint | None = None
        self._records: tuple[PublicKey, ...] = ()
        self._found: dict[str, SigningPort | None] = {}

    def revoked(self) -> Collection[str]:
        """The ids of keys whose signatures do not count any more."""
        return self._revoked()

    def current(self, role: KeyRole = KeyRole.CERTIFICATE) -> SigningPort:
        """Who signs for ``role`` now. Raises ``KeyFailure`` where nobody can."""
        with self._lock:
            self._look()
            if not self._records:
                return self._development[role]
            for public in self._valid(role):
                if public.key_id not in self._found:
                    self._found[public.key_id] = self._halves.find(public)
                result = self._found[public.key_id]
                if result is not None:
                    return result
        raise KeyFailure(
            f"no key in {self._directory} can sign for the role {role} now: there is none, or each "
            "is outside its window, revoked or without its private half; run affidavit keys "
            f"rotate --role {role}."
        )

    def signer(self, role: KeyRole) -> Callable[[], SigningPort]:
        """Who signs for ``role``, asked each time."""
        return partial(self.current, role)

    def accepts(self, role: KeyRole, signature: bytes, message: bytes) -> bool:
        """Whether a key that may sign for ``role`` now made ``signature``."""
        with self._lock:
            self._look()
            keys = self._valid(role) if self._records else [self._development[role].public]
        return any(key.accepts(signature, message) for key in keys)

    def signed(self, bundle: bytes) -> bool:
        """Whether a key of the directory for certificates, that is not revoked, signed it."""
        envelope = read_envelope(json.loads(bundle)["envelope"])
        with self._lock:
            self._look()
            keys = [key for key in self._records if key.may(KeyRole.CERTIFICATE)]
        return bool(envelope.signers(keys) - set(self._revoked()))

    def all_current(self) -> tuple[SigningPort, ...]:
        """Who signs for each role of a service. Raises ``KeyFailure`` where nobody can."""
        return tuple(self.current(role) for role in SERVICE_ROLES)

    def public_records(self) -> list[dict[str, Any]]:
        """The public records of the directory's keys, and of the development key if it signs."""
        with self._lock:
            self._look()
            development = (key.public for key in self._development.values())
            return [key.as_record() for key in self._records or development]

    def announce(self) -> None:
        """Say in the log who signs, loudly when it is a development key."""
        key, *_ = self.all_current()
        if key.public.development:
            log.warning(
                "UNTRUSTED: there is no signing key in %s; certificates are signed by a "
                "development key that nobody can trust. Run: affidavit keys new",
                self._directory,
            )
        else:
            log.info("certificates are signed by key %s", key.key_id)

    def _valid(self, role: KeyRole) -> list[PublicKey]:
        """The directory's keys that may sign for ``role`` now, newest first."""
        now, revoked = self.now(), self._revoked()
        may = [key for key in self._records if key.may(role) and key.covers(now)]
        return [key for key in reversed(may) if key.key_id not in revoked]

    def _look(self) -> None:
        """Read the directory again if anything in it is not as it was."""
        seen = _fingerprint(self._directory)
        if seen != self._seen:
            self._records = self._store.public_keys()
            self._found = {}
            self._seen = seen


def _fingerprint(directory: Path) -> Fingerprint:
    try:
        with os.scandir(directory) as entries:
            result = [(entry.name, entry.stat()) for entry in entries]
    except OSError:
        return ()
    return tuple(
        sorted((name, at.st_ino, at.st_mtime_ns, at.st_size, at.st_mode) for name, at in result)
    )


FRESH_SECONDS = 1.0

keysets = sa.Table(
    "keysets",
    metadata,
    sa.Column("version", Sequence, primary_key=True, autoincrement=False),
    sa.Column("follows", Sequence, sa.ForeignKey("keysets.version", name="keysets_follows")),
    sa.Column("digest", sa.String(71), nullable=False, unique=True),
    sa.Column("document", sa.LargeBinary, nullable=False),
    sa.Column("published_at", UtcDateTime, nullable=False),
    sa.Column("publisher", sa.String(255), nullable=False),
    sa.CheckConstraint(
        "(version = 1 AND follows IS NULL) OR (follows IS NOT NULL AND version = follows + 1)",
        name="keysets_in_order",
    ),
)

revoked_keys = sa.Table(
    "revoked_keys",
    metadata,
    sa.Column(
        "version",
        Sequence,
        sa.ForeignKey("keysets.version", name="revoked_keys_keyset"),
        primary_key=True,
        autoincrement=False,
    ),
    sa.Column("key_id", sa.String(64), primary_key=True),
    sa.Column("since", UtcDateTime, nullable=False),
    sa.Index("revoked_keys_by_key", "key_id"),
)


class KeysetStore(Store):
    """The keysets."""

    def newest(self) -> bytes | None:
        """The newest version, byte for byte."""
        return self.read(_newest)[1]

    def signed(self) -> SignedKeyset | None:
        """The newest version."""
        return self.read(_newest)[0]

    def administrators(self) -> int:
        """How many people a budget or a policy needs; 1 without a keyset."""
        newest = self.signed()
        return 1 if newest is None else newest.keyset.administrators or 1

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
            last, _ = _newest(connection)
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


def _newest(connection: Connection) -> tuple[SignedKeyset | None, bytes | None]:
    """The newest version up to which the roots of each signed the next, and its bytes.

    Others were inserted by whoever can write to the database, and count for nothing.
    """
    newest, content = None, None
    for document in connection.execute(_DOCUMENTS).scalars():
        try:
            signed = read_keyset(document)
            follow_keyset(signed, newest)
        except KeysetError:
            break
        newest, content = signed, document
    return newest, content


_DOCUMENTS = select(keysets.c.document).order_by(keysets.c.version)


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
            self._key_ids = _revoked_keys(self._store.signed(), self._now())
            self._read_at = now
        return self._key_ids


def _revoked_keys(newest: SignedKeyset | None, now: datetime) -> frozenset[str]:
    if newest is None:
        return frozenset()
    since = newest.keyset.revoked_since()
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
